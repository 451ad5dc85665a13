"""Means with confidence intervals for a few runs, and the steady part of a series."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal, NamedTuple

CONFIDENCE = 0.95
BLOCKS = 10  # of a single run: neighbouring measurements are correlated, blocks of them hardly
ENOUGH = 6  # measurements; with fewer, warm-up cannot be distinguished from noise
DRIFT = 0.1  # relative to the mean
ERRORS = 3  # standard errors
SMALLEST = 4  # each side of a cut has at least one part in this many
_ROUNDING = 1e-12  # of the squared mean: below it, deviations are rounding errors


@dataclass(frozen=True)
class Estimate:
    """A mean with its spread."""

    mean: float
    std: float  # of single runs (or blocks)
    low: float  # 95 % confidence interval of the mean
    high: float
    count: int
    of: str  # runs, or blocks of one run

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def estimate(values: Sequence[float], *, of: str = "runs") -> Estimate:
    """Mean, standard deviation and 95 % interval (Student's t); a single value has no spread."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, len(values), of)
    std = stdev(values)
    half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return Estimate(mean, std, mean - half, mean + half, len(values), of)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The bound that |T| stays below with this probability, for Student's t with `freedom` degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability that |T| <= t: the closed form for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


class Steady(NamedTuple):
    """The steady part of a series."""

    first: int  # the measurements before this one are warm-up
    verdict: Literal["steady", "drifting", "few"]


def find_steady(costs: Sequence[float], *, at_least: int = 1) -> Steady:
    """Find the steady part of a series of costs (seconds per image or batch); `at_least` are always warm-up."""
    count = len(costs)
    limit = max(count // 2, min(at_least, count - 1))
    least = min(at_least, limit)
    if count < ENOUGH:
        return Steady(max(least, 0), "few")
    errors = _marginal_errors(costs)
    first = min(range(least, limit + 1), key=errors.__getitem__)
    wants_more = first == limit and limit - least > 1 and _differ_at(costs[least:], [limit - least])
    return Steady(first, "drifting" if wants_more or _changes(costs[first:]) else "steady")


def _changes(costs: Sequence[float]) -> bool:
    """Whether some cut leaves two parts that differ."""
    least = max(2, len(costs) // SMALLEST)
    return _differ_at(costs, range(least, len(costs) - least + 1))


def _differ_at(costs: Sequence[float], cuts: Iterable[int]) -> bool:
    """Whether the parts on both sides of one of the cuts differ; each has at least two costs."""
    mean = fmean(costs)
    shifted = [cost - mean for cost in costs]  # for precision in the sums of squares
    sums = list(accumulate(shifted, initial=0.0))
    squares = list(accumulate((value * value for value in shifted), initial=0.0))

    def of(low: int, high: int) -> tuple[float, float]:
        """The mean of a part and its squared standard error."""
        count = high - low
        part = (sums[high] - sums[low]) / count
        deviations = max(squares[high] - squares[low] - count * part * part, 0.0)
        return part, deviations / (count - 1) / count

    for cut in cuts:
        (early, first_error), (late, second_error) = of(0, cut), of(cut, len(costs))
        apart = abs(early - late)
        if apart > DRIFT * mean and apart > ERRORS * (first_error + second_error) ** 0.5:
            return True
    return False


def _marginal_errors(costs: Sequence[float]) -> list[float]:
    """The squared deviations after each cut, divided by the square of their number."""
    count = len(costs)
    centre = sum(costs) / count  # for precision in the sums of squares
    shifted = [cost - centre for cost in reversed(costs)]
    sums = list(accumulate(shifted))
    squares = list(accumulate(value * value for value in shifted))
    errors = []
    for cut in range(count):
        left = count - cut
        total, square = sums[left - 1], squares[left - 1]
        deviations = square - total * total / left
        errors.append(deviations / left**2 if deviations > _ROUNDING * left * centre**2 else 0.0)
    return errors
