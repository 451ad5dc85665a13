"""Optimizers from the options: torch's, timm's, and our own SGD and LARS."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import ParamsT

from falconet.config.options import Optimizer
from falconet.numerics.kernels import update_rules
from falconet.numerics.rounding import Rounding
from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfOptimizer, HalfRMSprop, HalfRMSpropTF, HalfSGD
from falconet.optim.muon import Muon


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Names of parameters that the update rule treats differently."""

    undecayed: frozenset[str] | None = None  # without weight decay; None: those of one dimension
    shares: Mapping[str, float] = field(default_factory=dict)  # of the learning rate; 1 for those without an entry
    later: frozenset[str] = frozenset()  # get their first gradient in a later update
    orthogonal: frozenset[str] = frozenset()  # moved by orthogonal steps in muon


ALIKE = Treatment()


def build_optimizer(model: nn.Module, options: Optimizer, *, treatment: Treatment = ALIKE) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; `set_lr` gives it a rate before each update."""
    groups = _groups(model, options, treatment)
    on_cuda = any(p.is_cuda for group in groups for p in group["params"])
    # One pass over memory instead of three to ten. ResNet-18 on one core, ms per update, default -> fused:
    # sgd 9.2 -> 4.1, adamw 43 -> 6.2.
    fused = {p.device.type for group in groups for p in group["params"]} <= {"cpu", "cuda"}
    momentum, alpha, eps = options.momentum, options.rmsprop_decay, options.optimizer_eps
    match options.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=fused)
        case "sgd_combined":
            return CombinedSGD(groups, lr=0.0, momentum=momentum)
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.0, eps=eps, fused=fused, capturable=on_cuda)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=0.0, alpha=alpha, eps=eps, momentum=momentum, capturable=on_cuda)
        case "rmsprop_tf" if on_cuda:  # timm's takes the rate from the host, and eight launches for each weight
            return HalfRMSpropTF(groups, lr=0.0, alpha=alpha, eps=eps, momentum=momentum, rounding=None)
        case "rmsprop_tf":
            from timm.optim.rmsprop_tf import RMSpropTF  # timm takes two seconds to import

            return RMSpropTF(groups, lr=0.0, alpha=alpha, eps=eps, momentum=momentum)
        case "lars":
            return Lars(groups, lr=0.0, momentum=momentum, trust=options.lars_eeta, eps=eps)
        case "muon":
            return _muon(groups, options, rounding=None)
        case _:
            assert_never(options.optimizer)


def build_scaled_optimizer(
    model: nn.Module, options: Optimizer, *, rounding: Rounding | None, treatment: Treatment = ALIKE
) -> HalfOptimizer:
    """An optimizer for weights that may be half, scaled gradients and updates that may be skipped."""
    groups = _groups(model, options, treatment)
    momentum, alpha, eps = options.momentum, options.rmsprop_decay, options.optimizer_eps
    match options.optimizer:
        case "sgd" | "sgd_combined":  # a skipped update must not touch the velocity, so gradients are kept apart
            return HalfSGD(groups, lr=0.0, momentum=momentum, rounding=rounding)
        case "adamw":
            return HalfAdamW(groups, lr=0.0, eps=eps, rounding=rounding)
        case "rmsprop":
            return HalfRMSprop(groups, lr=0.0, alpha=alpha, eps=eps, momentum=momentum, rounding=rounding)
        case "rmsprop_tf":
            return HalfRMSpropTF(groups, lr=0.0, alpha=alpha, eps=eps, momentum=momentum, rounding=rounding)
        case "lars":
            return HalfLars(groups, lr=0.0, momentum=momentum, trust=options.lars_eeta, eps=eps, rounding=rounding)
        case "muon":
            return _muon(groups, options, rounding=rounding)
        case _:
            assert_never(options.optimizer)


def _muon(groups: list[dict[str, Any]], options: Optimizer, *, rounding: Rounding | None) -> Muon:
    """A Muon optimizer whose weight decay is a share of --lr, whatever a weight's own share of it."""
    for group in groups:
        group["weight_decay"] /= group.get("share", 1.0)
        if group.get("orthogonal"):
            group["momentum"] = options.muon_momentum
    steps, rescales = options.muon_steps, options.muon_rescale
    return Muon(groups, lr=0.0, momentum=options.momentum, steps=steps, rescales=rescales, rounding=rounding)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of the next update's rate; a rate that is a tensor is filled, not replaced."""
    for group in optimizer.param_groups:
        rate = lr * group.get("share", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def decay_groups(
    model: nn.Module, undecayed: frozenset[str] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters with and without weight decay: by name or, by default, without for one dimension."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}  # a tied parameter comes once
    if undecayed is None:
        plain = {name for name, p in trainable.items() if p.ndim <= 1}
    else:  # pieces of sharded parameters have names such as layer1|0|conv1|weight
        plain = {name for name in trainable if name.replace("|", ".") in undecayed}
    return (
        [p for name, p in trainable.items() if name not in plain],
        [p for name, p in trainable.items() if name in plain],
    )


def undecayed_names(model: nn.Module, exclude: Literal["vectors", "norms", "nothing"]) -> frozenset[str] | None:
    """Parameters without weight decay: every vector (None), the scales and shifts of norms, or none.

    Proxy norm's scale and shift of the Gaussian are decayed towards 0, as in the original.
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


def _groups(model: nn.Module, options: Optimizer, treatment: Treatment) -> list[dict[str, Any]]:
    """Groups of decayed and other parameters by shares of the rate; only LARS reads `adapts`, only Muon `orthogonal`.

    On CUDA the rate is a number on the device: a captured update sees it change.

    Parameters that are frozen at first have their own groups, because torch's rules start a group's state at once. A
    stage may have nothing to train.
    """
    names = {p: name.replace("|", ".") for name, p in model.named_parameters()}  # pieces have names with bars
    decayed, plain = decay_groups(model, treatment.undecayed)
    groups: dict[tuple[bool, float, bool, bool], dict[str, Any]] = {}
    for members, adapts in ((decayed, True), (plain, False)):
        decay = options.weight_decay if adapts else 0.0
        for p in members:
            share = treatment.shares.get(names[p], 1.0)
            is_orthogonal = names[p] in treatment.orthogonal
            empty = {"params": [], "weight_decay": decay, "adapts": adapts, "share": share, "orthogonal": is_orthogonal}
            groups.setdefault((adapts, share, names[p] in treatment.later, is_orthogonal), empty)["params"].append(p)
    for group in groups.values():
        if group["params"][0].is_cuda:
            group["lr"] = torch.zeros((), device=group["params"][0].device)
    return list(groups.values()) or [{"params": [], "weight_decay": options.weight_decay, "adapts": True}]


class CombinedSGD(torch.optim.Optimizer):
    """SGD with momentum (v = momentum * v + g + decay * w; w -= lr * v) that accumulates gradients onto v in `p.grad`.

    That takes one tensor per parameter instead of two. Each update is one `zero_grad()`, the backward passes, one
    `step()`. In between `p.grad` is not the gradient: do not clip, log or rescale it.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._decayed = False  # whether the velocity has been multiplied since the last update

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Prepare for the next gradients: leave the decayed velocity there, not zero."""
        # A second multiplication would lose momentum, and gradients added in between cannot be taken out again.
        assert not self._decayed, "zero_grad() twice without step(): velocity and gradient are one tensor"
        self._attach_velocities()
        for group in self.param_groups:
            velocities: list[Tensor] = []
            for p in group["params"]:
                if p in self.state:
                    velocities.append(p.grad)
                elif set_to_none or p.grad is None:
                    p.grad = None
                else:
                    p.grad.zero_()
            if velocities:
                torch._foreach_mul_(velocities, group["momentum"])
                # A capture only notes what is to be done, and may fail: then nothing has been done.
                self._decayed = not (velocities[0].is_cuda and torch.cuda.is_current_stream_capturing())

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
            if isinstance(group["lr"], Tensor):  # which torch's sums cannot take as a factor
                torch._fused_sgd_(
                    params,
                    velocities,
                    [],
                    weight_decay=0.0,
                    momentum=0.0,
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )
            else:
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
        """Put the state's velocities back into `p.grad`, after a restore or if they were detached."""
        for p, slots in self.state.items():
            p.grad = slots["velocity"]


class Lars(torch.optim.Optimizer):
    """v = momentum * v + lr * trust * (g + decay * w); w -= v, with trust 1 in groups that do not adapt.

    timm's Lars keeps the rate outside the velocity, so that a changing rate gives other weights than TensorFlow's, and
    launches about ten kernels per parameter. Here norms and sums are one kernel per group, and the host never waits.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, trust: float, eps: float) -> None:
        defaults = {"lr": lr, "momentum": momentum, "trust": trust, "eps": eps, "weight_decay": 0.0, "adapts": True}
        super().__init__(params, defaults)
        self.norms = norms  # replaced where a process has pieces of the parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an update is zero_grad, backward passes, step"
        for group in self.param_groups:
            params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params if p.grad is not None]
            if not params:
                continue
            if group["adapts"]:
                decay, sizes = group["weight_decay"], (self.norms(params), self.norms(grads))
                trust = update_rules.trust_ratios(*sizes, coefficient=group["trust"], decay=decay, eps=group["eps"])
                updates = torch._foreach_add(grads, params, alpha=decay)
                torch._foreach_mul_(updates, list((trust * group["lr"]).unbind()))
            else:
                updates = torch._foreach_mul(grads, group["lr"])
            velocities = [self._velocity(p) for p in params]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, updates)
            torch._foreach_sub_(params, velocities)

    def _velocity(self, p: Tensor) -> Tensor:
        slots = self.state[p]
        if "velocity" not in slots:
            slots["velocity"] = torch.zeros_like(p)
        velocity: Tensor = slots["velocity"]
        return velocity


def norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors)))
