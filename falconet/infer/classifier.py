"""Classifiers: models that are ready to predict, with class names and preprocessing; from a run, or from weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from falconet.checkpoint import format, initial_weights
from falconet.checkpoint.foreign import fitting_model, load_weights, read_file, read_weights
from falconet.checkpoint.manifest import MANIFEST, Manifest, read_manifest, require_folder
from falconet.checkpoint.origin import find_origin
from falconet.config import options
from falconet.config.commands import ExportOptions, PredictOptions, ServeOptions, ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import load_options
from falconet.config.settings import Setting
from falconet.data.dataset import Dataset
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, normaliser, short_side
from falconet.data.storage import FileSource
from falconet.errors import CheckpointError, ConfigError, named_option
from falconet.infer.prediction import Activation
from falconet.models import views, zoo
from falconet.models.folding import Folding, fold
from falconet.models.zoo import build_model
from falconet.numerics.cuda_graphs import Compute, captured
from falconet.numerics.precision import REGIMES, Regime
from falconet.parallel import world
from falconet.report.console import Say, counted

BATCH = 64  # images, for a run whose micro-batch was found by trying


class Scorer:
    """A function of images, built from a model's weights and built again after they change."""

    def __init__(
        self, model: nn.Module, build: Callable[[], Compute], device: torch.device, *, note: Say, capture: bool
    ) -> None:
        """`capture`: replay batches as graphs on CUDA; `note` gets a line if that fails."""
        self._model, self._build, self._device = model, build, device
        self._note, self._captures = note, capture
        self._built: _Built | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:  # N x 3 x S x S, anywhere -> N x classes, fp32, on the device
        """Compute scores; on CUDA, replayed from the second batch of a size on."""
        return self._newest().replayed(images.to(self._device, non_blocking=True))

    @torch.inference_mode()
    def uncaptured(self, images: Tensor) -> Tensor:
        """Compute scores layer by layer, so that hooks are called."""
        return self._newest().compute(images.to(self._device, non_blocking=True))

    def _newest(self) -> "_Built":
        """The function of the current weights; threads may build it twice, but never see part of it."""
        versions, built = (
            [_version(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())],
            self._built,
        )
        if built is None or versions != built.versions:
            compute = self._build()
            replayed = captured(compute, self._device, note=self._note, capture=self._captures)
            built = self._built = _Built(versions, compute, replayed)
        return built


class _Built(NamedTuple):
    """A function built from the weights at one moment."""

    versions: list[tuple[int, int]]
    compute: Compute
    replayed: Compute


def _version(tensor: Tensor) -> tuple[int, int]:
    """A tensor's place in memory, and how often it was written to, as autograd counts it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model that is ready to predict, with the facts that its checkpoint stores."""

    name: str
    model: nn.Module  # on `device`, in the formats of `regime`
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    regime: Regime
    device: torch.device
    data: options.Data = field(default_factory=options.Data)  # how the run read images: batches, threads, formats
    checkpoint: Path | None = None  # the one that it was loaded from
    origin: str = ""  # what its weights are, in words; empty: random
    tta: views.Kind = "none"  # the views of an image whose logits are averaged, as in the run's validation
    several_labels: bool = False  # whether an image can have any number of the classes
    capture: bool = True  # whether batches are replayed as graphs on CUDA
    note: Say = lambda _: None  # gets a line if that fails

    @property
    def served_name(self) -> str:
        """The name as a part of URLs and paths."""
        return self.name.replace("/", "-").replace(":", "-")

    @property
    def batch(self) -> int:
        """Images in one forward pass of the run's validation."""
        return value_or(self.data.validation_batch_size, value_or(self.data.micro_batch_size, BATCH))

    def loaded(self) -> list[str]:
        """A line on what was loaded; none for random weights."""
        return [f"loaded {self.origin}"] if self.origin else []

    def folding(self) -> Folding:
        """The model as it is now, with folded norms, averaged over the views of test-time augmentation."""
        found = fold(self.model, self.regime.formats(self.device)["activations"])
        return replace(found, model=views.averaged(found.model, self.tta).eval())

    def scoring(self, preprocessing: Preprocessing) -> Compute:
        """A function from pixels to scores, by the current weights."""
        found = self.folding()
        normalise = normaliser(preprocessing, dtype=found.dtype, channels=found.channels).to(self.device)
        return lambda images: self.regime.run(found.model, normalise(images))

    @cached_property
    def by_pixels(self) -> Scorer:
        """The scorer of images as validation reads them."""
        on_host = self.data.normalization_location == "host"
        preprocessing = self.preprocessing.unnormalised if on_host else self.preprocessing
        return self._scorer(lambda: self.scoring(preprocessing))

    @cached_property
    def by_inputs(self) -> Scorer:
        """The scorer of normalised images."""

        def build() -> Compute:
            model = self.folding().model
            return lambda images: self.regime.run(model, images)

        return self._scorer(build)

    def _scorer(self, build: Callable[[], Compute]) -> Scorer:
        return Scorer(self.model, build, self.device, note=self.note, capture=self.capture)

    @property
    def activation(self) -> Activation:
        """The function that turns scores into probabilities."""
        return "sigmoid" if self.several_labels else "softmax"

    def images(self, source: FileSource) -> Dataset:
        """Photos as validation images, prepared as in the run's validation."""
        return Dataset(
            train=source,
            validation=source,
            native_size=None,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            kind="folder",
            preprocessing=self.preprocessing,
            training=self.preprocessing,
            on_host=self.data.normalization_location == "host",
        )


Asked = PredictOptions | ServeOptions | ExportOptions
AskedT = TypeVar("AskedT", bound=Asked)
Weights = Path | Literal["published"]


