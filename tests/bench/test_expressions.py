"""Expressions in specs: what they compute, and what they never execute."""

import pytest

from falconet.bench.spec import check_expression, evaluate_expression
from falconet.errors import ConfigError

VALUES = {"throughput": 1000.0, "replicas": 4.0, "zero": 0.0}
SUMS = {
    "{throughput} / {replicas}": 250.0,
    "1000 * {replicas} + -2": 3998.0,
    "({throughput} - 1) ** 2": 998001.0,
    "{throughput} / {zero}": None,
    "{nothing} + 1": None,
    "({zero} - 8) ** 0.5": None,
}
HOSTILE = ["__import__('os').system('x')", "{throughput}.real", "9 ** 9 ** 9", "1 if 2 else 3", "'a' * 9", "1 +", ""]


@pytest.mark.parametrize(("expression", "value"), SUMS.items())
def test_expressions_are_evaluated(expression, value):
    assert evaluate_expression(expression, VALUES) == value


@pytest.mark.parametrize("expression", HOSTILE)
def test_anything_but_arithmetic_is_refused(expression):
    with pytest.raises(ConfigError, match="expr: "):
        check_expression(expression)
