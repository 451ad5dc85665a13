"""LARS: SGD with momentum whose step is scaled, layer by layer, to the size of the weights."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Lars(torch.optim.Optimizer):
    """v = momentum * v + lr * trust * (g + decay * w); w -= v, with trust 1 in groups that do not adapt.

    timm's Lars keeps the rate outside the velocity, so a changing rate gives other weights than TensorFlow's, and
    launches about ten kernels a parameter; here norms and sums are one kernel a group, and the host never waits.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, trust: float, eps: float) -> None:
        defaults = {"lr": lr, "momentum": momentum, "trust": trust, "eps": eps, "weight_decay": 0.0, "adapts": True}
        super().__init__(params, defaults)
        self.norms = norms  # replaced where a process has only pieces of the parameters

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
                trust = trust_ratios(*sizes, coefficient=group["trust"], decay=decay, eps=group["eps"])
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


def trust_ratios(weights: Tensor, gradients: Tensor, *, coefficient: float, decay: float, eps: float) -> Tensor:
    """Of norms, one a parameter: coefficient * |w| / (|g| + decay * |w| + eps), or 1 where one of the two is 0."""
    ratios = coefficient * weights / (gradients + decay * weights + eps)
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0)
