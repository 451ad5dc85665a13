"""Batch norm and what follows it, as layers that take fewer passes over memory.

A norm is followed by a residual sum, an activation, squeeze and excite, or the stem's pool; a 1 x 1 convolution or a
pool before it may be part of it, too. On CUDA, in training and in channels-last memory, a norm takes two passes forward
and two backward (three with excitation); elsewhere the layers run unchanged. `models/fused/fusion.py` finds them.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from falconet.models.fused import pointwise
from falconet.models.padding import SameMaxPool2d, same_padding

if TYPE_CHECKING:
    from falconet.models.fused.batchnorm_kernels import Reached, Running, Slopes
    from falconet.models.fused.span_kernels import Spanning
    from falconet.parallel.batchnorm import Span

# Torch's and timm's; SpanBatchNorm2d and so on, over several replicas; and ours of one pass over the input: the kernels
# take one for the variance, too, around the first pixel instead of 0.
NORMS = ("BatchNorm2d", "BatchNormAct2d", "OnePassBatchNorm2d")
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Hardswish: "hard_swish",
    nn.ReLU6: "relu6",
    nn.GELU: "gelu",
}


def kind_of(act: nn.Module) -> str | None:
    """The kernels' name of an activation; None: they do not have it."""
    is_approximate = getattr(act, "approximate", "none") != "none"  # GELU by a hyperbolic tangent
    return None if is_approximate else ACTIVATIONS.get(type(act))


