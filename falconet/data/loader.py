"""Batches for training and evaluation: the same ones for any number of threads, replicas or restarts."""

import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from falconet.data import keyed, mixing
from falconet.data.ahead import Job, in_order
from falconet.data.keyed import IntArray
from falconet.data.mixing import Mix, Mixing
from falconet.data.readers import Reader
from falconet.errors import DataError

UPDATES_AHEAD = 2  # read ahead of the one being used; more would only hide longer stalls, at a batch of memory each
BATCHES_AHEAD = 2  # the same for evaluation


class Batch(NamedTuple):
    """One micro-batch."""

    images: Tensor  # N x 3 x S x S, uint8, channels-last
    labels: Tensor  # N, int64; -1 counts for nothing: padding or a bad image
    mix: Mix | None


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How an update is divided, and which part of it is ours."""

    micro_batch: int  # images
    accumulation: int = 1  # micro-batches of each replica per update
    replicas: int = 1
    replica: int = 0  # ours

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def own_micro_batches(self) -> range:
        """Numbers of this replica's micro-batches within an update."""
        return range(self.replica * self.accumulation, (self.replica + 1) * self.accumulation)


class Loader:
    """Training batches.

    Update u of an epoch takes images u * G to (u + 1) * G of the epoch's order, G the global batch. The tail that fills
    no update is dropped; it is another one in the next epoch.
    """

    def __init__(
        self,
        reader: Reader,
        labels: IntArray,
        *,
        shape: BatchShape,
        seed: int,
        workers: int = 0,
        mixing: Mixing | None = None,
        pin: bool = False,
    ) -> None:
        if len(labels) < shape.global_batch:
            raise DataError(
                f"{len(labels)} training images are fewer than the {shape.global_batch} of one update: "
                f"micro-batch {shape.micro_batch} x accumulation {shape.accumulation} x replicas {shape.replicas}"
            )
        if mixing is not None:
            mixing.check(shape.micro_batch)
        self.updates_per_epoch = len(labels) // shape.global_batch
        self._reader, self._labels, self._shape, self._seed = reader, labels, shape, seed
        self._workers, self._mixing, self._pin = workers, mixing, pin
        self._open: weakref.WeakSet[Generator[list[Batch], None, None]] = weakref.WeakSet()

    def updates(self, epoch: int, *, skip: int = 0) -> Iterator[list[Batch]]:
        """This replica's micro-batches of each update of `epoch`, from update `skip` on."""
        updates = self._updates(epoch, skip)
        self._open.add(updates)
        return updates

    def close(self) -> None:
        """End the iterators that are still open, and with them their threads."""
        for updates in list(self._open):
            updates.close()

    def _updates(self, epoch: int, skip: int) -> Generator[list[Batch], None, None]:
        accumulation = self._shape.accumulation
        batches = in_order(self._jobs(epoch, skip), workers=self._workers, ahead=UPDATES_AHEAD * accumulation)
        try:
            for _ in range(skip, self.updates_per_epoch):
                yield [next(batches) for _ in range(accumulation)]
        finally:
            batches.close()

    def _jobs(self, epoch: int, skip: int) -> Iterator["_MicroBatch"]:
        shape = self._shape
        order = keyed.permutation(len(self._labels), seed=self._seed, epoch=epoch)
        for update in range(skip, self.updates_per_epoch):
            for own in shape.own_micro_batches:
                number = update * shape.accumulation * shape.replicas + own
                indices = order[number * shape.micro_batch : (number + 1) * shape.micro_batch]
                job = _MicroBatch(self._reader, indices, self._labels[indices], epoch=epoch, pin=self._pin)
                if self._mixing is not None:
                    job.mix = mixing.draw(
                        self._mixing,
                        indices=indices,
                        micro_batch=number,
                        side=self._reader.size,
                        seed=self._seed,
                        epoch=epoch,
                    )
                yield job


