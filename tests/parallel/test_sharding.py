"""Sharded optimizer state gives the same update and the same checkpoint."""

import pytest
import torch

import gloo
from replica_scenarios import Case, alone, furthest, run_cases, tensors

pytestmark = pytest.mark.dist

RULES = ("sgd", "sgd_combined", "adamw", "rmsprop_tf", "lars")
# The noise, the scale and the skipping of a run with a loss scale must not depend on who has which piece.
SCALED = [
    Case("sgd", "16.16", scale=128.0, stochastic=True, spoiled=1),
    Case("sgd", "bf16.bf16", scale=None, stochastic=True),
    Case("adamw", "16.16", scale=None, stochastic=True, spoiled=2),
    Case("adamw", "16.32", scale=128.0),
    Case("rmsprop_tf", "bf16.bf16", scale=1.0),
    Case("rmsprop_tf", "16.16", scale=None, accumulation=2),
    Case("lars", "16.16", scale=128.0, stochastic=True),
]


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_state_matches_one_process(size, tmp_path):
    whole_cases = [*(Case(rule) for rule in RULES), Case("lars", decays_all=True)]
    cases = [case._replace(sharded=True, accumulation={2: 2, 3: 1}[size]) for case in whole_cases]
    results = gloo.in_world(size, run_cases, cases, str(tmp_path / "many"))
    whole = alone(run_cases, whole_cases, str(tmp_path / "one"))
    for number, case in enumerate(cases):
        parts = [result[number] for result in results]
        assert len({part["digest"] for part in parts}) == 1, "the replicas drifted apart"
        assert sum(part["held"] for part in parts) == whole[number]["held"]
        assert max(part["held"] for part in parts) <= whole[number]["held"] / size * 1.1
        name, off = furthest(tensors(tmp_path / "many" / str(number)), tensors(tmp_path / "one" / str(number)))
        assert off < 5e-5, (case, name, off)


def test_two_replicas_with_sharded_state_are_bitwise_equal_in_every_regime(tmp_path):
    divided = [case._replace(sharded=True) for case in SCALED]
    offloaded = [case._replace(offloaded=True, bucket=0.02) for case in (SCALED[0], divided[2], divided[4])]
    results = gloo.in_world(2, run_cases, [*SCALED, *divided, *offloaded], str(tmp_path))
    for result in results:  # where the state lies changes nothing, whole or divided
        digests = [each["digest"] for each in result]
        assert digests[-3:] == [digests[0], digests[2], digests[4]]
    for number, case in enumerate(SCALED):
        whole, parts = ([result[at] for result in results] for at in (number, number + len(SCALED)))
        assert len({each["digest"] for each in (*whole, *parts)}) <= (1 if case.rule != "lars" else 2), case
        for key in ("scales", "skipped", "offender"):
            assert [each[key] for each in parts] == [whole[0][key]] * 2, (case, key)
        assert whole[0]["skipped"] == (case.spoiled is not None)
        assert whole[0]["offender"] == ("fc.bias" if case.spoiled is not None else None)
        assert sum(each["held"] for each in parts) == whole[0]["held"]
        one, other = (tensors(tmp_path / str(at)) for at in (number, number + len(SCALED)))
        if case.rule == "lars":  # norms are sums over the processes, in another order: the last bit of a rate
            name, off = furthest(other, one)
            assert off < 2 * torch.finfo(torch.float16).eps, (name, off)
        else:
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), case
