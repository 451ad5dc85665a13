"""Compare two runs of the same benchmarks by Welch's t-test: faster, slower or within noise."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from falconet.bench.results import Result, markdown_row, shown
from falconet.bench.statistics import Estimate, t_quantile

Verdict = Literal["faster", "slower", "within noise", "one value", "not comparable", "new", "missing"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one benchmark changed, in percent of the earlier throughput; positive is faster."""

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


def markdown(comparisons: Sequence[Comparison], *, margin: float) -> str:
    head = ("benchmark", "verdict", "before", "now", "change", "95 % interval", "remark")
    lines = [markdown_row(head), markdown_row(["---"] * len(head))]
    for one in comparisons:
        change = "" if one.change is None else f"{one.change:+.1f} %"
        known = one.low is not None and one.high is not None and math.isfinite(one.low)
        interval = f"{one.low:+.1f} to {one.high:+.1f} %" if known else ""
        verdict = f"**{one.verdict}**" if one.loses_more_than(margin) else one.verdict
        lines.append(markdown_row([one.name, verdict, shown(one.old), shown(one.new), change, interval, one.why]))
    return "\n".join(lines) + "\n"
