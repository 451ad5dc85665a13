"""Processes that measure one network, one run at a time: one for Falconet, one for its peers.

They wait without touching the device, so that only the process that was asked for a run uses it. The peers' process
keeps the results of torch.compile and of cuDNN's trials.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from torch import nn

from loops import timm_loop, torchvision_loop
from networks import CLASSES, NETWORKS, Network

sys.path.append(str(Path(__file__).parents[1]))
from product_runs import PARTS, give_memory_back, train

OURS = ("falconet", "falconet-mixed")
METHODS = (*OURS, "torchvision", "torchvision-compiled", "timm", "timm-compiled")
FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REGIMES = {"float32": "32.32", "float16": "16.16 --loss-scaling 128", "bfloat16": "bf16.bf16"}
MIXED = {"float32": "32.32", "float16": "16.32 --loss-scaling 128", "bfloat16": "bf16.32"}  # with weights in fp32
PREPARED = 2  # updates of a peer while the processes prepare together
ATTEMPTS, PAUSE = 4, 10.0  # to prepare: the others may use the memory meanwhile; seconds between them
PREPARE = "prepare"


@dataclass(frozen=True)
class Job:
    """The measurement of a network."""

    name: str
    batch: int
    image_size: int
    updates: int
    warmup: int
    device: str
    format: str

    @property
    def network(self) -> Network:
        return NETWORKS[self.name]

    @property
    def title(self) -> str:
        return f"{self.network.title}, {self.image_size}, batch {self.batch}"


class Falconet:
    """Successive runs of `falconet train --data synthetic`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def prepare(self, methods: Sequence[str]) -> None:
        """Compile its kernels."""
        for method in methods:
            self._train(method, updates=2 * PARTS)

    def measure(self, method: str) -> float:
        """The images per second after the first log point."""
        return self._train(method, updates=self._job.updates)

    def _train(self, method: str, *, updates: int) -> float:
        job = self._job
        regime = (REGIMES if method == "falconet" else MIXED)[job.format]
        line = f"--model {job.name} --image-size {job.image_size} --data synthetic --classes {CLASSES}"
        line += f" --device {job.device} --precision {regime} --micro-batch-size {job.batch} --iterations {updates}"
        return train(line).images_per_second


class Peers:
    """The loops of timm's and torchvision's scripts with their networks, plain and compiled."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, torch.device(job.device)
        self._updates: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {}
        torch.backends.cuda.matmul.allow_tf32 = True  # timm's script; with autocast nothing here is multiplied in fp32

    def prepare(self, methods: Sequence[str]) -> None:
        """Compile only; cuDNN's trials, which other processes would disturb, are made in the first run."""
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True  # cuDNN keeps both apart
        for method in methods:
            if method.endswith("-compiled"):
                self._run(method, PREPARED)
                give_memory_back()

    def measure(self, method: str) -> float:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False  # as in both scripts
        seconds = self._run(method, self._job.updates, warmup=self._job.warmup)
        give_memory_back()
        return self._job.batch * self._job.updates / seconds

    def _run(self, method: str, updates: int, *, warmup: int = 0) -> float:
        """The seconds that some updates take."""
        job = self._job
        update = self._update(method)
        shape = (job.batch, 3, job.image_size, job.image_size)
        images = torch.randn(shape, device=self._device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (job.batch,), device=self._device)
        for _ in range(warmup):
            update(images, labels)
        begin = self._now()
        for _ in range(updates):
            update(images, labels)
        return self._now() - begin

    def _update(self, method: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        if method not in self._updates:
            library, _, compiled = method.partition("-")
            make, loop = {
                "timm": (self._job.network.of_timm, timm_loop),
                "torchvision": (self._job.network.torchvision, torchvision_loop),
            }[library]
            model = make().to(self._device).to(memory_format=torch.channels_last).train()
            given = cast(nn.Module, torch.compile(model)) if compiled else model
            self._updates[method] = loop(given, self._device, FORMATS[self._job.format])
        return self._updates[method]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Worker:
    """A process that waits for orders; its output goes to a file."""

    def __init__(self, kind: type[Falconet] | type[Peers], job: Job, methods: Sequence[str], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._log, self._methods = log, list(methods)
        self.title = f"{job.title}, {', '.join(methods)}"
        self._process = context.Process(target=_obey, args=(kind, job, other, log))
        self._process.start()
        other.close()

    def start_preparing(self) -> None:
        self._pipe.send((PREPARE, self._methods))

    def measure(self, method: str) -> float:
        """The images per second of one run."""
        self._pipe.send((method, None))
        return self.answer()

    def answer(self, *, timeout: float | None = None) -> float:
        """The result of the last order; for preparing, its seconds."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"{self.title}: not ready in time")
        try:
            fault, value = self._pipe.recv()
        except EOFError:
            fault, value = "ended", 0.0
        if fault:
            raise RuntimeError(f"{self.title}: {fault}\n{self._log.read_text(errors='replace')[-2500:]}")
        return float(value)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _obey(kind: type[Falconet] | type[Peers], job: Job, pipe: Connection, log: Path) -> None:
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    subject = kind(job)
    for order, methods in _orders(pipe):
        begin, fault, value = time.monotonic(), "", 0.0
        try:
            if order == PREPARE:
                _patiently(partial(subject.prepare, methods), job.device)
                value = time.monotonic() - begin
            else:
                value = subject.measure(order)
        except Exception as error:  # noqa: BLE001, the parent reports it
            traceback.print_exc()
            fault = f"{order}: {error}"
        pipe.send((fault, value))


def _orders(pipe: Connection) -> Iterator[tuple[str, list[str]]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def _patiently(prepare: Callable[[], None], device: str) -> None:
    """Prepare, and try again if memory ran out, because the processes prepare at the same time."""
    for attempt in range(ATTEMPTS):
        try:
            return prepare()
        except RuntimeError:  # torch's and Falconet's report of it
            if attempt == ATTEMPTS - 1 or device != "cuda":
                raise
            traceback.print_exc()
        give_memory_back()
        time.sleep(PAUSE)
    raise AssertionError
