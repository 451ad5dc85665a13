"""One md5 for all files of a folder, whatever their names: what the original's validate_dataset.py compares."""

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from falconet.data.buffers import Landing
from falconet.data.keyed import IntArray
from falconet.data.loader import Batch, BatchShape, EvaluationLoader, Intake, Loader, singly
from falconet.data.readers import Reader
from falconet.data.source import ArraySource, BoolArray, PixelArray, Source
from falconet.errors import DataError
from falconet.report.console import counted

DIGEST_CHUNK = 1 << 20  # bytes

# The original's folders of ImageNet: their digests begin and end like this; the middle was not published to us.
IMAGENET = {"train": ("17aed950", "aa95"), "validation": ("8d6a57a7", "d5bd")}


def folder_md5(folder: Path, *, workers: int) -> str:
    """As the package checksumdir has it: the md5 of the sorted md5s of the files, in hexadecimal."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            digests = sorted(pool.map(_file_md5, _files(folder)))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return hashlib.md5("".join(digests).encode(), usedforsecurity=False).hexdigest()


def is_imagenet(digest: str, split: str) -> bool:
    """Whether it is the digest of the original's folder, as far as that is known: 48 of 128 bits."""
    begin, end = IMAGENET[split]
    return digest.startswith(begin) and digest.endswith(end)


def _files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        yield from (f"{root}/{name}" for name in names)


