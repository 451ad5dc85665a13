"""Faster, slower, or within noise: two runs of the same benchmark by Welch's t-test."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from falconet import writing
from falconet.bench.results import Result
from falconet.bench.statistics import Estimate, t_quantile
from falconet.report.console import counted

Verdict = Literal["faster", "slower", "within noise", "one value", "not comparable", "new", "missing"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one benchmark changed; percentages of the earlier throughput, more is faster."""

    name: str
    verdict: Verdict
    old: float | None = None
    new: float | None = None
    change: float | None = None
    low: float | None = None  # the 95 % interval of the change
    high: float | None = None
    why: str = ""

    def loses_more_than(self, margin: float) -> bool:
        """Whether it is slower for sure, and by more than `margin` percent."""
        return self.verdict == "slower" and self.change is not None and -self.change > margin


def compare(old: Mapping[str, Result], new: Sequence[Result]) -> Iterator[Comparison]:
    """Each new result against the old one of the same name, then what is missing."""
    for result in new:
        yield _compared(old[result.name], result) if result.name in old else Comparison(name=result.name, verdict="new")
    measured = {result.name for result in new}
    yield from (Comparison(name=name, verdict="missing") for name in old if name not in measured)


def change_between(old: Estimate, new: Estimate) -> tuple[float, float, float]:
    """The change in percent of the old mean, and its 95 % interval, which is not a number where no spread is known."""
    change = 100 * (new.mean / old.mean - 1)
    if old.count < 2 or new.count < 2:
        return change, math.nan, math.nan
    parts = [old.std**2 / old.count, new.std**2 / new.count]
    total = sum(parts)
    if math.isnan(total):
        return change, math.nan, math.nan
    if total == 0:
        return change, change, change
    # Welch and Satterthwaite; rounded down, which widens the interval.
    freedom = total**2 / (parts[0] ** 2 / (old.count - 1) + parts[1] ** 2 / (new.count - 1))
    half = 100 * t_quantile(max(1, math.floor(freedom))) * math.sqrt(total) / old.mean
    return change, change - half, change + half


def _compared(old: Result, new: Result) -> Comparison:
    if old.throughput is None or new.throughput is None:
        which = "the earlier run" if old.throughput is None else "this run"
        return Comparison(name=new.name, verdict="not comparable", why=f"{which} has no throughput")
    means = {"old": old.throughput.mean, "new": new.throughput.mean}
    for what, before, after in (
        ("status", old.status, new.status),
        ("folding", old.folded, new.folded),
        ("profiling", old.profiled, new.profiled),
        ("command", old.command, new.command),
    ):
        if before != after:
            return Comparison(name=new.name, verdict="not comparable", why=f"another {what}", **means)
    change, low, high = change_between(old.throughput, new.throughput)
    verdict: Verdict = "faster" if low > 0 else "slower" if high < 0 else "within noise"
    why = ""
    if math.isnan(low):
        verdict, why = "one value", "no spread is known; --repeat 3 or more tells"
    elif "runs" not in (old.throughput.of, new.throughput.of):
        why = "spread of one run alone, which is less than that between runs"
    return Comparison(name=new.name, verdict=verdict, change=change, low=low, high=high, why=why, **means)


COLUMNS = (
    *("benchmark", "status", "images_per_second", "std", "low", "high", "count", "of"),
    *("latency_p50_ms", "latency_p90_ms", "latency_p99_ms", "latency_mean_ms", "latency_max_ms"),
    *("waiting_percent", "peak_memory_bytes", "devices", "folded", "command"),
)


