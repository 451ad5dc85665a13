"""Work done ahead on threads and handed over in order."""

import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from falconet.data import keyed, mixing
from falconet.data.buffers import Landing, PixelLanding, Ring
from falconet.data.keyed import IntArray
from falconet.data.mixing import Mix, Mixing
from falconet.data.readers import Reader
from falconet.errors import DataError

Result = TypeVar("Result", covariant=True)
Part = tuple[int, int]  # the first row, and the one after the last


class Job(Protocol[Result]):
    """Rows that any threads may do in any order, in parts; `result` is asked when all are done."""

    def parts(self) -> Iterable[Part]: ...

    def do(self, part: Part) -> None: ...

    def result(self) -> Result: ...


def in_order(jobs: Iterable[Job[Result]], *, workers: int, ahead: int) -> Generator[Result, None, None]:
    """The jobs' results in their order, with up to `ahead` rows begun beyond the job handed over.

    No workers: each job is done when it is asked for. Closing the generator, exhausting it or an error in a job, which
    comes out here as it was raised, all end the threads.
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


class _Begun(Generic[Result]):
    """A job, of which not every part need be with the threads."""

    def __init__(self, job: Job[Result]) -> None:
        self.job = job
        self.waiting = deque(job.parts())
        self.rows = sum(end - begin for begin, end in self.waiting)
        self.futures: list[Future[None]] = []


class _Queue(Generic[Result]):
    """The jobs that were begun, the oldest first; rows are given to the threads as long as there are not too many."""

    def __init__(self, jobs: Iterator[Job[Result]], pool: ThreadPoolExecutor, ahead: int) -> None:
        self._jobs, self._pool, self._ahead = jobs, pool, ahead
        self._begun: deque[_Begun[Result]] = deque()
        self._rows = 0  # with the threads or done, and not handed over

    def next(self) -> _Begun[Result] | None:
        """The oldest job, done; None after the last."""
        self._give()
        if not self._begun:
            return None
        oldest = self._begun.popleft()
        for future in oldest.futures:
            future.result()
        self._rows -= oldest.rows
        return oldest

    def _give(self) -> None:
        for begun in self._begun:
            self._give_parts(begun)
        while not self._begun or (not self._begun[-1].waiting and self._rows < self._most()):
            job = next(self._jobs, None)
            if job is None:
                return
            self._begun.append(_Begun(job))
            self._give_parts(self._begun[-1])

    def _give_parts(self, begun: _Begun[Result]) -> None:
        while begun.waiting:
            begin, end = begun.waiting[0]
            if begun is not self._begun[0] and self._rows + end - begin > self._most():
                return
            begun.futures.append(self._pool.submit(begun.job.do, begun.waiting.popleft()))
            self._rows += end - begin

    def _most(self) -> int:
        """The job that is handed over next is done whatever its size."""
        return self._begun[0].rows + self._ahead


UPDATES_AHEAD = 2  # read ahead of the one being used; more would only hide longer stalls
PARTS_AHEAD = 2  # for each thread, so that none is idle where updates are small: one in hand, one waiting


class Batch(NamedTuple):
    """One micro-batch."""

    images: Tensor  # N x 3 x S x S, channels-last; uint8, or normalised already
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


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What is read, by how many threads, and where it comes to lie."""

    reader: Reader
    labels: IntArray
    workers: int = 0  # 0: the thread that asks reads
    landing: Landing = field(default_factory=PixelLanding)

    def ahead(self, images: int) -> int:
        """Images to read ahead of an update of `images`: enough for no thread to wait, as far as the memory goes."""
        part = min(self.landing.rows(self.reader), images)
        wanted = max(UPDATES_AHEAD * images, PARTS_AHEAD * self.workers * part)
        return self.landing.ahead(wanted, size=self.reader.size)

    def in_order(self, jobs: Iterable["_MicroBatch"], *, images: int) -> Generator[Batch, None, None]:
        """The micro-batches, of updates of `images`, each when it is read."""
        return in_order(jobs, workers=self.workers, ahead=self.ahead(images))


