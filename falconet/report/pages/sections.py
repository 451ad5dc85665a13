"""The sections of a page about one run, apart from its curves."""

from collections.abc import Mapping

from falconet.report.console import counted
from falconet.report.curves import short
from falconet.report.epochs import in_short
from falconet.report.pages.mistakes import answers_part
from falconet.report.pages.parts import Cell, Column, details, facts, inert, table, tiles
from falconet.report.pages.profile import profile_part, read_profile, timed
from falconet.report.run_files import RunFiles

MOST_LAYERS = 1000
TITLES = {  # of a section, and in the list of sections
    "wrong": ("Where it is wrong", "Where it is wrong"),
    "seen": ("What the network saw", "What it saw"),
    "layers": ("Layers", "Layers"),
    "profile": ("Profile", "Profile"),
    "checkpoints": ("Checkpoints", "Checkpoints"),
    "options": ("Plan and options", "Plan and options"),
    "environment": ("Environment", "Environment"),
}


def sections_of(run: RunFiles, prefix: str) -> dict[str, str]:
    """The sections by name, without empty ones; `prefix`: for the ids of their elements."""
    bodies = {
        "wrong": answers_part(run.answers, matrix=f"{prefix}matrix") if run.answers else "",
        "seen": _seen(run),
        "layers": _layers(run),
        "profile": profile_part(read_profile(run.profile)),
        "checkpoints": _checkpoints(run),
        "options": _options(run),
        "environment": facts(run.environment.items()) if run.environment else "",
    }
    return {
        name: f'<section id="{prefix}{name}"><h2>{TITLES[name][0]}</h2>{body}</section>'
        for name, body in bodies.items()
        if body
    }


def _seen(run: RunFiles) -> str:
    if run.seen is None:
        return ""
    words = f"Images of update {run.seen.update:,} as the network got them, after all augmentation."
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
    lines = "\n".join(map(inert, run.plan))
    plan = f'<pre class="plan">{lines}</pre>' if run.plan else ""
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
