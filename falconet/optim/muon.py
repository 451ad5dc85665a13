"""Muon: momentum whose direction is orthogonalised, for the filters of convolutions and the matrices between them.

torch.optim.Muon takes matrices only, not filters, and iterates for each weight by itself; here weights of one shape
share their products, and the rate, the loss scale and whether the update is skipped are read on the device.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from falconet.numerics.rounding import Rounding
from falconet.optim.half_optimizers import Arithmetic, HalfOptimizer

# One step maps each singular value s to a s + b s^3 + c s^5 (Jordan et al. 2024). The slope at 0 is as large as it can
# be while values stay between about 0.7 and 1.2: five steps lift everything above 0.002 of the norm there.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
BRANCHES = 3  # beside the current stream: torch shares 32 among all that ask, and each costs a workspace of 32 MiB
LEAST = 1e-7  # norm of a direction, so that a gradient of zeros moves nothing


def orthogonalised(matrices: Tensor, *, steps: int) -> Tensor:  # B x R x C, both
    """An approximation of U V^T for each matrix U S V^T: its singular values become about 1.

    Computed in bf16 on CUDA, which takes a fraction of the time; errors of a percent do not matter.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # the smaller square is multiplied
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(LEAST)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(HalfOptimizer):
    """Muon, for groups with `orthogonal`: v = momentum * v + g; w -= lr * (orthogonalised(g + momentum * v) + decay w).

    `rescales`: instead of decay, w is first scaled so that the mean square of its rows' norms is 1. Other groups use
    SGD with Nesterov's momentum: v = momentum * v + g + decay * w; w -= lr * (g + decay * w + momentum * v).
    """

    uploads = False

    def __init__(
        self, params: ParamsT, *, lr: float, momentum: float, steps: int, rescales: bool, rounding: Rounding | None
    ) -> None:
        """`momentum`: for groups without their own."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "orthogonal": False}
        super().__init__(params, defaults, rounding=rounding)
        self._steps, self._rescales = steps, rescales
        self._branches = _Branches(self._one.device)

    def slots(self, group: dict[str, Any]) -> dict[str, float]:  # noqa: ARG002
        return {"momentum_buffer": 0.0}

    def rule(self, group: dict[str, Any]) -> tuple[str, Arithmetic, tuple[float, ...]]:  # noqa: ARG002
        raise AssertionError("a direction depends on all elements of a weight, so no rule gives one by one")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an update is zero_grad, backward passes, step"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._fill_slots(params, self.slots(group))
                self._move(group, params)

    def rehearse(self) -> None:
        """Do nothing: there are no kernels of ours to launch."""

    def _move(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if not group["orthogonal"]:
            self._descend(group, params)
            return
        with self._branches as branches:
            for number, alike in enumerate(_by_shape(params)):
                with branches.at(number):
                    self._turn(group, alike)

    def _descend(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        velocities = [self.state[p]["momentum_buffer"] for p in params]
        weights, before = [p.float() for p in params], [v.float() for v in velocities]
        grads = [p.grad.float() for p in params if p.grad is not None]
        if self.scale is not None:
            grads = list(torch._foreach_mul(grads, self._one / self.scale))
        grads = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
        after = torch._foreach_mul(before, group["momentum"])
        torch._foreach_add_(after, grads)
        directions = torch._foreach_add(grads, after, alpha=group["momentum"])
        moved = torch._foreach_sub(weights, torch._foreach_mul(directions, self._lr(group)))
        self._keep(params, moved, slot=0, before=weights)
        self._keep(velocities, after, slot=1, before=before, owners=params)

    def _turn(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Move weights of one shape together, as matrices in one tensor, so that one launch does for all."""
        velocities = [self.state[p]["momentum_buffer"] for p in params]
        weights, before = _stacked(params), _stacked(velocities)
        grads = _stacked([p.grad for p in params if p.grad is not None])
        if self.scale is not None:
            grads = grads / self.scale
        after = torch.add(grads, before, alpha=group["momentum"])
        moves = orthogonalised(torch.add(grads, after, alpha=group["momentum"]), steps=self._steps)
        scaled = weights
        if self._rescales:
            sizes = weights.norm(dim=(-2, -1), keepdim=True).clamp_min(LEAST)
            scaled = weights * (float(weights.shape[-2]) ** 0.5 / sizes)
        elif group["weight_decay"]:
            moves = torch.add(moves, weights, alpha=group["weight_decay"])
        moved = scaled - moves * self._lr(group)
        self._keep(params, _unstacked(moved, params), slot=0, before=_unstacked(weights, params))
        before_each, after_each = _unstacked(before, params), _unstacked(after, params)
        self._keep(velocities, after_each, slot=1, before=before_each, owners=params)

    def _keep(
        self,
        stored: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        slot: int,
        before: Sequence[Tensor],
        owners: Sequence[Tensor] | None = None,
    ) -> None:
        """Write the values, unless the update is skipped; `owners`: the weights that the tensors belong to."""
        if self.found is not None:
            values = [torch.where(self.found, old, new) for old, new in zip(before, values, strict=True)]
        if self.rounding is not None:
            store = self._store()
            pairs = zip(stored, values, owners or stored, strict=True)
            values = [store(value, t.dtype, part=self.parts[p], slot=slot) for t, value, p in pairs]
        torch._foreach_copy_(list(stored), list(values))


class _Branches:
    """Streams beside the current one, for work that is independent and too small to fill a device; on a CPU, none.

    Captured, they become branches of the graph. At the end, the current stream waits for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = BRANCHES if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def __enter__(self) -> "_Branches":
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return self

    def at(self, number: int) -> AbstractContextManager[Any]:
        """A context for a piece of work; the first (and longest, if sorted so) runs on the current stream."""
        place = number % (1 + len(self._streams))
        return torch.cuda.stream(self._streams[place - 1]) if place else nullcontext()

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


def _by_shape(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """The weights of each shape, the largest first."""
    alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for p in params:
        alike[p.shape].append(p)
    return sorted(alike.values(), key=lambda same: -len(same) * same[0].numel())


def _stacked(weights: Sequence[Tensor]) -> Tensor:  # B x R x C, fp32
    rows = [_rows(weight) for weight in weights]
    return (rows[0][None] if len(rows) == 1 else torch.stack(rows)).float()


def _unstacked(matrices: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `_stacked`."""
    return [_unrolled(matrix, weight) for matrix, weight in zip(matrices, like, strict=True)]


def _rows(weight: Tensor) -> Tensor:  # R x C
    """A weight as a matrix with a row per output; for filters, rows are in the order of channels-last memory."""
    return (weight.movedim(1, -1) if weight.ndim > 2 else weight).reshape(len(weight), -1)


def _unrolled(matrix: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_rows`."""
    if like.ndim == 2:
        return matrix
    outputs, channels, *kernel = like.shape
    return matrix.view(outputs, *kernel, channels).movedim(-1, 1)
