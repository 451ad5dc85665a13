"""The program that wrote a weights file, and the options that follow from stored arguments or from names.

Programs compute different functions with the same shapes: zero channels on another side, another epsilon. Such weights
load without an error and predict badly.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from falconet.checkpoint.foreign import WeightsFile
from falconet.checkpoint.manifest import Manifest
from falconet.config.options import MODELS
from falconet.config.settings import DEFAULT, WEIGHTS
from falconet.config.values import BOUND_TO_WEIGHTS
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD

StoredOptions = dict[str, str | bool | list[str]]  # by name, as a checkpoint stores them
Shapes = Mapping[str, tuple[int, ...]]
TENSORFLOW_EPSILON = "0.001"  # of batch norm; torch's is 0.00001
NORMS = ("batch", "group", "none")
DATA = ("cifar10", "cifar100", "imagenet")  # kinds of data that a file may name


@dataclass(frozen=True)
class Origin:
    """The options that are known for weights."""

    why: str
    options: StoredOptions

    def table(self) -> dict[str, dict[str, Any]]:
        """The options in the form of a checkpoint's, which the command line overrides."""
        return {name: {"value": value, "source": WEIGHTS} for name, value in self.options.items()}

    def line(self, sources: Mapping[str, str]) -> str | None:
        """A line with the inferred options and the reason; `sources`: of the options in use, some set by the user."""
        taken = [_spelled(name, value) for name, value in self.options.items() if sources.get(name) == WEIGHTS]
        return f"{self.why}: {' '.join(taken)}" if taken else None


def find_origin(file: WeightsFile, *, model: str | None) -> Origin:
    """The options that follow from a file; `model`: the command line's, if any.

    There are none for a model of another kind, or if nothing is known.
    """
    stored = _from_arguments(file.arguments)
    named = stored.get("model")
    if named and model in (None, named):
        return Origin(f"{file.path.name} was trained with", stored)
    shapes = {name: tuple(tensor.shape) for name, tensor in file.weights.items()}
    for kind, is_one, options, families in LAYOUTS:
        if is_one(shapes) and (model is None or families.match(model)):
            return Origin(f"{file.path.name} has the layers of {kind}", dict(options))
    return Origin("", {})


def own_origin(manifest: Manifest, *, model: str | None) -> Origin:
    """The options about the model in the run of a checkpoint; `model` as above."""
    if model not in (None, manifest.model):
        return Origin("", {})
    stated = {name: entry["value"] for name, entry in manifest.config.items() if entry.get("source") != DEFAULT}
    taken = {name: stated[name] for name in ("model", *BOUND_TO_WEIGHTS) if name in stated}
    return Origin("the checkpoint was trained with", taken)


def _from_arguments(arguments: Mapping[str, Any]) -> StoredOptions:
    """The model's options among its training arguments, under the PyTorch program's names.

    Values that are not valid here are left out: the weights themselves show what they fit.
    """
    name = arguments.get("model")
    if not isinstance(name, str) or name not in MODELS:
        return {}
    found: StoredOptions = {"model": name}
    norm = arguments.get("norm_type")
    if norm in NORMS:
        found["norm-type"] = norm
    if norm == "group":
        found |= _numbers(arguments, "norm_eps", "norm_num_groups")  # its batch norms kept torch's epsilon
        if arguments.get("enable_fast_groupnorm") is True:
            found["norm-grouping"] = "strided"  # what that switch chose there
    if name.startswith("efficientnet"):
        found |= _numbers(arguments, "efficientnet_expand_ratio", "efficientnet_group_dim")
    if name.startswith("mobilenet-v3") and "norm_type" in arguments:
        found["mobilenet-wide-head"] = True  # as the PyTorch program built it
    if arguments.get("input_image_padding") is True:
        found["input-image-padding"] = True
    if arguments.get("data") in DATA:
        found["data"] = arguments["data"]
    if arguments.get("data") == "cifar10" and "norm_type" in arguments:  # prepared like photos there
        found["validation-crop"] = "centre"
        found["pixel-mean"], found["pixel-deviation"] = list(map(str, IMAGENET_MEAN)), list(map(str, IMAGENET_STD))
    if arguments.get("normalization_location") == "none":
        found["normalization-location"] = "none"
    return found


def _numbers(arguments: Mapping[str, Any], *names: str) -> StoredOptions:
    return {
        name.replace("_", "-"): str(arguments[name])
        for name in names
        if type(arguments.get(name)) in (int, float) and arguments[name] > 0
    }


def _spelled(name: str, value: str | bool | list[str]) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name} {' '.join(value) if isinstance(value, list) else value}"


def _is_akamaster(shapes: Shapes) -> bool:
    """Whether this is a CIFAR ResNet with weights in no shortcut and a classifier called `linear`."""
    return (
        shapes.get("conv1.weight") == (16, 3, 3, 3)
        and shapes.get("layer2.0.conv1.weight") == (32, 16, 3, 3)
        and shapes.get("linear.weight", ())[1:] == (64,)
        and not any("shortcut" in name or "downsample" in name for name in shapes)
    )


def _is_torchvision_mobilenet_v3(shapes: Shapes) -> bool:
    return (
        shapes.get("features.0.0.weight") == (16, 3, 3, 3)
        and "classifier.0.weight" in shapes
        and "classifier.3.weight" in shapes
    )


def _is_torchvision_large_efficientnet(shapes: Shapes) -> bool:
    """Whether this is B5, B6 or B7, which have TensorFlow's epsilon; B0 to B4 have torch's."""
    return "features.1.0.block.0.0.weight" in shapes and shapes.get("classifier.1.weight", (0, 0))[1] >= 2048


LAYOUTS: tuple[tuple[str, Callable[[Shapes], bool], StoredOptions, re.Pattern[str]], ...] = (
    (
        "akamaster's pytorch_resnet_cifar10",
        _is_akamaster,
        {"shortcut-padding": "both"},
        re.compile(r"resnet\d+-cifar"),
    ),
    (
        "torchvision's MobileNetV3",
        _is_torchvision_mobilenet_v3,
        {"norm-eps": TENSORFLOW_EPSILON},
        re.compile("mobilenet-v3"),
    ),
    (
        "torchvision's EfficientNet B5 to B7",
        _is_torchvision_large_efficientnet,
        {"norm-eps": TENSORFLOW_EPSILON},
        re.compile("efficientnet-b"),
    ),
)
