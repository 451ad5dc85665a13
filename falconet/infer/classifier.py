"""Classifiers: models that are ready to predict, with class names and preprocessing; from a run, or from weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from falconet.checkpoint import format
from falconet.checkpoint.foreign import load_weights, read_weights
from falconet.checkpoint.manifest import Manifest
from falconet.config import options
from falconet.config.commands import ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import load_options
from falconet.config.settings import Setting
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, short_side
from falconet.errors import CheckpointError, ConfigError, named_option
from falconet.models import zoo
from falconet.models.zoo import build_model
from falconet.numerics.precision import REGIMES, Regime
from falconet.parallel import world
from falconet.report.console import Say

IMAGENET_CLASSES = 1000
NAMES_SHOWN = 2  # of the several names that ImageNet has for a class


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model that is ready to predict, with the facts that its checkpoint stores."""

    name: str
    model: nn.Module  # on `device`, in the formats of `regime`
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    regime: Regime
    device: torch.device
    data: options.Data = field(default_factory=options.Data)  # how its run read images: batches, threads, formats


class Asked(Protocol):
    """What the options of a command that opens a classifier have in common."""

    @property
    def input(self) -> options.Input: ...

    @property
    def choice(self) -> options.Choice: ...

    @property
    def model(self) -> options.Model: ...

    @property
    def fresh(self) -> options.Fresh: ...

    @property
    def machine(self) -> options.Machine: ...


AskedT = TypeVar("AskedT", bound=Asked)


def open_model(
    command: type[AskedT], line: Sequence[Setting], note: Say, *, weights: Path | None = None
) -> tuple[Classifier, AskedT]:
    """Open the model that a command's line names; return it with the options, to which its checkpoint adds defaults.

    `weights`: a file with those of a model that the line names, instead of a checkpoint.
    """
    asked = load_options(command, line).options
    path = weights or asked.input.checkpoint_input_path
    if path is None or path.is_file():
        return _fresh(asked, path, line, note), asked
    folder, manifest = format.choose(path, asked.choice.checkpoint, note)
    average = ", the moving average of its weights" if manifest.better_stem == "ema" else ""
    note(f"loaded {folder}, saved after epoch {manifest.progress.epoch}{average}")
    asked = load_options(command, line, manifest.config).options
    return _trained(asked, folder, manifest), asked


def _fresh(asked: Asked, path: Path | None, line: Sequence[Setting], note: Say) -> Classifier:
    """A model by name, with random weights or with those of a file."""
    if not any(setting.option == "model" for setting in line):
        if path:
            raise ConfigError(f"{path}: holds only weights; expected --model as well")
        raise ConfigError("--checkpoint-input-path: required, or --model NAME to measure with random weights")
    name = asked.model.model
    with named_option("model"):
        size = value_or(asked.fresh.image_size, zoo.image_size(name))
    with named_option("image_size"):
        zoo.check_image_size(name, size)
    classes = value_or(asked.fresh.classes, 10 if name.endswith("-cifar") else 1000)
    preprocessing = Preprocessing(image_size=size, resize=short_side(size), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    model = build_model(asked.model, classes=classes, seed=0)
    names = tuple(map(str, range(classes)))
    if path is None:
        note(f"note: {name} has random weights (always the same ones), for measuring only")
    else:
        load_weights(model, read_weights(path), where=str(path), name=name)
        names = imagenet_names() if classes == IMAGENET_CLASSES else names
    return _classifier(asked, model, preprocessing, names)


def _trained(asked: Asked, folder: Path, manifest: Manifest) -> Classifier:
    try:
        preprocessing = Preprocessing.from_json(manifest.preprocessing)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    model = build_model(asked.model, classes=manifest.classes, seed=0)
    weights = format.model_weights(folder, manifest, manifest.better_stem)
    load_weights(model, weights, where=str(folder), name=asked.model.model)
    data = load_options(ValidateOptions, [], manifest.config).options.data
    return _classifier(asked, model, preprocessing, manifest.class_names, data)


def _classifier(
    asked: Asked,
    model: nn.Module,
    preprocessing: Preprocessing,
    class_names: tuple[str, ...],
    data: options.Data | None = None,
) -> Classifier:
    device, regime = world.open_machine(asked.machine).device, REGIMES[asked.machine.precision]
    with named_option("precision"):
        regime.require(device)
    return Classifier(
        name=asked.model.model.replace("/", "-").replace(":", "-"),  # it becomes part of the server's URLs
        model=regime.prepare(model, device).eval(),
        preprocessing=preprocessing,
        class_names=class_names,
        regime=regime,
        device=device,
        data=data or options.Data(),
    )


def imagenet_names() -> tuple[str, ...]:
    """What the 1,000 classes of ImageNet are called, such as `tabby, tabby cat`; timm has the list."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    full = [info.index_to_description(number).split(", ") for number in range(IMAGENET_CLASSES)]
    names = [", ".join(several[:NAMES_SHOWN]) for several in full]
    # A crane is a bird and a machine.
    return tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names))