class EvaluationLoader:
    """Every image once, in order.

    Each replica takes an equal stretch in batches of one shape, so that all have the same number of batches; what fills
    the last ones is labelled -1.
    """

    def __init__(
        self, reader: Reader, labels: IntArray, *, shape: BatchShape, workers: int = 0, pin: bool = False
    ) -> None:
        self._reader, self._labels, self._workers, self._pin = reader, labels, workers, pin
        self._batch = shape.micro_batch
        share = -(-len(labels) // shape.replicas)
        self._begin = min(share * shape.replica, len(labels))
        self._end = min(self._begin + share, len(labels))
        self.batches_per_replica = -(-share // self._batch)

    def batches(self) -> Iterator[Batch]:
        return in_order(self._jobs(), workers=self._workers, ahead=BATCHES_AHEAD)

    def _jobs(self) -> Iterator["_MicroBatch"]:
        for number in range(self.batches_per_replica):
            begin = min(self._begin + number * self._batch, self._end)
            indices = np.arange(begin, min(begin + self._batch, self._end), dtype=np.int64)
            labels = np.full(self._batch, -1, dtype=np.int64)
            labels[: len(indices)] = self._labels[indices]
            yield _MicroBatch(self._reader, indices, labels, epoch=0, pin=self._pin)


class SyntheticLoader:
    """One random batch, made once and kept on the device: training without any input at all."""

    def __init__(
        self, shape: BatchShape, *, image_size: int, classes: int, images: int, seed: int, device: torch.device
    ) -> None:
        self.updates_per_epoch = max(1, images // shape.global_batch)
        rows = np.arange(shape.micro_batch, dtype=np.int64) + shape.replica * shape.micro_batch
        drawn = keyed.words(
            seed=seed,
            epoch=0,
            indices=rows,
            purpose=keyed.Purpose.GENERATE,
            draws=-(-image_size * image_size * 3 // 8),
        )
        pixels = np.ascontiguousarray(drawn.astype("<u8").view(np.uint8)[:, : image_size * image_size * 3])
        made = torch.from_numpy(pixels).view(len(rows), image_size, image_size, 3).permute(0, 3, 1, 2)
        batch = Batch(made.to(device), torch.from_numpy(rows % classes).to(device), None)
        self._update = [batch] * shape.accumulation

    def updates(self, epoch: int, *, skip: int = 0) -> Iterator[list[Batch]]:  # noqa: ARG002, every epoch is the same
        for _ in range(skip, self.updates_per_epoch):
            yield list(self._update)

    def close(self) -> None:
        """Nothing is open."""


class IdleLoader:
    """As many updates as the other loaders, without micro-batches: for stages that are given activations instead."""

    def __init__(self, images: int, *, shape: BatchShape) -> None:
        self.updates_per_epoch = images // shape.global_batch

    def updates(self, epoch: int, *, skip: int = 0) -> Iterator[list[Batch]]:  # noqa: ARG002, every epoch is the same
        for _ in range(skip, self.updates_per_epoch):
            yield []

    def close(self) -> None:
        """Nothing is open."""


class _MicroBatch(Job[Batch]):
    """One micro-batch being read, in parts of as many rows as the reader likes to read at once."""

    def __init__(self, reader: Reader, indices: IntArray, labels: IntArray, *, epoch: int, pin: bool) -> None:
        self.mix: Mix | None = None
        self._reader, self._indices, self._epoch, self._pin = reader, indices, epoch, pin
        size = reader.size
        self._images = torch.empty((len(labels), size, size, 3), dtype=torch.uint8, pin_memory=pin)
        self._images[len(indices) :] = 0
        self._pixels = self._images.numpy()
        self._labels = labels.copy()

    def parts(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, len(self._indices), self._reader.rows):
            yield begin, min(begin + self._reader.rows, len(self._indices))

    def do(self, part: tuple[int, int]) -> None:
        rows = slice(*part)
        read = self._reader.read(self._indices[rows], epoch=self._epoch, out=self._pixels[rows])
        self._labels[rows][~read] = -1

    def result(self) -> Batch:
        batch = Batch(self._images.permute(0, 3, 1, 2), torch.from_numpy(self._labels), self.mix)
        return pinned(batch) if self._pin else batch


def pinned(batch: Batch) -> Batch:
    """The same batch with every tensor in pinned memory; the images are there already, so only small ones move."""
    mix = None if batch.mix is None else Mix(batch.mix.mixup.pin_memory(), batch.mix.box.pin_memory())
    return Batch(batch.images, batch.labels.pin_memory(), mix)
