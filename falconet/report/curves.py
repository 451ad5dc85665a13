"""The curves of runs: which metrics share a chart, the points to draw, and a summary in a sentence."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from falconet.report.epochs import in_short
from falconet.report.run_files import RunFiles

MOST_POINTS = 1500  # of a curve: more than the columns of a chart
MOST_EPOCHS = 4  # of equal values, by number
Role = Literal["training", "validation", "average"]
Points = Sequence[tuple[float, float]]  # epochs and values


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    run: int  # its place among the runs
    role: Role
    points: Points
    on_right: bool = False  # has the scale on the right


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over the epochs."""

    key: str
    title: str
    unit: str
    curves: Sequence[Curve]
    summary: str  # in a sentence, for readers who cannot see it
    right_unit: str = ""
    can_be_log: bool = False
    is_share: bool = False  # the scale on the right is a percentage
    from_zero: bool = False  # the scale on the left starts at 0


Part = tuple[str, Role, Callable[[RunFiles], Points], bool]  # label, role, points, on the right


def charts_of(runs: Sequence[RunFiles]) -> list[Chart]:
    """Every chart that has a curve."""
    metric = next((run.metric for run in runs if run.metric != "accuracy"), "accuracy")
    training = (
        _metric("training", "train/accuracy")
        if metric == "accuracy"
        else ("training, all labels right", "training", _series("train/exact"), False)  # mAP is not measured there
    )
    has_scale = _has(runs, "train/loss_scale")
    found = [
        _chart(
            "loss",
            "Loss",
            "",
            runs,
            [_metric("training", "train/loss"), _metric("validation", "validation/loss"), _ema("loss")],
            can_be_log=True,
        ),
        _chart(
            "accuracy",
            "Accuracy" if metric == "accuracy" else "Mean average precision",
            "%",
            runs,
            [training, _metric("validation", f"validation/{metric}"), _ema(metric)],
        ),
        _chart(
            "lr",
            "Learning rate" + (" and loss scale" if has_scale else ""),
            "learning rate" if has_scale else "",
            runs,
            [
                ("learning rate", "validation", _series("train/lr"), False),
                ("loss scale", "training", _series("train/loss_scale"), True),
            ],
            right_unit="loss scale",
        ),
        _chart(
            "throughput",
            "Throughput and waiting for data",
            "images/s",
            runs,
            [
                ("images per second", "validation", _series("train/images_per_second"), False),
                ("time waiting for data", "training", _series("train/waiting_percent"), True),
            ],
            right_unit="% waiting",
            is_share=True,
            from_zero=True,
        ),
        _chart(
            "memory",
            "Memory",
            "GiB",
            runs,
            [
                ("device, peak", "validation", lambda run: _memory(run, "device"), False),
                ("host", "training", lambda run: _memory(run, "host"), False),
            ],
            from_zero=True,
        ),
    ]
    return [chart for chart in found if chart.curves]


def _metric(role: Role, name: str) -> Part:
    return role, role, _series(name), False


def _ema(metric: str) -> Part:
    return "moving average", "average", _series(f"validation_ema/{metric}"), False


def _series(name: str) -> Callable[[RunFiles], Points]:
    return lambda run: run.series(name)


def _has(runs: Sequence[RunFiles], name: str) -> bool:
    return any(name in moment.metrics for run in runs for moment in run.moments)


def _memory(run: RunFiles, where: Literal["device", "host"]) -> Points:
    epochs = {moment.update: moment.epoch for moment in run.moments}
    found = [(epochs.get(each.update), getattr(each, where)) for each in run.memory]
    return [(epoch, value / 2**30) for epoch, value in found if epoch is not None and value]


def _chart(
    key: str,
    title: str,
    unit: str,
    runs: Sequence[RunFiles],
    parts: Sequence[Part],
    *,
    right_unit: str = "",
    can_be_log: bool = False,
    is_share: bool = False,
    from_zero: bool = False,
) -> Chart:
    curves = [
        Curve(
            label=f"{run.name}: {label}" if len(runs) > 1 else label,
            run=place,
            role=role,
            points=points,
            on_right=right,
        )
        for place, run in enumerate(runs)
        for label, role, read, right in parts
        if (points := thinned(read(run)))
    ]
    is_log = can_be_log and all(value > 0 for curve in curves for _, value in curve.points)
    on_right = any(curve.on_right for curve in curves)
    return Chart(
        key=key,
        title=title,
        unit=unit,
        curves=curves,
        summary=" ".join(_sentence(curve, is_lower_better=key == "loss") for curve in curves),
        right_unit=right_unit if on_right else "",
        can_be_log=is_log,
        is_share=is_share,
        from_zero=from_zero,
    )


