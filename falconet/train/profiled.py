"""A few updates under torch.profiler: where the time of an update goes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import profile

from falconet.data.loader import Batch
from falconet.report import tracing
from falconet.report.tracing import BEFORE, TRACED
from falconet.train.step import Step, Update


class ProfiledStep:
    """Another step, of which some updates are traced; the run goes on as it would."""

    def __init__(self, step: Step, folder: Path, *, device: torch.device, updates: int) -> None:
        """`updates`: how many there will be; a run of few is traced as far as it goes."""
        self._step, self._folder, self._device = step, folder, device
        self._first = min(BEFORE, max(0, updates - TRACED))
        self._last = min(self._first + TRACED, updates)
        self._done = 0
        self._profile: profile | None = None

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        if self._done == self._first:
            self._profile = tracing.started(self._device)
        made = self._step(micro_batches, update=update, lr=lr)
        self._done += 1
        if self._done == self._last and self._profile is not None:
            tracing.write(self._profile, self._folder, device=self._device)
            self._profile = None
        return made
