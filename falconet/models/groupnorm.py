"""Group norm, and TensorFlow's strided groups: fused for channels-last memory on CUDA, torch's elsewhere.

On CUDA a norm and what follows it (a residual sum, an activation, or a proxy norm instead of one) take two passes over
memory forward and two backward. `models/fused/fusion.py` finds them in a model.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falconet.models.fused.layers import dense_gradients, kind_of, own_activation
from falconet.models.proxynorm import ProxyNorm, fits, wide
from falconet.numerics.precision import uncast


class _Followed(nn.GroupNorm, ABC):
    """Group norm followed by `drop` and `act`, as timm's norms have them."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W
        if fits(x) and can_fuse(self):
            out: Tensor = _apply(x, self)
        else:
            out = self.act(self.drop(self.normalise(x)))
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
    """Group norm by the fused kernel if it can run, otherwise by the plain function, which gives the same result."""
    if fits(x):
        y: Tensor = _fused(x, weight, bias, _How(groups, eps=eps, strided=False))
        return y
    return plain_group_norm(x, groups, weight, bias, eps=eps)


def strided_group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Group norm with the groups c mod G."""
    if fits(x):
        y: Tensor = _fused(x, weight, bias, _How(groups, eps=eps, strided=True))
        return y
    return plain_strided_group_norm(x, groups, weight, bias, eps=eps)


def plain_group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Torch's group norm, computed in fp32 and rounded once."""
    with uncast(x):
        scale, shift = (None if parameter is None else wide(parameter) for parameter in (weight, bias))
        return functional.group_norm(wide(x), groups, scale, shift, eps).to(x.dtype)


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
    """Transpose the channels from (first, second) to (second, first).

    Torch's shuffle takes as long as a copy in both memory formats, but its gradient takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, second: int) -> Tensor:
        ctx.first, ctx.second = first, second
        return functional.channel_shuffle(x, first)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _Shuffle.apply(dy, ctx.second, ctx.first), None, None


_NORMS = ("GroupNorm", "GroupNormAct", "FastGroupNorm", "StridedGroupNorm")  # the first of torch, and of timm


def can_fuse(norm: nn.GroupNorm) -> bool:
    """Whether the kernels can compute the norm; a timm norm or ours may include an activation."""
    if type(norm).__name__ not in _NORMS or norm._forward_hooks:
        return False
    return type(getattr(norm, "drop", nn.Identity())) is nn.Identity and (
        own_activation(norm) is not None or _proxy(norm) is not None
    )


def _proxy(norm: nn.GroupNorm) -> ProxyNorm | None:
    """The proxy norm that replaces the activation of a norm without scale and shift, if any."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, ProxyNorm) and act.recompute and norm.weight is None and norm.bias is None else None


class FusedGroupNorm(nn.Module):
    """act(norm(y) + shortcut); the norm may include an activation or a proxy norm.

    Returns the result twice if two layers take it: their gradients are then added in the norm's own pass.
    """

    def __init__(self, norm: nn.GroupNorm, *, act: nn.Module | None = None) -> None:
        """`act`: the activation that follows, if the norm contains none."""
        super().__init__()
        self.norm, self.forks = norm, False
        self.act = nn.Identity() if act is None else act

    def saved(self, y: Tensor, shortcut: Tensor | None = None) -> list[Tensor]:
        """The tensors kept for the backward pass, apart from numbers per group of an image."""
        keeps = shortcut is not None and type(self.act) is nn.ReLU
        return [y, *([y.new_empty(-(-y.numel() // 8), dtype=torch.uint8)] if keeps else [])]

    def forward(self, y: Tensor, shortcut: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        taken = fits(y) and can_fuse(self.norm)
        if taken and (shortcut is None or (fits(shortcut) and shortcut.shape == y.shape)):
            kind = None if type(self.act) is nn.Identity else kind_of(self.act)
            fused: Tensor | tuple[Tensor, Tensor] = _apply(y, self.norm, act=kind, shortcut=shortcut, forks=self.forks)
            return fused
        z = self.norm(y)
        if shortcut is not None:
            z = z + shortcut
        z = self.act(z)
        return (z, z) if self.forks else z


class _How(NamedTuple):
    """The parameters of a fused norm."""

    groups: int
    eps: float
    strided: bool
    act: str = "none"
    forks: bool = False


def _apply(
    y: Tensor, norm: nn.GroupNorm, *, act: str | None = None, shortcut: Tensor | None = None, forks: bool = False
) -> Any:
    """Compute the norm and what follows it in the kernels; `act` None: its own activation."""
    proxy, how = _proxy(norm), _How(norm.num_groups, norm.eps, isinstance(norm, StridedGroupNorm), forks=forks)
    if proxy is None:
        how = how._replace(act=act or own_activation(norm) or "none")
        return _fused(y, norm.weight, norm.bias, how, shortcut)
    how = how._replace(act=proxy.activation)
    return _ProxiedNorm.apply(y, proxy.factors(), proxy.samples, proxy.eps, how)


def _fused(y: Tensor, weight: Tensor | None, bias: Tensor | None, how: _How, shortcut: Tensor | None = None) -> Any:
    # The kernels take both; a missing one is replaced by ones or zeros that get no gradient.
    weight = torch.ones(y.shape[1], device=y.device) if weight is None else weight
    bias = torch.zeros(y.shape[1], device=y.device) if bias is None else bias
    return _Norm.apply(y, weight, bias, shortcut, how)


class _Norm(torch.autograd.Function):
    """A fused group norm; keeps its input, two numbers per group of an image and the signs of a rectified sum."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, how: _How
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models.fused import groupnorm_kernels

        found = groupnorm_kernels.statistics(y, how.groups, strided=how.strided, eps=how.eps)
        z, bits = groupnorm_kernels.GroupNorm(y, found, weight, bias, how.act, how.strided).apply(shortcut)
        ctx.save_for_backward(y, found, weight, bias, bits)
        ctx.how, ctx.adds = how, shortcut is not None
        return (z, z.view_as(z)) if how.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import groupnorm_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        y, found, weight, bias, bits = ctx.saved_tensors
        norm = groupnorm_kernels.GroupNorm(y, found, weight, bias, ctx.how.act, ctx.how.strided)
        back = norm.backward(dz, dz2=dz2, adds=ctx.adds, bits=bits)
        return back.input, *back.parameters.to(weight.dtype).unbind(), back.shortcut, None


class _ProxiedNorm(torch.autograd.Function):
    """A norm without scale and shift, and its proxy norm; keeps its input and numbers per group and channel."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, factors: Tensor, samples: Tensor, eps: float, how: _How
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models.fused import groupnorm_kernels, proxynorm_kernels

        found = groupnorm_kernels.statistics(y, how.groups, strided=how.strided, eps=how.eps)
        moments = proxynorm_kernels.moments(factors, samples, how.act, eps)
        norm = groupnorm_kernels.GroupNorm(y, found, factors[0], factors[1], how.act, how.strided, moments)
        z, _ = norm.apply()
        ctx.save_for_backward(y, found, factors, samples, moments)
        ctx.how = how
        return (z, z.view_as(z)) if how.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import groupnorm_kernels, proxynorm_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        y, found, factors, samples, moments = ctx.saved_tensors
        act, strided = ctx.how.act, ctx.how.strided
        norm = groupnorm_kernels.GroupNorm(y, found, factors[0], factors[1], act, strided, moments)
        back = norm.backward(dz, dz2=dz2)
        dfactors = proxynorm_kernels.factor_gradients(factors, samples, moments, back.parameters, act)
        return back.input, dfactors.to(factors.dtype), None, None, None
