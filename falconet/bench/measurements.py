"""The measurements of one run, from its files or otherwise from its output, without the warm-up."""

import json
import math
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from falconet.bench.execution import Ended
from falconet.bench.spec import Benchmark, Metric, evaluate_expression
from falconet.bench.statistics import BLOCKS, Estimate, Steady, estimate, find_steady, percentile
from falconet.errors import ConfigError
from falconet.report.folders import RUNS

METRICS, SUMMARY, PLAN, INFERENCE = "metrics.jsonl", "summary.json", "plan.txt", "inference.json"
TIMES = "updates.jsonl"
PERCENTILES = (50, 90, 99)
REGEXP_SECONDS = 10.0  # for all lines of a run; a regexp that does not backtrack without end takes milliseconds
# How the trainer and `bench infer` report that a machine has fewer devices than a command asks for.
_FOLDED = re.compile(r"note: (\d+ (?:replicas|stages|devices)\b.* requested, .+)")


class Sample(NamedTuple):
    """A stretch between two log points, or one batch."""

    images: float
    seconds: float
    waiting: float | None = None  # seconds of it spent waiting for data, if measured


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run without its warm-up."""

    samples: Sequence[Sample] = ()
    latencies: Sequence[float] = ()  # milliseconds, of an update or a batch
    steady: Steady = field(default_factory=lambda: Steady(0, "few"))
    metrics: Mapping[str, float] = field(default_factory=dict)  # those of the spec
    given_up: Sequence[str] = ()  # metrics whose regexp took too long
    peak_memory: int = 0  # bytes
    folded: str | None = None  # how it was made to fit this machine
    seconds: float = 0.0

    @property
    def rates(self) -> list[float]:
        """Images per second of each sample."""
        return [sample.images / sample.seconds for sample in self.samples if sample.seconds > 0]

    @property
    def throughput(self) -> float | None:
        """Images per second over all samples."""
        seconds = sum(sample.seconds for sample in self.samples)
        return sum(sample.images for sample in self.samples) / seconds if seconds else None

    @property
    def waiting_percent(self) -> float | None:
        known = [sample.waiting for sample in self.samples if sample.waiting is not None]
        return 100 * sum(known) / sum(sample.seconds for sample in self.samples) if known else None

    def within(self) -> Estimate | None:
        """The spread of the throughput within this run, over blocks of consecutive samples."""
        if len(self.samples) < 4:
            return None
        count = min(BLOCKS, len(self.samples) // 2)
        bounds = [len(self.samples) * number // count for number in range(count + 1)]
        blocks = [self.samples[low:high] for low, high in pairwise(bounds)]
        rates = [sum(one.images for one in block) / sum(one.seconds for one in block) for block in blocks]
        return estimate(rates, of="blocks of one run")

    def spread(self) -> Estimate:
        """The spread over blocks, or over single samples if there are few."""
        return self.within() or estimate(self.rates)

    def latency(self) -> dict[str, float]:
        """Percentiles, mean and maximum, in milliseconds."""
        if not self.latencies:
            return {}
        found = {f"p{percent}": percentile(self.latencies, percent) for percent in PERCENTILES}
        return found | {"mean": sum(self.latencies) / len(self.latencies), "max": max(self.latencies)}


def settled(spacing: Sequence[float], latencies: Sequence[float], *, images: float) -> Measured:
    """Drop the warm-up from the times between batches of `images` and from the latencies; all in seconds."""
    steady, first = find_steady(spacing), find_steady(latencies).first
    samples = [Sample(images, seconds) for seconds in spacing[steady.first :]]
    return Measured(samples=samples, latencies=[1000 * seconds for seconds in latencies[first:]], steady=steady)


def measure(benchmark: Benchmark, parameters: Mapping[str, str], ended: Ended, runs: Path) -> Measured:
    """Collect everything that a run measured."""
    found: dict[str, list[float]] = {}
    given_up = []
    for name, metric in benchmark.metrics.items():
        try:
            with _limited(REGEXP_SECONDS):
                found[name] = _found(metric, ended.lines)
        except TimeoutError:
            given_up.append(name)
    for name, values in _logged(runs).items():
        if name in benchmark.metrics and not found.get(name):  # our own lines are a table, not one number each
            found[name] = values
    samples, latencies = _from_files(runs)
    latencies = latencies or [value for value in found.get("latency", []) if math.isfinite(value)]
    if not samples:
        samples = [Sample(1.0, 1.0 / value) for value in found.get("throughput", []) if 0 < value < math.inf]
    steady = find_steady(
        [sample.seconds / sample.images for sample in samples], at_least=_warm_up(benchmark, "throughput")
    )
    settled = find_steady(latencies, at_least=_warm_up(benchmark, "latency", "throughput"))
    metrics = {name: _reduced(benchmark.metrics[name], values) for name, values in found.items() if values}
    rest = Measured(samples=samples[steady.first :], latencies=latencies[settled.first :])
    if rest.throughput is not None:
        metrics["throughput"] = rest.throughput
    metrics |= {f"latency_{name}": value for name, value in rest.latency().items()}
    if "latency" in benchmark.metrics and rest.latencies:
        metrics.setdefault("latency", metrics["latency_mean"])  # measured, though the spec's regexp matched no line
    return Measured(
        samples=rest.samples,
        latencies=rest.latencies,
        steady=steady,
        metrics=metrics | _derived(benchmark.derived, metrics, parameters),
        given_up=given_up,
        peak_memory=_peak_memory(runs) or ended.peak_memory,
        folded="; ".join(match[1] for line in ended.lines if (match := _FOLDED.search(line))) or None,
        seconds=ended.seconds,
    )


def _warm_up(benchmark: Benchmark, *names: str) -> int:
    """First measurements to skip, by the first of these metrics that the spec has; at least one."""
    return max(1, next((benchmark.metrics[name].skip for name in names if name in benchmark.metrics), 1))


def leave(content: Mapping[str, object], *, output: Path | None) -> None:
    """Write a program's measurements to `output` and to the place where `falconet bench` looks for them."""
    home = os.environ.get(RUNS)
    for path in [output, Path(home) / INFERENCE if home else None]:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(content) + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _from_files(runs: Path) -> tuple[list[Sample], list[float]]:
    """Samples and latencies (ms) of a training run or of `bench infer`; empty for other programs."""
    for path in sorted(runs.rglob(INFERENCE)):
        content = _json(path.read_text(encoding="utf-8"))
        images = float(content.get("images_per_batch", 1))
        samples = [Sample(images, seconds) for seconds in content.get("throughput_seconds", [])]
        return samples, [1000 * seconds for seconds in content.get("latency_seconds", [])]
    for path in sorted(runs.rglob(METRICS)):
        return _from_training(path)
    return [], []


