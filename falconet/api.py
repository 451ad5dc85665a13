"""The Python API: train, load and evaluate, with the options and the code of the command line.

Keyword arguments are the options' names with underscores. A mistake raises `UserError` with the line that the command
would print.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from falconet import inputs
from falconet.checkpoint import format
from falconet.checkpoint.format import Which
from falconet.commands import train as train_command
from falconet.config.commands import Command, PredictOptions, TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import LoadedTraining, read_line
from falconet.config.options import MODELS
from falconet.config.recipes import PHOTOS_CONFIG
from falconet.config.settings import LINE, Setting
from falconet.data.dataset import Dataset
from falconet.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    WorldError,
    did_you_mean,
    path_near,
)
from falconet.evaluation import saved_model
from falconet.evaluation.evaluate import Evaluation, evaluator, never
from falconet.exits import DONE, INTERRUPTED
from falconet.infer.classifier import Classifier, open_classifier
from falconet.infer.model import Model
from falconet.parallel.host import return_freed_memory
from falconet.parallel.world import World
from falconet.report.run_files import METRICS
from falconet.train import run_folder

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]  # optional


def train(photos: str | Path | None = None, **options: object) -> "Run":
    """Train a model, as `falconet train` does, and return its run.

    `photos`: a folder of photos; None: the data that the options name, or the built-in digits. Interrupting it saves a
    checkpoint and raises KeyboardInterrupt; `falconet.Run(folder)` then holds what was logged until then.
    """
    with settings_kept():
        line = _line(TrainOptions, () if photos is None else (photos,), options)
        asked = inputs.load(TrainOptions, line).options.run
        for name, value in (("plan", asked.plan), ("temporary", asked.temporary)):
            if value:
                raise ConfigError(
                    f"--{name}: would leave no run to return; use it on the command line, with `falconet train`"
                )
        loaded = _placed(line)
        folder = loaded.options.run.run_dir
        assert isinstance(folder, Path)
        try:
            code = train_command.run(loaded)
        except Interrupted:
            code = INTERRUPTED
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if it is empty: the run stopped before it started
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code != DONE:
            raise WorldError(f"the run in {folder} ended with exit code {code}; its processes have printed why")
    return Run(folder)


def load(source: "str | Path | Run", *, checkpoint: Which = "best", **options: object) -> Model:
    """Load a model to predict with.

    `source`: a run, a folder of checkpoints or one of them, a weights file, or the name of a model whose published
    weights are taken. `checkpoint`: best, last, or a number of epochs. `options`: those of `falconet predict`.
    """
    with settings_kept():
        if isinstance(source, Run):
            source = source.folder
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(f"got {type(source).__name__}, expected a run, a path or the name of a model")
        path, name = Path(source), str(source)
        named: dict[str, object]
        if not path.exists() and (name in MODELS or name.startswith("timm:")):
            named = {"model": name, "pretrained": "published"}
        else:
            meant = "" if path.exists() or path.name != name or path_near(path) else did_you_mean(name, MODELS)
            if meant:
                raise CheckpointError(f"{name}: no such file, folder or model{meant}")
            named = {"checkpoint_input_path": source, "checkpoint": checkpoint}
        line = _line(PredictOptions, (), {**named, "photos": "-", **options})
        notes: list[str] = []  # such as a damaged checkpoint that was passed over
        classifier, _ = open_classifier(PredictOptions, inputs.load(PredictOptions, line).line, notes.append)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Model(classifier)


def evaluate(model: "Model | Run | str | Path", photos: str | Path | None = None) -> Evaluation:
    """Measure a model's accuracy, as `falconet validate` does, with the run's test-time augmentation.

    `photos`: a folder or a table, as for `--data-dir`. If a folder holds training photos as well, only the others are
    counted; in a folder called `val` or `test`, all are. None: the validation images of the run.
    """
    with settings_kept():
        opened = model if isinstance(model, Model) else load(model)
        about, notes = opened.classifier, list[str]()
        images, world = _images(about, photos), World(device=about.device)
        measure = evaluator(
            images,
            about.data,
            regime=about.regime,
            world=world,
            note=notes.append,
            tta=about.tta,
            capture=about.capture,
        )
        found = measure(about.model, never)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return found


class Best(NamedTuple):
    """The best validated checkpoint of a run."""

    accuracy: float | None  # percent, the mean average precision if photos have several labels; None: not validated
    epoch: int
    checkpoint: Path


class Metrics(list[dict[str, float]]):
    """The log of a run: a row per log point, with its update, its epoch, and each metric by name."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Convert the log to a table with the update as its index."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas: needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(self).set_index("update")


