"""Batch norm whose statistics take one pass: E[x^2] - E[x]^2."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class OnePassBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d, with its parameters and buffers, that sums values and squares together in fp32.

    Where a channel's mean is far from 0 the difference cancels: the variance is off by about 1e-7 * mean^2. It is
    never negative. Evaluation is torch's own. `drop` and `act` follow, as in timm's norms.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, **options: Any) -> None:
        super().__init__(num_features, eps, momentum, **options)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W
        if self.training:
            y, mean, variance = OnePass.apply(x, self.weight, self.bias, self.eps)
            self._track(mean, variance, count=x.numel() // x.shape[1])
        else:
            y = functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.running_mean is None, 0.0, self.eps
            )
        out: Tensor = self.act(self.drop(y))
        return out

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, *, count: int) -> None:
        """As torch does: the unbiased variance, weighed by the momentum, or over all batches without one."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        newest = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance * (count / max(1, count - 1)))):
            running += (value - running) * newest


class OnePass(torch.autograd.Function):
    """Keeps its input and three vectors for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, count = x.float(), x.numel() // x.shape[1]
        mean = wide.sum(_PIXELS) / count
        variance = (wide.square().sum(_PIXELS) / count - mean.square()).clamp_min(0.0)
        rstd = torch.rsqrt(variance + eps)
        factor = rstd if weight is None else rstd * weight.float()
        offset = -mean * factor if bias is None else bias.float() - mean * factor
        y = (wide * _spread(factor) + _spread(offset)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        slope, count = dy.float(), x.numel() // x.shape[1]
        normal = (x.float() - _spread(mean)) * _spread(rstd)
        dbias, dweight = slope.sum(_PIXELS), (slope * normal).sum(_PIXELS)
        factor = rstd if weight is None else rstd * weight.float()
        dx = (slope - (_spread(dbias) + normal * _spread(dweight)) / count) * _spread(factor)
        given = None if weight is None else dweight.to(weight.dtype)
        return dx.to(x.dtype), given, dbias.to(weight.dtype) if ctx.has_bias else None, None


_PIXELS = (0, 2, 3)  # everything but the channels


def _spread(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)
