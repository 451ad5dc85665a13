"""Batch norm whose statistics take one pass: E[x^2] - E[x]^2."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.errors import ConfigError
from falconet.models import proxynorm
from falconet.models.groupnorm import FastGroupNorm, StridedGroupNorm
from falconet.models.proxynorm import Proxy
from falconet.models.resnet import add_biases

if TYPE_CHECKING:
    from timm.layers.norm_act import BatchNormAct2d


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


def move_once(model: nn.Module, *, micro_batches: int) -> None:
    """Let the momentum m of each batch norm count once for all the micro-batches of an update, not for each of them.

    Torch moves statistics r to (1 - m) r + m s with every micro-batch, so that after many of them only the last are
    left. Here r becomes (1 - m) r + m mean(s): with the weight m / (K - (K - k) m) for the k-th of K micro-batches the
    steps in between multiply out to that, and nothing else has to be kept.
    """
    layers = [(layer, layer.momentum) for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if micro_batches == 1 or not layers:
        return
    done = 0  # micro-batches of this update

    def begin(module: nn.Module, _: Any) -> None:
        nonlocal done
        if not module.training:
            return
        done = done % micro_batches + 1
        for layer, momentum in layers:
            if momentum is not None:  # else it is a plain mean over all batches
                layer.momentum = momentum / (micro_batches - (micro_batches - done) * momentum)

    model.register_forward_pre_hook(begin)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What to normalise over; `None` keeps the model's own value."""

    kind: Literal["batch", "group", "none"] = "batch"
    eps: float | None = None
    groups: int = 32  # group norm only
    momentum: float | None = None  # batch norm only: the weight of the newest batch in the running statistics
    fast: bool = False  # group norm only: the fused kernel
    strided: bool = False  # group norm only: every G-th channel in a group, instead of neighbours
    stable: bool = True  # batch norm only: variance around the mean, not the difference of two sums
    proxy: Proxy | None = None  # activations after a norm are normalised too
    biases: bool = False  # no norm only: convolutions get biases in its place


def apply(model: nn.Module, norm: Norm) -> nn.Module:
    """`model` with every 2d batch norm changed, in place, to what `norm` asks for."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    if not layers:
        _check_nothing_was_asked(norm)
    match norm.kind:
        case "batch":
            for name, layer in layers.items():
                layer.eps = layer.eps if norm.eps is None else norm.eps
                layer.momentum = layer.momentum if norm.momentum is None else norm.momentum
                if not norm.stable:
                    model.set_submodule(name, _one_pass(layer).train(layer.training))
        case "group":
            _check_groups(layers, groups=norm.groups)
            for name, layer in layers.items():
                model.set_submodule(name, _group_norm(layer, norm).train(layer.training))
        case "none":
            for name, layer in layers.items():
                model.set_submodule(name, _without_norm(layer).train(layer.training))
            if norm.biases:
                add_biases(model)
    return model if norm.proxy is None else proxynorm.apply(model, norm.proxy)


def _group_norm(layer: nn.BatchNorm2d, norm: Norm) -> nn.GroupNorm:
    """Group norm in the place of `layer`, with its very parameters: zero-initialised ones stay zero."""
    eps = layer.eps if norm.eps is None else norm.eps
    group: nn.GroupNorm
    if norm.fast or norm.strided:
        kind = StridedGroupNorm if norm.strided else FastGroupNorm  # the kernel knows neighbours alone
        group = kind(norm.groups, layer.num_features, eps, affine=layer.affine, device="meta")
        if _acts(layer):
            group.drop, group.act = layer.drop, layer.act
    elif _acts(layer):
        from timm.layers.norm_act import GroupNormAct

        group = GroupNormAct(layer.num_features, norm.groups, eps, affine=layer.affine, device="meta")
        group.drop, group.act = layer.drop, layer.act
    else:
        group = nn.GroupNorm(norm.groups, layer.num_features, eps, affine=layer.affine, device="meta")
    group.weight, group.bias = layer.weight, layer.bias
    return group


def _acts(layer: nn.BatchNorm2d) -> "TypeGuard[BatchNormAct2d]":
    """Whether an activation belongs to it, as to a norm of timm, which takes two seconds to import for its class."""
    return hasattr(layer, "act")


def _one_pass(layer: nn.BatchNorm2d) -> OnePassBatchNorm2d:
    """One-pass batch norm in the place of `layer`, with its very parameters and statistics."""
    norm = OnePassBatchNorm2d(layer.num_features, layer.eps, layer.momentum, affine=layer.affine, device="meta")
    norm.weight, norm.bias = layer.weight, layer.bias
    norm._buffers.update(layer._buffers)
    if _acts(layer):
        norm.drop, norm.act = layer.drop, layer.act
    return norm


def _without_norm(layer: nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(layer.drop, layer.act) if _acts(layer) else nn.Identity()


def _check_groups(layers: dict[str, nn.BatchNorm2d], *, groups: int) -> None:
    assert groups >= 1
    for name, layer in layers.items():
        if layer.num_features % groups:
            largest = math.gcd(*(each.num_features for each in layers.values()))
            raise ConfigError(
                f"--norm-num-groups {groups}: layer '{name}' has {layer.num_features} channels, "
                f"which {groups} does not divide; {largest} divides every layer"
            )


def _check_nothing_was_asked(norm: Norm) -> None:
    """A model without batch norm must not seem to obey an option that cannot touch it."""
    asked = {
        f"--norm-type {norm.kind}": norm.kind != "batch",
        f"--norm-eps {norm.eps}": norm.eps is not None,
        f"--batchnorm-momentum {norm.momentum}": norm.momentum is not None,
        "--disable-stable-batchnorm": not norm.stable,
    }
    for option, given in asked.items():
        if given:
            raise ConfigError(f"{option}: this model has no 2d batch norm to change; leave the option out")
