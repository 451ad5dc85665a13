"""The time of every single update, without waiting for the device: marks on its stream, read at log points."""

from collections.abc import Sequence

import torch

from falconet.data.loader import Batch
from falconet.report.throughput import HostMoments, Moments, Stopwatch
from falconet.train.step import Step, Update


class DeviceMoments:
    """Events on the current CUDA stream: a mark is where the device stands when it comes to it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1000  # it counts milliseconds


def moments_of(device: torch.device) -> Moments:
    return DeviceMoments() if device.type == "cuda" else HostMoments()


class TimedStep:
    """Another step, whose updates a stopwatch is told of."""

    def __init__(self, step: Step, stopwatch: Stopwatch) -> None:
        self._step, self.stopwatch = step, stopwatch

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        made = self._step(micro_batches, update=update, lr=lr)
        self.stopwatch.updated()
        return made
