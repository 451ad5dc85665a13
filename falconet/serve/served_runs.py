"""What a server's command line names: runs, checkpoints and weights, each opened under a name."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from falconet.checkpoint import format
from falconet.checkpoint.manifest import MANIFEST
from falconet.config.commands import ServeOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, load_options
from falconet.config.settings import LINE, Setting
from falconet.data.image_files import open_rgb
from falconet.errors import CheckpointError, ConfigError
from falconet.infer.classifier import Classifier
from falconet.infer.model import Transform
from falconet.infer.predictor import Predictor, open_served
from falconet.report.console import Say, counted
from falconet.serve.batching import Execute
from falconet.serve.protocol import Served
from falconet.serve.repository import Decode, Opened, Source

MAX_BATCH = 64
CHECKPOINTS = "checkpoints"  # the folder of them in a run folder
OF_ONE_MODEL = ("checkpoint-input-path", "more-models", "model", "pretrained", "image-size", "classes")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def sources(loaded: Loaded[ServeOptions], say: Say) -> tuple[dict[str, Source], Callable[[], dict[str, Source]]]:
    """The models that are loaded at the start, by name; and a function for all that may be, found anew each time."""
    asked = loaded.options
    path = asked.input.checkpoint_input_path
    first: dict[str, Source] = {}
    if path is not None or any(setting.bare in ("model", "pretrained") for setting in loaded.line):
        name = served_name(path) if path else _plain(asked.model.model)
        first[name] = _source(name, loaded.line, path, say)
    for other in asked.models.more_models:
        name = served_name(other)
        if name in first:
            raise ConfigError(f"--more-models: {other} would be served as '{name}', which is taken; rename its folder")
        first[name] = _source(name, _line_for(other, loaded.line), other, say)
    if not first and asked.models.repository is None:
        raise ConfigError("expected a run, as in `falconet serve runs/my-run`, or --model NAME, or --repository DIR")

    def known() -> dict[str, Source]:
        if asked.models.repository is None:
            return first
        others = {served_name(run): run for run in _runs_in(asked.models.repository)}
        return {name: _source(name, _line_for(run, loaded.line), run, say) for name, run in others.items()} | first

    return first, known


def served_name(path: Path) -> str:
    """What a run, a checkpoint or a weights file is called in addresses: its own name, or that of its run."""
    whole = path.resolve()
    if (whole / MANIFEST).exists():
        whole = whole.parent
    if whole.name == CHECKPOINTS:
        whole = whole.parent
    return _plain(whole.name if whole.is_dir() else whole.name.partition(".")[0])


def _plain(name: str) -> str:
    return _ODD.sub("-", name) or "model"


def _runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder, by name."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--repository: {folder}: {error.strerror or error}; expected a folder of runs") from error
    return [each for each in found if (each / CHECKPOINTS).is_dir()]


def _line_for(path: Path, line: Sequence[Setting]) -> list[Setting]:
    """The options of the line for another run."""
    kept = [setting for setting in line if setting.bare not in OF_ONE_MODEL]
    return [*kept, Setting("checkpoint-input-path", (str(path),), LINE)]


def _source(name: str, line: Sequence[Setting], path: Path | None, say: Say) -> Source:
    which = load_options(ServeOptions, line).options.choice.checkpoint
    stamps = Stamps(path, which)
    return Source(open=lambda: _opened(name, line, stamps, say), stamp=stamps.newest)


def _opened(name: str, line: Sequence[Setting], stamps: "Stamps", say: Say) -> Opened:
    stamp = stamps.newest()  # before the weights are read: what comes later is newer
    classifier, options = open_served(line, say)
    max_batch = value_or(options.serving.max_batch, MAX_BATCH)
    predictor = Predictor(classifier, max_batch=max_batch)
    served = Served(
        name=name,
        version=_version(classifier),
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        output=str(predictor.dtype).removeprefix("torch."),
        max_batch=max_batch,
        activation=classifier.activation,
    )
    side = classifier.preprocessing.image_size
    about = (
        f"{counted(len(classifier.class_names), 'class')}, {side} x {side} pixels, up to {max_batch} at once,"
        f" {options.machine.precision} on {classifier.device}"
    )
    lanes: list[Execute] = list(predictor.lanes())
    return Opened(served, lanes, _decoder(classifier), stamp, about)


def _version(classifier: Classifier) -> str:
    """The epoch of a run's checkpoint; weights from elsewhere have only one version."""
    if classifier.checkpoint is None:
        return "1"
    return str(format.read_manifest(classifier.checkpoint).progress.epoch)


def _decoder(classifier: Classifier) -> Decode:
    transform = Transform(classifier.preprocessing)
    return lambda encoded: transform.pixels(open_rgb(BytesIO(encoded))).permute(1, 2, 0).numpy()


@dataclass
class Stamps:
    """Which weights a path stands for now; files are read again only if something in the folder has changed."""

    path: Path | None
    which: format.Which
    _listed: object = None
    _stamp: object = None
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def newest(self) -> object:
        """Equal for equal weights; CheckpointError if none of them is whole."""
        if self.path is None:
            return None
        with self._looking:
            listed = self._listing(self.path)
            if listed != self._listed:
                self._stamp = self._chosen(self.path) if self.path.is_dir() else listed
                self._listed = listed
            return self._stamp

    def _listing(self, path: Path) -> object:
        files = [path] if path.is_file() else [each / MANIFEST for each in format.checkpoints_in(path)]
        try:
            return [(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def _chosen(self, path: Path) -> object:
        folder, manifest = format.choose(path, self.which, lambda _: None)
        return folder, sorted((name, record.sha256) for name, record in manifest.files.items())
