"""Normalisation layers: batch norm replaced by another norm, one-pass batch norm, and running statistics."""

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.config.options import Model
from falconet.errors import ConfigError, named_option
from falconet.models import proxynorm
from falconet.models.groupnorm import FastGroupNorm, StridedGroupNorm

if TYPE_CHECKING:
    from timm.layers.norm_act import BatchNormAct2d


def apply(model: nn.Module, options: Model) -> nn.Module:
    """Replace every 2d batch norm of `model`, in place, by the norm that the options ask for."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    if not layers:
        _check_defaults(options)
    match options.norm_type:
        case "batch":
            for name, layer in layers.items():
                layer.eps = layer.eps if options.norm_eps == "auto" else options.norm_eps
                if options.batchnorm_momentum != "auto":
                    layer.momentum = options.batchnorm_momentum
                if options.disable_stable_batchnorm:
                    model.set_submodule(name, _one_pass(layer).train(layer.training))
        case "group":
            with named_option("norm_num_groups"):
                _check_groups(layers, groups=options.norm_num_groups)
            for name, layer in layers.items():
                model.set_submodule(name, _group_norm(layer, options).train(layer.training))
        case "none":
            for name, layer in layers.items():
                without = nn.Sequential(layer.drop, layer.act) if _acts(layer) else nn.Identity()
                model.set_submodule(name, without.train(layer.training))
            if options.conv_bias:
                _add_biases(model)
    if options.proxy_norm:
        with named_option("proxy_norm"):
            proxynorm.apply(model, eps=options.proxy_epsilon, recompute=options.proxy_recompute)
    return model


def _group_norm(layer: nn.BatchNorm2d, options: Model) -> nn.GroupNorm:
    """Group norm with the parameters of `layer` themselves, so that zero-initialised ones stay zero."""
    eps = layer.eps if options.norm_eps == "auto" else options.norm_eps
    groups, strided = options.norm_num_groups, options.norm_grouping == "strided"
    group: nn.GroupNorm
    if options.enable_fast_groupnorm or strided:
        kind = StridedGroupNorm if strided else FastGroupNorm  # the kernel has groups of neighbours only
        group = kind(groups, layer.num_features, eps, affine=layer.affine, device="meta")
        if _acts(layer):
            group.drop, group.act = layer.drop, layer.act
    elif _acts(layer):
        from timm.layers.norm_act import GroupNormAct

        group = GroupNormAct(layer.num_features, groups, eps, affine=layer.affine, device="meta")
        group.drop, group.act = layer.drop, layer.act
    else:
        group = nn.GroupNorm(groups, layer.num_features, eps, affine=layer.affine, device="meta")
    group.weight, group.bias = layer.weight, layer.bias
    return group


def _one_pass(layer: nn.BatchNorm2d) -> "OnePassBatchNorm2d":
    """One-pass batch norm with the parameters and statistics of `layer` themselves."""
    norm = OnePassBatchNorm2d(layer.num_features, layer.eps, layer.momentum, affine=layer.affine, device="meta")
    norm.weight, norm.bias = layer.weight, layer.bias
    norm._buffers.update(layer._buffers)
    if _acts(layer):
        norm.drop, norm.act = layer.drop, layer.act
    return norm


def _acts(layer: nn.BatchNorm2d) -> "TypeGuard[BatchNormAct2d]":
    """Whether a norm has an activation, as timm's do; not by class, because importing timm takes two seconds."""
    return hasattr(layer, "act")


def _add_biases(model: nn.Module) -> None:
    """Give every convolution without a bias one of zeros, which replaces the norms' shifts."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))


def _check_groups(layers: dict[str, nn.BatchNorm2d], *, groups: int) -> None:
    for name, layer in layers.items():
        if layer.num_features % groups:
            largest = math.gcd(*(each.num_features for each in layers.values()))
            raise ConfigError(
                f"got {groups}, which does not divide the {layer.num_features} channels of layer '{name}'; "
                f"{largest} divides every layer"
            )


def _check_defaults(options: Model) -> None:
    """Refuse options that would change nothing in a model without batch norm."""
    for field in ("norm_type", "norm_eps", "batchnorm_momentum", "disable_stable_batchnorm"):
        if getattr(options, field) != getattr(Model, field):
            with named_option(field):
                raise ConfigError("this model has no 2d batch norm to change; leave the option out")


class OnePassBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d whose variance takes one pass in fp32: E[x^2] - E[x]^2.

    If a channel's mean is far from 0, the difference cancels: the variance is off by about 1e-7 * mean^2, but never
    negative. Evaluation is torch's. `drop` and `act` follow, as in timm's norms.
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
        """Track the unbiased variance like torch: weighted by the momentum or, without one, a mean over all batches."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        newest = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance * (count / max(1, count - 1)))):
            running += (value - running) * newest


class OnePass(torch.autograd.Function):
    """Saves its input and three vectors for the backward pass."""

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
    """Apply the momentum m of each batch norm once per update instead of once per micro-batch.

    Torch moves statistics r to (1 - m) r + m s at every micro-batch, so after many of them only the last ones count.
    Here an update moves r to (1 - m) r + m mean(s). Weighting the k-th of K micro-batches with m / (K - (K - k) m)
    multiplies out to exactly that, without any further state.
    """
    layers = [(layer, layer.momentum) for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if micro_batches == 1 or not layers:
        return
    counts = [0, 0]  # micro-batches of this update, and of one being captured, which may fail

    def begin(module: nn.Module, inputs: Any) -> None:
        if not module.training or isinstance(inputs[0], FakeTensor):  # a pass that computes nothing
            return
        captures = inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()
        done = counts[captures] = counts[captures] % micro_batches + 1
        for layer, momentum in layers:
            if momentum is not None:  # None: a plain mean over all batches
                layer.momentum = momentum / (micro_batches - (micro_batches - done) * momentum)

    model.register_forward_pre_hook(begin)
