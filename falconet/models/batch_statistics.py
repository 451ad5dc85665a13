"""Whether batch norm's running statistics fit the data: one batch shows what loading weights cannot.

Weights load without a fault even if pixels are now scaled otherwise than in their training, or if a shortcut adds its
zero channels on the other side. The thresholds lie between what right networks show on photos, digits and a single
class, and what those two faults show: 6 public networks, docs/maintaining/log.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.models.resnet import ZeroPadShortcut

SCALE = math.log(3)  # of the variances; 0.9 at most on other data, 1.4 at least with other pixels
UNEVEN = 1 / 3  # of it: other data changes some channels more than others, another scale all alike
FITS = 0.06  # nats of divergence before padded shortcuts: at most 0.045 on photos; other data has more
MISFITS = 0.08  # after them: at most 0.035 where the side is right, at least 0.137 where it is wrong
GROWTH = 3.0  # from the one to the other


@dataclass(frozen=True)
class Misfit:
    """What about the data or the model is not as it was when the statistics were made."""

    what: Literal["pixels", "shortcuts"]
    text: str


@dataclass(frozen=True)
class _Seen:
    """A layer's input beside its running statistics."""

    divergence: float  # of two Gaussians, in nats, mean over the channels
    scale: float  # log of the ratio of variances, median over the channels
    spread: float  # median distance of the channels' from it


@torch.no_grad()
def misfit(model: nn.Module, run: Callable[[], object]) -> Misfit | None:
    """The first misfit that a batch shows, if any; `run` passes it through `model`, which is left as it was."""
    seen: list[_Seen] = []
    padded: list[int] = []  # layers seen before each shortcut that adds channels
    handles = [
        *(
            module.register_forward_pre_hook(lambda layer, given: seen.append(_compare(layer, given[0])))
            for module in model.modules()
            if isinstance(module, _BatchNorm) and _has_statistics(module)
        ),
        *(
            module.register_forward_pre_hook(lambda *_: padded.append(len(seen)))
            for module in model.modules()
            if isinstance(module, ZeroPadShortcut)
        ),
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        run()
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return _judged(seen, padded)


def _judged(seen: list[_Seen], padded: list[int]) -> Misfit | None:
    if not seen:
        return None
    first = seen[0]
    if abs(first.scale) > SCALE and first.spread < UNEVEN * abs(first.scale):
        factor = math.exp(abs(first.scale) / 2)
        size = "larger" if first.scale > 0 else "smaller"
        return Misfit(
            "pixels", f"the first layer sees values {factor:.3g} times {size} than in the training of these weights"
        )
    if padded and 0 < padded[0] < len(seen):
        before = _median([layer.divergence for layer in seen[: padded[0]]])
        after = _median([layer.divergence for layer in seen[padded[0] :]])
        if before < FITS and after > MISFITS and after > GROWTH * before:
            return Misfit(
                "shortcuts",
                "layers after a shortcut that adds channels see other values than in the training of these weights",
            )
    return None


def _has_statistics(layer: _BatchNorm) -> bool:
    """Whether it was trained: a new layer has a mean of 0 and a variance of 1."""
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


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
