"""Where warm-up ends: one rule for every series of measurements.

The first measurement is always dropped (it holds start-up, compilation and the first allocations). Then as many more as
minimise the marginal standard error (MSER; White, "An effective truncation heuristic for bias reduction in simulation
output", 1997): the sum of squared deviations of what is left, divided by the square of how many are left. At most half
of the measurements are dropped. A series that wants more, or that can then be cut (a quarter on either side at least)
into two parts that differ by more than a tenth and by more than three standard errors, was still changing and is told
as drifting.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Literal, NamedTuple

ENOUGH = 6  # measurements below which nobody can tell warm-up from noise
DRIFT = 0.1  # of the mean
ERRORS = 3  # standard errors
SMALLEST = 4  # parts: the smaller of two has one of them at least
_ROUNDING = 1e-12  # of the squared mean: below it, deviations are rounding errors


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
    wants_more = first == limit and limit - least > 1 and _differ_at(costs[least:], [limit - least])
    return Steady(first, "drifting" if wants_more or _changes(costs[first:]) else "steady")


def _changes(costs: Sequence[float]) -> bool:
    """Whether some cut leaves two parts that differ."""
    least = max(2, len(costs) // SMALLEST)
    return _differ_at(costs, range(least, len(costs) - least + 1))


def _differ_at(costs: Sequence[float], cuts: Iterable[int]) -> bool:
    """Whether the parts on both sides of one of the cuts, each of two at least, differ."""
    mean = fmean(costs)
    shifted = [cost - mean for cost in costs]  # sums of squares around it keep their digits
    sums = list(accumulate(shifted, initial=0.0))
    squares = list(accumulate((value * value for value in shifted), initial=0.0))

    def of(low: int, high: int) -> tuple[float, float]:
        """The mean of a part, and the square of its standard error."""
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
        deviations = square - total * total / left
        errors.append(deviations / left**2 if deviations > _ROUNDING * left * centre**2 else 0.0)
    return errors
