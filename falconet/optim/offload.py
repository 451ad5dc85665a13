"""Optimizer state in host memory: bucket by bucket it travels to the device for its update, and back.

The state travels, not the update: the very kernels that update state on the device do it here, so the bits are the
same, the loss scale and a skipped update stay the device's business, and the host never waits. An update on the host
would move half as many bytes for AdamW, but other kernels would round otherwise, and the host would wait for gradients
in every update.
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

PLACES = 3  # buckets on the device at a time: one comes, one is updated, one goes
ALIGNED = 64  # values between two places where a state may begin: 128 bytes of halves, as kernels like it


class Traffic(Protocol):
    """How copies go beside the computation; a mark is the moment when one is done."""

    def bring(self, to: Tensor, source: Tensor, *, after: Sequence[Any]) -> Any:
        """From the host, as soon as `after` is done."""

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """To the host (to, source), as soon as what has been computed so far is done."""

    def wait(self, mark: Any) -> None:
        """What is computed next waits for `mark`; the host does not."""

    def settle(self) -> None:
        """The host waits until every copy, and what has been computed so far, is done."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Host memory for `count` values."""


class Direct:
    """Copies at once, within one memory; for a CPU, where tests run."""

    def bring(self, to: Tensor, source: Tensor, *, after: Sequence[Any]) -> Any:  # noqa: ARG002
        to.copy_(source)

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        for to, source in pairs:
            to.copy_(source)

    def wait(self, mark: Any) -> None:
        """It is done."""

    def settle(self) -> None:
        """They are done."""

    def room(self, like: Tensor, count: int) -> Tensor:
        return torch.empty(count, dtype=like.dtype)


class Streams:
    """Copies of pinned memory on two streams of their own, one each way."""

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
                if source.is_cuda:  # and not what was read from a checkpoint
                    source.record_stream(self._out)  # freed only after its copy
        return self._out.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def settle(self) -> None:
        for stream in (self._in, self._out, torch.cuda.current_stream()):
            stream.synchronize()

    def room(self, like: Tensor, count: int) -> Tensor:
        return torch.empty(count, dtype=like.dtype, pin_memory=True)


class Bucket:
    """Parameters of one type that are updated together, and their state: at home on the host, a guest on the device."""

    def __init__(self, params: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
        self.params = params
        self.members = [[p for p in group if p in set(params)] for group in groups]  # of each group of the optimizer
        self.slots: list[tuple[Tensor, str]] = []
        self.home = torch.empty(0)  # all states of the bucket, side by side
        self.at_home: list[Tensor] = []  # views of it, one a slot
        self.fetched: Any = None  # mark of the copy to the device, while there is one
        self.returned: list[Any] = []  # mark of the last copy to the host

    def found(self, optimizer: Optimizer) -> list[tuple[Tensor, str]]:
        """What the optimizer keeps for these parameters; counts of updates are not worth a journey."""
        return [
            (p, slot)
            for p in self.params
            for slot, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and slot != "step"
        ]

    def settle_down(self, optimizer: Optimizer, traffic: Traffic) -> None:
        """Make a home for what the optimizer made, or was given, and move it there."""
        self.slots = self.found(optimizer)
        states = [optimizer.state[p][slot] for p, slot in self.slots]
        assert all(state.dtype == self.params[0].dtype for state in states), "state of another type than its weight"
        begins = list(accumulate((state.numel() + -state.numel() % ALIGNED for state in states), initial=0))
        self.home = traffic.room(self.params[0], begins[-1])
        self.at_home = self.views(self.home)
        self.returned = [traffic.take(list(zip(self.at_home, states, strict=True)))]
        self.fetched = None
        self.show(optimizer, self.at_home)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The states in memory like the home, in the shapes and memory orders of their parameters."""
        sizes = [p.numel() for p, _ in self.slots]
        begins = accumulate((size + -size % ALIGNED for size in sizes), initial=0)
        return [
            shaped_like(flat[begin : begin + size], p)
            for (p, _), begin, size in zip(self.slots, begins, sizes, strict=False)
        ]

    def show(self, optimizer: Optimizer, states: Sequence[Tensor]) -> None:
        """Let the optimizer see the state there."""
        for (p, slot), state in zip(self.slots, states, strict=True):
            optimizer.state[p][slot] = state


class HostedState:
    """Keeps an optimizer's state on the host; `step` takes the place of the optimizer's own."""

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
        """One update of all weights; the host waits for nothing, but when memory is made for new state."""
        for number, bucket in enumerate(self._buckets):
            self._fetch(number)
            if bucket.fetched is not None:
                self._traffic.wait(bucket.fetched)
                bucket.show(self._optimizer, self._guests(number))
            with self._only(bucket):
                self._optimizer.step()
            self._return(number)
            self._fetch(number + PLACES - 1)  # into the place of the bucket before this one
        for number in range(PLACES - 1):  # for the next update, beside its forward and backward passes
            self._fetch(number)

    def settle(self) -> None:
        """Before the host reads the state, which it finds in the optimizer as ever."""
        self._traffic.settle()

    def adopt(self) -> None:
        """Take over state that was put into the optimizer from outside."""
        for bucket in self._buckets:
            bucket.settle_down(self._optimizer, self._traffic)
        self.settle()

    def tensors(self) -> list[Tensor]:
        """Memory that the state takes: its home, and the places on the device."""
        return [*(bucket.home for bucket in self._buckets), *self._places]

    def _fetch(self, number: int) -> None:
        """Begin to bring a bucket, unless it is on its way, or has nothing to bring yet."""
        if number >= len(self._buckets):
            return
        bucket = self._buckets[number]
        if bucket.fetched is not None or not bucket.slots:
            return
        before = [each.returned for each in self._buckets[number % PLACES :: PLACES]]  # who had this place
        after = [mark for marks in before for mark in marks]
        bucket.fetched = self._traffic.bring(self._place(number), bucket.home, after=after) or True

    def _return(self, number: int) -> None:
        bucket = self._buckets[number]
        found = bucket.found(self._optimizer)
        if not found:
            return
        if bucket.fetched is None or len(found) != len(bucket.slots):
            bucket.settle_down(self._optimizer, self._traffic)  # state that is new
            return
        bucket.returned = [self._traffic.take([(bucket.home, self._place(number))])]
        bucket.fetched = None
        bucket.show(self._optimizer, bucket.at_home)

    def _place(self, number: int) -> Tensor:
        """Where a bucket's state lies on the device; always there, so that kernels find known addresses."""
        home = self._buckets[number].home
        needed = home.numel() * home.element_size()
        if self._places[number % PLACES].numel() < needed:
            largest = max(each.home.numel() * each.home.element_size() for each in self._buckets)
            self._places[number % PLACES] = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._traffic.settle()  # kernels that had this memory may not have run yet, and copies do not wait for them
        return self._places[number % PLACES][:needed].view(home.dtype)

    def _guests(self, number: int) -> list[Tensor]:
        return self._buckets[number].views(self._place(number))

    @contextmanager
    def _only(self, bucket: Bucket) -> Iterator[None]:
        """Within it, the optimizer has the parameters of one bucket alone."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, members in zip(groups, bucket.members, strict=True):
                group["params"] = members
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
