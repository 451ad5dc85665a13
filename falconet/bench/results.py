"""The results of benchmarks, and the file that keeps them: results.json."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

from falconet import writing
from falconet.bench.measurements import Measured
from falconet.bench.statistics import Estimate, estimate
from falconet.errors import ConfigError

FORMAT = "falconet-bench/1"
Status = Literal["passed", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One variant of a benchmark, over all of its runs."""

    name: str
    command: str
    status: Status
    reason: str = ""  # why it failed
    devices: int = 1  # that the command was written for
    folded: str | None = None  # how it was made to fit this machine
    profiled: bool = False
    throughput: Estimate | None = None  # images per second
    latency: Mapping[str, float] = field(default_factory=dict)  # milliseconds by percentile, mean over the runs
    waiting_percent: float | None = None
    peak_memory: int = 0  # bytes
    metrics: Mapping[str, float] = field(default_factory=dict)  # the spec's, mean over the runs
    # The other columns over the runs, by the name of the column; nothing where there was one run.
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    output: Mapping[str, str] = field(default_factory=dict)  # what the spec asks to be shown, by its titles
    runs: Sequence[Mapping[str, object]] = ()


def summarise(
    runs: Sequence[Measured],
    output: Sequence[tuple[str, str]] = (),
    parameters: Mapping[str, str] = MappingProxyType({}),
    **facts: Any,
) -> Result:
    """The result of several runs; with one alone, the spread is that within it.

    `output`: pairs of a title and a metric, or one of the `parameters`.
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


def write(path: Path, results: Sequence[Result], machine: Mapping[str, object]) -> None:
    content = {"format": FORMAT, "machine": machine, "results": [asdict(result) for result in results]}
    # Whole or as it was, whenever the power fails.
    writing.replace(path.parent, path.name, json.dumps(_finite(content), indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Result], dict[str, object]]:
    """The results of an earlier run by name, and its machine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--compare: {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--compare: {path}: is not JSON; wanted a results.json of `falconet bench`") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ConfigError(f"--compare: {path}: has format {found!r}, wanted {FORMAT!r}, a results.json")
    try:
        results = [_read_result(entry) for entry in content["results"]]
        return {result.name: result for result in results}, dict(content["machine"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--compare: {path}: is damaged ({type(error).__name__}: {error})") from error


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


def _mean(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over those that have it."""
    names = dict.fromkeys(name for one in of for name in one)
    return {name: fmean(one[name] for one in of if name in one) for name in names}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
