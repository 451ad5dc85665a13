"""Which normalisation a model uses, and how precisely."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

from torch import nn

from falconet.errors import ConfigError
from falconet.models import proxynorm
from falconet.models.groupnorm import FastGroupNorm, StridedGroupNorm
from falconet.models.onepass import OnePassBatchNorm2d
from falconet.models.proxynorm import Proxy
from falconet.models.shortcuts import add_biases

if TYPE_CHECKING:
    from timm.layers.norm_act import BatchNormAct2d


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
