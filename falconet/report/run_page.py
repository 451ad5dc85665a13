"""report.html: one page about one run, or about several side by side, from the files of their folders alone.

Everything that a run folder states is escaped text: the folder may come from another person. The page needs no network,
and its policy lets nothing run but the two scripts that are embedded here.
"""

import base64
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from falconet import writing
from falconet.report.console import counted
from falconet.report.curves import Chart, charts_of, columns_in, csv_lines, epoch_rows, short
from falconet.report.epochs import in_short, span
from falconet.report.page_parts import Cell, Column, details, examples, facts, inert, reliability, table, tiles
from falconet.report.profile_part import profile_part, read_profile, timed
from falconet.report.run_files import (
    DEFAULT,
    REPORT,
    RESULTS,
    Answers,
    RunFiles,
    State,
    Stated,
    number,
    read_run,
)

MOST_ROWS = 1000  # epochs in the table
MOST_CELLS = 60_000  # of a confusion matrix, the largest: about 700 kB
MOST_NAMED = 2000  # classes in a table, the worst
MOST_CONFUSED = 50  # pairs
MOST_LAYERS = 1000
STATES: Mapping[State, str] = {
    "done": "finished",
    "going": "under way when this was written",
    "stopped": "stopped before its end",
}


def write_own(folder: Path, *, state: State | None = None) -> RunFiles:
    """Write report.html and results.csv of a run into its folder; returns what was read of it."""
    run = read_run(folder, state=state)
    writing.replace(folder, REPORT, page([run]))
    writing.replace(folder, RESULTS, "".join(f"{line}\n" for line in csv_lines(run)))
    return run