def open_classifier(command: type[AskedT], line: Sequence[Setting], note: Say) -> tuple[Classifier, AskedT]:
    """Open the model that a command line names; return it with the options, to which its checkpoint adds defaults.

    `note` gets what was concluded or passed over; the classifier's `origin` says what was loaded.
    """
    asked = load_options(command, line).options
    weights = asked.pretrained.pretrained
    if weights == "none":
        classifier, options = _opened(command, line, note, chosen=asked.input.checkpoint_input_path)
    else:
        with named_option("pretrained"):
            classifier, options = _opened(command, line, note, chosen=weights)
    tta = classifier.tta if isinstance(options, ExportOptions) else options.views.tta  # an export has those of the run
    return replace(classifier, note=note, tta=tta), options


def _opened(
    command: type[AskedT], line: Sequence[Setting], note: Say, *, chosen: Weights | None
) -> tuple[Classifier, AskedT]:
    """Open a classifier. `chosen`: a run, a folder of checkpoints, one checkpoint, or weights from elsewhere."""
    asked = load_options(command, line).options
    is_named = any(setting.option == "model" for setting in line)
    if chosen is None:
        if not is_named:
            raise ConfigError("expected a run, such as runs/my-run, or --model NAME, which alone means random weights")
        return _untrained(asked, note), asked
    if chosen != "published" and not chosen.is_file():
        require_folder(chosen, or_weights=True)
        folder, manifest = format.choose(chosen, asked.choice.checkpoint, note)
        asked = load_options(command, line, manifest.config).options
        return _trained(asked, folder, manifest), asked
    if chosen != "published" and (chosen.parent / MANIFEST).is_file():  # a file of a checkpoint
        asked, is_named = load_options(command, line, read_manifest(chosen.parent).config).options, True
    elif chosen != "published":
        origin = find_origin(read_file(chosen), model=asked.model.model if is_named else None)
        loaded = load_options(command, line, origin.table())
        if concluded := origin.line(loaded.sources):
            note(concluded)
        asked, is_named = loaded.options, is_named or "model" in loaded.sources
    name = asked.model.model if is_named else _fitting(chosen, note)
    return _pretrained(asked, name, chosen), asked


def _untrained(asked: Asked, note: Say) -> Classifier:
    """A model with random weights."""
    name = asked.model.model
    with named_option("model"):
        size = value_or(asked.fresh.image_size, zoo.image_size(name))
    with named_option("image_size"):
        zoo.check_image_size(name, size)
    classes = value_or(asked.fresh.classes, 10 if name.endswith("-cifar") else 1000)
    preprocessing = Preprocessing(image_size=size, resize=short_side(size), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    note(f"note: {name} has random weights (always the same ones), for measuring only")
    model = build_model(asked.model, classes=classes, seed=0)
    return _classifier(asked, model, preprocessing, tuple(map(str, range(classes))))


def _pretrained(asked: Asked, name: str, weights: Weights) -> Classifier:
    """A model with weights that were trained elsewhere, and the preprocessing that they were trained with."""
    opened = initial_weights.pretrained_model(replace(asked.model, model=name), weights)
    classes, made = len(opened.class_names), opened.preprocessing
    if asked.fresh.classes not in ("auto", classes):
        raise ConfigError(f"--classes: got {asked.fresh.classes}, expected {classes}, as in {opened.source}")
    size = value_or(asked.fresh.image_size, made.image_size)
    with named_option("image_size"):
        zoo.check_image_size(name, size)
    made = replace(made, image_size=size, resize=max(size, size * made.resize // made.image_size))
    classifier = _classifier(asked, opened.model, made, opened.class_names, name=name)
    origin = f"{opened.source}, {counted(classes, 'class')}"
    return replace(classifier, several_labels=opened.several_labels, origin=origin)


def _fitting(weights: Weights, note: Say) -> str:
    if weights == "published":
        raise ConfigError("expected --model as well, whose published weights are taken")
    found = fitting_model(read_weights(weights), where=str(weights))
    if found is None:
        raise ConfigError(f"{weights}: holds only weights, which fit none of our models; expected --model as well")
    note(f"{weights}: its weights fit {found[0]}; --model names another one")
    return found[0]


def _trained(asked: Asked, folder: Path, manifest: Manifest) -> Classifier:
    try:
        preprocessing = Preprocessing.from_json(manifest.preprocessing)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    model = build_model(asked.model, classes=manifest.classes, seed=0)
    weights = format.model_weights(folder, manifest, manifest.better_stem)
    load_weights(model, weights, where=str(folder), name=asked.model.model)
    stored = load_options(ValidateOptions, [], manifest.config).options
    made = _classifier(asked, model, preprocessing, manifest.class_names, data=stored.data)
    average = ", the moving average of its weights" if manifest.better_stem == "ema" else ""
    return replace(
        made,
        checkpoint=folder,
        origin=f"{folder}, saved after epoch {manifest.progress.epoch}{average}",
        tta=stored.views.tta,
        several_labels=manifest.several_labels,
    )


def _classifier(
    asked: Asked,
    model: nn.Module,
    preprocessing: Preprocessing,
    class_names: tuple[str, ...],
    *,
    name: str = "",
    data: options.Data | None = None,
) -> Classifier:
    """Put a model on its device, ready to predict; `name`: if it differs from the one asked for."""
    device, regime = world.open_machine(asked.machine).device, REGIMES[asked.machine.precision]
    with named_option("precision"):
        regime.require(device)
    return Classifier(
        name=name or asked.model.model,
        model=regime.prepare(model, device).eval(),
        preprocessing=preprocessing,
        class_names=class_names,
        regime=regime,
        device=device,
        data=data or options.Data(),
        capture=asked.machine.capture,
    )
