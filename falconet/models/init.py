"""Initial weights: their distribution, and the norms that start at zero."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from falconet.models.resnet import blocks_of

Layer = nn.Conv2d | nn.Linear

CUT = 2.0  # standard deviations at which a truncated normal ends
LEFT = 0.8796256610342398  # standard deviation of a standard normal truncated there
CLASSIFIER_DEVIATION = 0.01


def draw(model: nn.Module, kind: Literal["auto", "uniform", "normal", "lecun", "he", "glorot", "channels"]) -> None:
    """Draw new weights for every convolution and linear layer, in order, from torch's generator.

    auto: keep the weights. uniform: torch's default, biases included; all other kinds set biases to zero.
    normal: variance 2 / fan-out; in linear layers, standard deviation 0.01.
    lecun: truncated normal of variance 1 / fan-in; linear layers as glorot.
    he: truncated normal of variance 2 / fan-out, or 2 / fan-in where channels are grouped; linear layers as glorot.
    glorot: uniform within sqrt(6 / (fan-in + fan-out)).
    channels: uniform within sqrt(6 / (channels in + channels out)), whatever the kernel's size.
    """
    if kind == "auto":
        return
    for layer in model.modules():
        if not isinstance(layer, Layer):
            continue
        if kind == "uniform":
            layer.reset_parameters()
            continue
        _RULES[kind](layer)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def shrink(classifier: nn.Module) -> None:
    """Scale the weights of a new classifier on trained layers to a standard deviation of 0.01, without biases.

    timm draws EfficientNet's and MobileNet's for 1,000 classes: with 10 classes they are ten times as wide as torch's,
    and the first gradients spoil the layers below. 600 photos, 4 epochs: 89.0 % with a tenth of them, 74.5 % as drawn.
    """
    for name, weight in classifier.named_parameters():
        weight.mul_(CLASSIFIER_DEVIATION / weight.std() if name == "weight" else 0.0)


def truncated_normal(weight: Tensor, *, variance: float) -> None:
    """Draw from a normal that is truncated at two standard deviations, widened to keep the given variance."""
    deviation = math.sqrt(variance) / LEFT
    nn.init.trunc_normal_(weight, std=deviation, a=-CUT * deviation, b=CUT * deviation)


def set_zeros(model: nn.Module, kind: Literal["auto", "none", "last", "identity", "shortcut"]) -> None:
    """Start some norms of a residual network with a scale of zero, and the other norms of its blocks with one.

    last: the last norm of every block. identity: the last norm where the shortcut is the identity. shortcut: as
    identity, and the shortcut's norm where it projects. If the shortcut appends zero channels, the last norm starts
    at one, because those channels would be dead.
    """
    if kind == "auto":
        return
    for block in blocks_of(model):
        projected = _projected_norm(block.downsample)
        same = block.downsample is None or isinstance(block.downsample, nn.Identity)
        last_is_zero = kind != "none" and (same or (kind == "last" and projected is not None))
        nn.init.constant_(last_norm(block).weight, 0.0 if last_is_zero else 1.0)
        if projected is not None:
            nn.init.constant_(projected.weight, 0.0 if kind == "shortcut" else 1.0)


def last_norm(block: Any) -> nn.BatchNorm2d:
    """The norm before the addition."""
    norm: nn.BatchNorm2d = block.bn3 if hasattr(block, "bn3") else block.bn2
    return norm


def _projected_norm(shortcut: nn.Module | None) -> nn.BatchNorm2d | None:
    norms = [] if shortcut is None else [each for each in shortcut.modules() if isinstance(each, nn.BatchNorm2d)]
    return norms[-1] if norms else None


def _fans(weight: Tensor) -> tuple[int, int]:
    """Fan-in and fan-out; in a grouped convolution fan-out counts every group's outputs."""
    field = weight[0, 0].numel()  # pixels of the kernel, 1 for a linear layer
    return weight.shape[1] * field, weight.shape[0] * field


def _normal(layer: Layer) -> None:
    deviation = CLASSIFIER_DEVIATION if isinstance(layer, nn.Linear) else math.sqrt(2.0 / _fans(layer.weight)[1])
    nn.init.normal_(layer.weight, std=deviation)


def _lecun(layer: Layer) -> None:
    if isinstance(layer, nn.Linear):
        _glorot(layer)
    else:
        truncated_normal(layer.weight, variance=1.0 / _fans(layer.weight)[0])


def _he(layer: Layer) -> None:
    if isinstance(layer, nn.Linear):
        _glorot(layer)
    else:
        fan = _fans(layer.weight)[0 if layer.groups > 1 else 1]
        truncated_normal(layer.weight, variance=2.0 / fan)


def _glorot(layer: Layer) -> None:
    bound = math.sqrt(6.0 / sum(_fans(layer.weight)))
    nn.init.uniform_(layer.weight, -bound, bound)


def _channels(layer: Layer) -> None:
    ins, outs = (
        (layer.in_features, layer.out_features)
        if isinstance(layer, nn.Linear)
        else (layer.in_channels, layer.out_channels)
    )
    bound = math.sqrt(6.0 / (ins + outs))
    nn.init.uniform_(layer.weight, -bound, bound)


_RULES: dict[str, Callable[[Layer], None]] = {
    "normal": _normal,
    "lecun": _lecun,
    "he": _he,
    "glorot": _glorot,
    "channels": _channels,
}
