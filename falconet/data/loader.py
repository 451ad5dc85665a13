"""Loaders: batches in order, read ahead by threads, whose number changes no batch, and delivered on the device."""

import itertools
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from falconet.config.options import Augmentation
from falconet.data import keyed, mixing
from falconet.data.augment import Chain, PixelChanges
from falconet.data.buffers import Batch, Buffers, RowReader, Rows, join, on_device
from falconet.data.keyed import IntArray
from falconet.data.mixing import Mix
from falconet.data.order import COPY_BITS, Order, OrderAhead, shuffled
from falconet.data.preprocessing import Channels
from falconet.errors import DataError

CPU = torch.device("cpu")
MOST_AHEAD = 1 << 30  # bytes of images to read ahead
UPDATES_AHEAD = 2  # beyond the one in use; more would only hide longer stalls
FOREVER = 1 << 30  # epochs that no run reaches
PARTS_AHEAD = 2  # per thread, so that none waits when updates are small: one in progress, one queued


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How an update is divided, and which part of it this replica gets."""

    micro_batch: int  # images
    accumulation: int = 1  # micro-batches per replica and update
    replicas: int = 1
    replica: int = 0  # the number of this one
    # If batch norm spans several folded replicas, the model takes their micro-batches together.
    joined: int = 1  # micro-batches that form one, from as many replicas
    folded: int = 1  # replicas that this one stands for

    @property
    def as_run(self) -> "BatchShape":
        """The shape as the model sees it, whose micro-batches are joined ones."""
        size, count = self.micro_batch * self.joined, self.accumulation // self.joined
        return BatchShape(micro_batch=size, accumulation=count, replicas=self.replicas, replica=self.replica)

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def own_micro_batches(self) -> Sequence[int]:
        """Numbers of this replica's micro-batches within an update; those to be joined follow each other."""
        numbers = np.arange(self.replica * self.accumulation, (self.replica + 1) * self.accumulation)
        each = self.accumulation // self.folded  # per folded replica, which would compute them one after another
        return numbers.reshape(-1, self.joined, each).swapaxes(1, 2).ravel().tolist()


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a loader may use, and where it delivers batches."""

    workers: int = 0  # threads; 0: the caller's thread reads
    device: torch.device = CPU
    buffers: Buffers = field(default_factory=Buffers)
    ahead: int = MOST_AHEAD  # bytes of images to read ahead

    def images_ahead(self, form: Rows, images: int) -> int:
        """Images to read ahead of an update of `images`: enough that no thread waits, if memory allows."""
        part = min(form.rows, images)
        enough = max(UPDATES_AHEAD * images, PARTS_AHEAD * self.workers * part)
        return max(1, min(enough, self.ahead // (form.size * form.size * 3 * form.dtype.itemsize)))

    def images_held(self, form: Rows, shape: BatchShape) -> int:
        """The most images that have memory before they are delivered, also between two epochs.

        Besides those that are read ahead, they are the micro-batch to deliver next, whatever its size, and one of which
        the threads have been given only the first rows.
        """
        if self.workers == 0:  # nothing is read ahead
            return shape.micro_batch
        return self.images_ahead(form, shape.micro_batch * shape.accumulation) + 2 * shape.micro_batch

    def batch_for(self, reader: RowReader, images: int) -> Batch:
        return self.buffers.batch(images, size=reader.size, dtype=reader.dtype)


class _Begun(NamedTuple):
    """An epoch whose first updates are being read."""

    epoch: int
    end: int  # the epoch before which reading ends
    read: Generator[Iterator[Batch], None, None]  # in host memory
    updates: Iterator[list[Batch]]  # on the device


class Loader:
    """Training batches.

    Update u of an epoch takes images u * G to (u + 1) * G of the epoch's order, where G is the global batch. The tail
    that fills no update is dropped; it is a different one in each epoch.

    With N copies of each image, an update takes images u * D to (u + 1) * D, where D is G / N, rounded up, then the
    same images again until it is full: copies of an image are far apart, so that mixing combines different images.
    """

    def __init__(
        self,
        reader: RowReader,
        *,
        labels: IntArray,
        shape: BatchShape,
        seed: int,
        augmentation: Augmentation | None = None,
        resources: Resources | None = None,
        order: Order | None = None,
        fill: Channels = (0.0, 0.0, 0.0),
    ) -> None:
        """`order`: the images of each epoch; None: each once, at random. `fill`: replaces erased pixels, in 0..1."""
        if len(labels) < shape.global_batch:
            raise DataError(
                f"{len(labels)} training images are fewer than the {shape.global_batch} of one update: "
                f"micro-batch {shape.micro_batch} x accumulation {shape.accumulation} x replicas {shape.replicas}"
            )
        asked = augmentation or Augmentation()
        self._mixed = asked if mixing.mixes_or_cuts(asked) else None
        changes = PixelChanges(augmentation=asked, seed=seed, fill=fill)
        self._changes = None if changes.is_nothing else changes
        self._repeats = asked.repeated_augmentation
        self._images_per_update = -(-shape.global_batch // self._repeats)
        self.updates_per_epoch = len(labels) // shape.global_batch
        self._reader, self._labels, self._shape, self._seed = reader, labels, shape, seed
        self._resources = resources or Resources()
        drawn = order or shuffled(len(labels), seed=seed)
        self._order = OrderAhead(drawn) if self._resources.workers else drawn
        self._open: weakref.WeakSet[Generator[Iterator[Batch], None, None]] = weakref.WeakSet()
        self._begun: _Begun | None = None

    def updates(self, epoch: int, *, skip: int = 0, until: int | None = None) -> Iterator[list[Batch]]:
        """This replica's micro-batches of each update of `epoch`, from update `skip` on, on the device.

        `until`: if further epochs follow, the epoch before which they end, the same in every call. Reading ahead then
        continues into the next epoch, whose call takes what was read, so that it begins without a wait.
        """
        end = epoch + 1 if until is None else until
        begun, self._begun = self._begun, None
        if begun is None or (begun.epoch, begun.end, 0) != (epoch, end, skip):
            if begun is not None:
                begun.read.close()
            read = self.streamed(epoch, skip=skip, until=end)
            begun = _Begun(epoch, end, read, self._on_device(read))
        return begun.updates if end == epoch + 1 else self._first(begun, self.updates_per_epoch - skip)

    def _on_device(self, updates: Iterator[Iterator[Batch]]) -> Iterator[list[Batch]]:
        here = on_device(updates, device=self._resources.device, buffers=self._resources.buffers)
        return (joined(update, self._shape.joined) for update in here) if self._shape.joined > 1 else here

    def _first(self, begun: "_Begun", number: int) -> Iterator[list[Batch]]:
        """Yield the updates of one epoch, `number` of them; keep what was read ahead for the next epoch.

        What is kept stays in memory during a validation, on the device if photos are decoded there: as many images as
        `Resources.images_held` says, up to 1 GiB, and one update that is on the device anyway. `train/setup.py` counts
        them.
        """
        yield from islice(begun.updates, max(number, 0))
        if begun.read in self._open:  # otherwise the loader has been closed
            self._begun = begun._replace(epoch=begun.epoch + 1)

    def streamed(
        self, epoch: int, *, skip: int = 0, until: int | None = None
    ) -> Generator[Iterator[Batch], None, None]:
        """Updates in host memory, each micro-batch as soon as it is read; finish an update before taking the next."""
        updates = self._updates(epoch, skip, epoch + 1 if until is None else until)
        self._open.add(updates)
        return updates

    def close(self) -> None:
        """End all open iterators and threads."""
        self._begun = None
        for updates in list(self._open):
            updates.close()
        self._open.clear()
        if isinstance(self._order, OrderAhead):
            self._order.close()

    def _updates(self, epoch: int, skip: int, until: int) -> Generator[Iterator[Batch], None, None]:
        shape = self._shape
        ahead = self._resources.images_ahead(self._reader, shape.micro_batch * shape.accumulation)
        jobs = (job for each in range(epoch, until) for job in self._jobs(each, skip if each == epoch else 0))
        batches = in_order(jobs, workers=self._resources.workers, ahead=ahead)
        try:
            for _ in range(skip, (until - epoch) * self.updates_per_epoch):
                yield islice(batches, shape.accumulation)
        finally:
            batches.close()

    def _jobs(self, epoch: int, skip: int) -> Iterator["_Reading"]:
        shape = self._shape
        order = self._order(epoch)
        for update in range(skip, self.updates_per_epoch):
            for own in shape.own_micro_batches:
                place = np.arange(own * shape.micro_batch, (own + 1) * shape.micro_batch)  # in the update
                copies, place = np.divmod(place, self._images_per_update)
                drawn = order[update * self._images_per_update + place]
                copies += (drawn >> COPY_BITS) * self._repeats  # an image that comes again has further copies
                rank = np.argsort(copies, kind="stable")
                indices, copies = (drawn & ((1 << COPY_BITS) - 1))[rank], copies[rank]
                batch = self._resources.batch_for(self._reader, shape.micro_batch)
                drawn = indices + (copies << COPY_BITS)
                number = update * shape.accumulation * shape.replicas + own
                mix = None if self._mixed is None else self._mix(drawn, number, epoch)
                chain = self._chain(drawn, epoch)
                batch = _filled(batch, self._labels[indices], mix)._replace(chain=chain)
                yield _Reading(self._reader, indices, epoch=epoch, batch=batch, copies=copies)

    def _chain(self, indices: IntArray, epoch: int) -> Chain | None:
        return None if self._changes is None else self._changes.draw(indices, epoch=epoch, side=self._reader.size)

    def _mix(self, indices: IntArray, number: int, epoch: int) -> Mix:
        assert self._mixed is not None
        side = self._reader.size
        return mixing.draw(self._mixed, indices=indices, micro_batch=number, side=side, seed=self._seed, epoch=epoch)


def joined(micro_batches: Sequence[Batch], count: int) -> list[Batch]:
    """Join every `count` micro-batches into one; each is still mixed by itself."""
    return [join(micro_batches[begin : begin + count]) for begin in range(0, len(micro_batches), count)]


def stretch(images: int, *, replicas: int, replica: int) -> range:
    """The images that a replica evaluates; no replica has more than the first."""
    share = -(-images // replicas)
    begin = min(share * replica, images)
    return range(begin, min(begin + share, images))


class EvaluationLoader:
    """Evaluation batches: every image once, in order.

    Each replica takes an equal stretch in batches of one shape, so that all have the same number of batches; padding is
    labelled -1.
    """

    def __init__(
        self, reader: RowReader, *, labels: IntArray, shape: BatchShape, resources: Resources | None = None
    ) -> None:
        self._reader, self._labels, self._batch = reader, labels, shape.micro_batch
        self._resources = resources or Resources()
        own = stretch(len(labels), replicas=shape.replicas, replica=shape.replica)
        self._begin, self._end = own.start, own.stop
        self.batches_per_replica = -(-len(stretch(len(labels), replicas=shape.replicas, replica=0)) // self._batch)

    def batches(self) -> Iterator[Batch]:
        """This replica's batches, on the device."""
        resources = self._resources
        ahead = resources.images_ahead(self._reader, self._batch)
        batches = ((batch,) for batch in in_order(self._jobs(), workers=resources.workers, ahead=ahead))
        return (batch for (batch,) in on_device(batches, device=resources.device, buffers=resources.buffers))

    def _jobs(self) -> Iterator["_Reading"]:
        for number in range(self.batches_per_replica):
            begin = min(self._begin + number * self._batch, self._end)
            indices = np.arange(begin, min(begin + self._batch, self._end), dtype=np.int64)
            labels = np.full(self._batch, -1, dtype=np.int64)
            labels[: len(indices)] = self._labels[indices]
            batch = self._resources.batch_for(self._reader, self._batch)
            batch.images[len(indices) :] = 0
            yield _Reading(self._reader, indices, epoch=0, batch=_filled(batch, labels, None))


