"""Results of benchmarks: summarised over runs, kept in results.json, shown as tables."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

from falconet import writing
from falconet.bench.measurements import Measured
from falconet.bench.statistics import Estimate, estimate, t_quantile
from falconet.errors import ConfigError
from falconet.report.console import counted

FORMAT = "falconet-bench/1"
Status = Literal["passed", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One variant of a benchmark, over all of its runs."""

    name: str
    command: str
    status: Status
    reason: str = ""  # why it failed
    devices: int = 1  # number that the command was written for
    folded: str | None = None  # how it was made to fit this machine
    profiled: bool = False
    throughput: Estimate | None = None  # images per second
    latency: Mapping[str, float] = field(default_factory=dict)  # milliseconds by percentile, mean over the runs
    waiting_percent: float | None = None
    peak_memory: int = 0  # bytes
    metrics: Mapping[str, float] = field(default_factory=dict)  # those of the spec, mean over the runs
    # Estimates for the other columns, by column; empty after a single run.
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    output: Mapping[str, str] = field(default_factory=dict)  # what the spec wants shown, by title
    runs: Sequence[Mapping[str, object]] = ()


def summarise(
    runs: Sequence[Measured],
    output: Sequence[tuple[str, str]] = (),
    parameters: Mapping[str, str] = MappingProxyType({}),
    **facts: Any,
) -> Result:
    """Combine several runs; for a single run, the spread is the one within it.

    `output`: pairs of a title and the name of a metric or parameter.
    """
    rates = [run.throughput for run in runs if run.throughput is not None]
    throughput = estimate(rates) if rates else None
    if len(rates) == 1 and (within := runs[0].within()):
        throughput = Estimate(rates[0], within.std, within.low, within.high, within.count, within.of)
    waits = [run.waiting_percent for run in runs if run.waiting_percent is not None]
    latency = _mean([run.latency() for run in runs])
    if latency:
        latency["max"] = max(run.latency()["max"] for run in runs if run.latencies)
    metrics = _mean([run.metrics for run in runs])
    shown = {**parameters, **{name: f"{value:g}" for name, value in metrics.items()}}
    return Result(
        **facts,
        folded=next((run.folded for run in runs if run.folded), None),
        throughput=throughput,
        latency=latency,
        waiting_percent=fmean(waits) if waits else None,
        peak_memory=max((run.peak_memory for run in runs), default=0),
        metrics=metrics,
        estimates=_over_runs(runs),
        output={title: shown[name] for title, name in output if name in shown},
        runs=[_stored(run) for run in runs],
    )


