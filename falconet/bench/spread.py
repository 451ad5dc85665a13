"""Means with their spread: Student's t, because runs are few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
BLOCKS = 10  # of one run, when there is only one: neighbouring measurements are alike, blocks of them hardly


@dataclass(frozen=True)
class Estimate:
    """A mean and how far it can be trusted."""

    mean: float
    std: float  # of single runs (or blocks)
    low: float  # the 95 % interval of the mean
    high: float
    count: int
    of: str  # runs, or blocks of one run

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def estimate(values: Sequence[float], *, of: str = "runs") -> Estimate:
    """Mean, standard deviation and 95 % interval; of one value alone nothing is known but itself."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, len(values), of)
    std = stdev(values)
    half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return Estimate(mean, std, mean - half, mean + half, len(values), of)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values in order, linearly."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """What Student's t with `freedom` degrees stays below, in absolute value, with this probability."""
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