def _from_training(path: Path) -> tuple[list[Sample], list[float]]:
    """Samples between log points, and the milliseconds of every update."""
    batch = _global_batch(path.with_name(PLAN))
    samples, before = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        point = _json(line)
        rate, update = point.get("train/images_per_second"), point.get("update", 0)
        if not rate or update <= before:
            continue
        seconds = (update - before) * batch / rate
        waiting = seconds * point.get("train/waiting_percent", 0.0) / 100
        samples.append(Sample((update - before) * batch, seconds, waiting))
        before = update
    times = path.with_name(TIMES)
    stretches = times.read_text(encoding="utf-8").splitlines() if times.exists() else []
    return samples, [one for line in stretches for one in _json(line).get("milliseconds", [])]


def _logged(runs: Path) -> dict[str, list[float]]:
    """The loss and the accuracy (percent) of training at every log point; empty for other programs."""
    for path in sorted(runs.rglob(METRICS)):
        points = [_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        names = {"loss": "train/loss", "accuracy": "train/accuracy"}
        return {name: [point[key] for point in points if key in point] for name, key in names.items()}
    return {}


def _global_batch(plan: Path) -> int:
    text = plan.read_text(encoding="utf-8") if plan.exists() else ""
    found = re.search(r"^global batch ([\d,]+)", text, re.M)
    return int(found[1].replace(",", "")) if found else 1


def _peak_memory(runs: Path) -> int:
    paths = [*runs.rglob(SUMMARY), *runs.rglob(INFERENCE)]
    return max((int(_json(path.read_text(encoding="utf-8")).get("peak_memory_bytes", 0)) for path in paths), default=0)


def _json(text: str) -> dict[str, Any]:
    """Parse a JSON object; a killed run may leave half a line."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after some seconds, even in the middle of a match: it checks for signals."""

    def expire(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _found(metric: Metric, lines: Sequence[str]) -> list[float]:
    values = []
    for line in lines:
        for text in metric.pattern.findall(line):
            try:
                values.append(float(text.replace(",", "")))
            except ValueError:
                continue  # the pattern also matched other text
    return values


def _reduced(metric: Metric, values: Sequence[float]) -> float:
    if metric.reduction == "final":
        return values[-1]
    if metric.reduction == "value":
        return values[0]
    if metric.reduction == "min":
        return min(values)
    kept = values[metric.skip :] or values[-1:]
    return sum(kept) / len(kept)


def _derived(
    expressions: Mapping[str, str], metrics: Mapping[str, float], parameters: Mapping[str, str]
) -> dict[str, float]:
    """Evaluate in the order of the spec, so that one may use another."""
    known = {name: float(value) for name, value in parameters.items() if _is_number(value)} | dict(metrics)
    for name, expression in expressions.items():
        value = evaluate_expression(expression, known)
        if value is not None:
            known[name] = value
    return {name: known[name] for name in expressions if name in known}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
