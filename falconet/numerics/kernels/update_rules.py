"""The update rules as plain arithmetic on fp32 tensors: weight, unscaled gradient and state in, new values out.

Every operation is rounded separately (no fused multiply-add) and in this order, so that the Triton kernels in
`fused_updates.py` can give the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Tensor


class Adam(NamedTuple):
    """AdamW's constants and its two bias corrections: 1 / (1 - beta1^updates), 1 / sqrt(1 - beta2^updates)."""

    beta1: float
    beta2: float
    eps: float
    correction1: Number
    correction2: Number
    smallest: float = 0.0  # positive number of the stored type, where gradients come near it


class MeanSquare(NamedTuple):
    """RMSprop's constants, in torch's form."""

    alpha: float
    eps: float
    smallest: float = 0.0  # as in Adam


def descent(w: Tensor, g: Tensor, *, lr: Number, decay: float) -> tuple[Tensor]:
    """SGD without momentum."""
    return (w - (g + w * decay) * lr,)


def momentum_descent(
    w: Tensor, g: Tensor, v: Tensor, *, lr: Number, momentum: float, decay: float
) -> tuple[Tensor, ...]:
    """SGD with momentum."""
    v = v * momentum + (g + w * decay)
    return w - v * lr, v


def lars(w: Tensor, g: Tensor, v: Tensor, *, rate: Number, momentum: float, decay: float) -> tuple[Tensor, ...]:
    """SGD with the rate, times the layer's trust ratio, inside the velocity."""
    v = v * momentum + (g + w * decay) * rate
    return w - v, v


def trust_ratios(weights: Tensor, gradients: Tensor, *, coefficient: float, decay: float, eps: float) -> Tensor:
    """LARS's ratios from one norm per parameter: coefficient * |w| / (|g| + decay * |w| + eps), or 1 if either is 0."""
    ratios = coefficient * weights / (gradients + decay * weights + eps)
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0)


def rmsprop(
    w: Tensor, g: Tensor, s: Tensor, *, lr: Number, alpha: float, decay: float, eps: float
) -> tuple[Tensor, ...]:
    """TensorFlow's RMSprop without momentum: eps inside the root."""
    g = g + w * decay
    s = s + (g * g - s) * (1.0 - alpha)
    return w - g / _root(s + eps) * lr, s


def momentum_rmsprop(
    w: Tensor, g: Tensor, s: Tensor, m: Tensor, *, lr: Number, alpha: float, momentum: float, decay: float, eps: float
) -> tuple[Tensor, ...]:
    """TensorFlow's RMSprop: eps inside the root, the rate inside the momentum."""
    g = g + w * decay
    s = s + (g * g - s) * (1.0 - alpha)
    m = m * momentum + g / _root(s + eps) * lr
    return w - m, s, m


def root_rmsprop(w: Tensor, g: Tensor, r: Tensor, *, lr: Number, decay: float, mean: MeanSquare) -> tuple[Tensor, ...]:
    """Torch's RMSprop without momentum: eps outside the root, which is stored instead of the square, as in `adamw`."""
    g = g + w * decay
    r = _root(r * r * mean.alpha + g * g * (1.0 - mean.alpha))
    return w - g / (r + mean.eps) * lr, torch.where(r > 0, r.clamp_min(mean.smallest), r)


def momentum_root_rmsprop(
    w: Tensor, g: Tensor, r: Tensor, m: Tensor, *, lr: Number, momentum: float, decay: float, mean: MeanSquare
) -> tuple[Tensor, ...]:
    """Torch's RMSprop: the rate outside the momentum."""
    g = g + w * decay
    r = _root(r * r * mean.alpha + g * g * (1.0 - mean.alpha))
    m = m * momentum + g / (r + mean.eps)
    return w - m * lr, torch.where(r > 0, r.clamp_min(mean.smallest), r), m


def adamw(w: Tensor, g: Tensor, m: Tensor, r: Tensor, *, lr: Number, decay: float, adam: Adam) -> tuple[Tensor, ...]:
    """AdamW whose second moment is stored as its root `r`: half precision has the range of gradients, not of squares.

    A root that is not 0 is never stored as 0: if it were rounded down to 0, the next step would be `m / eps`.
    """
    m = m * adam.beta1 + g * (1.0 - adam.beta1)
    r = _root(r * r * adam.beta2 + g * g * (1.0 - adam.beta2))
    step = (m * adam.correction1) / (r * adam.correction2 + adam.eps)
    return w - (step + w * decay) * lr, m, torch.where(r > 0, r.clamp_min(adam.smallest), r)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded root: torch's fp32 root on CPUs is wrong in the last bit for one number in five."""
    return torch.sqrt(x.double()).to(x.dtype)
