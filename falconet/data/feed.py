"""Batches from the host to the device, the next update while the current one computes."""

from collections.abc import Iterable, Iterator

import torch

from falconet.data.loader import Batch
from falconet.data.memory import Ring
from falconet.data.mixing import Mix

Update = list[Batch]


class Feed:
    """The updates of an iterator, on the device, in order; each may be an iterator itself, of micro-batches."""

    def __init__(self, updates: Iterable[Iterable[Batch]], *, device: torch.device, ring: Ring | None = None) -> None:
        """`ring`: whose memory the updates lie in, to be lent again when they are copied."""
        self._updates, self._device, self._ring = updates, device, ring

    def __iter__(self) -> Iterator[Update]:
        if self._device.type == "cuda":
            return self._copied_ahead()
        return ([_moved(batch, self._device) for batch in update] for update in self._updates)

    def _copied_ahead(self) -> Iterator[Update]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        waiting: tuple[Update, torch.cuda.Event] | None = None
        for update in self._updates:
            copied = [self._copied(batch, side) for batch in update]
            done = side.record_event()
            if waiting is not None:
                yield self._taken_over(*waiting)
            waiting = (copied, done)
        if waiting is not None:
            yield self._taken_over(*waiting)

    def _copied(self, batch: Batch, side: torch.cuda.Stream) -> Batch:
        with torch.cuda.stream(side):
            # From pinned memory, so the host does not wait. Memory of no ring may go out of scope at once: torch keeps
            # a freed pinned block until the copies recorded on it are done.
            moved = _moved(batch, self._device)
            if self._ring is not None and moved.images is not batch.images:
                self._ring.give_back(batch.images, copied=side.record_event())
        return moved

    def _taken_over(self, update: Update, copied: torch.cuda.Event) -> Update:
        """Order the consumer's stream behind the copy, and the reuse of its memory behind the consumer."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for batch in update:
            for tensor in (batch.images, batch.labels, *(batch.mix or ())):
                tensor.record_stream(stream)
        return update


def singly(batches: Iterable[Batch], *, device: torch.device, ring: Ring | None = None) -> Iterator[Batch]:
    """The same for batches that belong to no update."""
    return (batch for update in Feed(((batch,) for batch in batches), device=device, ring=ring) for batch in update)


def _moved(batch: Batch, device: torch.device) -> Batch:
    images, labels = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    mix = batch.mix and Mix(*(tensor.to(device, non_blocking=True) for tensor in batch.mix))
    return Batch(images, labels, mix)