class Loader:
    """Training batches.

    Update u of an epoch takes images u * G to (u + 1) * G of the epoch's order, G the global batch. The tail that fills
    no update is dropped; it is another one in the next epoch.
    """

    def __init__(self, intake: Intake, *, shape: BatchShape, seed: int, mixing: Mixing | None = None) -> None:
        images = len(intake.labels)
        if images < shape.global_batch:
            raise DataError(
                f"{images} training images are fewer than the {shape.global_batch} of one update: "
                f"micro-batch {shape.micro_batch} x accumulation {shape.accumulation} x replicas {shape.replicas}"
            )
        if mixing is not None:
            mixing.check(shape.micro_batch)
        self.updates_per_epoch = images // shape.global_batch
        self._intake, self._shape, self._seed, self._mixing = intake, shape, seed, mixing
        self._open: weakref.WeakSet[Generator[Iterator[Batch], None, None]] = weakref.WeakSet()

    def updates(self, epoch: int, *, skip: int = 0) -> Iterator[list[Batch]]:
        """This replica's micro-batches of each update of `epoch`, from update `skip` on."""
        return (list(update) for update in self.streamed(epoch, skip=skip))

    def streamed(self, epoch: int, *, skip: int = 0) -> Iterator[Iterator[Batch]]:
        """The same, each micro-batch as soon as it is read; an update is used up before the next is asked for."""
        updates = self._updates(epoch, skip)
        self._open.add(updates)
        return updates

    @property
    def ring(self) -> Ring | None:
        """Whose memory the batches lie in."""
        return self._intake.landing.ring

    def close(self) -> None:
        """End the iterators that are still open, and with them their threads."""
        for updates in list(self._open):
            updates.close()

    def _updates(self, epoch: int, skip: int) -> Generator[Iterator[Batch], None, None]:
        shape = self._shape
        batches = self._intake.in_order(self._jobs(epoch, skip), images=shape.micro_batch * shape.accumulation)
        try:
            for _ in range(skip, self.updates_per_epoch):
                yield islice(batches, shape.accumulation)
        finally:
            batches.close()

    def _jobs(self, epoch: int, skip: int) -> Iterator["_MicroBatch"]:
        shape, intake = self._shape, self._intake
        order = keyed.permutation(len(intake.labels), seed=self._seed, epoch=epoch)
        for update in range(skip, self.updates_per_epoch):
            for own in shape.own_micro_batches:
                number = update * shape.accumulation * shape.replicas + own
                indices = order[number * shape.micro_batch : (number + 1) * shape.micro_batch]
                job = _MicroBatch(intake, indices, intake.labels[indices], epoch=epoch)
                if self._mixing is not None:
                    job.mix = mixing.draw(
                        self._mixing,
                        indices=indices,
                        micro_batch=number,
                        side=intake.reader.size,
                        seed=self._seed,
                        epoch=epoch,
                    )
                yield job


class EvaluationLoader:
    """Every image once, in order.

    Each replica takes an equal stretch in batches of one shape, so that all have the same number of batches; what fills
    the last ones is labelled -1.
    """

    def __init__(self, intake: Intake, *, shape: BatchShape) -> None:
        self._intake, self._batch = intake, shape.micro_batch
        images = len(intake.labels)
        share = -(-images // shape.replicas)
        self._begin = min(share * shape.replica, images)
        self._end = min(self._begin + share, images)
        self.batches_per_replica = -(-share // self._batch)

    @property
    def ring(self) -> Ring | None:
        """Whose memory the batches lie in."""
        return self._intake.landing.ring

    def batches(self) -> Iterator[Batch]:
        return self._intake.in_order(self._jobs(), images=self._batch)

    def _jobs(self) -> Iterator["_MicroBatch"]:
        for number in range(self.batches_per_replica):
            begin = min(self._begin + number * self._batch, self._end)
            indices = np.arange(begin, min(begin + self._batch, self._end), dtype=np.int64)
            labels = np.full(self._batch, -1, dtype=np.int64)
            labels[: len(indices)] = self._intake.labels[indices]
            yield _MicroBatch(self._intake, indices, labels, epoch=0)


class SyntheticLoader:
    """One random batch, made once and kept on the device: training without any input at all."""

    ring = None

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

    streamed = updates

    def close(self) -> None:
        """Nothing is open."""


class IdleLoader:
    """As many updates as the other loaders, without micro-batches: for stages that are given activations instead."""

    ring = None

    def __init__(self, images: int, *, shape: BatchShape) -> None:
        self.updates_per_epoch = images // shape.global_batch

    def streamed(self, epoch: int, *, skip: int = 0) -> Iterator[Iterator[Batch]]:  # noqa: ARG002, all are the same
        for _ in range(skip, self.updates_per_epoch):
            yield iter(())

    def close(self) -> None:
        """Nothing is open."""


class _MicroBatch(Job[Batch]):
    """One micro-batch being read, in parts of as many rows as are worth a call."""

    def __init__(self, intake: Intake, indices: IntArray, labels: IntArray, *, epoch: int) -> None:
        self.mix: Mix | None = None
        self._reader, self._landing, self._indices, self._epoch = intake.reader, intake.landing, indices, epoch
        self._room = self._landing.room(len(labels), size=self._reader.size)
        self._room.images[len(indices) :] = 0
        self._labels = self._room.labels.numpy()
        self._labels[:] = labels

    def parts(self) -> Iterator[Part]:
        rows = self._landing.rows(self._reader)
        for begin in range(0, len(self._indices), rows):
            yield begin, min(begin + rows, len(self._indices))

    def do(self, part: Part) -> None:
        rows = slice(*part)
        read = self._landing.fill(self._room.images[rows], self._reader, self._indices[rows], epoch=self._epoch)
        self._labels[rows][~read] = -1

    def result(self) -> Batch:
        room = self._room
        mix = None if self.mix is None else Mix(room.mixup.copy_(self.mix.mixup), room.box.copy_(self.mix.box))
        return Batch(room.images.permute(0, 3, 1, 2), room.labels, mix)


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
