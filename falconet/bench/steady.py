"""Where warm-up ends: one rule for every series of measurements.

The first measurement is always dropped (it holds start-up, compilation and the first allocations). Then as many more as
minimise the marginal standard error (MSER; White, "An effective truncation heuristic for bias reduction in simulation
output", 1997): the sum of squared deviations of what is left, divided by the square of how many are left. At most half
of the measurements are dropped. A series that wants more, or whose two halves then differ by more than a tenth and by
more than three standard errors, was still changing and is told as drifting.
"""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, pvariance
from typing import Literal, NamedTuple

ENOUGH = 6  # measurements below which nobody can tell warm-up from noise
DRIFT = 0.1  # of the mean
ERRORS = 3  # standard errors


class Steady(NamedTuple):
    """The steady part of a series."""

    first: int  # the measurements before this one are warm-up
    verdict: Literal["steady", "drifting", "few"]


def find_steady(costs: Sequence[float], *, at_least: int = 1) -> Steady:
    """The steady part of a series of costs (seconds for an image, or a batch); `at_least` are warm-up in any case."""
    count = len(costs)
    limit = max(count // 2, min(at_least, count - 1))
    least = min(at_least, limit)
    if count < ENOUGH:
        return Steady(max(least, 0), "few")
    errors = _marginal_errors(costs)
    first = min(range(least, limit + 1), key=errors.__getitem__)
    drifting = (first == limit and least < limit) or _halves_differ(costs[first:])
    return Steady(first, "drifting" if drifting else "steady")


def _halves_differ(costs: Sequence[float]) -> bool:
    early, late = costs[: len(costs) // 2], costs[len(costs) // 2 :]
    if not early:
        return False
    apart = abs(fmean(early) - fmean(late))
    error = (pvariance(early) / len(early) + pvariance(late) / len(late)) ** 0.5
    return apart > DRIFT * fmean(costs) and apart > ERRORS * error


def _marginal_errors(costs: Sequence[float]) -> list[float]:
    """For each cut, the squared deviations of the rest over the square of its length."""
    count = len(costs)
    centre = sum(costs) / count  # sums of squares around it keep their digits
    shifted = [cost - centre for cost in reversed(costs)]
    sums = list(accumulate(shifted))
    squares = list(accumulate(value * value for value in shifted))
    errors = []
    for cut in range(count):
        left = count - cut
        total, square = sums[left - 1], squares[left - 1]
        errors.append(max(square - total * total / left, 0.0) / left**2)
    return errors
