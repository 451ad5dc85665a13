"""SGD whose gradients accumulate onto the velocity: one tensor a parameter instead of two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


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
