"""The models that a server's command line names: runs, checkpoints and weights, each opened under a name."""

import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from falconet.checkpoint import format
from falconet.checkpoint.manifest import MANIFEST
from falconet.config.commands import ServeOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, load_options
from falconet.config.settings import LINE, Setting
from falconet.data.encoded import PhotoDecoder
from falconet.errors import CheckpointError, ConfigError
from falconet.infer.classifier import Classifier
from falconet.infer.engines import Engine, open_engine, opened_export
from falconet.infer.predictor import open_served
from falconet.parallel import world
from falconet.report.console import Say, counted
from falconet.report.run_files import CHECKPOINTS, EXPORT_RECORD, EXPORTS
from falconet.serve.protocol import Served
from falconet.serve.repository import AGAIN_SECONDS, Opened, Source

MAX_BATCH = 64
OF_ONE_MODEL = ("checkpoint-input-path", "more-models", "model", "pretrained", "image-size", "classes")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


class ServedRuns:
    """The models of a command line: those loaded at the start, and those that clients may load."""

    def __init__(self, loaded: Loaded[ServeOptions], photos: PhotoDecoder, say: Say) -> None:
        """`photos` decodes for all models; `say` gets a line about each that is opened."""
        self._line, self._photos, self._say = loaded.line, photos, say
        self._folder = loaded.options.models.repository
        self._found: dict[Path, Source] = {}  # found in the repository so far
        self._told: set[str] = set()  # lines about what is left out of the repository
        self._paths: dict[str, Path | None] = {}  # by name, for those on the line; None: published weights
        self.first = dict(self._named(loaded.options))

    def _named(self, asked: ServeOptions) -> Iterator[tuple[str, Source]]:
        path, taken = asked.input.checkpoint_input_path, self._paths
        if path is not None or any(setting.bare in ("model", "pretrained") for setting in self._line):
            name = served_name(path) if path else _plain(asked.model.model)
            taken[name] = path
            yield name, self._source(name, self._line, path)
        for other in asked.models.more_models:
            name = served_name(other)
            if name in taken:
                raise ConfigError(
                    f"--more-models: {other} would be served as '{name}', which is taken; rename its folder"
                )
            taken[name] = other
            yield name, self._source(name, _line_for(other, self._line), other)
        if not taken and self._folder is None:
            raise ConfigError(
                "expected a run, as in `falconet serve runs/my-run`, or --model NAME, or --repository DIR"
            )

    def known(self) -> dict[str, Source]:
        """All models by name, including those now in the repository."""
        runs = self._runs_in(self._folder) if self._folder else {}
        for name, run in runs.items():
            if run not in self._found:
                self._found[run] = self._source(name, _line_for(run, self._line), run)
        return {name: self._found[run] for name, run in runs.items()} | self.first

    def _runs_in(self, folder: Path) -> dict[str, Path]:
        """The run folders in a folder, by name; what is left out is reported once."""
        try:
            found = sorted(folder.iterdir(), key=lambda each: (each.name != _plain(each.name), each))
        except OSError as error:
            raise ConfigError(
                f"--repository: {folder}: {error.strerror or error}; expected a folder of runs"
            ) from error
        runs: dict[str, Path] = {}
        for each in found:  # first the folders whose names are unchanged
            name = _plain(each.name)  # also for a link: `current` stays `current`, whichever run it leads to
            try:
                if not _holds_checkpoints(each):
                    continue
                taken = [paths[name] for paths in (self._paths, runs) if name in paths]
                if not taken:
                    runs[name] = each
                elif not any(path and path.exists() and path.samefile(each) for path in taken):
                    self._leave_out(each, f"would be served as '{name}', which is taken; rename its folder")
            except OSError as error:
                self._leave_out(each, error.strerror or str(error))
        return runs

    def _leave_out(self, run: Path, why: str) -> None:
        line = f"{run}: left out: {why}"
        if line not in self._told:
            self._told.add(line)
            self._say(line)

    def _source(self, name: str, line: Sequence[Setting], path: Path | None) -> Source:
        stamps = Stamps(path, load_options(ServeOptions, line).options.choice.checkpoint)
        return Source(open=lambda: self._opened(name, line, stamps), stamp=lambda: stamps.settled(self._say))

    def _opened(self, name: str, line: Sequence[Setting], stamps: "Stamps") -> Opened:
        stamp = stamps.newest(lambda _: None)  # taken before the weights are read, so that later ones are newer
        opened = self._opened_export if stamps.is_export else self._opened_classifier
        served, engine, about = opened(name, line)
        preprocessing = served.preprocessing
        side = preprocessing.image_size
        pixels = (
            f"{counted(len(served.class_names), 'class')}, {side} x {side} pixels, up to {served.max_batch} at once"
        )
        return Opened(
            served, engine.lanes, lambda photo: self._photos.decode(photo, preprocessing), stamp, f"{pixels}, {about}"
        )

    def _opened_classifier(self, name: str, line: Sequence[Setting]) -> tuple[Served, Engine, str]:
        classifier, options = open_served(line, self._say)
        max_batch = value_or(options.serving.max_batch, MAX_BATCH)
        engine = open_engine(classifier, options, line, self._say, max_batch=max_batch)
        served = Served(
            name=name,
            version=_version(classifier),
            preprocessing=classifier.preprocessing,
            class_names=_as_text(classifier.class_names),
            output=engine.dtype.name,
            max_batch=max_batch,
            activation=classifier.activation,
        )
        return served, engine, f"{options.machine.precision} on {classifier.device}"

    def _opened_export(self, name: str, line: Sequence[Setting]) -> tuple[Served, Engine, str]:
        options = load_options(ServeOptions, line).options
        folder, max_batch = options.input.checkpoint_input_path, value_or(options.serving.max_batch, MAX_BATCH)
        assert folder is not None
        world.open_machine(options.machine)  # sets the number of threads
        found, engine = opened_export(folder, max_batch=max_batch)
        for text in engine.lines():
            self._say(text)
        served = Served(
            name=name,
            preprocessing=found.preprocessing,
            class_names=_as_text(found.class_names),
            output=engine.dtype.name,
            max_batch=max_batch,
            activation=found.activation,
        )
        return served, engine, f"{found.precision} on cpu"


