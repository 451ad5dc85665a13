"""Measures the input pipeline: images per second of each step alone, and of all of them together."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from falconet.config.options import Augmentation
from falconet.data import augment, native
from falconet.data.augment import PixelChanges
from falconet.data.buffers import Batch, RowReader
from falconet.data.keyed import IntArray
from falconet.data.loader import FOREVER, BatchShape, EvaluationLoader, Loader, Resources
from falconet.data.native.binding import Workspace
from falconet.data.readers import opener
from falconet.data.storage import ArraySource, BoolArray, FileSource, PhotoSource, Source
from falconet.parallel.world import ALONE, World
from falconet.report.console import counted

READ, DECODE, BATCH, COPY, AUGMENT, TOGETHER = "read", "decode and resize", "batch", "copy", "augment", "together"


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline; the rate is None if the pipeline lacks it."""

    name: str
    images_per_second: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline that is measured."""

    source: Source
    reader: RowReader
    resources: Resources
    micro_batch: int
    training: bool  # random order; otherwise in order, as in evaluation
    world: World = ALONE  # processes that read at the same time, each its share of the images
    augmentation: Augmentation = field(default_factory=Augmentation)  # changes of pixels on the device, in training

    @property
    def threads(self) -> int:
        return max(1, self.resources.workers)

    def batches(self, reader: RowReader, epoch: int) -> Iterator[Batch]:
        """One pass over this process's share of the data, on the device."""
        if self.training:
            return itertools.chain.from_iterable(self._training_loader(reader).updates(epoch))
        return EvaluationLoader(
            reader, labels=self.source.labels, shape=self._shape, resources=self.resources
        ).batches()

    def endless(self, reader: RowReader) -> Generator[Batch, None, None]:
        """Yield batches, pass after pass; in training, the next pass is read ahead, as in a run."""
        if not self.training:
            for epoch in itertools.count():
                yield from self.batches(reader, epoch)
        with contextlib.closing(self._training_loader(reader)) as loader:
            for epoch in itertools.count():
                for update in loader.updates(epoch, until=FOREVER):
                    yield from update

    def _training_loader(self, reader: RowReader) -> Loader:
        return Loader(
            reader,
            labels=self.source.labels,
            shape=self._shape,
            seed=0,
            augmentation=self.augmentation,
            resources=self.resources,
        )

    @property
    def _shape(self) -> BatchShape:
        share = max(1, len(self.source) // self.world.size)
        return BatchShape(micro_batch=min(self.micro_batch, share), replicas=self.world.size, replica=self.world.rank)


def stage_rates(pipeline: Pipeline, *, seconds: float) -> list[Stage]:
    """Measure each step for this many seconds, with the pipeline's threads; files are read from where they are stored.

    If several processes measure at the same time, the rates are sums over all.
    """
    pipeline.world.barrier("measuring the steps")
    return [_of_all(stage, pipeline.world) for stage in _own_rates(pipeline, seconds)]


def _of_all(stage: Stage, world: World) -> Stage:
    if stage.images_per_second is None or world.size == 1:
        return stage
    total = float(world.sum(torch.tensor(stage.images_per_second, dtype=torch.float64)))
    return Stage(stage.name, total, f"{stage.words}, in each of {world.size} processes")


def _own_rates(pipeline: Pipeline, seconds: float) -> list[Stage]:
    threads = counted(pipeline.threads, "thread")
    read = read_rate(pipeline, seconds=seconds)
    both = fill_rate(pipeline, seconds=seconds)
    decode = both if read is None else 1 / max(1 / both - 1 / read, 1e-9)
    copy = copy_rate(pipeline, seconds=seconds)
    device = pipeline.resources.device
    return [
        Stage(READ, read, threads if read else "the images are in memory"),
        Stage(DECODE, decode, f"{threads}, the time of reading and decoding minus that of reading"),
        Stage(
            BATCH, _passing(pipeline, _Blank(pipeline.reader), seconds), "the loader with a reader that does nothing"
        ),
        Stage(COPY, copy, "from pinned memory" if copy else "the images are not copied"),
        *_augment_stage(pipeline, seconds),
        Stage(TOGETHER, loader_rate(pipeline, seconds=seconds), f"{threads}, to {device.type}"),
    ]


def fill_rate(pipeline: Pipeline, *, seconds: float) -> float:
    """Images per second read, decoded and resized by the pipeline's threads, without a loader."""
    return _thread_rate(pipeline, _filled(pipeline), pipeline.reader.rows, seconds)


def loader_rate(pipeline: Pipeline, *, seconds: float) -> float:
    """Images per second of the whole pipeline, to the device."""
    return _passing(pipeline, pipeline.reader, seconds)


MOST_COLD = 4096  # images to drop from memory and read again, each once; enough for a pass of a loader


class Cold(NamedTuple):
    """The result of reading files from the disk."""

    images_per_second: float
    read: IntArray  # the images read, which the system now has in memory


def cold_reads(source: PhotoSource, *, threads: int, seconds: float) -> Cold:
    """Read photos from the disk for at most this many seconds, by as many threads as the loader has.

    What the system has of their files in memory is dropped first, by posix_fadvise.
    """
    order, begin = np.random.default_rng(1).permutation(len(source))[:MOST_COLD].tolist(), time.perf_counter()
    dropped: list[int] = []
    while not dropped or (len(dropped) < len(order) and time.perf_counter() - begin < seconds):
        _drop(source, order[len(dropped)])
        dropped.append(order[len(dropped)])
    left, begin = iter(dropped), time.perf_counter()
    read, read_one = list[int](), _only_read(source)

    def read_on() -> None:
        for index in iter(lambda: next(left, None), None):  # taking the next one is atomic
            read_one(np.array([index]))
            read.append(index)
            if time.perf_counter() - begin > seconds:
                break

    with ThreadPoolExecutor(threads, thread_name_prefix="falconet-measure") as pool:
        for done in [pool.submit(read_on) for _ in range(threads)]:
            done.result()
    return Cold(len(read) / (time.perf_counter() - begin), np.array(read))


def _drop(source: PhotoSource, index: int) -> None:
    """Make the system forget an image's file, after writing what is not on the disk yet."""
    if isinstance(source, FileSource):
        path, begin, size = source.path(index), 0, 0  # all of it
    else:
        path = source.shards.paths[int(source.places.shards[index])]
        begin, size = int(source.places.begins[index]), int(source.places.sizes[index])
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a broken link, which the loader counts as a bad image
        return
    try:
        os.fdatasync(handle)
        os.posix_fadvise(handle, begin, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def limiting(measured: Iterable[Stage]) -> str:
    """The slowest step."""
    alone = [stage for stage in measured if stage.images_per_second is not None and stage.name != TOGETHER]
    return min(alone, key=lambda stage: stage.images_per_second or 0.0).name


def passes(pipeline: Pipeline, count: int) -> Iterator[float]:
    """Yield the images per second of whole passes: those of all processes in the time of the slowest."""
    world = pipeline.world
    for epoch in range(count):
        world.barrier("beginning a pass")
        begin = time.perf_counter()
        images = sum(len(batch.labels) for batch in pipeline.batches(pipeline.reader, epoch))
        _settle(pipeline.resources.device)
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        yield int(world.sum(torch.tensor(images))) / float(world.max(seconds))


class _Blank:
    """A reader that reads nothing, so that only the loader's own work remains."""

    def __init__(self, reader: RowReader) -> None:
        self.size, self.rows, self.dtype = reader.size, reader.rows, reader.dtype

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:  # noqa: ARG002
        return np.ones(len(indices), dtype=np.bool_)


def read_rate(pipeline: Pipeline, *, seconds: float) -> float | None:
    """Images per second read but not decoded; None if they are in memory."""
    source = pipeline.source
    if isinstance(source, ArraySource):
        return None

    return _thread_rate(pipeline, _only_read(source), pipeline.reader.rows, seconds)


def _only_read(source: PhotoSource) -> Callable[[IntArray], object]:
    """A function that reads files as the loaders do: by the native library if possible, without Python's lock."""
    library, thread = native.library(), threading.local()
    if library is None:
        return lambda indices: [_encoded(source, index) for index in indices.tolist()]
    opened = opener(source)

    def read(indices: IntArray) -> object:
        if not hasattr(thread, "workspace"):
            thread.workspace = Workspace(library)
        return opened(thread.workspace, indices)

    return read


def _encoded(source: PhotoSource, index: int) -> bytes:
    try:
        return source.encoded(index)
    except FileNotFoundError:  # a broken link, which the loader counts as a bad image
        return b""


def _filled(pipeline: Pipeline) -> Callable[[IntArray], None]:
    """A function that reads images into the calling thread's own memory."""
    reader, thread = pipeline.reader, threading.local()

    def fill(indices: IntArray) -> None:
        if not hasattr(thread, "images"):
            thread.images = pipeline.resources.batch_for(reader, reader.rows).images.permute(0, 2, 3, 1)
        reader.read(indices, epoch=0, out=thread.images[: len(indices)])

    return fill


def _thread_rate(pipeline: Pipeline, work: Callable[[IntArray], object], rows: int, seconds: float) -> float:
    """Images per second of `work` on parts of a random order, in as many threads as the loader has."""
    order = np.random.default_rng(0).permutation(len(pipeline.source))
    rows = min(rows, len(order))
    parts = [order[begin : begin + rows] for begin in range(0, len(order) - rows + 1, rows)]
    work(parts[0])  # one-time work is not measured
    numbers = itertools.count()  # counts the parts; taking the next number is atomic
    begin = time.perf_counter()

    def repeat() -> int:
        done = 0
        while done == 0 or time.perf_counter() - begin < seconds:  # at least one, however late a thread starts
            work(parts[next(numbers) % len(parts)])
            done += rows
        return done

    with ThreadPoolExecutor(pipeline.threads, thread_name_prefix="falconet-measure") as pool:
        images = sum(pool.map(lambda _: repeat(), range(pipeline.threads)))
    return images / (time.perf_counter() - begin)


def _passing(pipeline: Pipeline, reader: RowReader, seconds: float) -> float:
    """Images per second of the loader, pass after pass, from its second batch on."""
    with contextlib.closing(pipeline.endless(reader)) as batches:
        next(batches)
        _settle(pipeline.resources.device)
        begin, images = time.perf_counter(), 0
        while images == 0 or time.perf_counter() - begin < seconds:
            images += len(next(batches).labels)
        _settle(pipeline.resources.device)
        return images / (time.perf_counter() - begin)


def copy_rate(pipeline: Pipeline, *, seconds: float) -> float | None:
    """Images per second from the host's memory to the device; None if nothing is copied."""
    images, device = (
        pipeline.resources.batch_for(pipeline.reader, pipeline.micro_batch).images,
        pipeline.resources.device,
    )
    if images.device.type == device.type:
        return None
    begin, copied = time.perf_counter(), 0
    while copied == 0 or time.perf_counter() - begin < seconds:
        for _ in range(8):
            images.to(device, non_blocking=True)
            copied += pipeline.micro_batch
        _settle(device)
    return copied / (time.perf_counter() - begin)


def _augment_stage(pipeline: Pipeline, seconds: float) -> list[Stage]:
    """The step that changes pixels on the device; none if there is no such change."""
    changes, device, size = (
        PixelChanges(augmentation=pipeline.augmentation),
        pipeline.resources.device,
        pipeline.reader.size,
    )
    if changes.is_nothing or not pipeline.training:
        return []
    indices = np.arange(min(pipeline.micro_batch, len(pipeline.source)))
    images = torch.zeros((len(indices), size, size, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    begin, changed = time.perf_counter(), 0
    while changed == 0 or time.perf_counter() - begin < seconds:
        for _ in range(4):
            augment.apply(images, changes.draw(indices, epoch=changed, side=size).to(device))
            changed += len(indices)
        _settle(device)
    return [Stage(AUGMENT, changed / (time.perf_counter() - begin), f"on {device.type}")]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