def _sentence(curve: Curve, *, is_lower_better: bool) -> str:
    """`training: 2.04 after epoch 1, 0.0085 after epoch 30, lowest 0.0068 after epoch 29.`"""
    (first, begin), (last, end) = curve.points[0], curve.points[-1]
    if len(curve.points) == 1:
        return f"{curve.label}: {short(end)} after epoch {in_short(last)}."
    best = (min if is_lower_better else max)(value for _, value in curve.points)
    word = "lowest" if is_lower_better else "highest"
    return (
        f"{curve.label}: {short(begin)} after epoch {in_short(first)}, {short(end)} after epoch {in_short(last)},"
        f" {word} {short(best)} after {_epochs([epoch for epoch, value in curve.points if value == best])}."
    )


def _epochs(found: Sequence[float]) -> str:
    """`epoch 3`, or `epochs 1, 2 and 3` of equal values, or `epoch 1 and 4 later ones`."""
    names = [in_short(epoch) for epoch in found]
    if len(names) > MOST_EPOCHS:
        return f"epoch {names[0]} and {len(names) - 1} later ones"
    return f"epoch {names[0]}" if len(names) == 1 else f"epochs {', '.join(names[:-1])} and {names[-1]}"


def short(value: float) -> str:
    """About four digits: 0.0085, 98.61, 2,017."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: the first, the last, and the lowest and highest of each stretch between."""
    if len(points) <= most:
        return points
    stretches = (most - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for number in range(stretches):
        part = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]


COLUMNS = {  # of results.csv and of the table in the report: metric -> name
    "train/loss": "train_loss",
    "train/accuracy": "train_accuracy",
    "train/exact": "train_exact",
    "validation/loss": "validation_loss",
    "validation/accuracy": "validation_accuracy",
    "validation/top5_accuracy": "validation_top5_accuracy",
    "validation/mAP": "validation_mAP",
    "validation/exact": "validation_exact",
    "validation_ema/loss": "ema_loss",
    "validation_ema/accuracy": "ema_accuracy",
    "validation_ema/mAP": "ema_mAP",
    "train/lr": "lr",
    "train/loss_scale": "loss_scale",
    "train/skipped": "skipped_updates",
    "train/images_per_second": "images_per_second",
    "train/waiting_percent": "waiting_percent",
    "validation/seconds": "validation_seconds",
}
Row = Mapping[str, float]


def epoch_rows(run: RunFiles) -> list[Row]:
    """One row per epoch, or per validation within one: `epoch`, `update` and the columns above that are known.

    Where an epoch has several log points, its row has the mean of their losses, accuracies and rates.
    """
    rows, since = list[Row](), list[Row]()
    for moment in run.moments:
        since.append(moment.metrics)
        ends = abs(moment.epoch - round(moment.epoch)) < 1e-6
        if not ends and not any(name.startswith("validation/") for name in moment.metrics):
            continue
        row = {"epoch": moment.epoch, "update": float(moment.update)}
        for metric, column in COLUMNS.items():
            values = [metrics[metric] for metrics in since if metric in metrics]
            if values:
                row[column] = _joined(metric, values)
        rows.append(row)
        since.clear()
    return rows


def _joined(metric: str, values: Sequence[float]) -> float:
    if metric == "train/skipped":
        return sum(values)
    is_mean = metric.startswith("train/") and metric not in ("train/lr", "train/loss_scale")
    return sum(values) / len(values) if is_mean else values[-1]


def columns_in(rows: Sequence[Row]) -> list[str]:
    """The columns that at least one row has."""
    return ["epoch", "update", *(column for column in COLUMNS.values() if any(column in row for row in rows))]


def csv_lines(*runs: RunFiles) -> Iterator[str]:
    """A header and a row per epoch, which names its run if there are several; empty cells were not measured."""
    rows = [(run, row) for run in runs for row in epoch_rows(run)]
    columns = columns_in([row for _, row in rows])
    yield ",".join([*(["run"] if len(runs) > 1 else []), *columns])
    for run, row in rows:
        yield ",".join([*([_quoted(run.name)] if len(runs) > 1 else []), *(_cell(row.get(each)) for each in columns)])


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(each in text for each in ',"\n\r') else text


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
