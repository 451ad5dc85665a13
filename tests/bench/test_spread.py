"""Means, intervals and percentiles match tables and numpy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.bench.statistics import estimate, percentile, t_quantile

# Two-sided 95 % points of Student's t, from printed tables.
TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    9: 2.262,
    10: 2.228,
    30: 2.042,
    120: 1.98,
}


@pytest.mark.parametrize(("freedom", "point"), TABLE.items())
def test_students_t_matches_the_tables(freedom, point):
    assert t_quantile(freedom) == pytest.approx(point, abs=6e-4)


def test_other_confidence_levels_work():
    assert t_quantile(4, 0.9) == pytest.approx(2.132, abs=6e-4)
    assert t_quantile(4, 0.99) == pytest.approx(4.604, abs=6e-4)


def test_interval_matches_a_hand_calculation():
    # mean 100, deviations -10, 0, 10: std 10; 4.303 x 10 / sqrt 3 = 24.84
    found = estimate([90.0, 100.0, 110.0])
    assert (found.mean, found.std, found.count) == (100.0, 10.0, 3)
    assert (found.low, found.high) == (pytest.approx(75.16, abs=0.01), pytest.approx(124.84, abs=0.01))


def test_a_single_value_has_no_spread():
    found = estimate([7.0])
    assert found.mean == 7.0
    assert math.isnan(found.std)
    assert math.isnan(found.low)


def test_interval_contains_the_true_mean_nineteen_times_in_twenty():
    draws = np.random.default_rng(0).normal(50, 5, (2000, 4))
    held = [found.low <= 50 <= found.high for found in map(estimate, draws.tolist())]
    assert 0.935 < np.mean(held) < 0.965


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_match_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)
