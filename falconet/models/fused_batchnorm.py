"""Batch norm as one operation with what follows it: a residual sum, an activation, squeeze and excite.

On CUDA, in training and in channels-last memory, each is two passes over memory forward and two backward (three with
excitation); elsewhere the layers run as they are. `models/fusion.py` finds them in a model.
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


def can_fuse(norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels compute what the layer does; a norm of timm's may have an activation."""
    if getattr(norm, "aa", None) is not None or type(norm).__name__ not in ("BatchNorm2d", "BatchNormAct2d"):
        return False
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None and not norm._forward_hooks
    return plain and type(getattr(norm, "drop", nn.Identity())) is nn.Identity and own_activation(norm) is not None


def own_activation(norm: nn.BatchNorm2d) -> str | None:
    """The name of the activation that a norm of timm's has, "none" for others; None: unknown here."""
    act: nn.Module = getattr(norm, "act", nn.Identity())
    return ACTIVATIONS.get(type(act))


def fits(y: Tensor, *norms: nn.BatchNorm2d) -> bool:
    """Whether the kernels can take this input; frozen norms are in evaluation mode and run as they are."""
    return y.is_cuda and y.is_contiguous(memory_format=torch.channels_last) and all(norm.training for norm in norms)


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

    def forward(self, y: Tensor, shortcut: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        norms = [norm for norm in (self.norm, self.shortcut_norm) if norm is not None]
        if not fits(y, *norms) or (shortcut is not None and not fits(shortcut)):
            z = self.norm(y)
            if shortcut is not None:
                z = z + (shortcut if self.shortcut_norm is None else self.shortcut_norm(shortcut))
            z = self.act(z)
            return (z, z) if self.forks else z
        other = (None, None) if self.shortcut_norm is None else (self.shortcut_norm.weight, self.shortcut_norm.bias)
        fused: Tensor | tuple[Tensor, Tensor] = _Norm.apply(y, self.norm.weight, self.norm.bias, shortcut, *other, self)
        return fused


class FusedExcitation(nn.Module):
    """act(norm(y)) times what `excite` makes of its mean over each image's pixels; the product's input is not kept."""

    def __init__(self, norm: nn.BatchNorm2d, *, act: nn.Module | None, excite: nn.Module) -> None:
        super().__init__()
        self.norm, self.excite = norm, excite
        self.act = nn.Identity() if act is None else act
        self.kind = own_activation(norm) or "none" if act is None else ACTIVATIONS[type(act)]

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


def _dense(gradient: Tensor) -> Tensor:
    """The gradient of a mean, for one, is an expanded view."""
    return gradient.contiguous(memory_format=torch.channels_last)


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

        if dz is None:
            dz, dz2 = dz2, None
        assert dz is not None
        y, found, *rest = ctx.saved_tensors
        added = batchnorm_kernels.Added(*rest) if ctx.adds else None
        own, other = batchnorm_kernels.backward(
            _dense(dz), y, found, act=ctx.act, dz2=None if dz2 is None else _dense(dz2), added=added
        )
        others = other if isinstance(other, tuple) else (other, None, None)
        return (*own, *others, None)


class _Excitation(torch.autograd.Function):
    """Keeps its input, a few numbers per channel, and the graph of the small layers that make the gate."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,  # noqa: ARG004
        bias: Tensor,  # noqa: ARG004
        layer: FusedExcitation,
        *parameters: Tensor,
    ) -> Tensor:
        from falconet.models import batchnorm_kernels

        found = _statistics(y, layer.norm)
        mean = batchnorm_kernels.image_means(y, found, act=layer.kind)
        with torch.enable_grad():
            mean = mean.requires_grad_()
            gate = layer.excite(mean)
        ctx.save_for_backward(y, found)
        ctx.act, ctx.mean, ctx.gate, ctx.parameters = layer.kind, mean, gate, parameters
        z: Tensor = batchnorm_kernels.excite(y, found, gate.detach().contiguous(), act=layer.kind)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        from falconet.models import batchnorm_kernels

        y, found = ctx.saved_tensors
        dz = _dense(dz)
        dgate = batchnorm_kernels.gate_gradients(dz, y, found, act=ctx.act)
        dmean, *others = torch.autograd.grad(ctx.gate, (ctx.mean, *ctx.parameters), dgate.to(ctx.gate.dtype))
        gated = batchnorm_kernels.Gated(
            ctx.gate.detach().contiguous(), (dmean / (y.shape[2] * y.shape[3])).contiguous()
        )
        own, _ = batchnorm_kernels.backward(dz, y, found, act=ctx.act, gated=gated)
        return (*own, None, *others)
