"""Replicas in every regime: the update of one process that takes the same micro-batches one after the other.

With one micro-batch for all images instead, convolutions sum in another order, and 16-bit activations are rounded to
other neighbours: that is the regime's noise, some percent of an update, and says nothing about replicas.
"""

import pytest

import gloo
from replica_scenarios import Case, alone, furthest, run_cases, tensors

pytestmark = pytest.mark.dist

CASES = [
    Case("sgd", "16.32", scale=None),
    Case("adamw", "16.32", scale=128.0, spoiled=1),
    Case("sgd", "bf16.32", scale=0.0),
    Case("sgd", "16.16", scale=None, spoiled=2),
    Case("adamw", "16.16", scale=128.0, stochastic=True),
    Case("adamw", "bf16.bf16", scale=1.0),
    Case("sgd", "bf16.bf16", scale=None, stochastic=True, spoiled=0),
]
# Two gradients have one sum in any order, so even halves agree; of four, the order shows in the last bits, which in 16
# bits the next updates' rounding carries on. Beside the largest value of a tensor, weights alone.
BOUNDS = {2: {"32": 1e-6, "16": 0.0, "bf16": 0.0}, 4: {"32": 4e-6, "16": 2**-9, "bf16": 2**-6}}


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_match_one_process_with_the_same_micro_batches(size, tmp_path):
    results = gloo.in_world(size, run_cases, CASES, str(tmp_path / "many"))
    single = alone(run_cases, [case._replace(accumulation=size) for case in CASES], str(tmp_path / "one"))
    for number, case in enumerate(CASES):
        many = [result[number] for result in results]
        assert len({each["digest"] for each in many}) == 1, "the replicas drifted apart"
        for key in ("scales", "skipped", "offender"):
            assert [each[key] for each in many] == [single[number][key]] * size, (case, key)
        assert single[number]["skipped"] == (case.spoiled is not None)
        found, expected = (
            {name: t for name, t in tensors(tmp_path / home / f"{number}-first").items() if name.startswith("model:")}
            for home in ("many", "one")
        )
        name, off = furthest(found, expected)
        assert off <= BOUNDS[size][case.regime.partition(".")[2]], (case, name, off)
