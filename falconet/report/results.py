"""The headline numbers of runs, in words, and the options in which they differ."""

import itertools
import math
import posixpath
from collections.abc import Sequence
from dataclasses import fields
from pathlib import PurePosixPath
from typing import NamedTuple

from falconet.config.facts import PHOTO_KINDS
from falconet.config.options import Logging
from falconet.report.curves import short
from falconet.report.epochs import in_short, span
from falconet.report.foreign_folder import number
from falconet.report.gpu_driver import joules_in_words
from falconet.report.run_files import DEFAULT, RunFiles, Stated


def best_of(run: RunFiles) -> tuple[float, float] | None:
    """The best validation in percent and its epoch; ties go to the lowest loss, as with checkpoints."""
    points = [
        (each.metrics[f"{kind}/{run.metric}"], -each.metrics.get(f"{kind}/loss", math.inf), -each.epoch)
        for each in run.moments
        for kind in ("validation", "validation_ema")  # the moving average's weights
        if f"{kind}/{run.metric}" in each.metrics
    ]
    percent, _, epoch = max(points, default=(0.0, 0.0, 0.0))
    return (percent, -epoch) if points else None


def results_of(run: RunFiles) -> dict[str, str]:
    """The headline numbers, in words."""
    found, best, last = {}, best_of(run), run.moments[-1] if run.moments else None
    name = "accuracy" if run.metric == "accuracy" else run.metric
    if best:
        found[f"best {name}"] = f"{best[0]:.2f} %"
        found["reached after"] = f"epoch {in_short(best[1])}"
    final = run.series(f"validation/{run.metric}")
    if final:
        found[f"last {name}"] = f"{final[-1][1]:.2f} %"
    losses = run.series("train/loss")
    if losses:
        found["last training loss"] = short(losses[-1][1])
    if last:
        found["epochs"] = in_short(last.epoch)
        found["updates"] = f"{last.update:,}"
    rate, seconds = _speed(run), number(run.summary.get("training_seconds"))
    if rate is not None:
        found["images per second"] = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
    waiting = _mean([value for _, value in run.series("train/waiting_percent")])
    if waiting is not None:
        found["waiting for data"] = f"{waiting:.0f} %"
    if seconds:
        found["training time"] = span(seconds)
    whole = number(run.summary.get("whole_seconds"))
    if whole:
        found["total time"] = span(whole)
    peak = number(run.summary.get("peak_memory_bytes"))
    if peak:
        found["peak memory"] = f"{peak / 2**30:.2f} GiB"
    energy = number(run.summary.get("energy_joules"))
    if energy:
        found["energy"] = joules_in_words(energy)
    if run.answers and run.answers.calibration_error is not None:
        found["calibration error"] = f"{run.answers.calibration_error:.2f} %"
    return found


def _speed(run: RunFiles) -> float | None:
    whole = number(run.summary.get("images_per_second"))
    return whole if whole else _mean([value for _, value in run.series("train/images_per_second")])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Options about where and what a run writes: they cannot change the training.
OUTPUTS = frozenset(each.name.replace("_", "-") for each in fields(Logging)) | {
    *("run-dir", "temporary", "name-suffix", "resume", "plan"),
    *("checkpoint-output-path", "checkpoints-kept", "initial-checkpoint", "validate-checkpoints", "model-cache-path"),
}


def differences(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """The options that differ, with the value in each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    stated = {name: [run.options.get(name) for run in runs] for name in names}
    return {
        name: ["-" if each is None else each.value for each in values]
        for name, values in stated.items()
        if _differ(values)
    }


def _differ(values: Sequence[Stated | None]) -> bool:
    """Whether runs differ in an option; in an older run without it, the default counts."""
    known = [each for each in values if each is not None]
    is_set = len(known) < len(values) and any(each.source != DEFAULT for each in known)
    return len({each.value for each in known}) > 1 or is_set


def about_of(run: RunFiles) -> str:
    """The model, the images and the device."""
    named = [run.options[name].value for name in ("model", "data") if name in run.options]
    if named[1:] == ["folder"] and "data-dir" in run.options:
        named[1] = run.options["data-dir"].value.rstrip("/").rpartition("/")[2]
    return " · ".join([*named, *([run.environment["device"]] if "device" in run.environment else [])])


def last_of(run: RunFiles, metric: str) -> float | None:
    """The newest value of a metric."""
    return next((each.metrics[metric] for each in reversed(run.moments) if metric in each.metrics), None)


MIXED = "The runs have different images: their accuracies cannot be compared."


def is_mixed(runs: Sequence[RunFiles]) -> bool:
    """Whether runs state different images, or show different classes."""
    stated = {each for each in map(_images_of, runs) if each is not None}
    classes = {tuple(each.name for each in run.answers.classes) for run in runs if run.answers}
    return len(classes) > 1 or any(not _can_be_same(one, other) for one, other in itertools.combinations(stated, 2))


class _Images(NamedTuple):
    """A run's facts about its images; None: not known."""

    kind: str
    folder: PurePosixPath | None  # of photos; those of a published dataset are the same everywhere
    validated: float | None  # images


def _images_of(run: RunFiles) -> _Images | None:
    if "data" not in run.options:
        return None
    kind, place = run.options["data"].value, run.options.get("data-dir")
    folder = PurePosixPath(posixpath.normpath(place.value)) if place and kind in PHOTO_KINDS else None
    return _Images(kind, folder, last_of(run, "validation/images"))


def _can_be_same(one: _Images, other: _Images) -> bool:
    """Whether no known fact distinguishes the images of two runs."""
    numbers = {one.validated, other.validated} - {None}
    folders = [each for each in (one.folder, other.folder) if each is not None]
    return one.kind == other.kind and len(numbers) < 2 and (len(folders) < 2 or _can_be_one(*folders))


def _can_be_one(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Whether two paths may be the same; of an older run's relative path, only the end can be compared."""
    if one.is_absolute() and other.is_absolute():
        return one == other
    ends = [(path.is_absolute(), [part for part in path.parts if part != ".."]) for path in (one, other)]
    (_, end), (_, whole) = sorted(ends, key=lambda each: (each[0], len(each[1])))
    return not end or whole[-len(end) :] == end
