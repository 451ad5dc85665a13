"""Group norm, and TensorFlow's strided groups: fused for channels-last memory on CUDA, torch's elsewhere."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Followed(nn.GroupNorm, ABC):
    """Group norm followed by `drop` and `act`, as timm's norms have them."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W
        out: Tensor = self.act(self.drop(self.normalise(x)))
        return out

    @abstractmethod
    def normalise(self, x: Tensor) -> Tensor:
        """Group norm alone."""


class FastGroupNorm(_Followed):
    """nn.GroupNorm with the same parameters and groups of neighbouring channels, so it loads any checkpoint.

    Statistics are in fp32 whatever the input's type, and the output has the input's type and memory format. Torch's
    group norm would copy channels-last memory to row-major and back.
    """

    def normalise(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)


class StridedGroupNorm(_Followed):
    """Group norm over every G-th channel, as in the TensorFlow program: channel c is in group c mod G.

    Parameters are in the order of the channels; the arithmetic is fp32 whatever the input's type.
    """

    def normalise(self, x: Tensor) -> Tensor:
        return strided_group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """The fused kernel where it can run, otherwise the plain function that it equals."""
    if _fits(x):
        return _fused(x, groups, weight, bias, eps=eps, strided=False)
    return plain_group_norm(x, groups, weight, bias, eps=eps)


def strided_group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """The same for the groups c mod G."""
    if _fits(x):
        return _fused(x, groups, weight, bias, eps=eps, strided=True)
    return plain_strided_group_norm(x, groups, weight, bias, eps=eps)


def plain_group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Torch's group norm, computed in fp32 and rounded once."""
    with uncast(x):
        wide = [None if parameter is None else parameter.float() for parameter in (weight, bias)]
        return functional.group_norm(x.float(), groups, wide[0], wide[1], eps).to(x.dtype)


def plain_strided_group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """Torch's group norm of the channels sorted by group; keeps the memory format."""
    size = x.shape[1] // groups
    sorted_weight, sorted_bias = (None if p is None else p.view(size, groups).t().reshape(-1) for p in (weight, bias))
    y = plain_group_norm(_Shuffle.apply(x, size, groups), groups, sorted_weight, sorted_bias, eps=eps)
    shuffled: Tensor = _Shuffle.apply(y, groups, size)
    return shuffled


class _Shuffle(torch.autograd.Function):
    """Channels numbered (first, second) renumbered (second, first).

    Torch's shuffle takes as long as a copy, in both memory formats; its gradient in torch takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, second: int) -> Tensor:
        ctx.first, ctx.second = first, second
        return functional.channel_shuffle(x, first)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _Shuffle.apply(dy, ctx.second, ctx.first), None, None


def uncast(x: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, except on meta tensors, which it does not support; footprints and stage shapes use those."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _fits(x: Tensor) -> bool:
    return x.is_cuda and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.numel() > 0


def _fused(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float, strided: bool) -> Tensor:
    # The kernel takes both; a missing one is replaced by ones or zeros that get no gradient.
    weight = torch.ones(x.shape[1], device=x.device) if weight is None else weight
    bias = torch.zeros(x.shape[1], device=x.device) if bias is None else bias
    y: Tensor = FusedGroupNorm.apply(x, groups, weight, bias, eps, strided)
    return y


class FusedGroupNorm(torch.autograd.Function):
    """Three kernels forward and three backward; the input is the only large tensor saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, strided: bool) -> Tensor:
        from falconet.models import groupnorm_kernels  # Triton comes with CUDA only

        y, mean, rstd = groupnorm_kernels.forward(x, groups, weight, bias, eps, strided=strided)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.strided = groups, strided
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from falconet.models import groupnorm_kernels

        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = groupnorm_kernels.backward(x, dy, ctx.groups, weight, mean, rstd, strided=ctx.strided)
        return dx, None, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None
