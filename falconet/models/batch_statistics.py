"""A check of batch norm's running statistics against one batch, which finds faults that loading weights cannot.

Weights load without an error even if pixels are scaled differently than in their training, or if a shortcut adds its
zero channels on the other side. The thresholds are between the values that correct networks show on photos, digits and
a single class, and the values with those two faults: 6 public networks, docs/maintaining/log.md.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.models import resnet

SCALE = math.log(3)  # of the variances; 0.9 at most on other data, 1.4 at least with other pixels
UNEVEN = 1 / 3  # of it: other data changes some channels more than others, another scale changes all alike
FITS = 0.06  # nats of divergence before shortcuts that add channels: at most 0.045 on photos; more on other data
BETTER = 1.5  # times less divergence after them, on the right side: 1.6 to 57 measured


@dataclass(frozen=True)
class Misfit:
    """A difference between the data or the model now and when the statistics were made."""

    what: Literal["pixels", "shortcuts"]
    text: str
    side: resnet.Side | None = None  # of the shortcuts' zero channels that fits better


@dataclass(frozen=True)
class _Seen:
    """A layer's input beside its running statistics."""

    divergence: float  # of two Gaussians, in nats, mean over the channels
    scale: float  # log of the ratio of variances, median over the channels
    spread: float  # median distance of the channels' from it


@torch.no_grad()
def misfit(model: nn.Module, run: Callable[[], object]) -> Misfit | None:
    """The first misfit that a batch shows, if any; `run` passes it through `model`, which is left as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        seen, padded = _passed(model, run)
        return _other_pixels(seen) or _other_side(model, run, seen, padded)
    finally:
        for module, training in modes.items():
            module.training = training


def _passed(model: nn.Module, run: Callable[[], object]) -> tuple[list[_Seen], int]:
    """Every layer's input in forward order, and the number of layers before a shortcut adds channels."""
    seen: list[_Seen] = []
    padded: list[int] = []
    handles = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _has_statistics(module):
            hook = lambda layer, given: seen.append(_compare(layer, given[0]))  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        elif isinstance(module, resnet.ZeroPadShortcut):
            handles.append(module.register_forward_pre_hook(lambda *_: padded.append(len(seen))))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen, padded[0] if padded else len(seen)


def _other_pixels(seen: list[_Seen]) -> Misfit | None:
    """The misfit of a first layer that sees images on another scale than in training."""
    if not seen or abs(seen[0].scale) < SCALE or seen[0].spread > UNEVEN * abs(seen[0].scale):
        return None
    factor, size = math.exp(abs(seen[0].scale) / 2), "larger" if seen[0].scale > 0 else "smaller"
    return Misfit(
        "pixels", f"the first layer sees values {factor:.3g} times {size} than in the training of these weights"
    )


def _other_side(model: nn.Module, run: Callable[[], object], seen: list[_Seen], padded: int) -> Misfit | None:
    """The misfit if zero channels on the other side would fit better, on data that fits the earlier layers."""
    if not 0 < padded < len(seen) or _divergence(seen[:padded]) > FITS:
        return None
    side = resnet.side_of_zeros(model)
    other: resnet.Side = "back" if side == "both" else "both"
    resnet.pad_shortcuts(model, other)
    try:
        there, _ = _passed(model, run)
    finally:
        resnet.pad_shortcuts(model, side)
    if _divergence(seen[padded:]) < BETTER * _divergence(there[padded:]):
        return None
    return Misfit("shortcuts", "these weights fit better with the zero channels of shortcuts on the other side", other)


def _has_statistics(layer: _BatchNorm) -> bool:
    """Whether a layer was trained: a new one has a mean of 0 and a variance of 1."""
    return layer.running_mean is not None and bool(layer.running_mean.any())


def _compare(layer: Any, values: Tensor) -> _Seen:  # N x C x H x W
    values = values.detach().float()
    axes = [axis for axis in range(values.dim()) if axis != 1]
    variance = layer.running_var.float() + layer.eps
    shift = (values.mean(axes) - layer.running_mean.float()) ** 2 / variance
    scale = ((values.var(axes, correction=0) + layer.eps) / variance).log()
    middle = scale.median()
    divergence = 0.5 * (shift + scale.exp() - 1 - scale).mean()
    return _Seen(divergence.item(), middle.item(), (scale - middle).abs().median().item())


def _divergence(seen: list[_Seen]) -> float:
    return statistics.median(layer.divergence for layer in seen)
