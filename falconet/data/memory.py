"""Host memory for micro-batches: new each time, or pinned and used again."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


def fresh(shape: Shape) -> Room:
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