def results_markdown(results: Sequence[Result], machine: dict[str, object]) -> str:
    """The table, what the machine was, and what needs saying about single rows."""
    head = (
        "benchmark",
        "status",
        "images/s",
        "95 % interval",
        "spread",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "waiting",
        "memory",
    )
    lines = [_row(head), _row(["---"] * len(head)), *(_row(_cells(result)) for result in results), ""]
    lines += [f"- {_in_one_line(note)}" for result in results for note in _notes(result)]
    lines += ["", "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items() if value)]
    return "\n".join(lines) + "\n"


def comparison_markdown(comparisons: Sequence[Comparison], *, margin: float) -> str:
    head = ("benchmark", "verdict", "before", "now", "change", "95 % interval", "remark")
    lines = [_row(head), _row(["---"] * len(head))]
    for one in comparisons:
        change = "" if one.change is None else f"{one.change:+.1f} %"
        known = one.low is not None and one.high is not None and math.isfinite(one.low)
        interval = f"{one.low:+.1f} to {one.high:+.1f} %" if known else ""
        verdict = f"**{one.verdict}**" if one.loses_more_than(margin) else one.verdict
        lines.append(_row([one.name, verdict, _number(one.old), _number(one.new), change, interval, one.why]))
    return "\n".join(lines) + "\n"


def plain_table(table: str) -> list[str]:
    """A Markdown table's rows with its columns aligned, for the screen."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    rows = [row for row in rows if set(row) != {"---"}]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write_csv(path: Path, results: Sequence[Result], *, metrics: Sequence[str]) -> None:
    """One row a variant; `metrics` are further columns."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow([*COLUMNS, *metrics])
    for result in results:
        writer.writerow([*_csv_cells(result), *(result.metrics.get(name, "") for name in metrics)])
    writing.replace(path.parent, path.name, file.getvalue())


def metric_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.metrics))


def _csv_cells(result: Result) -> list[object]:
    rate = result.throughput
    spread = ["", "", "", "", "", ""]
    if rate:
        known = (rate.mean, rate.std, rate.low, rate.high)
        spread = [*(_cell(value) for value in known), str(rate.count), rate.of]
    latency = [_cell(result.latency[name]) if name in result.latency else "" for name in _LATENCIES]
    waiting = "" if result.waiting_percent is None else f"{result.waiting_percent:.2f}"
    rest = [waiting, result.peak_memory, result.devices, result.folded or "", result.command]
    return [result.name, result.status, *spread, *latency, *rest]


_LATENCIES = ("p50", "p90", "p99", "mean", "max")


def _cells(result: Result) -> list[str]:
    rate = result.throughput
    interval = f"{_number(max(0.0, rate.low))} to {_number(rate.high)}" if rate and math.isfinite(rate.low) else ""
    spread = f"{100 * rate.std / rate.mean:.1f} %" if rate and math.isfinite(rate.std) else ""
    marks = ", folded" * bool(result.folded) + ", profiled" * result.profiled
    latency = [_with_interval(result, name, result.latency.get(name), ".2f") for name in _LATENCIES[:3]]
    waiting = _with_interval(result, "waiting_percent", result.waiting_percent, ".1f", " %")
    memory = f"{result.peak_memory / 2**30:.2f} GiB" if result.peak_memory else ""
    status = result.status.upper() + marks
    return [result.name, status, _number(rate.mean if rate else None), interval, spread, *latency, waiting, memory]


def _with_interval(result: Result, name: str, value: float | None, places: str, unit: str = "") -> str:
    """A mean over the runs, and half of its 95 % interval."""
    if value is None:
        return ""
    known = result.estimates.get(name)
    return f"{value:{places}}" + (f" +- {known.half_width:{places}}" if known else "") + unit


def _notes(result: Result) -> list[str]:
    notes = [f"{result.name}: {result.reason}"] if result.reason else []
    if result.output:
        notes.append(f"{result.name}: " + ", ".join(f"{title} {value}" for title, value in result.output.items()))
    if result.folded:
        notes.append(f"{result.name}: written for {result.devices} devices; {result.folded}")
    if result.throughput and result.throughput.of != "runs":
        notes.append(f"{result.name}: one run; the interval is that of {result.throughput.count} blocks of it")
    drifting = sum(run["state"] == "drifting" for run in result.runs)
    if drifting:
        notes.append(f"{result.name}: {drifting} of {counted(len(result.runs), 'run')} not steady: measure longer")
    few = sorted({str(run["warm_up"]) for run in result.runs if run["state"] == "few" and run["measurements"]})
    if few:
        dropped = "the first was dropped" if few == ["1"] else f"{' or '.join(few)} dropped"
        notes.append(f"{result.name}: too few measurements in a run to tell warm-up from noise; {dropped}")
    return notes


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_in_one_line(cell).replace("|", "/") for cell in cells) + " |"


def _in_one_line(text: str) -> str:
    """A name or a reason as a table or a list can have it."""
    return " ".join(text.split())


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _cell(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""
