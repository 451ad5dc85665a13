"""Optimizer state in host memory, copied to the device bucket by bucket for its update, and back.

Updates run on the device, with the same kernels as for state that stays there. So the bits are the same,
loss scale and skipped updates need no host, and the host never waits. Updates on the host would move half as many
bytes for AdamW, but other kernels would round differently, and the host would wait for gradients in every update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from falconet.parallel.data_parallel import MEGABYTE, divided
from falconet.parallel.slices import shaped_like

PLACES = 3  # buckets on the device at a time: one arrives, one is updated, one leaves
ALIGNED = 64  # values; states start at multiples of this, 128 bytes in half precision, for the kernels


class Traffic(Protocol):
    """The interface for copies that overlap with computing; a mark stands for the moment when one is done."""

    def bring(self, to: Tensor, source: Tensor, *, after: Sequence[Any]) -> Any:
        """Copy from the host, as soon as `after` is done."""

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy to the host, pairs of (to, source), as soon as the computation so far is done."""

    def wait(self, mark: Any) -> None:
        """Let the following computation wait for `mark`; the host does not wait."""

    def settle(self) -> None:
        """Let the host wait until every copy and the computation so far are done."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Host memory for `count` values."""


class Direct:
    """Immediate copies within host memory, for tests on a CPU."""

    def bring(self, to: Tensor, source: Tensor, *, after: Sequence[Any]) -> Any:  # noqa: ARG002
        to.copy_(source)

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        for to, source in pairs:
            to.copy_(source)

    def wait(self, mark: Any) -> None:
        """Do nothing: copies are already done."""

    def settle(self) -> None:
        """Do nothing: copies are already done."""

    def room(self, like: Tensor, count: int) -> Tensor:
        return torch.empty(count, dtype=like.dtype)


class Streams:
    """Copies of pinned memory on two streams, one in each direction."""

    def __init__(self, device: torch.device) -> None:
        self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def bring(self, to: Tensor, source: Tensor, *, after: Sequence[Any]) -> Any:
        for mark in after:
            self._in.wait_event(mark)
        with torch.cuda.stream(self._in):
            to.copy_(source, non_blocking=True)
        to.record_stream(self._in)
        return self._in.record_event()

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        self._out.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._out):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                if source.is_cuda:  # state from a checkpoint is not
                    source.record_stream(self._out)  # not freed before its copy is done
        return self._out.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def settle(self) -> None:
        for stream in (self._in, self._out, torch.cuda.current_stream()):
            stream.synchronize()

    def room(self, like: Tensor, count: int) -> Tensor:
        return torch.empty(count, dtype=like.dtype, pin_memory=True)


