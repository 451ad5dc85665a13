"""Layers of a network that take fewer passes over memory: batch norm with what follows it, the stem, the last mean.

What follows a norm is a residual sum, an activation, squeeze and excite, or the stem's pool. On CUDA, in training and
in channels-last memory, a norm is two passes forward and two backward (three with excitation); elsewhere the layers run
as they are. `models/fusion.py` finds them in a model.
"""

from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hard_swish",
    nn.ReLU6: "relu6",
}


# The one-pass norm, too: the kernels find the variance in one pass, around the first pixel instead of 0.
_NORMS = ("BatchNorm2d", "BatchNormAct2d", "OnePassBatchNorm2d")


def can_fuse(norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels compute what the layer does; a norm of timm's may have an activation."""
    if getattr(norm, "aa", None) is not None or type(norm).__name__ not in _NORMS:
        return False
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None and not norm._forward_hooks
    return plain and type(getattr(norm, "drop", nn.Identity())) is nn.Identity and own_activation(norm) is not None


def own_activation(norm: nn.Module) -> str | None:
    """The name of the activation that a norm of timm's or ours has, "none" for others; None: unknown here."""
    act: nn.Module = getattr(norm, "act", nn.Identity())
    return ACTIVATIONS.get(type(act))


def fits(y: Tensor, *norms: nn.BatchNorm2d) -> bool:
    """Whether the kernels can take this input.

    Norms may change after they were fused: frozen for a while, they keep their statistics; over a span, other replicas
    have a part in them. Such norms run as they are, and so do those of one value, which torch refuses.
    """
    dense = y.is_cuda and y.is_contiguous(memory_format=torch.channels_last) and y.numel() > y.shape[1]
    return dense and all(norm.training and can_fuse(norm) for norm in norms)


class FusedNorm(nn.Module):
    """act(norm(y) + shortcut), where both norm and shortcut may have an activation or a norm of their own.

    Returns it twice if two layers take it: their gradients are then added in the norm's own pass.
    """

    def __init__(
        self,
        norm: nn.BatchNorm2d,
        *,
        act: nn.Module | None = None,
        shortcut_norm: nn.BatchNorm2d | None = None,
        forks: bool = False,
    ) -> None:
        """`act`: what follows, if the norm has no activation itself."""
        super().__init__()
        self.norm, self.shortcut_norm, self.forks = norm, shortcut_norm, forks
        self.act = nn.Identity() if act is None else act
        self.kind = own_activation(norm) or "none" if act is None else ACTIVATIONS[type(act)]

    def saved(self, y: Tensor, shortcut: Tensor | None = None) -> list[Tensor]:
        """What the backward pass keeps, but for numbers of a channel."""
        signs = [y.new_empty(-(-y.numel() // 8), dtype=torch.uint8)] if shortcut is not None else []
        return [y, *([] if shortcut is None or self.shortcut_norm is None else [shortcut]), *signs]

    def forward(self, y: Tensor, shortcut: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        norms = [norm for norm in (self.norm, self.shortcut_norm) if norm is not None]
        if not fits(y, *norms) or (shortcut is not None and not (shortcut.shape == y.shape and fits(shortcut))):
            z = self.norm(y)
            if shortcut is not None:
                z = z + (shortcut if self.shortcut_norm is None else self.shortcut_norm(shortcut))
            z = self.act(z)
            return (z, z) if self.forks else z
        other = (None, None) if self.shortcut_norm is None else (self.shortcut_norm.weight, self.shortcut_norm.bias)
        fused: Tensor | tuple[Tensor, Tensor] = _Norm.apply(y, self.norm.weight, self.norm.bias, shortcut, *other, self)
        return fused


class FusedPool(nn.Module):
    """The max pool of relu(norm(y)), as in the stem of a ResNet. Returns it twice if two layers take it."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.norm, self.act, self.pool, self.forks = norm, act, pool, False

    def saved(self, y: Tensor) -> list[Tensor]:
        """What the backward pass keeps, but for numbers of a channel."""
        pooled = -(-y.numel() // 4)
        return [y, y.new_empty(pooled), y.new_empty(pooled, dtype=torch.uint8)]

    def forward(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not fits(y, self.norm):
            z = self.pool(self.act(self.norm(y)))
            return (z, z) if self.forks else z
        fused: Tensor | tuple[Tensor, Tensor] = _Pool.apply(y, self.norm.weight, self.norm.bias, self)
        return fused


def can_pool(pool: nn.MaxPool2d) -> bool:
    """Whether the kernels compute what the layer does."""
    sizes = [_pair(size) for size in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
    return sizes == [(3, 3), (2, 2), (1, 1), (1, 1)] and not pool.ceil_mode and not pool.return_indices


def _pair(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


class FusedExcitation(nn.Module):
    """act(norm(y)) times what `excite` makes of its mean over each image's pixels; the product's input is not kept."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module | None, excite: nn.Module) -> None:
        super().__init__()
        self.norm, self.excite = norm, excite
        self.act = nn.Identity() if act is None else act
        self.kind = own_activation(norm) or "none" if act is None else ACTIVATIONS[type(act)]

    def saved(self, y: Tensor) -> list[Tensor]:
        """What the backward pass keeps, but for numbers of a channel or an image."""
        return [y]

    def forward(self, y: Tensor) -> Tensor:
        if not fits(y, self.norm):
            z: Tensor = self.act(self.norm(y))
            product: Tensor = z * self.excite(z.mean((2, 3), keepdim=True))
            return product
        parameters = [p for p in self.excite.parameters() if p.requires_grad]
        fused: Tensor = _Excitation.apply(y, self.norm.weight, self.norm.bias, self, *parameters)
        return fused


def _statistics(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    from falconet.models import batchnorm_kernels  # Triton comes with CUDA only

    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    running = batchnorm_kernels.Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
    found: Tensor = batchnorm_kernels.statistics(y, norm.weight, norm.bias, running, eps=norm.eps)
    return found


def dense_gradients(dz: Tensor | None, dz2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of both results, of which one may not have been used."""
    from falconet.models import batchnorm_kernels

    given = [batchnorm_kernels.dense(gradient) for gradient in (dz, dz2) if gradient is not None]
    return given[0], given[1] if len(given) == 2 else None


class PaddedStem(nn.Module):
    """A convolution whose input has zeros for further channels, with which cuDNN's kernels are faster.

    ResNet-50's, 512 images on an H200: 2.3 ms with 3 channels, 1.6 with 4, 4.3 with 8. EfficientNet-B4's: 1.2, 1, 0.8.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv, self.channels = conv, 4 if conv.kernel_size == (7, 7) else 8

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.channels:
            plain: Tensor = self.conv(x)
            return plain
        weight = nn.functional.pad(self.conv.weight, (0, 0, 0, 0, 0, self.channels - self.conv.in_channels))
        padded: Tensor = self.conv._conv_forward(x, weight, self.conv.bias)
        return padded


class Means(nn.Module):
    """The mean over each image's pixels, whose gradient is not spread over them before the norm's pass does it."""

    def __init__(self, *, keeps: bool) -> None:
        """`keeps`: the pixels' dimensions stay, as one."""
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        means: Tensor = _Means.apply(x)
        return means if self.keeps else means.flatten(1)


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        spread: Tensor = (gradient / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)
        return spread


class _Norm(torch.autograd.Function):
    """Keeps its input, a few numbers per channel and, where a sum is rectified, its signs as bits."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004  # here for its gradient, as are the next
        bias: Tensor,  # noqa: ARG004
        shortcut: Tensor | None,
        shortcut_weight: Tensor | None,  # noqa: ARG004
        shortcut_bias: Tensor | None,  # noqa: ARG004
        layer: FusedNorm,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models import batchnorm_kernels

        found = _statistics(y, layer.norm)
        other = layer.shortcut_norm
        other_found = None if other is None or shortcut is None else _statistics(shortcut, other)
        z, bits = batchnorm_kernels.normalise(y, found, act=layer.kind, shortcut=shortcut, shortcut_found=other_found)
        ctx.save_for_backward(y, found, None if other is None else shortcut, other_found, bits)
        ctx.act, ctx.adds = layer.kind, shortcut is not None
        return (z, z.view_as(z)) if layer.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models import batchnorm_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        y, found, *rest = ctx.saved_tensors
        added = batchnorm_kernels.Added(*rest) if ctx.adds else None
        own, other = batchnorm_kernels.backward(dz, y, found, act=ctx.act, dz2=dz2, added=added)
        others = other if isinstance(other, tuple) else (other, None, None)
        return (*own, *others, None)


class _Pool(torch.autograd.Function):
    """Keeps its input, a few numbers per channel, and which values won."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedPool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models import pool_kernels

        found = _statistics(y, layer.norm)
        z, *won = pool_kernels.forward(y, found)
        ctx.save_for_backward(y, found, *won)
        return (z, z.view_as(z)) if layer.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models import pool_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        return (*pool_kernels.backward(dz, *ctx.saved_tensors, dz2=dz2), None)


def _kept(tensor: Tensor) -> Tensor:
    return tensor


class _Excitation(torch.autograd.Function):
    """Keeps its input, a few numbers per channel and image, and the graph of the small layers that make the gate."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedExcitation,
        *parameters: Tensor,
    ) -> Tensor:
        from falconet.models.excitation_kernels import Excitation

        norm = Excitation(y, _statistics(y, layer.norm), layer.kind)
        sums = norm.sums()
        # Kept as it is where the rest is recomputed: its own backward pass would recompute everything once more.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_kept, _kept):
            mean = sums[0, :, :, None, None].to(y.dtype).requires_grad_()
            gate = layer.excite(mean)
        ctx.save_for_backward(y, norm.found, sums)
        ctx.act, ctx.mean, ctx.gate, ctx.parameters = layer.kind, mean, gate, parameters
        z: Tensor = norm.apply(gate.detach().contiguous())
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        from falconet.models.excitation_kernels import Excitation

        y, found, sums = ctx.saved_tensors
        (dz, _), norm = dense_gradients(dz, None), Excitation(y, found, ctx.act)
        back = norm.gate_sums(dz)
        dgate = back[0, :, :, None, None].to(ctx.gate.dtype)
        dmean, *others = torch.autograd.grad(ctx.gate, (ctx.mean, *ctx.parameters), dgate)
        own = norm.backward(dz, ctx.gate.detach().contiguous(), dmean.contiguous(), (sums, back))
        return (*own, None, *others)