class SyntheticLoader:
    """One random batch, made once and kept on the device: training without an input pipeline."""

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
        self._update = joined([batch] * shape.accumulation, shape.joined)

    def updates(
        self,
        epoch: int,  # noqa: ARG002, every epoch is the same
        *,
        skip: int = 0,
        until: int | None = None,  # noqa: ARG002, nothing is read
    ) -> Iterator[list[Batch]]:
        for _ in range(skip, self.updates_per_epoch):
            yield list(self._update)

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class LoaderByEpoch:
    """Training batches from one loader after another, for example with larger and larger images."""

    def __init__(self, loaders: Mapping[int, Loader | SyntheticLoader]) -> None:
        """`loaders`: by the first epoch of each, ascending from 0."""
        self._loaders = loaders
        self.updates_per_epoch = loaders[0].updates_per_epoch

    def updates(self, epoch: int, *, skip: int = 0, until: int | None = None) -> Iterator[list[Batch]]:
        begin = max(first for first in self._loaders if first <= epoch)
        end = until if until is None else min([until, *(first for first in self._loaders if first > epoch)])
        return self._loaders[begin].updates(epoch, skip=skip, until=end)

    def close(self) -> None:
        for loader in self._loaders.values():
            loader.close()


class IdleLoader:
    """Updates without micro-batches, as many as other loaders have: for stages that get activations instead."""

    def __init__(self, images: int, *, shape: BatchShape) -> None:
        self.updates_per_epoch = images // shape.global_batch

    def updates(
        self,
        epoch: int,  # noqa: ARG002, all are the same
        *,
        skip: int = 0,
        until: int | None = None,  # noqa: ARG002, nothing is read
    ) -> Iterator[list[Batch]]:
        for _ in range(skip, self.updates_per_epoch):
            yield []

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


