"""The curves of a page: a figure for each chart, the data that its script draws, and every epoch in numbers."""

import math
import statistics
from collections.abc import Sequence

from falconet.report.curves import Chart, columns_in, epoch_rows, short
from falconet.report.epochs import in_short
from falconet.report.pages.parts import Cell, Column, details, inert, table
from falconet.report.run_files import RESULTS, RunFiles

MOST_ROWS = 1000  # epochs in the table


def curves_section(charts: str, numbers: str) -> str:
    return f'<section id="curves"><h2>Curves</h2>{charts}{numbers}</section>'


def figures(runs: Sequence[RunFiles], charts: Sequence[Chart]) -> str:
    if not charts:
        yet = " yet" if any(run.state == "going" for run in runs) else ""
        return f"<p>There are no log points{yet}.</p>"
    drawn = "".join(_figure(chart, several=len(runs) > 1) for chart in charts)
    return f'<div class="charts">{drawn}</div>'


def numbers_part(runs: Sequence[RunFiles]) -> str:
    """Tables with the times of updates and with every epoch."""
    tables = "".join(
        details("Every epoch in numbers" + (f": {run.name}" if len(runs) > 1 else ""), _epoch_table(run))
        for run in runs
        if run.moments
    )
    return "".join(_times(run, several=len(runs) > 1) for run in runs) + tables


def _figure(chart: Chart, *, several: bool) -> str:
    words = details("In words", inert(chart.summary)) if several else inert(chart.summary)
    log = (
        f'<button type="button" class="log" aria-pressed="false" data-chart="{chart.key}">log scale</button>'
        if chart.can_be_log
        else ""
    )
    return (
        f'<figure class="chart"><div class="title"><h3>{inert(chart.title)}</h3>{log}</div>'
        f'<div class="plot" id="chart-{chart.key}" tabindex="0" role="img"'
        f' aria-label="{inert(chart.title)}. {inert(chart.summary)}"></div>'
        f"<figcaption>{words}</figcaption></figure>"
    )


def _times(run: RunFiles, *, several: bool) -> str:
    if len(run.update_times) < 20:
        return ""
    cuts = statistics.quantiles(run.update_times, n=100, method="inclusive")
    name = f"{run.name}: a" if several else "A"
    words = (
        f"{name}n update took {short(cuts[49])} ms at the median, {short(cuts[94])} ms at the 95th percentile and"
        f" {short(max(run.update_times))} ms at most, waiting for data included."
    )
    return f'<p class="times">{inert(words)}</p>'


def _epoch_table(run: RunFiles) -> str:
    rows = epoch_rows(run)
    names = columns_in(rows)
    shown = rows if len(rows) <= MOST_ROWS else rows[:: math.ceil(len(rows) / MOST_ROWS)]
    cells = [[_measured(name, row.get(name)) for name in names] for row in shown]
    few = (
        "" if len(shown) == len(rows) else f"<p>Every {math.ceil(len(rows) / MOST_ROWS)}th row; {RESULTS} has all.</p>"
    )
    heads = [Column(name.replace("_", " "), is_number=True) for name in names]
    return table(f"Epochs of {run.name}", heads, cells, tall=True) + few


def _measured(name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("-", by=-1e300)
    if name == "epoch":
        return Cell(in_short(value), by=value)
    is_percent = name.endswith(("accuracy", "mAP", "exact", "percent"))
    return Cell(f"{value:.2f}" if is_percent else short(value), by=value)


def chart_data(chart: Chart) -> dict[str, object]:
    """The curves on one axis, as the chart library takes them: a gap is null."""
    epochs = sorted({epoch for curve in chart.curves for epoch, _ in curve.points})
    places = {epoch: place for place, epoch in enumerate(epochs)}
    columns = []
    for curve in chart.curves:
        column: list[float | None] = [None] * len(epochs)
        for epoch, value in curve.points:
            column[places[epoch]] = _compact(value)
        columns.append(column)
    return {
        "key": chart.key,
        "unit": chart.unit,
        "right": chart.right_unit,
        "share": chart.is_share,
        "zero": chart.from_zero,
        "data": [[_compact(epoch) for epoch in epochs], *columns],
        "curves": [
            {"label": curve.label, "run": curve.run, "role": curve.role, "right": curve.on_right}
            for curve in chart.curves
        ],
    }


def _compact(value: float) -> float:
    """The value to six digits; more would not be visible."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
