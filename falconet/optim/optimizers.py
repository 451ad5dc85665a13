"""SGD whose gradients accumulate onto the velocity: one tensor a parameter instead of two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import ParamsT

from falconet.numerics.rounding import Rounding
from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfOptimizer, HalfRMSprop, HalfRMSpropTF, HalfSGD, Lars


class CombinedSGD(torch.optim.Optimizer):
    """SGD with momentum (v = momentum * v + g + decay * w; w -= lr * v) that keeps v in `p.grad`.

    Each update is one `zero_grad()`, the backward passes, one `step()`. In between `p.grad` is not the gradient:
    do not clip, log or rescale it.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._decayed = False  # whether the velocity has been multiplied since the last update

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Make room for the next gradients: what is left of the velocity, not zero."""
        # A second multiplication would be lost momentum, and the gradients added in between cannot be taken out.
        assert not self._decayed, "zero_grad() twice without step(): velocity and gradient are one tensor"
        self._attach_velocities()
        for group in self.param_groups:
            velocities = []
            for p in group["params"]:
                if p in self.state:
                    velocities.append(p.grad)
                elif set_to_none or p.grad is None:
                    p.grad = None
                else:
                    p.grad.zero_()
            if velocities:
                torch._foreach_mul_(velocities, group["momentum"])
                self._decayed = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an update is zero_grad, backward passes, step"
        for group in self.param_groups:
            params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            velocities = [p.grad for p in params if p.grad is not None]
            if not params:
                continue
            if group["weight_decay"]:
                torch._foreach_add_(velocities, params, alpha=group["weight_decay"])
            torch._foreach_add_(params, velocities, alpha=-group["lr"])
            if group["momentum"]:
                for p, velocity in zip(params, velocities, strict=True):
                    self.state[p]["velocity"] = velocity
        self._decayed = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._attach_velocities()
        self._decayed = False

    def _attach_velocities(self) -> None:
        """The state owns the velocity: a restored one, or one that somebody detached, goes back to `p.grad`."""
        for p, slots in self.state.items():
            p.grad = slots["velocity"]


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Which optimizer, and its constants; a constant that the named optimizer lacks has no effect."""

    name: Literal["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"]
    momentum: float = 0.9  # all but adamw, which keeps the library's 0.9 and 0.999
    weight_decay: float = 1e-4  # added to the gradient (L2); adamw: decoupled
    eps: float = 1e-8  # all but sgd
    rmsprop_decay: float = 0.99  # of the average of squared gradients
    lars_trust: float = 0.001
    undecayed: frozenset[str] | None = None  # names of parameters without weight decay; None: those of one dimension


def build_optimizer(model: nn.Module, rule: UpdateRule) -> torch.optim.Optimizer:
    """The optimizer of `model`'s trainable parameters; `set_lr` gives it a rate before each update."""
    groups = _groups(model, rule)
    # One pass over memory instead of three to ten. ResNet-18 on one core, ms an update, default -> fused:
    # sgd 9.2 -> 4.1, adamw 43 -> 6.2.
    fused = {p.device.type for group in groups for p in group["params"]} <= {"cpu", "cuda"}
    match rule.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=rule.momentum, fused=fused)
        case "sgd_combined":
            return CombinedSGD(groups, lr=0.0, momentum=rule.momentum)
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.0, eps=rule.eps, fused=fused)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=0.0, alpha=rule.rmsprop_decay, eps=rule.eps, momentum=rule.momentum)
        case "rmsprop_tf":
            from timm.optim.rmsprop_tf import RMSpropTF  # timm takes two seconds to import

            return RMSpropTF(groups, lr=0.0, alpha=rule.rmsprop_decay, eps=rule.eps, momentum=rule.momentum)
        case "lars":
            return Lars(groups, lr=0.0, momentum=rule.momentum, trust=rule.lars_trust, eps=rule.eps)
        case _:
            assert_never(rule.name)


def build_scaled_optimizer(model: nn.Module, rule: UpdateRule, *, rounding: Rounding | None) -> HalfOptimizer:
    """The same for weights that may be half, gradients that are scaled and updates that may be skipped."""
    groups = _groups(model, rule)
    match rule.name:
        case "sgd" | "sgd_combined":  # a skipped update must not touch the velocity, so it has a tensor of its own
            return HalfSGD(groups, lr=0.0, momentum=rule.momentum, rounding=rounding)
        case "adamw":
            return HalfAdamW(groups, lr=0.0, eps=rule.eps, rounding=rounding)
        case "rmsprop" | "rmsprop_tf":
            kind, decay = HalfRMSprop if rule.name == "rmsprop" else HalfRMSpropTF, rule.rmsprop_decay
            return kind(groups, lr=0.0, alpha=decay, eps=rule.eps, momentum=rule.momentum, rounding=rounding)
        case "lars":
            trust = rule.lars_trust
            return HalfLars(groups, lr=0.0, momentum=rule.momentum, trust=trust, eps=rule.eps, rounding=rounding)
        case _:
            assert_never(rule.name)


def _groups(model: nn.Module, rule: UpdateRule) -> list[dict[str, Any]]:
    """Decayed parameters and the others; `adapts` is read by LARS alone. A stage may have none to train."""
    decayed, plain = decay_groups(model, rule.undecayed)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": rule.weight_decay, "adapts": True},
        {"params": plain, "weight_decay": 0.0, "adapts": False},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def decay_groups(
    model: nn.Module, undecayed: frozenset[str] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters that are decayed, and those that are not: by name, or else those of one dimension."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}  # a tied parameter comes once
    if undecayed is None:
        plain = {name for name, p in trainable.items() if p.ndim <= 1}
    else:  # pieces of divided parameters are called layer1|0|conv1|weight
        plain = {name for name in trainable if name.replace("|", ".") in undecayed}
    return (
        [p for name, p in trainable.items() if name not in plain],
        [p for name, p in trainable.items() if name in plain],
    )


def undecayed_names(model: nn.Module, exclude: Literal["vectors", "norms", "nothing"]) -> frozenset[str] | None:
    """Whom `--weight-decay-exclude` spares: every vector, the scales and shifts of norms alone, or nothing.

    Proxy norm's scale and shift of the Gaussian are none of a norm's: they are decayed towards 0, as in the original.
    """
    if exclude == "vectors":
        return None
    norms = (_NormBase, nn.GroupNorm, nn.LayerNorm)
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if exclude == "norms" and isinstance(module, norms)
        for name, _ in module.named_parameters(recurse=False)
        if not name.startswith("proxy_")
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the rate of the next update; a rate kept on the device is filled, not replaced."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
