"""Time a model's predictions: the latency of single batches, and the rate of consecutive ones."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from falconet.data.buffers import Batch, on_device
from falconet.parallel.world import World

T = TypeVar("T")
Predict = Callable[[Tensor], Tensor]  # N x 3 x S x S, pixels or values, on the device -> N x classes
AHEAD = 4  # batches that the host may run ahead of the device: enough to keep it busy within bounded memory


@dataclass(frozen=True, kw_only=True)
class Series:
    """Seconds per batch on the slowest replica, including warm-up."""

    latency: list[float]  # one batch at a time, until its scores have arrived
    throughput: list[float]  # consecutive batches

    @staticmethod
    def joined(several: Sequence["Series"]) -> "Series":
        return Series(
            latency=[one for each in several for one in each.latency],
            throughput=[one for each in several for one in each.throughput],
        )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The findings from a first batch."""

    seconds: float  # on the slowest replica, after one that warms up
    accuracy: float  # on the first batch of every replica, percent


@torch.inference_mode()
def try_out(predict: Predict, batch: Batch, *, world: World) -> Trial:
    """Predict one batch twice, and time the second."""
    images, labels = batch.images.to(world.device), batch.labels.to(world.device)
    counts = torch.stack([(predict(images).argmax(1) == labels).sum(), (labels >= 0).sum()])
    right, counted = world.sum(counts).tolist()
    own = _timed(lambda one: predict(one).cpu(), images)
    seconds = world.max(torch.tensor(own, dtype=torch.float64, device=world.device))
    return Trial(seconds=float(seconds), accuracy=100.0 * right / max(1, counted))


@torch.inference_mode()
def measure_with_copy(predict: Predict, batches: Sequence[Batch], *, count: int, world: World) -> Series:
    """Time from images in host memory to scores in host memory."""
    device = world.device

    def there_and_back(batch: Batch) -> None:
        predict(batch.images.to(device, non_blocking=True)).cpu()  # waits for the scores

    world.barrier("inference")
    latency = [_timed(there_and_back, batch) for batch in islice(cycle(batches), count)]
    if device.type != "cuda":
        return _everywhere(world, latency, latency)
    world.barrier("inference")
    ahead = on_device(([batch] for batch in islice(cycle(batches), count)), device=device)
    answers = (predict(update[0].images).to("cpu", non_blocking=True) for update in ahead)
    return _everywhere(world, latency, _spacing(answers))


@torch.inference_mode()
def measure_resident(predict: Predict, batches: Sequence[Batch], *, count: int, world: World) -> Series:
    """Time from images in device memory to scores in device memory."""
    device = world.device
    images = [batch.images.to(device) for batch in batches]

    def there(one: Tensor) -> None:
        predict(one)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    world.barrier("inference")
    latency = [_timed(there, one) for one in islice(cycle(images), count)]
    if device.type != "cuda":
        return _everywhere(world, latency, latency)
    world.barrier("inference")
    return _everywhere(world, latency, _spacing(predict(one) for one in islice(cycle(images), count)))


def _timed(call: Callable[[T], object], value: T) -> float:
    start = time.perf_counter()
    call(value)
    return time.perf_counter() - start


def _spacing(answers: Iterator[Tensor]) -> list[float]:
    """Seconds between the ends of consecutive batches on the current stream."""
    events = [_marked()]
    for _ in answers:
        events.append(_marked())
        if len(events) > AHEAD:
            events[-AHEAD - 1].synchronize()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]


def _marked() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _everywhere(world: World, latency: list[float], throughput: list[float]) -> Series:
    """Share the slowest replica's times with all replicas."""
    own = torch.tensor([latency, throughput], dtype=torch.float64, device=world.device)
    slowest = world.max(own).tolist()
    return Series(latency=slowest[0], throughput=slowest[1])