class Bucket:
    """Parameters of one type that are updated together, and their state on the host."""

    def __init__(self, params: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
        self.params = params
        self.members = [[p for p in group if p in set(params)] for group in groups]  # per group of the optimizer
        self.slots: list[tuple[Tensor, str]] = []
        self.home = torch.empty(0)  # host memory of all states of the bucket
        self.at_home: list[Tensor] = []  # views of it, one per slot
        self.fetched: Any = None  # mark of the copy to the device, while it is there
        self.returned: list[Any] = []  # mark of the last copy to the host

    def found(self, optimizer: Optimizer) -> list[tuple[Tensor, str]]:
        """The states of these parameters, without their counts of updates."""
        return [
            (p, slot)
            for p in self.params
            for slot, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and slot != "step"
        ]

    def settle_down(self, optimizer: Optimizer, traffic: Traffic) -> None:
        """Allocate host memory for new or loaded state, and move the state there."""
        self.slots = self.found(optimizer)
        states = [optimizer.state[p][slot] for p, slot in self.slots]
        assert all(state.dtype == self.params[0].dtype for state in states), "a state has another type than its weight"
        begins = list(accumulate((state.numel() + -state.numel() % ALIGNED for state in states), initial=0))
        self.home = traffic.room(self.params[0], begins[-1])
        self.at_home = self.views(self.home)
        self.returned = [traffic.take(list(zip(self.at_home, states, strict=True)))]
        self.fetched = None
        self.show(optimizer, self.at_home)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The states in flat memory, with the shapes and strides of their parameters."""
        sizes = [p.numel() for p, _ in self.slots]
        begins = accumulate((size + -size % ALIGNED for size in sizes), initial=0)
        return [
            shaped_like(flat[begin : begin + size], p)
            for (p, _), begin, size in zip(self.slots, begins, sizes, strict=False)
        ]

    def show(self, optimizer: Optimizer, states: Sequence[Tensor]) -> None:
        """Make these tensors the optimizer's state."""
        for (p, slot), state in zip(self.slots, states, strict=True):
            optimizer.state[p][slot] = state


class HostedState:
    """An optimizer's state on the host; `step` replaces that of the optimizer."""

    def __init__(self, optimizer: Optimizer, *, bucket_megabytes: float, device: torch.device) -> None:
        self._optimizer = optimizer
        self._traffic: Traffic = Streams(device) if device.type == "cuda" else Direct()
        groups = [group["params"] for group in optimizer.param_groups]
        size = int(bucket_megabytes * MEGABYTE)
        self._buckets = [Bucket(params, groups) for params in divided((p for group in groups for p in group), size)]
        self._places: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        self._device = device

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights; the host waits only when memory for new state is allocated."""
        for number, bucket in enumerate(self._buckets):
            self._fetch(number)
            if bucket.fetched is not None:
                self._traffic.wait(bucket.fetched)
                bucket.show(self._optimizer, self._guests(number))
            with self._only(bucket):
                self._optimizer.step()
            self._return(number)
            self._fetch(number + PLACES - 1)  # into the place of the previous bucket
        for number in range(PLACES - 1):  # for the next update, during its forward and backward passes
            self._fetch(number)

    def settle(self) -> None:
        """Wait until the host may read the state in the optimizer."""
        self._traffic.settle()

    def adopt(self) -> None:
        """Move state that was loaded into the optimizer to the host."""
        for bucket in self._buckets:
            bucket.settle_down(self._optimizer, self._traffic)
        self.settle()

    def tensors(self) -> list[Tensor]:
        """The memory of the state, on the host and in the places on the device."""
        return [*(bucket.home for bucket in self._buckets), *self._places]

    def _fetch(self, number: int) -> None:
        """Start copying a bucket to the device, unless its copy has started or it has no state yet."""
        if number >= len(self._buckets):
            return
        bucket = self._buckets[number]
        if bucket.fetched is not None or not bucket.slots:
            return
        before = [each.returned for each in self._buckets[number % PLACES :: PLACES]]  # earlier users of this place
        after = [mark for marks in before for mark in marks]
        bucket.fetched = self._traffic.bring(self._place(number), bucket.home, after=after) or True

    def _return(self, number: int) -> None:
        bucket = self._buckets[number]
        found = bucket.found(self._optimizer)
        if not found:
            return
        if bucket.fetched is None or len(found) != len(bucket.slots):
            bucket.settle_down(self._optimizer, self._traffic)  # new state
            return
        bucket.returned = [self._traffic.take([(bucket.home, self._place(number))])]
        bucket.fetched = None
        bucket.show(self._optimizer, bucket.at_home)

    def _place(self, number: int) -> Tensor:
        """A bucket's memory on the device; always the same, so that kernels see known addresses."""
        home = self._buckets[number].home
        needed = home.numel() * home.element_size()
        if self._places[number % PLACES].numel() < needed:
            largest = max(each.home.numel() * each.home.element_size() for each in self._buckets)
            self._places[number % PLACES] = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._traffic.settle()  # pending kernels may still use the old memory, and copies do not wait for them
        return self._places[number % PLACES][:needed].view(home.dtype)

    def _guests(self, number: int) -> list[Tensor]:
        return self._buckets[number].views(self._place(number))

    @contextmanager
    def _only(self, bucket: Bucket) -> Iterator[None]:
        """Restrict the optimizer to the parameters of one bucket."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, members in zip(groups, bucket.members, strict=True):
                group["params"] = members
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
