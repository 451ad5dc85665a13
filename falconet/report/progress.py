"""A run's progress, time left and outcome, from the files in its folder."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from falconet.report.epochs import span
from falconet.report.run_files import RunFiles

RECENT_UPDATES = 200  # whose mean time is taken for those to come
Tone = Literal["good", "busy", "bad"]
_LENGTH = re.compile(r"([0-9,]{1,20}) updates? = [\d.,e+]+ epochs? x ([0-9,]{1,20}) updates?;.*")  # a line of plan.txt


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run; None: not known."""

    update: int
    updates: int | None  # of the whole run
    epoch: float
    epochs: float | None
    seconds_left: float | None  # about

    @property
    def share(self) -> float | None:
        """The share of updates that are done, 0 to 1."""
        return min(1.0, self.update / self.updates) if self.updates else None


def progress_of(run: RunFiles, *, clock: Callable[[], float] = time.time) -> Progress:
    last = run.moments[-1] if run.moments else None
    lengths = [match.groups() for line in run.plan if (match := _LENGTH.fullmatch(line))]
    phases = [[int(each.replace(",", "") or 0) for each in pair] for pair in lengths]
    update, epoch = (last.update, last.epoch) if last else (0, 0.0)
    epochs, left = 0.0, 0.0  # of the phases so far
    for own, in_epoch in phases:  # counted from the epoch: updates may have been made with another global batch
        begun, epochs = epochs, epochs + own / max(1, in_epoch)
        left += in_epoch * max(0.0, epochs - max(begun, epoch))
    seconds = _seconds_left(run, round(left), now=clock()) if phases and run.state == "going" else None
    return Progress(
        update=update,
        updates=update + round(left) if epochs else None,
        epoch=epoch,
        epochs=epochs or None,
        seconds_left=seconds,
    )


def _seconds_left(run: RunFiles, updates: int, *, now: float) -> float | None:
    """The time left: updates at their latest pace, validations as long and as frequent as so far."""
    recent = run.update_times[-RECENT_UPDATES:]
    if not recent or not run.moments:
        return None
    per_update = sum(recent) / len(recent) / 1000
    validated = [value for _, value in run.series("validation/seconds")]
    per_update += sum(validated) / max(1, run.moments[-1].update)
    since = now - run.written if run.written is not None else 0.0
    return max(0.0, updates * per_update - max(0.0, since))


def left_in_words(seconds: float) -> str:
    """`about 7m10s left`, rounded, because it is a guess."""
    step = 1 if seconds < 60 else 10 if seconds < 600 else 60
    return f"about {span(step * round(seconds / step)).replace('.0s', 's')} left"


def state_in_words(run: RunFiles) -> tuple[str, Tone]:
    """`finished`, `under way`, `interrupted`, `failed: why`, or `no longer writing` if it left no ending."""
    if run.state == "going":
        return "under way", "busy"
    if run.state == "done":
        return ("ended early" if run.summary.get("ended_early") is True else "finished"), "good"
    if run.ending is not None and run.ending.kind in ("interrupted", "failed"):
        return f"{run.ending.kind}{f': {run.ending.reason}' if run.ending.reason else ''}", "bad"
    return "no longer writing, stopped before its end", "bad"
