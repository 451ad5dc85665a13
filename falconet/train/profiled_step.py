"""A step of which some updates are profiled: one layer by layer, the next ones kernel by kernel."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from falconet.data.buffers import Batch
from falconet.errors import UserError
from falconet.report.console import Say, counted
from falconet.report.profile import trace
from falconet.report.profile.kernel_times import brief, kernel_times
from falconet.report.profile.layer_costs import Layers, layer_costs
from falconet.report.profile.trace import BEFORE, FILES, TRACED, Tracing
from falconet.train.step import Step, Update

LOOKED = 3  # the update that is profiled layer by layer; a profiled run captures updates only after it
NEEDED = BEFORE + TRACED
Pause = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is profiled, and where that goes."""

    model: nn.Module  # whose names layers have
    device: torch.device
    folder: Path
    say: Say
    pause: Pause = nullcontext  # excludes time from training
    facts: Mapping[str, object] = field(default_factory=dict)  # about the run, for the report


class ProfiledStep:
    """A step of which some updates are profiled; training is not changed.

    A captured update hides its layers and allocations, so these come from an update before, made as it is. Kernels
    come from later ones, as all the others are made. Whatever goes wrong costs a line and no update.
    """

    def __init__(self, step: Step, subject: Subject, *, updates: int) -> None:
        """`updates`: how many there will be; of a short run, less is profiled."""
        self._step, self._subject, self._updates = step, subject, updates
        self._looked = min(LOOKED, updates - 1)  # 0: none
        self._first = min(BEFORE, updates - 1)  # made before the trace begins
        self._last = min(self._first + TRACED, updates)
        self._done = 0
        self._tracing: Tracing | None = None
        self._found: dict[str, object] = {}
        self._is_broken = False

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        if self._done == 0 and self._updates < NEEDED:
            self._subject.say(_short(self._updates))
        if self._first == self._done == 0:
            self._begin()
        if self._done + 1 == self._looked:
            made = self._look(micro_batches, update=update, lr=lr)
        else:
            made = self._step(micro_batches, update=update, lr=lr)
        self._done += 1
        if self._done == self._first:  # here, not in the next call, because the wait for its images is traced too
            self._begin()
        if self._done == self._last and self._tracing is not None:
            self._end(self._tracing, update=update)
        return made

    def close(self) -> None:
        """Stop a profiler that an interruption left running."""
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.profiler.stop()

    def _begin(self, *, memory: bool = False) -> None:
        trace.settle(self._subject.device)  # before the pause: what the device still computes is training time
        with self._subject.pause():
            try:
                self._tracing = trace.started(self._subject.device, memory=memory)
            except (UserError, RuntimeError) as error:  # torch's, if the device's driver refuses
                self._broken(error)

    def _look(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        """Make an update whose layers are marked."""
        layers, device = Layers(self._subject.model), self._subject.device
        with trace.warnings_withheld():
            self._begin(memory=True)
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
            with layers.marked() if self._tracing else nullcontext():
                made = self._step(micro_batches, update=update, lr=lr)
            tracing, self._tracing = self._tracing, None
            if tracing is not None:
                trace.settle(device)
                with self._subject.pause():
                    costs = layer_costs(trace.stopped(tracing), layers, before=before)
                self._found = {"looked": update + 1, "layers": costs.to_json(), "memory": costs.memory}
            return made

    def _end(self, tracing: Tracing, *, update: int) -> None:
        self._tracing = None
        trace.settle(self._subject.device)
        with self._subject.pause():  # takes seconds
            traced = trace.stopped(tracing)
            calls = self._last - self._first
            times = kernel_times(traced, calls=calls)
            if not times["kinds"]:
                self._subject.say(
                    "note: the profile has no kernels, because the GPU's driver lets this user trace none"
                )
            about = {**self._subject.facts, "what": "update", "traced": calls, "last": update + 1}
            try:
                trace.write(traced, {**about, **times, **self._found}, self._subject.folder)
            except UserError as error:
                self._broken(error)
            else:
                self._subject.say(f"profiled {counted(calls, 'update')} of {brief(times)}; see {', '.join(FILES)}")

    def _broken(self, error: Exception) -> None:
        if not self._is_broken:  # one line is enough
            self._is_broken = True
            self._subject.say(
                f"note: there is no profile: {str(error).partition(chr(10))[0]}; training is not affected"
            )


def _short(updates: int) -> str:
    """What a short run leaves out."""
    without = "; layers are not profiled" if updates == 1 else ""
    return (
        f"note: --profile takes {NEEDED} updates, and this run makes {updates}: the first ones choose kernels and"
        f" allocate memory, so the profile shows longer times than usual{without}"
    )
