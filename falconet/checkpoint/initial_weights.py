"""Initial weights of a new model: published ones, those of a file, or those of a checkpoint.

`find` describes them and how photos were prepared for them; `InitialWeights.load` copies them into a model, whose
classifier starts small if the classes differ. `pretrained_model` does both, for prediction.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from falconet.checkpoint import format
from falconet.checkpoint.foreign import WeightsFile, fit, load_foreign, read_file, shapes_of
from falconet.checkpoint.manifest import MANIFEST, checkpoints_near
from falconet.checkpoint.origin import Origin, find_origin, own_origin
from falconet.config.options import Data, Model
from falconet.config.values import BOUND_TO_WEIGHTS
from falconet.data.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Channels,
    Interpolation,
    Preprocessing,
    short_side,
)
from falconet.errors import CheckpointError, ConfigError
from falconet.models import init, pretrained, zoo
from falconet.models.zoo import build_model

Asked = Literal["published"] | Path
CONFIG = "config.json"  # beside the weights in a repository of timm's on the Hugging Face hub
MOST_CONFIG = 1 << 24  # bytes of it


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The preparation of photos for some weights."""

    image_size: int
    mean: Channels
    std: Channels
    interpolation: Interpolation
    crop_ratio: float  # of the short side, that validation's centre crop kept
    antialias: bool = True
    standardised: bool = False  # each image by its own mean and deviation

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(
            image_size=self.image_size,
            resize=short_side(self.image_size, ratio=self.crop_ratio),
            mean=self.mean,
            std=self.std,
            interpolation=self.interpolation,
            antialias=self.antialias,
            standardised=self.standardised,
        )

    def table(self, data: Data) -> dict[str, dict[str, Any]]:
        """The options that prepare photos in this way, as a checkpoint stores them; `data`: the run's other options."""
        values: dict[str, Any] = {"image-size": str(self.image_size)}
        if data.normalization == "deviation" and data.normalization_location != "none":
            values |= {"pixel-mean": list(map(str, self.mean)), "pixel-deviation": list(map(str, self.std))}
        if data.antialias:
            values["interpolation"] = self.interpolation
        if data.validation_crop != "whole":
            values["validation-crop-ratio"] = str(self.crop_ratio)
        return {name: {"value": value} for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A description of weights before they are loaded."""

    source: str  # a repository on the Hugging Face hub, or a path
    classes: int
    class_names: tuple[str, ...]  # empty: unknown
    inputs: Inputs
    options: Mapping[str, Mapping[str, Any]]  # that follow from the program, or the run, that wrote the weights
    read: Callable[[], Mapping[str, Tensor]]
    is_here: bool = True  # else reading them may download them
    several_labels: bool = False  # whether they were trained on images with any number of labels

    def keeps_classifier(self, class_names: tuple[str, ...]) -> bool:
        """Whether the data and the weights have the same classes, as far as names are known."""
        numbers = tuple(map(str, range(self.classes)))  # of data whose classes have no names
        return len(class_names) == self.classes and (
            not self.class_names or class_names in (self.class_names, numbers) or self.class_names == numbers
        )

    def load(self, model: nn.Module, *, name: str, class_names: tuple[str, ...]) -> None:
        """Copy these weights into `model`; if the classes differ, its classifier starts small."""
        weights = self.read()
        found = fit(model.state_dict(), weights)
        if not found.is_whole and not found.other_classes:
            load_foreign(model, weights, where=self.source, name=name)  # raises, with what does not fit
        is_same, classifier = found.is_whole and self.keeps_classifier(class_names), f"{found.classifier}."
        taken = {key: tensor for key, tensor in found.tensors.items() if is_same or not key.startswith(classifier)}
        model.load_state_dict(taken, strict=False)
        if not is_same:
            init.shrink(model.get_submodule(found.classifier))

    def describe(self, class_names: tuple[str, ...]) -> str:
        """A line that says with which weights a model of these classes starts."""
        if self.keeps_classifier(class_names):
            return f"starts with the weights of {self.source}, classifier included"
        other = f"{self.classes:,}" if self.classes != len(class_names) else f"{self.classes:,} other"
        return (
            f"starts with the weights of {self.source}, except the classifier's: {other} classes there,"
            f" {len(class_names):,} here"
        )


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A model with weights that were trained elsewhere, and the facts that prediction needs."""

    model: nn.Module  # fp32, on the host
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    source: str
    several_labels: bool  # whether an image has any number of the classes


def pretrained_model(options: Model, asked: Asked) -> PretrainedModel:
    """The model of the options, with published weights or those of a file or checkpoint.

    ImageNet's classes are named by their descriptions; classes with unknown names are numbered.
    """
    found = find(options.model, asked)
    model = build_model(options, classes=found.classes, seed=0)
    found.load(model, name=options.model, class_names=found.class_names or tuple(map(str, range(found.classes))))
    names = found.class_names or tuple(map(str, range(found.classes)))
    if names == pretrained.imagenet_classes(found.classes):
        names = pretrained.imagenet_descriptions()
    return PretrainedModel(
        model=model,
        preprocessing=found.inputs.preprocessing,
        class_names=names,
        source=found.source,
        several_labels=found.several_labels,
    )


def find(name: str, asked: Asked, *, fetched: bool = True) -> InitialWeights:
    """The weights for the model `name`; published ones are downloaded into the Hugging Face cache if `fetched`."""
    if asked == "published":
        return _published(name, fetched=fetched)
    if not asked.exists():
        expected = "a safetensors or torch file, a checkpoint or a run folder"
        meant = checkpoints_near(asked, or_weights=True)
        raise CheckpointError(f"{asked}: no such file or folder; expected {expected}{meant}")
    if asked.is_file() and not (asked.parent / MANIFEST).exists():
        return _of_file(asked, name)
    return _of_checkpoint(asked, name)


def _published(name: str, *, fetched: bool) -> InitialWeights:
    found = pretrained.published(name)
    if fetched:
        pretrained.fetch(found)
    return InitialWeights(
        source=found.repository,
        classes=found.classes,
        class_names=pretrained.imagenet_classes(found.classes),
        inputs=_inputs(found.config, where=found.repository),
        options={},
        read=lambda: read_file(pretrained.fetch(found)).weights,
        is_here=fetched,
    )


def _of_file(path: Path, name: str) -> InitialWeights:
    """Weights in a file of ours, timm's or torchvision's; a config beside it or torchvision's list describes photos."""
    file = read_file(path)  # read again to be loaded, rather than kept for the whole run
    config = _beside(path) or pretrained.torchvision_config(path.name) or _standard(name)
    origin = find_origin(file, model=name)
    classes = _classes(file, name)
    stated = config.get("label_names")
    names = tuple(map(str, stated)) if isinstance(stated, list | tuple) and len(stated) == classes else ()
    return InitialWeights(
        source=str(path),
        classes=classes,
        class_names=names or pretrained.imagenet_classes(classes),
        inputs=_inputs(config, where=str(path)),
        options=_of_model(origin),
        read=lambda: read_file(path).weights,
    )


def _of_checkpoint(path: Path, name: str) -> InitialWeights:
    """The weights that predictions use: those of a run's best checkpoint or their average, whichever is better."""
    folder, manifest = format.choose(path.parent if path.is_file() else path, "best", lambda _: None)
    stem = manifest.better_stem if path.is_dir() else "ema" if path.stem == "ema" else "model"
    try:
        stored = Preprocessing.from_json(manifest.preprocessing)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return InitialWeights(
        source=f"{folder} (moving average)" if stem == "ema" else str(folder),
        classes=manifest.classes,
        class_names=manifest.class_names,
        inputs=Inputs(
            image_size=stored.image_size,
            mean=stored.mean,
            std=stored.std,
            interpolation=stored.interpolation,
            crop_ratio=_ratio(stored),
            antialias=stored.antialias,
            standardised=stored.standardised,
        ),
        options={"antialias": {"value": stored.antialias}}
        | ({"normalization": {"value": "image"}} if stored.standardised else {})
        | _of_model(own_origin(manifest, model=name)),
        read=lambda: format.model_weights(folder, manifest, stem),
        several_labels=manifest.several_labels,
    )


def _of_model(origin: Origin) -> dict[str, dict[str, Any]]:
    """The options of an origin that determine what the weights compute."""
    return {name: entry for name, entry in origin.table().items() if name in BOUND_TO_WEIGHTS}


def _ratio(stored: Preprocessing) -> float:
    """The ratio that leads to the same short side."""
    ratio = stored.image_size / stored.resize
    return ratio if short_side(stored.image_size, ratio=ratio) == stored.resize else math.nextafter(ratio, 0)


def _classes(file: WeightsFile, name: str) -> int:
    """The number of classes of a file's last layer, which may differ from the named model's."""
    shapes = {key: tensor.to("meta") for key, tensor in file.weights.items()}
    own = shapes_of(name, classes=pretrained.IMAGENET_CLASSES)
    return fit(own, shapes).other_classes or pretrained.IMAGENET_CLASSES


def _standard(name: str) -> Mapping[str, Any]:
    """timm's facts about its weights for the model, or ImageNet's usual preparation at the model's size."""
    try:
        return {**pretrained.published(name).config, "label_names": None}
    except CheckpointError:
        size = zoo.image_size(name)
        return {"input_size": (3, size, size), "mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def _beside(path: Path) -> dict[str, Any] | None:
    """timm's config beside a file, as in repositories on the hub."""
    config = path.parent / CONFIG
    try:
        if not config.is_file() or config.stat().st_size > MOST_CONFIG:
            return None
        stored = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("pretrained_cfg"), dict):
        return None
    return {"label_names": stored.get("label_names"), **stored["pretrained_cfg"]}


def _inputs(config: Mapping[str, Any], *, where: str) -> Inputs:
    """Convert timm's config to ours; it may come from another person's file."""
    size = config.get("input_size")
    ratio = config.get("crop_pct") or 7 / 8
    if not (isinstance(size, list | tuple) and len(size) == 3 and size[1] == size[2] and isinstance(size[1], int)):
        raise CheckpointError(f"{where}: its input size is {size!r:.80}; expected 3, N, N for square images")
    if type(ratio) not in (int, float) or not 0.1 <= ratio <= 1:
        raise CheckpointError(f"{where}: its crop_pct is {ratio!r:.80}; expected a number from 0.1 to 1")
    stored = {
        "image_size": size[1],
        "resize": size[1],
        "mean": list(config.get("mean") or IMAGENET_MEAN),
        "std": list(config.get("std") or IMAGENET_STD),
        "interpolation": config.get("interpolation") or "bilinear",
    }
    try:
        checked = Preprocessing.from_json(stored)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return Inputs(
        image_size=checked.image_size,
        mean=checked.mean,
        std=checked.std,
        interpolation=checked.interpolation,
        crop_ratio=float(ratio),
    )
