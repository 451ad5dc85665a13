"""Further averages as they are typed."""

import pytest

from falconet.config.options import further_average

TYPED = {
    "mean:5": ("mean", 5, "mean_5"),
    "mean:all": ("mean", None, "mean_all"),
    "exponential:0.97": ("exponential", None, "exp_0.97"),
    "exponential:1": ("exponential", None, "exp_1"),
}


@pytest.mark.parametrize(("text", "expected"), TYPED.items())
def test_an_average_is_read(text, expected):
    found = further_average(text)
    assert (found.strategy, found.last, found.suffix) == expected


@pytest.mark.parametrize("text", ["mean", "mean:0", "mean:-1", "exponential:1.5", "exponential:", "ema:0.9", ""])
def test_anything_else_is_none(text):
    assert further_average(text) is None