class Run:
    """A run folder, with its log and its best checkpoint."""

    def __init__(self, folder: str | Path) -> None:
        """`folder`: that of any run, including those of the command line."""
        self.folder = Path(folder)
        if not (self.folder / METRICS).is_file():
            raise DataError(f"{self.folder}: is not a run folder; expected one that contains {METRICS}")

    @property
    def metrics(self) -> Metrics:
        """Everything logged so far, one row per update; later lines of the same update add to its row."""
        rows: dict[int, dict[str, float]] = {}
        # The last line may be incomplete: it is being written, or its run was killed.
        for line in (self.folder / METRICS).read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
            logged: dict[str, Any] = json.loads(line)
            rows.setdefault(logged["update"], {}).update(logged)
        return Metrics(rows[update] for update in sorted(rows))

    @property
    def best(self) -> Best:
        """The best checkpoint, which `load` opens."""
        folder, manifest = format.choose(self.folder, "best", lambda _: None)
        return Best(manifest.score, manifest.progress.epoch, folder)

    def __repr__(self) -> str:
        try:
            accuracy, epoch, _ = self.best
        except CheckpointError:
            return f"<{self.folder}: nothing saved>"
        how = "not validated" if accuracy is None else f"best {accuracy:.2f} %"
        return f"<{self.folder}: {how} after epoch {epoch}>"


def _line(command: type[Command], words: tuple[object, ...], options: Mapping[str, object]) -> list[Setting]:
    argv = [str(word) for word in words]
    for field, value in options.items():
        name = field.replace("_", "-")
        option = options_of(command).get(name)
        if value is None and option and option.default is not None:
            raise ConfigError(f"--{name}: got None, expected {option.expected()}")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            argv += [f"--{name}", *map(str, value)]
        else:
            argv.append(f"--{name}={value}")
    return read_line(command, argv, photos=PHOTOS_CONFIG)


def _placed(line: list[Setting]) -> LoadedTraining:
    """The options of a training run, with its folder, which is created now if the user did not name it."""
    loaded = inputs.load(TrainOptions, line)
    if loaded.options.run.run_dir != "auto":
        return loaded
    folder = run_folder.claim(loaded.options)
    return inputs.load(TrainOptions, [*line, Setting("run-dir", (str(folder),), LINE)])


def _images(about: Classifier, photos: str | Path | None) -> Dataset:
    """The images on which `falconet validate` measures the model."""
    if about.checkpoint is not None:
        line = [] if photos is None else [Setting("data-dir", (str(photos),), LINE)]
        return saved_model.images_of(about.checkpoint, format.read_manifest(about.checkpoint), line)[1]
    if photos is None:
        raise ConfigError(
            f"{about.name} is not from a run, so it has no validation images; expected a folder of photos"
        )
    size = about.preprocessing.image_size
    data = replace(about.data, data="folder", data_dir=Path(photos), image_size=size, exclude_list=None)
    images = saved_model.foreign_images(data, model=about.name)
    images = saved_model.of_imagenet(images, about.class_names, where=about.name)
    images = images.of_classes(about.class_names, where=about.name, several=about.several_labels)
    return replace(images, preprocessing=about.preprocessing, training=about.preprocessing)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's settings, random state and environment variables afterwards, and return freed memory."""
    backends, variables, threads = torch.backends, dict(os.environ), torch.get_num_threads()
    flags = {
        backends.cudnn: ("deterministic", "benchmark"),
        backends.cuda.matmul: (
            *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
            "allow_fp16_accumulation",
        ),
    }
    before = [(place, name, getattr(place, name)) for place, names in flags.items() for name in names]
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if is_used else 0)):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for place, name, value in before:
                setattr(place, name, value)
            for name in {*os.environ} - {*variables}:
                del os.environ[name]
            os.environ.update(variables)
            return_freed_memory()
