"""Where warm-up ends, on series with a known warm-up."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.bench.statistics import ENOUGH, find_steady


def noisy(count, *, mean=1.0, spread=0.02, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


SERIES = {
    "nothing but the first": ([5.0] + [1.0] * 20, 1, "steady"),
    "three slow ones": ([9.0, 4.0, 2.0] + [1.0] * 20, 3, "steady"),
    "three slow ones in noise": ([9.0, 4.0, 2.0, *noisy(40)], 3, "steady"),
    "constant from the start": ([1.0] * 20, 1, "steady"),
    "a slow one near the end is no warm-up": ([5.0] + [1.0] * 30 + [4.0] + [1.0] * 4, 1, "steady"),
    "slow until past the middle": ([5.0] * 15 + [1.0] * 10, 1, "drifting"),
    "one of many is slow by chance": ([5.0, *noisy(20), 1.5, *noisy(20, seed=1)], 1, "steady"),
    "ever faster": ([2.0 - 0.05 * number for number in range(30)], 15, "drifting"),
    "four of six are slow": ([3.0] * 4 + [1.0] * 2, 1, "drifting"),
    "slow until just before the middle": ([3.0] * 5 + [1.0] * 7, 5, "steady"),
    "six in noise": (noisy(6, spread=0.01, seed=3), find_steady(noisy(6, spread=0.01, seed=3)).first, "steady"),
    "two": ([3.0, 1.0], 1, "few"),
    "one": ([3.0], 0, "few"),
    "none": ([], 0, "few"),
}


@pytest.mark.parametrize(("costs", "first", "verdict"), SERIES.values(), ids=SERIES)
def test_known_warm_up_is_found(costs, first, verdict):
    assert find_steady(costs) == (first, verdict)


@pytest.mark.parametrize("decay", [1, 2, 5])
def test_exponential_warm_up_is_cut_where_noise_covers_it(decay):
    noise = noisy(100, spread=0.05, seed=decay)
    costs = [cost + 3 * math.exp(-number / decay) for number, cost in enumerate(noise)]
    first, verdict = find_steady(costs)
    assert verdict == "steady"
    assert 3 * math.exp(-first / decay) < 0.2
    assert np.mean(costs[first:]) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("count", [6, 8, 12, 40])
def test_noise_is_not_drift_but_a_late_change_is(count):
    for seed in range(100):
        noise = noisy(count, spread=0.01, seed=seed)
        assert find_steady(noise).verdict == "steady"
        late = [3 * cost if place < 0.7 * count - 1 else cost for place, cost in enumerate(noise)]
        assert find_steady(late).verdict == "drifting"


def test_a_spec_can_ask_for_more_warm_up():
    assert find_steady([1.0] * 20, at_least=4).first == 4
    assert find_steady([1.0, 1.0, 1.0], at_least=2).first == 2
    assert find_steady([1.0], at_least=3).first == 0


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=ENOUGH, max_size=60))
def test_the_cut_minimises_the_marginal_standard_error(costs):
    first, _ = find_steady(costs)

    def error(cut):
        rest = np.array(costs[cut:])
        return float(((rest - rest.mean()) ** 2).sum() / len(rest) ** 2)

    best = min(error(cut) for cut in range(1, len(costs) // 2 + 1))
    assert 1 <= first <= len(costs) // 2
    assert error(first) == pytest.approx(best, rel=1e-6, abs=1e-9)