def served_name(path: Path) -> str:
    """The name in addresses of a run, a checkpoint, an export or a weights file: its own, or its run's."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100, resolve follows links
    if not whole.is_symlink():  # `current` stays `current`, whichever run it leads to
        if (whole / EXPORT_RECORD).exists() and whole.parent.name == EXPORTS:
            return _plain(f"{whole.parent.parent.name}-{whole.name}")
        if (whole / MANIFEST).exists():
            whole = whole.parent
        if whole.name == CHECKPOINTS:
            whole = whole.parent
    return _plain(whole.name if whole.is_dir() else whole.name.partition(".")[0])


def _plain(name: str) -> str:
    return _ODD.sub("-", name) or "model"


def _as_text(names: Iterable[str]) -> tuple[str, ...]:
    """Class names that every client can read: bytes that are not UTF-8, from folders' names, are escaped."""
    return tuple(name.encode("utf-8", "backslashreplace").decode() for name in names)


def _holds_checkpoints(folder: Path) -> bool:
    """Whether a folder holds checkpoints; OSError if the system does not let us look."""
    try:
        return stat.S_ISDIR((folder / CHECKPOINTS).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _line_for(path: Path, line: Sequence[Setting]) -> list[Setting]:
    """The line's settings, for another run."""
    kept = [setting for setting in line if setting.bare not in OF_ONE_MODEL]
    return [*kept, Setting("checkpoint-input-path", (str(path),), LINE)]


def _version(classifier: Classifier) -> str:
    """The version: the epoch of a run's checkpoint; weights from elsewhere have only one."""
    if classifier.checkpoint is None:
        return "1"
    return str(format.read_manifest(classifier.checkpoint).progress.epoch)


@dataclass
class Stamps:
    """Tells which weights a path stands for now; files are read again only if the folder has changed."""

    path: Path | None
    which: format.Which
    _seen: object = None  # the files when `settled` last looked
    _listed: object = None  # the files when `_stamp` was found
    _stamp: object = None
    _problem: str = ""  # why there is no stamp
    _again: float = math.inf  # when to look again even so: what was skipped may have failed for a temporary reason
    _told: frozenset[str] = frozenset()  # lines about what was skipped
    _looking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_export(self) -> bool:
        """Whether the path is a folder made by `falconet export`."""
        return self.path is not None and (self.path / EXPORT_RECORD).is_file()

    def settled(self, say: Say) -> object:
        """The stamp of files that have not changed since the last call: others may be half written or copied."""
        listed, before = self._listing(self.path) if self.path else None, self._seen
        self._seen = listed
        return self.newest(say) if listed == before else self._stamp

    def newest(self, say: Say) -> object:
        """A stamp, equal for equal weights; CheckpointError if none are whole; `say` is told which are not."""
        if self.path is None:
            return None
        with self._looking:
            listed = self._listing(self.path)
            if listed != self._listed or time.monotonic() > self._again:
                if self.is_export or self.path.is_file():
                    self._stamp = listed
                else:
                    self._choose(self.path, say)
                self._listed = listed
            if self._problem:
                raise CheckpointError(self._problem)
            return self._stamp

    def _listing(self, path: Path) -> object:
        try:
            if path.is_file():
                files = [path]
            else:  # all files of each: a copy may bring the manifest before the weights
                folders = [path] if self.is_export else format.checkpoints_in(path)
                files = [file for folder in folders for file in sorted(folder.iterdir())]
            return [(file, found.st_mtime_ns, found.st_size) for file in files for found in [file.stat()]]
        except FileNotFoundError:  # a run in progress removes older checkpoints
            return object()  # not equal to anything
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def _choose(self, path: Path, say: Say) -> None:
        noted, self._problem = list[str](), ""
        try:
            folder, manifest = format.choose(path, self.which, noted.append)
            self._stamp = folder, sorted((name, record.sha256) for name, record in manifest.files.items())
        except CheckpointError as error:
            self._problem = str(error)
        for line in noted:
            if line not in self._told:
                say(line)
        self._told = frozenset(noted)
        is_doubtful = self._problem or any(line.startswith("skipped ") for line in noted)
        self._again = time.monotonic() + AGAIN_SECONDS if is_doubtful else math.inf