Result = TypeVar("Result", covariant=True)
Part = tuple[int, int]  # first row and the one after the last


class Job(Protocol[Result]):
    """Rows to process in parts, by any thread in any order; `result` is called when all are done."""

    def parts(self) -> Iterable[Part]: ...

    def do(self, part: Part) -> None: ...

    def result(self) -> Result: ...


def in_order(jobs: Iterable[Job[Result]], *, workers: int, ahead: int) -> Generator[Result, None, None]:
    """Yield the jobs' results in order, with up to `ahead` rows started beyond the job handed over.

    Without workers, each job is done on request. Closing or exhausting the generator ends the threads, and so does an
    error in a job, which is raised here unchanged.
    """
    if workers == 0:
        for job in jobs:
            for part in job.parts():
                job.do(part)
            yield job.result()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="falconet-data") as pool:
        queue = _Queue(iter(jobs), pool, ahead)
        try:
            while (result := queue.next()) is not None:
                yield result.job.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Started(Generic[Result]):
    """A job of which some parts have been given to the threads."""

    def __init__(self, job: Job[Result]) -> None:
        self.job = job
        self.waiting = deque(job.parts())
        self.rows = sum(end - begin for begin, end in self.waiting)
        self.futures: list[Future[None]] = []


class _Queue(Generic[Result]):
    """Started jobs, the oldest first; rows are given to the threads up to a limit."""

    def __init__(self, jobs: Iterator[Job[Result]], pool: ThreadPoolExecutor, ahead: int) -> None:
        self._jobs, self._pool, self._ahead = jobs, pool, ahead
        self._started: deque[_Started[Result]] = deque()
        self._rows = 0  # given to the threads and not yet handed over

    def next(self) -> _Started[Result] | None:
        """Finish the oldest job and return it; None after the last."""
        self._start()
        if not self._started:
            return None
        oldest = self._started.popleft()
        for future in oldest.futures:
            future.result()
        self._rows -= oldest.rows
        return oldest

    def _start(self) -> None:
        for started in self._started:
            self._submit(started)
        while not self._started or (not self._started[-1].waiting and self._rows < self._most()):
            job = next(self._jobs, None)
            if job is None:
                return
            self._started.append(_Started(job))
            self._submit(self._started[-1])

    def _submit(self, started: _Started[Result]) -> None:
        while started.waiting:
            begin, end = started.waiting[0]
            if started is not self._started[0] and self._rows + end - begin > self._most():
                return
            started.futures.append(self._pool.submit(started.job.do, started.waiting.popleft()))
            self._rows += end - begin

    def _most(self) -> int:
        """The most rows to start: those ahead, beyond the job handed over next, whatever its size."""
        return self._started[0].rows + self._ahead


