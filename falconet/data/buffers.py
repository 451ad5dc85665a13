"""Micro-batches in memory: the form in which they are read, their buffers, and the copy to the device."""

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.data import augment
from falconet.data.augment import Chain
from falconet.data.keyed import IntArray
from falconet.data.mixing import Mix
from falconet.data.preprocessing import Normalise, standardise_pixels
from falconet.data.readers import ArrayReader, Reader
from falconet.data.storage import BoolArray, PixelArray

T = TypeVar("T")

BITS = {2: torch.int16, 4: torch.int32}  # by bytes per value: numpy has no bfloat16


class Batch(NamedTuple):
    """One micro-batch."""

    images: Tensor  # N x 3 x S x S, channels-last; uint8, or already normalised
    labels: Tensor  # N, int64; -1 counts for nothing: padding or a bad image
    mix: Mix | None
    chain: Chain | None = None  # changes to make to the pixels once they are on the device


def join(batches: Sequence[Batch]) -> Batch:
    """Several micro-batches as one."""
    if len(batches) == 1:
        return batches[0]
    mixes = [batch.mix for batch in batches if batch.mix is not None]
    mix = Mix(torch.cat([each.mixup for each in mixes]), torch.stack([each.box for each in mixes])) if mixes else None
    return Batch(torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches]), mix)


class Rows(Protocol):
    """The form in which images are read."""

    @property
    def size(self) -> int: ...  # side of the images, pixels

    @property
    def rows(self) -> int: ...  # images per call

    @property
    def dtype(self) -> torch.dtype: ...


class RowReader(Rows, Protocol):
    """Reads images into rows of a batch, in the form in which the device gets them, for several threads at once."""

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        """Write the images into `out` (N x S x S x 3); return which could be read. The others are black."""


class PixelRows:
    """Reads pixels unchanged."""

    dtype = torch.uint8

    def __init__(self, reader: Reader, *, rows: int | None = None) -> None:
        self._reader, self.size, self.rows = reader, reader.size, rows or reader.rows

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        return self._reader.read(indices, epoch=epoch, out=out.numpy())


class ValueRows:
    """Reads values in the compute format, made on the loader's threads: 2 or 4 bytes to copy per value, not 1.

    Each value comes from a table of what `prepare` gives for the 256 levels of each channel, so that it equals what the
    device would have computed, bit for bit.
    """

    def __init__(self, reader: Reader, prepare: Normalise, *, rows: int | None = None) -> None:
        self._reader, self.size, self.rows = reader, reader.size, rows or reader.rows
        self.dtype = prepare.dtype
        self._bits = BITS[self.dtype.itemsize]
        levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 256, 1).expand(1, 3, 256, 1)
        self._levels = prepare(levels)[0, :, :, 0].reshape(768).view(self._bits).numpy()  # red's 256, green's, blue's
        self._thread = threading.local()

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        pixels = self._scratch(tuple(out.shape))
        read = self._reader.read(indices, epoch=epoch, out=pixels)
        found: npt.NDArray[np.generic] = out.view(self._bits).numpy()
        _, height, width, channels = out.shape
        # One image at a time: its table positions, 8 bytes each, stay in the cache. About 0.2 ms at 224 x 224.
        first = np.tile(np.arange(channels, dtype=np.intp) * 256, width)
        for image, values in zip(pixels, found, strict=True):
            positions = image.reshape(height, width * channels) + first
            self._levels.take(positions, out=values.reshape(height, width * channels), mode="clip")
        return read

    def _scratch(self, shape: tuple[int, ...]) -> PixelArray:
        """Memory for this thread's pixels, freed with the thread."""
        kept: PixelArray | None = getattr(self._thread, "pixels", None)
        if kept is None or kept.shape[0] < shape[0] or kept.shape[1:] != shape[1:]:
            kept = self._thread.pixels = np.empty(shape, np.uint8)
        return kept[: shape[0]]


class StandardRows:
    """Reads images standardised, one by one, on the loader's threads, in the compute format.

    Images in memory are standardised before they are shifted, as in the TensorFlow original: the zeros that move in
    are then the mean of every image. Photos are standardised after they are read.
    """

    def __init__(self, reader: Reader, dtype: torch.dtype, *, rows: int | None = None) -> None:
        self._reader, self.size, self.rows = reader, reader.size, rows or reader.rows
        self.dtype, self._bits = dtype, BITS[dtype.itemsize]

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        reader, shape = self._reader, tuple(out.shape)
        values = np.empty(shape, np.float32)
        if isinstance(reader, ArrayReader) and reader.only_moves:
            reader.move(standardise_pixels(reader.stored(indices)), indices, epoch=epoch, out=values)
            read = np.ones(len(indices), np.bool_)
        else:
            pixels = np.empty(shape, np.uint8)
            read = reader.read(indices, epoch=epoch, out=pixels)
            values = standardise_pixels(pixels)
        # By numpy: torch refuses to write into memory that evaluation allocated in inference mode.
        out.view(self._bits).numpy()[:] = torch.from_numpy(values).to(self.dtype).view(self._bits).numpy()
        return read


