"""The headline numbers of runs, in words, and the options in which they differ."""

import math
from collections.abc import Iterable, Sequence

from falconet.report.curves import short
from falconet.report.epochs import in_short, span
from falconet.report.foreign_folder import number
from falconet.report.run_files import DEFAULT, RunFiles, Stated


def best_of(run: RunFiles) -> tuple[float, float] | None:
    """The best validation: percent, and its epoch; of equal ones that of the lowest loss, as checkpoints are chosen."""
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
    peak = number(run.summary.get("peak_memory_bytes"))
    if peak:
        found["peak memory"] = f"{peak / 2**30:.2f} GiB"
    energy = number(run.summary.get("energy_joules"))
    if energy:
        found["energy"] = f"{energy / 3.6e6:.3f} kWh"
    if run.answers and run.answers.calibration_error is not None:
        found["calibration error"] = f"{run.answers.calibration_error:.2f} %"
    return found


def _speed(run: RunFiles) -> float | None:
    whole = number(run.summary.get("images_per_second"))
    return whole if whole else _mean([value for _, value in run.series("train/images_per_second")])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
    """Whether runs differ in an option; one that an older run does not know has its default there."""
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


def is_mixed(runs: Iterable[RunFiles]) -> bool:
    """Whether runs state different images, and so may have different classes."""
    stated = [tuple(run.options[name].value for name in ("data", "data-dir") if name in run.options) for run in runs]
    return len(set(filter(None, stated))) > 1
