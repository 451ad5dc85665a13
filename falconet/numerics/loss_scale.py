"""The loss scale, fixed, stepped or automatic, and non-finite gradients; nothing waits for the device."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from falconet.errors import CheckpointError, ConfigError

EDGE = 1 / 16  # of the largest finite number; gradients above it are near overflow
SHARE = 1e-7  # of all gradients; more above the edge halve the scale
HISTORY = 256  # updates whose scale is remembered

_ALL = 1e18  # outweighs any count of gradients


class Scale(Protocol):
    """A factor for the loss before the backward pass, by which gradients are divided before the update."""

    value: Tensor  # 0-d, fp32, on the device; always this tensor, so that a captured graph sees it change

    def before(self, update: int) -> None:
        """Prepare for update number `update`."""

    def watch(self, grads: Sequence[Tensor]) -> None:
        """Look at the gradients, still scaled, after a micro-batch has added to them."""

    def after(self, found: Tensor) -> None:
        """Note the end of an update; `found`: it was skipped because a gradient was not finite."""

    def state_tensors(self) -> dict[str, Tensor]: ...
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class _Remembered:
    """The state of every kind of scale: its value, its last values, and the numbers of updates and skipped updates."""

    def __init__(self, value: float, *, device: torch.device) -> None:
        self.value = torch.tensor(value, dtype=torch.float32, device=device)
        self.history = torch.zeros(HISTORY, device=device)  # update u at u % HISTORY
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def watch(self, grads: Sequence[Tensor]) -> None: ...

    def after(self, found: Tensor) -> None:
        self.history.index_copy_(0, (self.updates % HISTORY).view(1), self.value.view(1))
        self.updates += 1
        self.skipped += found

    def state_tensors(self) -> dict[str, Tensor]:
        """The scale's tensors themselves, not copies, by name."""
        return {"value": self.value, "history": self.history, "updates": self.updates, "skipped": self.skipped}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_tensors` returned; change nothing if something is missing."""
        missing = self.state_tensors().keys() - tensors.keys()
        if missing:
            raise CheckpointError(f"loss scale: '{min(missing)}' is missing; was the run's scale of another kind?")
        for name, tensor in self.state_tensors().items():
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(f"loss scale: '{name}' has a shape other than {list(tensor.shape)}")
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])


class FixedScale(_Remembered):
    """A scale that is the same for the whole run."""

    def __init__(self, value: float, *, device: torch.device) -> None:
        super().__init__(value, device=device)
        self._fixed = value

    def before(self, update: int) -> None:  # noqa: ARG002
        self.value.fill_(self._fixed)  # not the restored value: the options may have changed


class SteppedScale(_Remembered):
    """A scale that doubles from `initial` to `final` at equal intervals of epochs."""

    def __init__(
        self, initial: float, final: float, *, epochs: int, updates_per_epoch: int, device: torch.device, first: int = 0
    ) -> None:
        """`first`: the number of the update from which epochs are counted."""
        super().__init__(initial, device=device)
        self._steps = doublings(initial, final, epochs=epochs)
        self._updates_per_epoch, self._first = updates_per_epoch, first

    def before(self, update: int) -> None:
        epoch = (update - self._first) // self._updates_per_epoch + 1
        self.value.fill_(max(value for first, value in self._steps if first <= epoch))


class AutomaticScale(_Remembered):
    """A scale that is halved when too many gradients are near overflow, and otherwise doubled, as in PopART.

    `watch` gets the gradients of convolution and linear weights (`watched`) as accumulated after each micro-batch. A
    skipped update also halves the scale.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,  # of the gradients: its range decides where they overflow
        device: torch.device,
        initial: float = 1.0,
        period: int = 1,  # updates between changes
        bounds: tuple[float, float] = (2.0**-15, 2.0**15),
        sum: Callable[[Tensor], Tensor] = lambda counts: counts,  # over replicas and stages
    ) -> None:
        super().__init__(initial, device=device)
        assert period >= 1
        self._edge = EDGE * torch.finfo(dtype).max
        self._period, self._bounds, self._sum = period, bounds, sum
        # Gradients above the edge (or skipped updates), and all gradients: of all processes since the last change,
        # and of this process in this update.
        self.counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._own = torch.zeros_like(self.counts)

    def before(self, update: int) -> None: ...

    @torch.no_grad()
    def watch(self, grads: Sequence[Tensor]) -> None:
        for _, same in _by_type(grads):
            self._own[0] += _count_above(same, self._edge)
        self._own[1] += sum(grad.numel() for grad in grads)

    @torch.no_grad()
    def after(self, found: Tensor) -> None:
        super().after(found)
        self.counts += self._sum(self._own)
        self.counts[0] += found * _ALL
        self._own.zero_()
        down = self.counts[0] > SHARE * self.counts[1]
        changed = torch.where(down, self.value * 0.5, self.value * 2.0).clamp(*self._bounds)
        due = self.updates % self._period == 0
        self.value.copy_(torch.where(due, changed, self.value))
        self.counts.mul_(~due)

    def state_tensors(self) -> dict[str, Tensor]:
        return {**super().state_tensors(), "counts": self.counts}


class NonFinite(NamedTuple):
    """Whether a gradient was infinite or NaN, and the first tensor with one; -1: none."""

    found: Tensor  # 0-d, bool
    first: Tensor  # 0-d, int64


class Offender:
    """The first layer with a non-finite gradient since it was last read."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), -1, dtype=torch.int64, device=device)

    def note(self, non_finite: NonFinite) -> None:
        """Remember the tensor, on the device, unless one is remembered already."""
        self._first.copy_(torch.where(self._first < 0, non_finite.first, self._first))

    def read(self, names: Sequence[str]) -> str | None:
        """Return the layer's name, out of the tensors' names, and forget it; the host waits for the device."""
        number = int(self._first)
        self._first.fill_(-1)
        return names[number] if number >= 0 else None


def doublings(initial: float, final: float, *, epochs: int) -> tuple[tuple[int, float], ...]:
    """Pairs of epoch, counted from 1, and scale: from 16 to 128 over 100 epochs it doubles at 26, 51 and 76."""
    ratio = final / initial
    if ratio < 1 or not math.log2(ratio).is_integer():
        raise ConfigError(
            f"got {initial:g}, which doubling does not bring to {final:g}; "
            f"expected {final:g} divided by 1, 2, 4 and so on"
        )
    steps = int(math.log2(ratio)) + 1
    if epochs < steps:
        raise ConfigError(
            f"got {initial:g}, whose {steps} scales up to {final:g} need at least {steps} epochs; there are {epochs}"
        )
    return tuple((step * (epochs // steps) + 1, initial * 2.0**step) for step in range(steps))


def watched(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of convolutions and linear layers, whose gradients are sums of products."""
    layers = (m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd | nn.Linear))
    weights: dict[nn.Parameter, None] = {m.weight: None for m in layers if m.weight.requires_grad}  # type: ignore[misc]
    return list(weights)  # a tied one once


@torch.no_grad()
def find_non_finite(
    grads: Sequence[Tensor],
    *,
    everywhere: Callable[[Tensor], Tensor] = lambda flags: flags,
    device: torch.device | None = None,
) -> NonFinite:
    """Check gradients, scaled or not, in one pass; a sum over replicas is not finite if one replica's was not.

    `everywhere` combines the flags of all processes if each has other pieces of the gradients; one without any
    takes part as well, with its `device`.
    """
    largest: dict[int, Tensor] = {}
    for numbers, same in _by_type(grads):
        largest.update(zip(numbers, torch._foreach_norm(same, math.inf, dtype=torch.float32), strict=True))
    sizes = torch.stack([largest[number] for number in range(len(grads))]) if grads else torch.empty(0, device=device)
    bad = everywhere(~sizes.isfinite())
    found = bad.any()
    return NonFinite(found, torch.where(found, bad.to(torch.int32).argmax(), -1))


def _count_above(grads: list[Tensor], edge: float) -> Tensor:
    """The number of values above `edge`; takes six kernels for any number of tensors, and memory for a copy."""
    signs = torch._foreach_abs(grads)
    torch._foreach_sub_(signs, edge)
    torch._foreach_clamp_min_(signs, 0.0)
    torch._foreach_sign_(signs)  # 1 above the edge, else 0
    count = torch.stack(torch._foreach_norm(signs, 1, dtype=torch.float32)).sum(dtype=torch.float64)
    return torch.nan_to_num(count)  # NaN is reported as `found`


def _by_type(grads: Iterable[Tensor]) -> Iterable[tuple[list[int], list[Tensor]]]:
    """The indices and tensors of each type; for mixed types, foreach would launch one kernel per tensor."""
    types: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for number, grad in enumerate(grads):
        numbers, same = types.setdefault(grad.dtype, ([], []))
        numbers.append(number)
        same.append(grad)
    return types.values()
