"""A few updates under torch.profiler: where the time of an update goes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import profile

from falconet.data.loader import Batch
from falconet.report import tracing
from falconet.report.tracing import BEFORE, TRACED
from falconet.train.step import Step, Update

Pause = Callable[[], AbstractContextManager[None]]


class ProfiledStep:
    """Another step, of which some updates are traced; the run goes on as it would."""

    def __init__(self, step: Step, folder: Path, *, device: torch.device, updates: int, pause: Pause) -> None:
        """`updates`: how many there will be; a run of few is traced as far as it goes. `pause`: no training time."""
        self._step, self._folder, self._device, self._pause = step, folder, device, pause
        self._first = min(BEFORE, max(0, updates - TRACED))
        self._last = min(self._first + TRACED, updates)
        self._done = 0
        self._profile: profile | None = None

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        if self._first == self._done == 0:
            self._begin()
        made = self._step(micro_batches, update=update, lr=lr)
        self._done += 1
        if self._done == self._first:  # here and not in the next call: the wait for its images is training time
            self._begin()
        if self._done == self._last and self._profile is not None:
            self._end(self._profile)
        return made

    def _begin(self) -> None:
        tracing.settle(self._device)
        with self._pause():
            self._profile = tracing.started(self._device)

    def _end(self, traced: profile) -> None:
        tracing.settle(self._device)
        with self._pause():  # seconds, of which no update is made
            tracing.write(traced, self._folder, device=self._device)
        self._profile = None