def _over_runs(runs: Sequence[Measured]) -> dict[str, Estimate]:
    columns = [
        run.latency()
        | ({} if run.waiting_percent is None else {"waiting_percent": run.waiting_percent})
        | {"peak_memory": float(run.peak_memory)}
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    values = {name: [column[name] for column in columns if name in column] for name in names}
    return {name: estimate(found) for name, found in values.items() if len(found) > 1}


def _mean(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the mappings that have it."""
    names = dict.fromkeys(name for one in of for name in one)
    return {name: fmean(one[name] for one in of if name in one) for name in names}


def _stored(run: Measured) -> dict[str, object]:
    return {
        "throughput": run.throughput,
        "latency": run.latency(),
        "waiting_percent": run.waiting_percent,
        "peak_memory": run.peak_memory,
        "metrics": dict(run.metrics),
        "warm_up": run.steady.first,
        "measurements": len(run.samples),
        "state": run.steady.verdict,
        "seconds": round(run.seconds, 2),
    }


def write(path: Path, results: Sequence[Result], machine: Mapping[str, object]) -> None:
    content = {"format": FORMAT, "machine": machine, "results": [asdict(result) for result in results]}
    writing.replace(path.parent, path.name, json.dumps(_finite(content), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null: JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> tuple[dict[str, Result], dict[str, object]]:
    """Read the results of an earlier run by name, and its machine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON; expected a results.json of `falconet bench`") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ConfigError(f"{path} has format {found!r}, expected {FORMAT!r}")
    try:
        results = [_read_result(entry) for entry in content["results"]]
        return {result.name: result for result in results}, dict(content["machine"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _read_result(entry: Mapping[str, Any]) -> Result:
    rate, others = entry["throughput"], entry.get("estimates", {})
    if rate is not None and not rate["mean"] > 0:
        raise ValueError(f"a throughput of {rate['mean']}")
    read = {
        "throughput": None if rate is None else _read_estimate(rate),
        "estimates": {name: _read_estimate(one) for name, one in others.items()},
    }
    return Result(**{**entry, **read})


def _read_estimate(entry: Mapping[str, Any]) -> Estimate:
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in entry.items()}
    for name in ("mean", "std", "low", "high"):
        known[name] = float(known[name])
    known["count"] = int(known["count"])
    return Estimate(**known)


COLUMNS = (
    *("benchmark", "status", "images_per_second", "std", "low", "high", "count", "of"),
    *("latency_p50_ms", "latency_p90_ms", "latency_p99_ms", "latency_mean_ms", "latency_max_ms"),
    *("waiting_percent", "peak_memory_bytes", "devices", "folded", "command"),
)
_LATENCIES = ("p50", "p90", "p99", "mean", "max")


def markdown(results: Sequence[Result], machine: dict[str, object]) -> str:
    """The table, notes on single rows, and the machine."""
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
    lines = [
        markdown_row(head),
        markdown_row(["---"] * len(head)),
        *(markdown_row(_cells(result)) for result in results),
        "",
    ]
    lines += [f"- {_in_one_line(note)}" for result in results for note in _notes(result)]
    lines += ["", "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items() if value)]
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> list[str]:
    rate = result.throughput
    interval = f"{shown(max(0.0, rate.low))} to {shown(rate.high)}" if rate and math.isfinite(rate.low) else ""
    spread = f"{100 * rate.std / rate.mean:.1f} %" if rate and math.isfinite(rate.std) else ""
    marks = ", folded" * bool(result.folded) + ", profiled" * result.profiled
    latency = [_with_interval(result, name, result.latency.get(name), ".2f") for name in _LATENCIES[:3]]
    waiting = _with_interval(result, "waiting_percent", result.waiting_percent, ".1f", " %")
    memory = f"{result.peak_memory / 2**30:.2f} GiB" if result.peak_memory else ""
    status = result.status.upper() + marks
    return [result.name, status, shown(rate.mean if rate else None), interval, spread, *latency, waiting, memory]


def _with_interval(result: Result, name: str, value: float | None, places: str, unit: str = "") -> str:
    """A mean over the runs, with half the width of its 95 % interval."""
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
        notes.append(f"{result.name}: one run; the interval is over {result.throughput.count} blocks of it")
    drifting = sum(run["state"] == "drifting" for run in result.runs)
    if drifting:
        notes.append(f"{result.name}: {drifting} of {counted(len(result.runs), 'run')} not steady; measure longer")
    few = sorted({str(run["warm_up"]) for run in result.runs if run["state"] == "few" and run["measurements"]})
    if few:
        dropped = "dropped the first" if few == ["1"] else f"dropped {' or '.join(few)}"
        notes.append(f"{result.name}: too few measurements in a run to distinguish warm-up from noise; {dropped}")
    return notes


def plain_table(table: str) -> list[str]:
    """Align the columns of a Markdown table for a terminal."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    rows = [row for row in rows if set(row) != {"---"}]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write_csv(path: Path, results: Sequence[Result], *, metrics: Sequence[str]) -> None:
    """Write one row per variant; `metrics` are additional columns."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow([*COLUMNS, *metrics])
    for result in results:
        writer.writerow([*_csv_cells(result), *(result.metrics.get(name, "") for name in metrics)])
    writing.replace(path.parent, path.name, file.getvalue())


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


def metric_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.metrics))


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_in_one_line(cell).replace("|", "/") for cell in cells) + " |"


def _in_one_line(text: str) -> str:
    """Text that fits into a table or a list."""
    return " ".join(text.split())


def shown(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _cell(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


Verdict = Literal["faster", "slower", "within noise", "one value", "not comparable", "new", "missing"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The change of one benchmark in percent of the earlier throughput; positive is faster."""

    name: str
    verdict: Verdict
    old: float | None = None
    new: float | None = None
    change: float | None = None
    low: float | None = None  # the 95 % interval of the change
    high: float | None = None
    why: str = ""

    def loses_more_than(self, margin: float) -> bool:
        """Whether it is significantly slower, and by more than `margin` percent."""
        return self.verdict == "slower" and self.change is not None and -self.change > margin


def compare(old: Mapping[str, Result], new: Sequence[Result]) -> Iterator[Comparison]:
    """Compare each new result with the old one of the same name, then list the missing ones."""
    for result in new:
        yield _compared(old[result.name], result) if result.name in old else Comparison(name=result.name, verdict="new")
    measured = {result.name for result in new}
    yield from (Comparison(name=name, verdict="missing") for name in old if name not in measured)


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
            return Comparison(name=new.name, verdict="not comparable", why=f"different {what}", **means)
    change, low, high = change_between(old.throughput, new.throughput)
    verdict: Verdict = "faster" if low > 0 else "slower" if high < 0 else "within noise"
    why = ""
    if math.isnan(low):
        verdict, why = "one value", "the spread is unknown; repeat each run 3 times or more"
    elif "runs" not in (old.throughput.of, new.throughput.of):
        why = "the spread is within one run, and smaller than that between runs"
    return Comparison(name=new.name, verdict=verdict, change=change, low=low, high=high, why=why, **means)


def change_between(old: Estimate, new: Estimate) -> tuple[float, float, float]:
    """The change in percent of the old mean, and its 95 % interval (NaN if the spread is unknown)."""
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


def comparison_markdown(comparisons: Sequence[Comparison], *, margin: float) -> str:
    head = ("benchmark", "verdict", "before", "now", "change", "95 % interval", "remark")
    lines = [markdown_row(head), markdown_row(["---"] * len(head))]
    for one in comparisons:
        change = "" if one.change is None else f"{one.change:+.1f} %"
        known = one.low is not None and one.high is not None and math.isfinite(one.low)
        interval = f"{one.low:+.1f} to {one.high:+.1f} %" if known else ""
        verdict = f"**{one.verdict}**" if one.loses_more_than(margin) else one.verdict
        lines.append(markdown_row([one.name, verdict, shown(one.old), shown(one.new), change, interval, one.why]))
    return "\n".join(lines) + "\n"
