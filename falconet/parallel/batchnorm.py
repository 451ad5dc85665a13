"""Batch norm over the batches of several replicas, on CPU and CUDA (torch's SyncBatchNorm refuses CPU tensors).

In a fused model, `models/fused/span_kernels.py` computes it on CUDA.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
from falconet.parallel.collectives import Processes
from falconet.parallel.grid import Grid


@dataclass(frozen=True)
class Span:
    """The replicas that normalise together, seen from one of them."""

    world: Processes
    group: dist.ProcessGroup

    def gathered(self, values: Tensor) -> Tensor:  # N -> replicas x N, in their order
        everyone = values.new_empty(self.group.size() * values.numel())
        if not isinstance(values, FakeTensor):  # a pass that computes nothing
            with self.world.waiting("sharing batch norm's statistics"):
                dist.all_gather_into_tensor(everyone, values, group=self.group)
        return everyone.view(self.group.size(), -1)

    def summed(self, values: Tensor) -> Tensor:
        if not isinstance(values, FakeTensor):
            with self.world.waiting("sharing batch norm's gradients"):
                dist.all_reduce(values, group=self.group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return self: a copy of a model, such as its moving average, normalises with the same replicas."""
        return self


def span_batchnorm(model: nn.Module, grid: Grid, *, span: int) -> nn.Module:
    """Change every batch norm of `model`, in place, to one over `span` replicas; 1 changes nothing."""
    if span == 1:
        return model
    replicas = grid.replicas.size
    if replicas % span:
        raise ConfigError(f"batch norm over {span} replicas: expected a divisor of {replicas}, the number of replicas")
    assert isinstance(grid.world, Processes)
    return over(model, Span(grid.world, _own_group(grid.world, grid.spans(span))))


def over(model: nn.Module, span: Span) -> nn.Module:
    """Change every batch norm of `model`, in place, to one over these replicas."""
    kinds = _kinds()
    for name, layer in model.named_modules():
        if type(layer) in kinds:
            layer.__class__ = kinds[type(layer)]  # keeps its parameters and buffers
            layer.span = span
        elif isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"layer '{name}' is a {type(layer).__name__}, which cannot span {span.group.size()} replicas"
            )
    return model


def _kinds() -> dict[type[nn.Module], Any]:
    """The classes of layers that can span, each with its replacement."""
    if "timm.layers.norm_act" not in sys.modules:  # slow to import; without it, no model has layers of timm's
        return {nn.BatchNorm2d: SpanBatchNorm2d}
    return {nn.BatchNorm2d: SpanBatchNorm2d, **_timm_kinds()}


@cache
def _timm_kinds() -> dict[type[nn.Module], Any]:
    from timm.layers.norm_act import BatchNormAct2d

    class SpanBatchNormAct2d(BatchNormAct2d):
        """Batch norm over a span, then timm's activation; its state is that of a plain one."""

        span: Span

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return self.act(self.drop(normalised(self, x)))  # type: ignore[no-any-return]
            return super().forward(x)  # type: ignore[no-untyped-call,no-any-return]

    return {BatchNormAct2d: SpanBatchNormAct2d}


def _own_group(world: Processes, every: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Create all groups in the same order on every process, as torch requires, and return this process's own."""
    wait = timedelta(seconds=world.timeout)
    made = [dist.new_group(list(ranks), timeout=wait) for ranks in every]
    own = next(group for group, ranks in zip(made, every, strict=True) if world.rank in ranks)
    assert isinstance(own, dist.ProcessGroup)
    return own


class SpanBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over a span; its state is that of a plain one."""

    span: Span

    def forward(self, input: Tensor) -> Tensor:
        return normalised(self, input) if self.training else super().forward(input)


def normalised(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalise `x` by the statistics of the layer's span, and update the running statistics."""
    out, mean, variance, count = _Normalise.apply(x, layer.weight, layer.bias, layer.eps, layer.span)
    if layer.track_running_stats:
        _track(layer, mean, variance * (count / (count - 1)))
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    for running, newest in ((layer.running_mean, mean), (layer.running_var, variance)):
        # Without a momentum, torch keeps a cumulative average; as a tensor, the weight does not synchronise.
        weight = (1.0 / layer.num_batches_tracked).to(running.dtype) if layer.momentum is None else layer.momentum
        running.lerp_(newest.to(running.dtype), weight)


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias over the span; also returns mean, variance and count per channel.

    Means and variances are merged as by Chan et al., without differences of large squares. The gradients of weight and
    bias are those of this replica; they are averaged later, with all the others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, span: Span) -> Any:
        channels, wide = x.shape[1], x.float()  # x: N x C x H x W
        variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        own = torch.cat((mean, variance, mean.new_full((1,), x.numel() // channels)))
        means, variances, counts = torch.split(span.gathered(own), [channels, channels, 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
        inverse = torch.rsqrt(variance + eps)
        factor = inverse if weight is None else inverse * weight.float()
        out = (wide - _spread(mean)) * _spread(factor)
        if bias is not None:
            out = out + _spread(bias.float())
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.span, ctx.has_bias = span, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        incoming = gradients[0].float()
        normal = (x.float() - _spread(mean)) * _spread(inverse)
        sums = torch.stack((incoming.sum((0, 2, 3)), (incoming * normal).sum((0, 2, 3))))
        for_bias, for_weight = sums.clone()
        whole = ctx.span.summed(sums) / count
        factor = inverse if weight is None else inverse * weight.float()
        for_x = _spread(factor) * (incoming - _spread(whole[0]) - normal * _spread(whole[1]))
        kind = x.dtype if weight is None else weight.dtype
        return (
            for_x.to(x.dtype),
            None if weight is None else for_weight.to(kind),
            for_bias.to(kind) if ctx.has_bias else None,
            None,
            None,
        )


def _spread(values: Tensor) -> Tensor:  # C -> 1 x C x 1 x 1
    return values.view(1, -1, 1, 1)
