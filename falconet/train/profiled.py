"""A few updates under torch.profiler: where the time of an update goes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from falconet.data.loader import Batch
from falconet.train.step import Step, Update

BEFORE, TRACED = 3, 3  # updates: the first ones choose kernels and allocate
TRACE, TABLE = "profile.json", "profile.txt"
_ROWS = 30


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
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._profile = profile(activities=kinds, record_shapes=True)
            self._profile.start()
        made = self._step(micro_batches, update=update, lr=lr)
        self._done += 1
        if self._done == self._last and self._profile is not None:
            self._write(self._profile)
            self._profile = None
        return made

    def _write(self, traced: profile) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the last kernels are missing from the trace
        traced.stop()
        traced.export_chrome_trace(str(self._folder / TRACE))
        order = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=order, row_limit=_ROWS)
        (self._folder / TABLE).write_text(table + "\n", encoding="utf-8")