def can_fuse(norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels can compute the norm; a timm norm may include an activation."""
    if getattr(norm, "aa", None) is not None or type(norm).__name__.removeprefix("Span") not in NORMS:
        return False
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None and not norm._forward_hooks
    return plain and type(getattr(norm, "drop", nn.Identity())) is nn.Identity and own_activation(norm) is not None


def own_activation(norm: nn.Module) -> str | None:
    """The name of the activation inside a timm norm or ours, "none" for other norms; None: unknown to the kernels."""
    return kind_of(getattr(norm, "act", nn.Identity()))


def _kind(norm: nn.Module, act: nn.Module | None) -> str:
    """The name of the activation that follows a norm or is inside it."""
    return (own_activation(norm) if act is None else kind_of(act)) or "none"


def fits(y: Tensor, *norms: nn.BatchNorm2d) -> bool:
    """Whether the kernels can take this input.

    Norms may change after they were fused: frozen for a while, they keep their statistics. Such norms run unchanged,
    and so do norms of a single value, which torch refuses.
    """
    dense = y.is_cuda and y.is_contiguous(memory_format=torch.channels_last) and y.numel() > y.shape[1]
    return dense and all(norm.training and can_fuse(norm) for norm in norms)


class FusedNorm(nn.Module):
    """act(norm(x) + shortcut); the shortcut may have a norm, and each norm may follow a 1 x 1 convolution.

    Returns the result twice if two layers take it: their gradients are then added in the norm's own pass.
    """

    def __init__(
        self,
        norm: nn.BatchNorm2d,
        *,
        act: nn.Module | None = None,
        shortcut_norm: nn.BatchNorm2d | None = None,
        forks: bool = False,
    ) -> None:
        """`act`: the activation that follows, if the norm contains none."""
        super().__init__()
        self.norm, self.shortcut_norm, self.forks = norm, shortcut_norm, forks
        self.act = nn.Identity() if act is None else act
        self.kind = _kind(norm, act)
        self.conv: nn.Conv2d | None = None  # 1 x 1, whose result nothing but the norm reads
        self.shortcut_conv: nn.Conv2d | None = None

    def saved(self, x: Tensor, shortcut: Tensor | None = None) -> list[Tensor]:
        """The tensors kept for the backward pass, apart from numbers per channel."""
        y, *inputs = _kept_before(self.conv, x)
        if shortcut is None:
            return [y, *inputs]
        others = [] if self.shortcut_norm is None else _kept_before(self.shortcut_conv, shortcut)
        return [y, *inputs, *others, y.new_empty(-(-y.numel() // 8), dtype=torch.uint8)]

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight, x = _joined(self.conv, self.norm, x)
        other_weight, norms = None, [self.norm]
        if shortcut is not None and self.shortcut_norm is not None:
            other_weight, shortcut = _joined(self.shortcut_conv, self.shortcut_norm, shortcut)
            norms.append(self.shortcut_norm)
        alike = shortcut is None or pointwise.shape_after(weight, x) == pointwise.shape_after(other_weight, shortcut)
        if not alike or not fits(x, *norms) or (shortcut is not None and not fits(shortcut)):
            z = self.norm(_convolved(weight, x))
            if shortcut is not None:
                shortcut = _convolved(other_weight, shortcut)
                z = z + (shortcut if self.shortcut_norm is None else self.shortcut_norm(shortcut))
            z = self.act(z)
            return (z, z) if self.forks else z
        other = (None, None) if self.shortcut_norm is None else (self.shortcut_norm.weight, self.shortcut_norm.bias)
        fused: Tensor | tuple[Tensor, Tensor] = _Norm.apply(
            x, weight, self.norm.weight, self.norm.bias, shortcut, other_weight, *other, self
        )
        return fused


def _joined(conv: nn.Conv2d | None, norm: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """The weight and the input of a convolution that the norm's kernels compute, or None and its result."""
    if conv is None:
        return None, x
    return (conv.weight, x) if fits(x, norm) and pointwise.fits(conv, x) else (None, conv(x))


def _convolved(weight: Tensor | None, x: Tensor) -> Tensor:
    return x if weight is None else nn.functional.conv2d(x, weight.to(x.dtype))


def _kept_before(conv: nn.Conv2d | None, x: Tensor) -> list[Tensor]:
    """The input of the norm, and that of a convolution that is part of it."""
    return [x] if conv is None else [x.new_empty(pointwise.shape_after(conv.weight, x)), x]


class FusedPool(nn.Module):
    """The max pool of relu(norm(y)), as in the stem of a ResNet. Returns the result twice if two layers take it."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.norm, self.act, self.pool, self.forks = norm, act, pool, False

    def saved(self, y: Tensor) -> list[Tensor]:
        """The tensors kept for the backward pass, apart from numbers per channel."""
        pooled = -(-y.numel() // 4)
        return [y, y.new_empty(pooled), y.new_empty(pooled, dtype=torch.uint8)]

    def forward(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not fits(y, self.norm):
            z = self.pool(self.act(self.norm(y)))
            return (z, z) if self.forks else z
        fused: Tensor | tuple[Tensor, Tensor] = _Pool.apply(y, self.norm.weight, self.norm.bias, self)
        return fused


def can_pool(pool: nn.MaxPool2d) -> bool:
    """Whether the kernels can compute the layer."""
    padding = {nn.MaxPool2d: (1, 1), SameMaxPool2d: (0, 0)}.get(type(pool))
    return _windows(pool) == [(3, 3), (2, 2), padding, (1, 1)] and not pool.ceil_mode and not pool.return_indices


def _padding(pool: nn.MaxPool2d, y: Tensor) -> tuple[int, int]:
    """The pixels of padding above an image and to its left."""
    if type(pool) is nn.MaxPool2d:
        return 1, 1
    above, left = (same_padding(side, kernel=3, stride=2)[0] for side in y.shape[2:])
    return above, left


def _windows(pool: nn.MaxPool2d) -> list[tuple[int, ...]]:
    """Size, stride, padding and dilation."""
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return [(size, size) if isinstance(size, int) else tuple(size) for size in sizes]


class FusedHalving(nn.Module):
    """act(norm(pool(y))) of a 2 x 2 pool, as in SpeedNet. Returns the result twice if two layers take it."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module | None, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.norm, self.pool, self.forks = norm, pool, False
        self.act = nn.Identity() if act is None else act
        self.kind = _kind(norm, act)

    def saved(self, y: Tensor) -> list[Tensor]:
        """The tensors kept for the backward pass, apart from numbers per channel."""
        return [y.new_empty(y.numel() // 4), y.new_empty(y.numel() // 4, dtype=torch.uint8)]

    def forward(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        images, _, height, width = y.shape
        values = images * (height // 2) * (width // 2)  # of a channel; torch refuses one, and an empty image
        if not fits(y, self.norm) or values < 2:
            z = self.act(self.norm(self.pool(y)))
            return (z, z) if self.forks else z
        fused: Tensor | tuple[Tensor, Tensor] = _Halving.apply(y, self.norm.weight, self.norm.bias, self)
        return fused


def can_halve(pool: nn.MaxPool2d) -> bool:
    """Whether the kernels can compute the layer."""
    is_plain = type(pool) is nn.MaxPool2d and not pool.ceil_mode and not pool.return_indices
    return is_plain and _windows(pool) == [(2, 2), (2, 2), (0, 0), (1, 1)]


class FusedExcitation(nn.Module):
    """act(norm(y)) times the result of `excite` for its mean over each image; the product's input is not kept."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module | None, excite: nn.Module) -> None:
        super().__init__()
        self.norm, self.excite = norm, excite
        self.act = nn.Identity() if act is None else act
        self.kind = _kind(norm, act)

    def saved(self, y: Tensor) -> list[Tensor]:
        """The tensors kept for the backward pass, apart from numbers per channel or image."""
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
    from falconet.models.fused import batchnorm_kernels

    found: Tensor = batchnorm_kernels.statistics(
        y, norm.weight, norm.bias, _running(norm), eps=norm.eps, span=_spanning(norm)
    )
    return found


def _running(norm: nn.BatchNorm2d) -> "Running":
    from falconet.models.fused import batchnorm_kernels

    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    return batchnorm_kernels.Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)


def _spanning(norm: nn.BatchNorm2d) -> "Spanning | None":
    """The sums of a norm over the replicas of its span; None: this replica alone."""
    span: Span | None = getattr(norm, "span", None)
    if span is None:
        return None
    from falconet.models.fused.span_kernels import Spanning

    return Spanning(span)


def dense_gradients(dz: Tensor | None, dz2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of both results, one of which may be unused."""
    from falconet.models.fused import batchnorm_kernels

    given = [batchnorm_kernels.dense(gradient) for gradient in (dz, dz2) if gradient is not None]
    return given[0], given[1] if len(given) == 2 else None


class _Norm(torch.autograd.Function):
    """A fused norm; keeps the inputs of norms and convolutions, a few numbers per channel and the signs of a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        conv_weight: Tensor | None,
        weight: Tensor,  # noqa: ARG004  # here for its gradient, as is the next
        bias: Tensor,  # noqa: ARG004
        shortcut: Tensor | None,
        shortcut_conv_weight: Tensor | None,
        shortcut_weight: Tensor | None,  # noqa: ARG004
        shortcut_bias: Tensor | None,  # noqa: ARG004
        layer: FusedNorm,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models.fused import batchnorm_kernels

        own, other = _Branch.of(x, conv_weight, layer.norm), None
        if shortcut is not None and layer.shortcut_norm is not None:
            other = _Branch.of(shortcut, shortcut_conv_weight, layer.shortcut_norm)
        z, bits = batchnorm_kernels.normalise(
            own.y,
            own.found,
            act=layer.kind,
            shortcut=shortcut if other is None else other.y,
            shortcut_found=None if other is None else other.found,
        )
        ctx.save_for_backward(*own, *(other or (None,) * len(own)), bits)
        ctx.act, ctx.adds, ctx.span = layer.kind, shortcut is not None, _spanning(layer.norm)
        return (z, z.view_as(z)) if layer.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import batchnorm_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        *saved, bits = ctx.saved_tensors
        own, other = _Branch(*saved[:4]), _Branch(*saved[4:]) if saved[4] is not None else None
        added = batchnorm_kernels.Added(other and other.y, other and other.found, bits) if ctx.adds else None
        reached, slopes, other_slopes = batchnorm_kernels.sum_gradients(
            dz, own.y, own.found, act=ctx.act, dz2=dz2, added=added, span=ctx.span
        )
        if other is None or other_slopes is None:
            return (*own.backward(reached, slopes), reached.dz if ctx.adds else None, None, None, None, None)
        if own.weight is None and other.weight is None:  # both in one pass
            dy, dother = batchnorm_kernels.spread_gradients(
                reached, own.y, own.found, slopes.found, other.y, other_slopes.found
            )
            return (dy, None, *slopes.own, dother, None, *other_slopes.own, None)
        return (*own.backward(reached, slopes), *other.backward(reached, other_slopes), None)


class _Branch(NamedTuple):
    """A norm's input and numbers, and those of the convolution before it if that is part of the norm."""

    y: Tensor
    found: Tensor
    x: Tensor | None
    weight: Tensor | None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None, norm: nn.BatchNorm2d) -> "_Branch":
        from falconet.models.fused import batchnorm_kernels, pointwise_kernels

        if weight is None:
            return cls(x, _statistics(x, norm), None, None)
        y, partial = pointwise_kernels.forward(x, weight)
        found = batchnorm_kernels.numbers(
            y, partial, norm.weight, norm.bias, _running(norm), eps=norm.eps, span=_spanning(norm)
        )
        return cls(y, found, x, weight)

    def backward(self, reached: "Reached", slopes: "Slopes") -> tuple[Tensor | None, ...]:
        """The gradients of the input, the convolution's weight, and the norm's weight and bias."""
        from falconet.models.fused import batchnorm_kernels

        given = (reached, self.y, self.found, slopes.found)
        if self.x is None or self.weight is None:
            return (batchnorm_kernels.spread_gradients(*given)[0], None, *slopes.own)
        return (*pointwise.backward(*given, self.x, self.weight), *slopes.own)


class _Pool(torch.autograd.Function):
    """A norm with a pool after it; keeps its input, a few numbers per channel, and which values won."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedPool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models.fused import pool_kernels

        found = _statistics(y, layer.norm)
        ctx.span, ctx.padding = _spanning(layer.norm), _padding(layer.pool, y)
        z, *won = pool_kernels.forward(y, found, ctx.padding)
        ctx.save_for_backward(y, found, *won)
        return (z, z.view_as(z)) if layer.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import pool_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        own = pool_kernels.backward(dz, *ctx.saved_tensors, dz2=dz2, span=ctx.span, padding=ctx.padding)
        return (*own, None)


class _Halving(torch.autograd.Function):
    """A norm with a pool before it; keeps the pooled values, a few numbers per channel, and which values won."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedHalving,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from falconet.models.fused import batchnorm_kernels, pool_kernels

        norm = layer.norm
        pooled, winners, partial = pool_kernels.halve(y)
        found = batchnorm_kernels.numbers(
            pooled, partial, norm.weight, norm.bias, _running(norm), eps=norm.eps, span=_spanning(norm)
        )
        z, _ = batchnorm_kernels.normalise(pooled, found, act=layer.kind)
        ctx.save_for_backward(pooled, found, winners)
        ctx.shape, ctx.act, ctx.span = y.shape, layer.kind, _spanning(norm)
        return (z, z.view_as(z)) if layer.forks else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dz2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import batchnorm_kernels, pool_kernels

        dz, dz2 = dense_gradients(dz, dz2)
        pooled, found, winners = ctx.saved_tensors
        reached, slopes, _ = batchnorm_kernels.sum_gradients(dz, pooled, found, act=ctx.act, dz2=dz2, span=ctx.span)
        dy = pool_kernels.spread_halved(reached, pooled, found, slopes.found, winners, shape=ctx.shape)
        return (dy, *slopes.own, None)


def _kept(tensor: Tensor) -> Tensor:
    return tensor


class _Excitation(torch.autograd.Function):
    """A norm with a gate; keeps its input, a few numbers per channel and image, and the graph of the gate's layers."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedExcitation,
        *parameters: Tensor,
    ) -> Tensor:
        from falconet.models.fused.excitation_kernels import Excitation

        norm = Excitation(y, _statistics(y, layer.norm), layer.kind)
        sums = norm.sums()
        # Kept even if the rest is recomputed: its own backward pass would recompute everything once more.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_kept, _kept):
            mean = sums[0, :, :, None, None].to(y.dtype).requires_grad_()
            gate = layer.excite(mean)
        ctx.save_for_backward(y, norm.found, sums)
        ctx.act, ctx.mean, ctx.gate, ctx.parameters = layer.kind, mean, gate, parameters
        ctx.span = _spanning(layer.norm)
        z: Tensor = norm.apply(gate.detach().contiguous())
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        from falconet.models.fused.excitation_kernels import Excitation

        y, found, sums = ctx.saved_tensors
        (dz, _), norm = dense_gradients(dz, None), Excitation(y, found, ctx.act, ctx.span)
        back = norm.gate_sums(dz)
        dgate = back[0, :, :, None, None].to(ctx.gate.dtype)
        dmean, *others = torch.autograd.grad(ctx.gate, (ctx.mean, *ctx.parameters), dgate)
        own = norm.backward(dz, ctx.gate.detach().contiguous(), dmean.contiguous(), (sums, back))
        return (*own, None, *others)
