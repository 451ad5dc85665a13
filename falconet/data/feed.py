"""Batches from the host to the device, the next update while the current one computes."""

from collections.abc import Iterable, Iterator

import torch

from falconet.data.loader import Batch
from falconet.data.mixing import Mix

Update = list[Batch]


class Feed:
    """The updates of an iterator, on the device, in order."""

    def __init__(self, updates: Iterable[Update], *, device: torch.device) -> None:
        self._updates, self._device = updates, device

    def __iter__(self) -> Iterator[Update]:
        if self._device.type == "cuda":
            return self._copied_ahead()
        return ([_moved(batch, self._device) for batch in update] for update in self._updates)

    def _copied_ahead(self) -> Iterator[Update]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        waiting: tuple[Update, torch.cuda.Event] | None = None
        for update in self._updates:
            with torch.cuda.stream(side):
                # From pinned memory, so the host does not wait. Torch's pinned allocator keeps a freed block until the
                # copies recorded on it are done, so the host's tensors may go out of scope at once.
                copied = [_moved(batch, self._device) for batch in update]
                done = side.record_event()
            if waiting is not None:
                yield self._taken_over(*waiting)
            waiting = (copied, done)
        if waiting is not None:
            yield self._taken_over(*waiting)

    def _taken_over(self, update: Update, copied: torch.cuda.Event) -> Update:
        """Order the consumer's stream behind the copy, and the reuse of its memory behind the consumer."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for batch in update:
            for tensor in (batch.images, batch.labels, *(batch.mix or ())):
                tensor.record_stream(stream)
        return update


def _moved(batch: Batch, device: torch.device) -> Batch:
    images, labels = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    mix = batch.mix and Mix(*(tensor.to(device, non_blocking=True) for tensor in batch.mix))
    return Batch(images, labels, mix)