class _Reading(Job[Batch]):
    """A micro-batch being read, in parts of the reader's rows per call."""

    def __init__(
        self, reader: RowReader, indices: IntArray, *, epoch: int, batch: Batch, copies: IntArray | None = None
    ) -> None:
        """`copies`: how often each image came earlier in the epoch, ascending; None: never."""
        self._reader, self._indices, self._epoch, self._batch = reader, indices, epoch, batch
        self._copies = np.zeros_like(indices) if copies is None else copies

    def parts(self) -> Iterator[Part]:
        rows, count = self._reader.rows, len(self._indices)
        changes = np.flatnonzero(np.diff(self._copies)) + 1  # the images of a part are copies of the same number
        for first, end in itertools.pairwise((0, *changes.tolist(), count)):
            for begin in range(first, end, rows):
                yield begin, min(begin + rows, end)

    def do(self, part: Part) -> None:
        rows, images = slice(*part), self._batch.images.permute(0, 2, 3, 1)
        # Crops are drawn by epoch: for a copy, by an epoch that no run reaches.
        epoch = self._epoch + (int(self._copies[part[0]]) << COPY_BITS)
        read = self._reader.read(self._indices[rows], epoch=epoch, out=images[rows])
        self._batch.labels.numpy()[rows][~read] = -1

    def result(self) -> Batch:
        return self._batch


def _filled(batch: Batch, labels: IntArray, mix: Mix | None) -> Batch:
    """Write labels and mix into a batch's memory; the images are read later."""
    batch.labels.numpy()[:] = labels
    if mix is None:
        return batch._replace(mix=None)
    assert batch.mix is not None
    batch.mix.mixup.copy_(mix.mixup)
    batch.mix.box.copy_(mix.box)
    return batch
