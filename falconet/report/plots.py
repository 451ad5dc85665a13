"""PNG and PDF plots of runs, for papers and messages, drawn with matplotlib."""

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falconet import writing
from falconet.errors import ConfigError
from falconet.report.answers import Answers
from falconet.report.curves import Chart, charts_of
from falconet.report.run_files import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "plots"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6F6F00", "#555555")  # Okabe and Ito's
ROLES = {"validation": 0, "training": 1, "average": 2}
STYLES = {"validation": "-", "training": "--", "average": ":"}
MOST_MARKED = 40  # points of a curve, each with a mark
MOST_NAMED = 40  # classes whose names fit beside a matrix
INCHES, DOTS = (6.4, 4.0), 160  # of a figure; dots per inch of a PNG


def save(runs: Sequence[RunFiles], folder: Path) -> list[str]:
    """Write every plot below `folder` as PNG and PDF; returns their names."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--save-plots: needs the package matplotlib: pip install 'falconet[plots]'") from error
    written = []
    for name, figure in _figures(runs, Figure):
        for kind in ("png", "pdf"):
            file = io.BytesIO()
            # Without the time of day, so that the same run gives the same file.
            about: dict[str, Any] = {"CreationDate": None} if kind == "pdf" else {}
            figure.savefig(file, format=kind, dpi=DOTS, metadata=about)
            written.append(f"{FOLDER}/{name}.{kind}")
            writing.replace(folder, written[-1], file.getvalue())
    return written


def _figures(runs: Sequence[RunFiles], new: "type[Figure]") -> "Iterator[tuple[str, Figure]]":
    for chart in charts_of(runs):
        figure = new(figsize=INCHES, layout="constrained")
        _draw(chart, figure, several=len(runs) > 1)
        yield chart.key, figure
    for place, run in enumerate(runs):
        suffix = f"-{place + 1}" if len(runs) > 1 else ""
        if run.answers and run.answers.cells:
            yield f"confusion{suffix}", _confusion(run.answers, new, title=run.name)
        if run.answers and run.answers.bins:
            yield f"calibration{suffix}", _calibration(run.answers, new, title=run.name)


def _draw(chart: Chart, figure: "Figure", *, several: bool) -> None:
    axes = figure.add_subplot()
    right = axes.twinx() if chart.right_unit else None
    lines = []
    is_short = max(len(curve.points) for curve in chart.curves) <= MOST_MARKED
    for curve in chart.curves:
        place = curve.run if several else ROLES[curve.role]
        epochs, values = zip(*curve.points, strict=True)
        target = right if curve.on_right and right is not None else axes
        lines += target.plot(
            epochs,
            values,
            STYLES[curve.role],
            color=COLOURS[place % len(COLOURS)],
            label=_literal(curve.label),
            marker="o" if is_short or len(curve.points) == 1 else None,  # a line with one point is invisible
            markersize=4,
        )
    axes.set(xlabel="epoch", ylabel=chart.unit or chart.title.lower(), title=_literal(chart.title))
    axes.grid(alpha=0.3)
    _tick_epochs(chart, axes)
    if right is not None:
        right.set_ylabel(chart.right_unit)
        right.set_ylim(0, 100 if chart.is_share else None)  # else a constant scale of 1 is drawn from 0.95 to 1.05
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    # Below the axes: within them it would cover curves of one scale or the other.
    figure.legend(handles=lines, fontsize="small", loc="outside lower center", ncols=2 if several else len(lines))
    figure.set_figheight(INCHES[1] + 0.2 * math.ceil(len(lines) / 2) if several else INCHES[1] + 0.2)


def _tick_epochs(chart: Chart, axes: "Axes") -> None:
    """Put ticks at whole epochs, unless there is only a part of one to show."""
    epochs = {epoch for curve in chart.curves for epoch, _ in curve.points}
    if len(epochs) == 1:
        axes.set_xticks([*epochs])
    else:
        axes.locator_params(axis="x", integer=max(epochs) - min(epochs) >= 1)


def _confusion(answers: Answers, new: "type[Figure]", *, title: str) -> "Figure":
    """Draw the share of each class's images in each column; with many classes, several share a square."""
    classes = len(answers.classes)
    side = min(classes, 500)
    rows = [[0.0] * side for _ in range(side)]
    for label, predicted, images in answers.cells:
        y, x = label * side // classes, predicted * side // classes
        rows[y][x] = max(rows[y][x], 100 * images / max(1, answers.classes[label].images))
    inches = min(12.0, max(5.0, 0.28 * min(classes, MOST_NAMED) + 2.5))
    figure = new(figsize=(inches + 0.8, inches), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(rows, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
    figure.colorbar(shown, ax=axes, label="of the class, %", shrink=0.8)
    axes.set(xlabel="taken for", ylabel="class", title=_literal(title))
    if classes <= MOST_NAMED:
        names = [_literal(each.name[:24]) for each in answers.classes]
        axes.set_xticks(range(classes), names, rotation=90)
        axes.set_yticks(range(classes), names)
        for label, predicted, images in answers.cells:
            is_dark = rows[label][predicted] > 50
            axes.text(
                predicted,
                label,
                str(images),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if is_dark else "black",
            )
    return figure


def _calibration(answers: Answers, new: "type[Figure]", *, title: str) -> "Figure":
    figure = new(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    known = [each for each in answers.bins if each.accuracy is not None]
    axes.bar(
        [50 * (each.low + each.high) for each in known],
        [each.accuracy or 0.0 for each in known],
        width=[95 * (each.high - each.low) for each in known],
        color=COLOURS[0],
        label="right",
    )
    axes.plot([0, 100], [0, 100], "--", color=COLOURS[1], label="perfectly calibrated")
    error = "" if answers.calibration_error is None else f", ECE {answers.calibration_error:.2f} %"
    axes.set(xlabel="sure, %", ylabel="right, %", xlim=(0, 100), ylim=(0, 100), title=_literal(f"{title}{error}"))
    axes.legend(fontsize="small")
    return figure


def _literal(text: str) -> str:
    """Text escaped from matplotlib's math mode; a leading _ is hidden because it would drop a label from the legend."""
    plain = text.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain
