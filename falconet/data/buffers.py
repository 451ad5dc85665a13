"""Host memory for micro-batches: new each time, or pinned and used again."""

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Normalise, standardise_pixels
from falconet.data.readers import ArrayReader, Reader
from falconet.data.source import BoolArray, PixelArray


@dataclass(frozen=True)
class Shape:
    """Of the images of one micro-batch."""

    images: int
    size: int  # side, pixels
    dtype: torch.dtype = torch.uint8

    @property
    def bytes_an_image(self) -> int:
        return self.size * self.size * 3 * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Room:
    """Where one micro-batch lies."""

    images: Tensor  # N x S x S x 3
    labels: Tensor  # N, int64
    mixup: Tensor  # N, float32
    box: Tensor  # 4, int64


class Event(Protocol):
    """Something a device will have done; torch.cuda.Event is one."""

    def synchronize(self) -> None: ...


def fresh_room(shape: Shape) -> Room:
    """New memory, its owner's for as long as it likes."""
    return _carved(torch.empty(_bytes(shape), dtype=torch.uint8), shape)


class Ring:
    """Memory that goes round: a slot is lent again when the copy out of it is done.

    It has as many slots as were ever lent at once, which the loader's prefetch bounds. A slot that nobody gives back
    (an epoch that ends early) is freed like any other tensor.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: deque[tuple[Tensor, Event]] = deque()  # the oldest copy first
        self.allocated = 0  # slots, ever

    def __call__(self, shape: Shape) -> Room:
        size = _bytes(shape)
        while self._free:
            slot, copied = self._free.popleft()
            copied.synchronize()  # of some batches ago: done long since, unless the device is behind
            if len(slot) == size:  # evaluation and training may differ
                return _carved(slot, shape)
        self.allocated += 1
        return _carved(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin), shape)

    def give_back(self, images: Tensor, *, copied: Event) -> None:
        """Lend the slot of these images again once `copied` has happened."""
        slot = torch.empty(0, dtype=torch.uint8).set_(images.untyped_storage())
        self._free.append((slot, copied))


def _bytes(shape: Shape) -> int:
    return sum(size for _, _, size in _parts(shape))


def _parts(shape: Shape) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
    """Shape, format and bytes of each tensor of a room; the widest formats first, so that each is aligned."""
    count, side = shape.images, shape.size
    tensors = [
        ((count,), torch.int64),
        ((4,), torch.int64),
        ((count,), torch.float32),
        ((count, side, side, 3), shape.dtype),
    ]
    return [(size, dtype, math.prod(size) * dtype.itemsize) for size, dtype in tensors]


def _carved(slot: Tensor, shape: Shape) -> Room:
    begin, tensors = 0, []
    for size, dtype, count in _parts(shape):
        tensors.append(slot[begin : begin + count].view(dtype).view(size))
        begin += count
    labels, box, mixup, images = tensors
    return Room(images, labels, mixup, box)


MOST_AHEAD = 1 << 30  # bytes of images read ahead of their use
BITS = {2: torch.int16, 4: torch.int32}  # by bytes of a value: numpy has no bfloat16


class Landing(Protocol):
    """Makes room for a micro-batch and has its rows filled. Several threads call `fill` at once, on different rows."""

    @property
    def ring(self) -> Ring | None: ...  # whose memory the room is

    def rows(self, reader: Reader) -> int: ...  # worth one call of `fill`

    def ahead(self, images: int, *, size: int) -> int: ...  # of these images, how many may be read before their use

    def room(self, images: int, *, size: int) -> Room: ...

    def fill(self, images: Tensor, reader: Reader, indices: IntArray, *, epoch: int) -> BoolArray:
        """Have the images (N x S x S x 3) written; which of them could be read. The others are black."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What the loader may take."""

    ring: Ring | None = None  # without one, each micro-batch gets new memory
    portion: int | None = None  # images that a thread reads at once; else what the reader likes
    most: int = MOST_AHEAD  # bytes

    def rows(self, reader: Reader) -> int:
        return self.portion or reader.rows

    def ahead(self, shape: Shape) -> int:
        return max(1, min(shape.images, self.most // shape.bytes_an_image))

    def room(self, shape: Shape) -> Room:
        return self.ring(shape) if self.ring is not None else fresh_room(shape)


class PixelLanding:
    """Pixels as they are, written by the reader itself."""

    def __init__(self, allowance: Allowance | None = None) -> None:
        self._allowance = allowance or Allowance()
        self.ring, self.rows = self._allowance.ring, self._allowance.rows

    def ahead(self, images: int, *, size: int) -> int:
        return self._allowance.ahead(Shape(images, size))

    def room(self, images: int, *, size: int) -> Room:
        return self._allowance.room(Shape(images, size))

    def fill(self, images: Tensor, reader: Reader, indices: IntArray, *, epoch: int) -> BoolArray:
        return reader.read(indices, epoch=epoch, out=images.numpy())


class ValueLanding:
    """Values in the compute format, made on the loader's threads: 2 or 4 bytes a value to copy, not 1.

    They are those that `prepare` gives for the 256 levels of each channel, looked up in a table: what the device would
    have made of the pixels, bit for bit.
    """

    def __init__(self, prepare: Normalise, allowance: Allowance | None = None) -> None:
        self._allowance = allowance or Allowance()
        self.ring, self.rows = self._allowance.ring, self._allowance.rows
        self._dtype = prepare.dtype
        self._bits = BITS[self._dtype.itemsize]
        levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 256, 1).expand(1, 3, 256, 1)
        self._levels = prepare(levels)[0, :, :, 0].reshape(768).view(self._bits).numpy()  # red's 256, green's, blue's
        self._own = threading.local()

    def ahead(self, images: int, *, size: int) -> int:
        return self._allowance.ahead(Shape(images, size, self._dtype))

    def room(self, images: int, *, size: int) -> Room:
        return self._allowance.room(Shape(images, size, self._dtype))

    def fill(self, images: Tensor, reader: Reader, indices: IntArray, *, epoch: int) -> BoolArray:
        pixels = self._pixels(tuple(images.shape))
        read = reader.read(indices, epoch=epoch, out=pixels)
        out: npt.NDArray[np.generic] = images.view(self._bits).numpy()
        _, height, width, channels = images.shape
        # An image at a time: the places of one, 8 bytes each, stay in the cache. About 0.2 ms at 224 x 224.
        first = np.tile(np.arange(channels, dtype=np.intp) * 256, width)
        for image, values in zip(pixels, out, strict=True):
            places = image.reshape(height, width * channels) + first
            self._levels.take(places, out=values.reshape(height, width * channels), mode="clip")
        return read

    def _pixels(self, shape: tuple[int, ...]) -> PixelArray:
        """This thread's own scratch; it goes when the thread does."""
        kept: PixelArray | None = getattr(self._own, "pixels", None)
        if kept is None or kept.shape[0] < shape[0] or kept.shape[1:] != shape[1:]:
            kept = self._own.pixels = np.empty(shape, np.uint8)
        return kept[: shape[0]]


class StandardLanding:
    """Images standardised by themselves, on the loader's threads, in the compute format.

    Images that lie in memory are standardised before they are shifted, as the TensorFlow original did: what moves in
    from outside is 0, the mean of every image. Others are when they are read.
    """

    def __init__(self, dtype: torch.dtype, allowance: Allowance | None = None) -> None:
        self._allowance = allowance or Allowance()
        self.ring, self.rows = self._allowance.ring, self._allowance.rows
        self._dtype, self._bits = dtype, BITS[dtype.itemsize]

    def ahead(self, images: int, *, size: int) -> int:
        return self._allowance.ahead(Shape(images, size, self._dtype))

    def room(self, images: int, *, size: int) -> Room:
        return self._allowance.room(Shape(images, size, self._dtype))

    def fill(self, images: Tensor, reader: Reader, indices: IntArray, *, epoch: int) -> BoolArray:
        values = np.empty(tuple(images.shape), np.float32)
        if isinstance(reader, ArrayReader) and reader.only_moves:
            reader.move(standardise_pixels(reader.stored(indices)), indices, epoch=epoch, out=values)
            read = np.ones(len(indices), np.bool_)
        else:
            pixels = np.empty(tuple(images.shape), np.uint8)
            read = reader.read(indices, epoch=epoch, out=pixels)
            values = standardise_pixels(pixels)
        # By numpy, because torch forbids to write into memory that evaluation made in its inference mode.
        images.view(self._bits).numpy()[:] = torch.from_numpy(values).to(self._dtype).view(self._bits).numpy()
        return read