class Event(Protocol):
    """A point in a device's work that can be waited for, such as a torch.cuda.Event."""

    def synchronize(self) -> None: ...


class Buffers:
    """Host memory for micro-batches, reused once a batch has been copied to the device.

    There are as many buffers as were ever in use at once, which the loader's read-ahead bounds. A buffer that is not
    given back (when a batch stays on the host or an epoch ends early) is freed like any other tensor.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._free: deque[tuple[Tensor, Event]] = deque()  # the oldest copy first
        self.allocated = 0  # buffers, in total

    def batch(self, images: int, *, size: int, dtype: torch.dtype = torch.uint8) -> Batch:
        """Memory for one micro-batch, uninitialised."""
        tensors = [  # the widest types first, so that each is aligned
            ((images,), torch.int64),
            ((4,), torch.int64),
            ((images,), torch.float32),
            ((images, size, size, 3), dtype),
        ]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in tensors]
        parts = torch.split(self._buffer(sum(sizes)), sizes)
        labels, box, mixup, pixels = (
            part.view(kind).view(shape) for part, (shape, kind) in zip(parts, tensors, strict=True)
        )
        return Batch(pixels.permute(0, 3, 1, 2), labels, Mix(mixup, box))

    def give_back(self, batch: Batch, *, copied: Event) -> None:
        """Reuse the buffer of this batch once `copied` has happened."""
        buffer = torch.empty(0, dtype=torch.uint8).set_(batch.images.untyped_storage())
        self._free.append((buffer, copied))

    def _buffer(self, size: int) -> Tensor:
        while self._free:
            buffer, copied = self._free.popleft()
            copied.synchronize()  # recorded some batches ago, so finished by now unless the device is late
            if len(buffer) == size:  # evaluation and training may differ
                return buffer
        self.allocated += 1
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)


def on_device(
    updates: Iterable[Iterable[Batch]], *, device: torch.device, buffers: Buffers | None = None
) -> Iterator[list[Batch]]:
    """Each update's micro-batches on the device, in order, copied and augmented there one update ahead.

    `buffers` gets the host memory back once it has been copied.
    """
    if device.type != "cuda":
        yield from ([_augmented(_moved(batch, device)) for batch in update] for update in updates)
        return
    # High priority: otherwise the augmentation of images would wait until a captured update has ended.
    side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    read = ([_copied(batch, side, buffers) for batch in update] for update in updates)
    for copied, done in one_ahead((update, side.record_event()) for update in read):
        yield _handed_over(copied, done, device)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Hand over each item once the next one is there; an item that fails does not lose the one before it."""
    iterator, waiting = iter(items), []
    while True:
        try:
            waiting.append(next(iterator))
        except StopIteration:
            yield from waiting
            return
        except Exception:
            yield from waiting
            raise
        if len(waiting) > 1:
            yield waiting.pop(0)


def _copied(batch: Batch, side: torch.cuda.Stream, buffers: Buffers | None) -> Batch:
    with torch.cuda.stream(side):
        # Pinned memory is copied without making the host wait. Without buffers it may go out of scope at once: torch
        # keeps a freed pinned block until the copies recorded on it are done.
        moved = _moved(batch, side.device)
        if buffers is not None and moved.images is not batch.images:
            buffers.give_back(batch, copied=side.record_event())
        if moved.chain is not None:
            moved.images.record_stream(side)  # what the device decoded is another stream's memory, and not kept
        return _augmented(moved)


def _handed_over(update: list[Batch], copied: torch.cuda.Event, device: torch.device) -> list[Batch]:
    """Make the consumer's stream wait for the copy, and the reuse of its memory wait for the consumer."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    for batch in update:
        for tensor in (batch.images, batch.labels, *(batch.mix or ())):
            tensor.record_stream(stream)
    return update


def _moved(batch: Batch, device: torch.device) -> Batch:
    images, labels = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    mix = batch.mix and Mix(*(tensor.to(device, non_blocking=True) for tensor in batch.mix))
    chain = batch.chain and batch.chain.to(device)
    return Batch(images, labels, mix, chain)


def _augmented(batch: Batch) -> Batch:
    if batch.chain is None:
        return batch
    return batch._replace(images=augment.apply(batch.images, batch.chain), chain=None)