def page(runs: Sequence[RunFiles]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    charts = charts_of(runs)
    body = [_header(runs, title)]
    body += [_notes([problem for run in runs for problem in run.problems])]
    body += [_comparison(runs)] if len(runs) > 1 else []
    body += [_headline(runs[0])] if len(runs) == 1 else []
    body += [_curves(runs, charts)]
    for place, run in enumerate(runs):
        sections = _sections(run, f"r{place}-")
        if len(runs) == 1:
            body += sections.values()
        else:
            body.append(f'<section class="run">{details(run.name, "".join(sections.values()))}</section>')
    data = {
        "charts": [_chart_data(chart) for chart in charts],
        "matrices": {f"r{place}-matrix": _matrix(run.answers) for place, run in enumerate(runs) if run.answers},
    }
    return _document(title, "".join(body), data)


def _document(title: str, body: str, data: Mapping[str, object]) -> str:
    """The page around its body, with a policy that names its scripts by their digests."""
    scripts = [_asset("uplot/uPlot.iife.min.js"), _asset("report.js")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    # What would end the element, or start a comment in it, cannot occur in it.
    island = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    licence = inert(_asset("uplot/LICENSE"))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="generator" content="falconet report">',
            f"<title>{inert(title)} - Falconet</title>",
            f"<style>{_asset('uplot/uPlot.min.css')}{_asset('report.css')}</style>",
            "</head>",
            "<body>",
            f'<a class="skip" href="#main">Skip to the content</a>{body}',
            f"<footer>Made by Falconet from the files of the run folder. Charts by uPlot 1.6.32 (MIT):"
            f" {details('licence', f'<pre>{licence}</pre>')}</footer></main>",
            f'<script type="application/json" id="data">{island}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


@cache
def _asset(name: str) -> str:
    return files("falconet.report").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# The head of the page.


def _header(runs: Sequence[RunFiles], title: str) -> str:
    kind = "one" if len(runs) == 1 else "several"
    links = {"curves": "Curves"}
    if len(runs) == 1:
        links |= _links(runs[0])
    else:
        links = {"comparison": "Comparison", **links}
    nav = "".join(f'<a href="#{inert(name)}">{inert(label)}</a>' for name, label in links.items())
    about = _about(runs[0]) if len(runs) == 1 else ", ".join(run.name for run in runs)
    badge = f'<span class="badge {runs[0].state}">{STATES[runs[0].state]}</span>' if len(runs) == 1 else ""
    return (
        f'<header class="{kind}"><p class="brand">Falconet report</p><h1>{inert(title)} {badge}</h1>'
        f'<p class="about">{inert(about)}</p></header><nav aria-label="Sections">{nav}</nav><main id="main">'
    )


def _links(run: RunFiles) -> dict[str, str]:
    known = {
        "r0-wrong": ("Where it is wrong", run.answers),
        "r0-seen": ("What it saw", run.seen),
        "r0-layers": ("Layers", run.layers),
        "r0-profile": ("Profile", read_profile(run.profile)),
        "r0-checkpoints": ("Checkpoints", run.checkpoints),
        "r0-options": ("Plan and options", run.options or run.plan),
        "r0-environment": ("Environment", run.environment),
    }
    return {name: label for name, (label, there) in known.items() if there}


def _about(run: RunFiles) -> str:
    named = [run.options[name].value for name in ("model", "data") if name in run.options]
    if named[1:] == ["folder"] and "data-dir" in run.options:
        named[1] = run.options["data-dir"].value.rstrip("/").rpartition("/")[2]
    return " · ".join([*named, *([run.environment["device"]] if "device" in run.environment else [])])


def _notes(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    shown = "".join(f"<li>{inert(problem)}</li>" for problem in problems[:20])
    return f'<aside class="notes" aria-label="What could not be read"><ul>{shown}</ul></aside>'


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


def _headline(run: RunFiles) -> str:
    found = results_of(run)
    if not found:
        return '<section class="cards"><p>There are no log points yet.</p></section>'
    main = next((name for name in found if name.startswith("best ")), None)
    cards = [
        f'<div class="card{" main" if name == main else ""}"><dt>{inert(name)}</dt><dd>{inert(value)}</dd></div>'
        for name, value in found.items()
    ]
    return f'<section aria-label="Results"><dl class="cards">{"".join(cards)}</dl></section>'


# Several runs.


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


def _comparison(runs: Sequence[RunFiles]) -> str:
    columns = [Column(""), *(Column(run.name) for run in runs)]
    results = [results_of(run) for run in runs]
    names = list(dict.fromkeys(name for found in results for name in found))
    states = [Cell("state"), *(Cell(STATES[run.state]) for run in runs)]
    rows = [[Cell(name), *(Cell(found.get(name, "-")) for found in results)] for name in names]
    changed = [
        [Cell(f"--{name}", is_mono=True), *(Cell(value, is_mono=True) for value in values)]
        for name, values in differences(runs).items()
    ]
    options = (
        table("Options that differ", columns, changed, sorts=False) if changed else "<p>All options are the same.</p>"
    )
    classes = {tuple(each.name for each in run.answers.classes) for run in runs if run.answers}
    note = (
        '<aside class="notes"><p>The runs have different classes: their accuracies cannot be compared.</p></aside>'
        if len(classes) > 1
        else ""
    )
    return (
        f'<section id="comparison"><h2>What differs</h2>{note}{options}<h3>Results</h3>'
        f"{table('Results', columns, [states, *rows], sorts=False)}</section>"
    )


# Curves.


def _curves(runs: Sequence[RunFiles], charts: Sequence[Chart]) -> str:
    if not charts:
        return '<section id="curves"><h2>Curves</h2><p>There are no log points yet.</p></section>'
    drawn = "".join(_figure(chart, several=len(runs) > 1) for chart in charts)
    tables = "".join(
        details("Every epoch in numbers" + (f": {run.name}" if len(runs) > 1 else ""), _epoch_table(run))
        for run in runs
        if run.moments
    )
    times = "".join(_times(run, several=len(runs) > 1) for run in runs)
    return f'<section id="curves"><h2>Curves</h2><div class="charts">{drawn}</div>{times}{tables}</section>'


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


def _chart_data(chart: Chart) -> dict[str, object]:
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
    """Six digits, which no screen can tell from more."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


# One run.


def _sections(run: RunFiles, prefix: str) -> dict[str, str]:
    """The sections about one run, without those that have nothing to show."""
    found = {
        "wrong": _wrong(run, prefix),
        "seen": _seen(run),
        "layers": _layers(run),
        "profile": profile_part(read_profile(run.profile)),
        "checkpoints": _checkpoints(run),
        "options": _options(run),
        "environment": facts(run.environment.items()) if run.environment else "",
    }
    titles = {
        "wrong": "Where it is wrong",
        "seen": "What the network saw",
        "layers": "Layers",
        "profile": "Profile",
        "checkpoints": "Checkpoints",
        "options": "Plan and options",
        "environment": "Environment",
    }
    return {
        name: f'<section id="{prefix}{name}"><h2>{titles[name]}</h2>{body}</section>'
        for name, body in found.items()
        if body
    }


def _wrong(run: RunFiles, prefix: str) -> str:
    answers = run.answers
    if answers is None:
        return ""
    epoch = f" after epoch {answers.epoch}" if answers.epoch else ""
    images = sum(each.images for each in answers.classes)
    which = f"The best validation{epoch}, of {counted(images, 'image')}."
    if answers.checkpoint:
        which += f" Checkpoint: {answers.checkpoint}."
    parts = [f"<p>{inert(which)}</p>", _class_table(answers)]
    if answers.cells:
        listed = parts.pop() + _confusions(answers)
        parts.append(f'<div class="beside">{_matrix_figure(answers, prefix)}<div>{listed}</div></div>')
    if answers.bins:
        parts.append(_calibration(answers))
    if answers.mistakes:
        parts.append(f"<h3>Most confident mistakes</h3>{examples(answers.mistakes, is_wrong=True)}")
    if answers.hits:
        parts.append(f"<h3>Least confident hits</h3>{examples(answers.hits, is_wrong=False)}")
    return "".join(parts)


def _class_table(answers: Answers) -> str:
    is_one = any(each.correct is not None for each in answers.classes)
    ranked = sorted(answers.classes, key=lambda each: (each.score is None, each.score or 0.0, each.name))
    shown = ranked[:MOST_NAMED]
    heads = [Column("class"), Column("accuracy, %" if is_one else "average precision, %", is_number=True)]
    heads += [Column("right", is_number=True)] if is_one else []
    heads += [Column("images", is_number=True)]
    rows = []
    for each in shown:
        score = Cell("-", by=-1.0) if each.score is None else Cell(f"{each.score:.2f}", by=each.score, bar=each.score)
        right = [Cell(f"{each.correct or 0:,}", by=each.correct or 0)] if is_one else []
        rows.append([Cell(each.name), score, *right, Cell(f"{each.images:,}", by=each.images)])
    more = f"<p>The worst {MOST_NAMED:,} of {len(ranked):,} classes.</p>" if len(shown) < len(ranked) else ""
    title = "Accuracy by class" if is_one else "Average precision by class"
    return f"<h3>{title}</h3>{table(title, heads, rows, tall=len(rows) > 12)}{more}"


def _matrix_figure(answers: Answers, prefix: str) -> str:
    number_of = len(answers.classes)
    words = (
        f"Confusion matrix of {number_of:,} classes: a row for each class, a column for what its images were taken for."
        " The table of confused classes below lists the largest cells."
    )
    return (
        f'<figure class="matrix"><div class="title"><h3>Confusion matrix</h3><span class="tools">'
        f'<button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        f'<button type="button" data-zoom="out" aria-label="Zoom out">&minus;</button>'
        f'<button type="button" data-zoom="all">all</button></span></div>'
        f'<div class="canvas" id="{prefix}matrix" tabindex="0" role="img" aria-label="{inert(words)}"></div>'
        f"<figcaption>A row for each class, a column for what its images were taken for."
        f'<output aria-live="polite">Point at a cell, or move with the arrow keys; +, - and 0, or a mouse wheel,'
        f" zoom.</output></figcaption></figure>"
    )


def _matrix(answers: Answers) -> dict[str, object]:
    """Names, images of each class, and the cells as one flat list, which is compact."""
    largest = sorted(answers.cells, key=lambda cell: -cell[2])[:MOST_CELLS]
    return {
        "names": [each.name for each in answers.classes] if answers.cells else [],
        "images": [each.images for each in answers.classes],
        "cells": [value for cell in sorted(largest) for value in cell],
    }


def _confusions(answers: Answers) -> str:
    wrong = answers.confusions()
    if not wrong:
        return "<p>No image was taken for another class.</p>"
    rows = []
    for label, predicted, images in wrong[:MOST_CONFUSED]:
        own = answers.classes[label]
        share = 100 * images / max(1, own.images)
        rows.append(
            [
                Cell(own.name),
                Cell(answers.classes[predicted].name),
                Cell(f"{images:,}", by=images),
                Cell(f"{share:.1f}", by=share, bar=share),
            ]
        )
    heads = [
        Column("class"),
        Column("taken for"),
        Column("images", is_number=True),
        Column("of the class, %", is_number=True),
    ]
    more = f", the largest {MOST_CONFUSED} of {len(wrong):,} pairs" if len(wrong) > MOST_CONFUSED else ""
    return f"<h3>Most confused classes{more}</h3>{table('Most confused classes', heads, rows, tall=len(rows) > 6)}"


def _calibration(answers: Answers) -> str:
    error = answers.calibration_error
    known = [each for each in answers.bins if each.accuracy is not None and each.confidence is not None]
    images = max(1, sum(each.images for each in known))
    sure = sum(each.images * (each.confidence or 0.0) for each in known) / images
    right = sum(each.images * (each.accuracy or 0.0) for each in known) / images
    verdict = (
        "too sure of itself" if sure > right + 0.5 else "not sure enough" if sure < right - 0.5 else "well calibrated"
    )
    words = (
        f"On average the model is {sure:.2f} % sure and {right:.2f} % right: {verdict} overall."
        + ("" if error is None else f" Expected calibration error (ECE, {len(answers.bins)} bins): {error:.2f} %.")
        + " Bars that end below the line are answers that the model was too sure of; faint bars are few images."
    )
    rows = [
        [
            Cell(f"{100 * each.low:.0f} to {100 * each.high:.0f}", by=each.low),
            Cell(f"{each.images:,}", by=each.images),
            Cell(f"{each.confidence:.1f}", by=each.confidence),
            Cell(f"{each.accuracy:.1f}", by=each.accuracy),
        ]
        for each in known
    ]
    heads = [Column(name, is_number=True) for name in ("sure, %", "images", "mean confidence, %", "right, %")]
    numbers = details("Numbers", table("Calibration", heads, rows))
    return (
        f'<h3>Calibration</h3><div class="calibration">{reliability(answers.bins, error=error)}'
        f"<div><p>{inert(words)}</p>{numbers}</div></div>"
    )


def _seen(run: RunFiles) -> str:
    if run.seen is None:
        return ""
    words = f"Images of update {run.seen.update:,} as the network got them: cropped, augmented and mixed."
    return f"<p>{inert(words)}</p>{tiles(run.seen.pictures)}"


def _layers(run: RunFiles) -> str:
    if not run.layers:
        return ""
    layers = timed(run.layers, read_profile(run.profile))
    total = sum(layer.parameters for layer in layers)
    work = sum(layer.multiplications or 0 for layer in layers)
    is_timed = any(layer.milliseconds is not None for layer in layers)
    heads = [Column("layer"), Column("kind"), Column("output"), Column("parameters", is_number=True)]
    heads += [
        Column("multiplications", is_number=True),
        *([Column("ms per update", is_number=True)] if is_timed else []),
    ]
    rows = []
    for layer in layers[:MOST_LAYERS]:
        own, made = layer.multiplications, layer.milliseconds
        row = [Cell(layer.name, is_mono=True), Cell(layer.kind), Cell(layer.output or "-", is_mono=True)]
        row.append(Cell(f"{layer.parameters:,}", by=layer.parameters, bar=100 * layer.parameters / max(1, total)))
        row.append(Cell("-", by=-1) if own is None else Cell(_large(own), by=own, bar=100 * own / max(1, work)))
        row += [Cell("-", by=-1) if made is None else Cell(f"{made:.3f}", by=made)] if is_timed else []
        rows.append(row)
    words = f"{counted(len(run.layers), 'layer')}, {total:,} parameters"
    words += f", {_large(work)} multiplications for one image." if work else "."
    return f"<p>{inert(words)}</p>{table('Layers', heads, rows, tall=len(rows) > 15)}"


def _large(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _checkpoints(run: RunFiles) -> str:
    elsewhere = run.options.get("checkpoint-output-path")
    where = f"<p>The run saves its checkpoints in {inert(elsewhere.value)}.</p>" if elsewhere else ""
    if not run.checkpoints:
        return where
    name = "accuracy" if run.metric == "accuracy" else run.metric
    heads = [
        Column("checkpoint"),
        *(Column(each, is_number=True) for each in ("epoch", "update", f"{name}, %", "loss", "MB")),
    ]
    heads.append(Column(""))
    rows = [
        [
            Cell(each.name, is_mono=True),
            Cell(in_short(each.epoch), by=each.epoch),
            Cell(f"{each.update:,}", by=each.update),
            Cell("-", by=-1) if each.score is None else Cell(f"{each.score:.2f}", by=each.score),
            Cell("-", by=1e300) if each.loss is None else Cell(short(each.loss), by=each.loss),
            Cell(f"{each.megabytes:,.1f}", by=each.megabytes),
            Cell("best" if each.is_best else ""),
        ]
        for each in run.checkpoints
    ]
    return where + table("Checkpoints", heads, rows)


def _options(run: RunFiles) -> str:
    plan = f'<pre class="plan">{inert_lines(run.plan)}</pre>' if run.plan else ""
    heads = [Column("option"), Column("value"), Column("set by")]

    def rows(chosen: Mapping[str, tuple[str, str]]) -> list[list[Cell]]:
        return [
            [Cell(f"--{name}", is_mono=True), Cell(value, is_mono=True), Cell(source)]
            for name, (value, source) in chosen.items()
        ]

    changed = (
        f"<h3>Options that are not at their defaults</h3>{table('Changed options', heads, rows(run.changed))}"
        if run.changed
        else "<p>All options are at their defaults.</p>"
        if run.options
        else ""
    )
    every = (
        details(f"All {len(run.options)} options", table("All options", heads, rows(run.options), tall=True))
        if run.options
        else ""
    )
    return plan + changed + every


def inert_lines(lines: Sequence[str]) -> str:
    return "\n".join(map(inert, lines))
