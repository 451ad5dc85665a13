"""What a run reached: summary.json, the lines at its end, and what trackers compare runs by."""

import contextlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from falconet import writing
from falconet.checkpoint import format
from falconet.errors import CheckpointError
from falconet.report import plots, terminal_plot
from falconet.report.console import counted
from falconet.report.epochs import BEST, Metric, in_short, span
from falconet.report.gpu_driver import joules_in_words
from falconet.report.run_files import SUMMARY, read_run
from falconet.report.throughput import Rate
from falconet.report.trackers.tracker import Tracker
from falconet.train import memory_report
from falconet.train.log import Log
from falconet.train.memory_report import StageMemory


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known after the last update of a phase; `after` adds what the phases before it took."""

    checkpoints: Path
    metric: Metric  # what its validations measured
    memory: Sequence[StageMemory]  # of each stage
    is_last: bool  # no phase follows
    rate: Rate
    whole: float  # seconds, with validations and saves
    seconds: Mapping[str, float] = field(default_factory=dict)  # by what took them
    joules: float | None = None  # that all devices used; None: they do not tell
    report: Path | None = None  # None: there is none
    draws: bool = False  # plots beside it

    def after(self, before: "Ending") -> "Ending":
        """The same with the time, images and energy of the phases before, as far as this process trained them."""
        return replace(
            self,
            rate=before.rate + self.rate,
            whole=before.whole + self.whole,
            seconds={part: round(taken + before.seconds[part], 4) for part, taken in self.seconds.items()},
            joules=None if self.joules is None or before.joules is None else before.joules + self.joules,
        )


def write(folder: Path, log: Log, ending: Ending, environment: Mapping[str, str]) -> None:
    """summary.json."""
    rate, measured = ending.rate, log.output.measurements
    best = measured.best
    summary = {
        "updates": log.state.progress.update,
        "epochs": log.plan.last_epoch,
        "ended_early": log.ended_early,
        "phase": log.plan.phase,
        **(
            {"images_per_second": round(rate.images_per_second, 1)} if rate.images else {}
        ),  # else only the end was left
        "training_seconds": round(rate.seconds, 1),
        "whole_seconds": round(ending.whole, 1),
        "seconds": ending.seconds,
        "waiting_percent": round(rate.waiting_percent, 1),
        "peak_memory_bytes": max(stage.peak for stage in ending.memory),
        "memory_bytes": ending.memory[0].held.to_json(),
        **({"stages": [stage.to_json() for stage in ending.memory]} if len(ending.memory) > 1 else {}),
        **({} if ending.joules is None else {"energy_joules": round(ending.joules)}),
        "metrics": measured.latest,
        "best": {f"validation_{ending.metric.name}": best.accuracy, "update": best.update} if best else None,
        "checkpoints": str(ending.checkpoints),
        "environment": dict(environment),
    }
    writing.replace(folder, SUMMARY, json.dumps(summary, indent=1) + "\n")


def hand_over(log: Log, ending: Ending, trackers: Sequence[Tracker]) -> None:
    """Give trackers what they compare runs by."""
    measured, metric = log.output.measurements, ending.metric
    names = {"train_loss": "train/loss", f"validation_{metric.name}": metric.key, "validation_loss": "validation/loss"}
    found = {f"final/{name}": measured.latest[key] for name, key in names.items() if key in measured.latest}
    if measured.best:
        found[f"best/validation_{metric.name}"] = measured.best.accuracy
        if math.isfinite(measured.best.loss):
            found["best/validation_loss"] = measured.best.loss
    for each in trackers:
        each.write_result(log.state.progress.update, found)


def show(folder: Path, log: Log, ending: Ending) -> None:
    """What matters of the summary, below a plot on a terminal."""
    screen = log.output.screen
    if ending.is_last and ending.report and screen.is_drawable:
        for line in terminal_plot.lines(read_run(folder, state="done")):
            screen.line(line)
    for name, text in {"": "", **_told(folder, log, ending)}.items():
        screen.line(f"{name:21}{text}".rstrip())


def _told(folder: Path, log: Log, ending: Ending) -> dict[str, str]:
    """The summary for a person: the result, where it is, and what to do with it."""
    measured, lines, chosen, rate = log.output.measurements, {}, None, ending.rate
    if ending.is_last:
        with contextlib.suppress(CheckpointError):  # the file system may be gone by now; the run itself is done
            chosen = format.choose(ending.checkpoints, "best", lambda _: None)
    if measured.best:
        score, update, _, epoch = measured.best
        is_here = epoch > log.plan.epochs_before
        when = f"after epoch {in_short(epoch)} ({BEST})" if is_here else "in an earlier phase"
        scores = (ending.metric.key, ending.metric.average_key)
        last = [measured.latest[name] for name in scores if name in measured.latest]
        later = f", {max(last):.2f}% at the end" if last and update != log.plan.updates else ""
        is_average = chosen and chosen.manifest.progress.update == update and chosen.manifest.better_stem == "ema"
        whose = " (moving average)" if is_average else ""
        lines[f"best {ending.metric.name}"] = f"{score:.2f}%{whose} {when}{later}"
    if log.ended_early:
        end, epochs = log.plan.epoch_at(log.state.progress.update), counted(log.plan.patience or 0, "epoch")
        lines["ended early"] = f"after epoch {in_short(end)}: {epochs} without a better validation"
    lines["time"] = f"{span(ending.whole)} in all, training time {span(rate.seconds)}"
    if rate.images:
        waited = f"{rate.waiting_percent:.0f}% of the time waiting for data"
        lines["images per second"] = f"{rate.images_per_second:,.0f} ({waited})"
    lines |= memory_report.told(ending.memory, replicas=log.plan.replicas)
    if ending.joules is not None:
        lines["energy"] = joules_in_words(ending.joules)
    if chosen:
        lines["best checkpoint"] = str(chosen.folder)
    if ending.report:
        lines["report"] = str(ending.report)
        if ending.draws:
            lines["plots"] = str(ending.report.with_name(plots.FOLDER))
    lines["run folder"] = str(folder)
    if ending.is_last and log.plan.validation_mode != "none":
        is_inside = ending.checkpoints in (folder, folder / "checkpoints")
        run = shlex.quote(str(folder if is_inside else ending.checkpoints))
        lines["next"] = f"falconet predict {run} photo.jpg"
        lines[" "] = f"falconet validate {run}"
    return lines