def _file_md5(path: str) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123, a million of them
        while chunk := file.read(DIGEST_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


READ, DECODE, BATCH, COPY, TOGETHER = "read", "decode and resize", "batch", "copy", "together"


@dataclass(frozen=True)
class Stage:
    """One stage; the rate is None where there is no such stage."""

    name: str
    images_per_second: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is measured."""

    source: Source
    reader: Reader
    landing: Landing
    device: torch.device
    micro_batch: int
    workers: int
    training: bool  # in a random order, or as evaluation reads

    def batches(self, reader: Reader, epoch: int) -> Iterator[Batch]:
        """A pass over the data, on the device."""
        shape = BatchShape(micro_batch=min(self.micro_batch, len(self.source)))
        intake = Intake(reader=reader, labels=self.source.labels, workers=self.workers, landing=self.landing)
        if self.training:
            updates = Loader(intake, shape=shape, seed=0).streamed(epoch)
            batches: Iterator[Batch] = itertools.chain.from_iterable(updates)
        else:
            batches = EvaluationLoader(intake, shape=shape).batches()
        return singly(batches, device=self.device, ring=self.landing.ring)


def stage_rates(pipeline: Pipeline, *, seconds: float) -> list[Stage]:
    """Each stage for so many seconds, with the pipeline's own threads; the first comes from wherever the data lies."""
    threads = counted(max(1, pipeline.workers), "thread")
    read = _read_rate(pipeline, seconds)
    both = fill_rate(pipeline, seconds=seconds)
    decode = both if read is None else 1 / max(1 / both - 1 / read, 1e-9)
    copy = _copy_rate(pipeline, seconds)
    blank = _Blank(pipeline.reader.size, pipeline.reader.rows)
    return [
        Stage(READ, read, f"{threads}" if read else "the images lie in memory"),
        Stage(DECODE, decode, f"{threads}, what reading and decoding take together less the reading"),
        Stage(BATCH, _passing(pipeline, blank, seconds), "the loader with a reader that does nothing, to the device"),
        Stage(COPY, copy, "from pinned memory" if copy else "the images stay where they are"),
        Stage(TOGETHER, _passing(pipeline, pipeline.reader, seconds), f"{threads}, to {pipeline.device.type}"),
    ]


def fill_rate(pipeline: Pipeline, *, seconds: float) -> float:
    """Images a second read, decoded and resized, by the pipeline's threads, without a loader."""
    return _thread_rate(pipeline, _filled(pipeline), pipeline.landing.rows(pipeline.reader), seconds)


def limiting(measured: Iterable[Stage]) -> str:
    """The slowest stage."""
    alone = [stage for stage in measured if stage.images_per_second is not None and stage.name != TOGETHER]
    return min(alone, key=lambda stage: stage.images_per_second or 0.0).name


def passes(pipeline: Pipeline, count: int) -> Iterator[float]:
    """Images a second of whole passes over the data."""
    for epoch in range(count):
        begin = time.perf_counter()
        images = sum(len(batch.labels) for batch in pipeline.batches(pipeline.reader, epoch))
        _settle(pipeline.device)
        yield images / (time.perf_counter() - begin)


class _Blank:
    """Reads nothing: what is left is the loader's own work."""

    def __init__(self, size: int, rows: int) -> None:
        self.size, self.rows = size, rows

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:  # noqa: ARG002
        return np.ones(len(indices), dtype=np.bool_)


def _read_rate(pipeline: Pipeline, seconds: float) -> float | None:
    source = pipeline.source
    if isinstance(source, ArraySource):
        return None

    def read(indices: IntArray) -> None:
        for index in indices.tolist():
            source.encoded(index)

    return _thread_rate(pipeline, read, 16, seconds)


def _filled(pipeline: Pipeline) -> Callable[[IntArray], None]:
    """Reads into memory of each thread's own."""
    landing, reader, own = pipeline.landing, pipeline.reader, threading.local()
    rows = landing.rows(reader)

    def fill(indices: IntArray) -> None:
        if not hasattr(own, "images"):
            own.images = landing.room(rows, size=reader.size).images
        landing.fill(own.images[: len(indices)], reader, indices, epoch=0)

    return fill


def _thread_rate(pipeline: Pipeline, work: Callable[[IntArray], None], rows: int, seconds: float) -> float:
    """Images a second of `work` on parts of a random order, by as many threads as the loader has."""
    order = np.random.default_rng(0).permutation(len(pipeline.source))
    rows = min(rows, len(order))
    parts = [order[begin : begin + rows] for begin in range(0, len(order) - rows + 1, rows)]
    work(parts[0])  # what is made once is not measured
    numbers = itertools.count()  # of parts, taken in turn: a step of it is one step of the interpreter
    begin = time.perf_counter()

    def repeat() -> int:
        done = 0
        while done == 0 or time.perf_counter() - begin < seconds:  # one at the least, however late a thread begins
            work(parts[next(numbers) % len(parts)])
            done += rows
        return done

    workers = max(1, pipeline.workers)
    with ThreadPoolExecutor(workers, thread_name_prefix="falconet-measure") as pool:
        images = sum(pool.map(lambda _: repeat(), range(workers)))
    return images / (time.perf_counter() - begin)


def _passing(pipeline: Pipeline, reader: Reader, seconds: float) -> float:
    """Images a second of the loader, pass after pass, after its first batch."""
    batches = itertools.chain.from_iterable(pipeline.batches(reader, epoch) for epoch in itertools.count())
    next(batches)
    _settle(pipeline.device)
    begin, images = time.perf_counter(), 0
    while images == 0 or time.perf_counter() - begin < seconds:
        images += len(next(batches).labels)
    _settle(pipeline.device)
    return images / (time.perf_counter() - begin)


def _copy_rate(pipeline: Pipeline, seconds: float) -> float | None:
    """Images a second from the host's memory to the device; None where nothing is copied."""
    room = pipeline.landing.room(pipeline.micro_batch, size=pipeline.reader.size)
    if room.images.device.type == pipeline.device.type:
        return None
    begin, images = time.perf_counter(), 0
    while images == 0 or time.perf_counter() - begin < seconds:
        for _ in range(8):
            room.images.to(pipeline.device, non_blocking=True)
            images += pipeline.micro_batch
        _settle(pipeline.device)
    return images / (time.perf_counter() - begin)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
