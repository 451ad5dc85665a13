"""Batch norm over a span of replicas matches batch norm of their combined batches."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import gloo
from falconet.errors import ConfigError
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.grid import divide
from falconet.parallel.world import ALONE
from replica_scenarios import alone, groups_made, one_layer, spanning

pytestmark = pytest.mark.dist

NAMES = ("output", "gradient of the input", "gradient of the weight", "of the bias", "running mean", "running variance")


@pytest.mark.parametrize("kind", ["plain", "cumulative", "with activation"])
def test_a_layer_over_two_replicas_matches_the_whole_batch(kind):
    results = gloo.in_world(2, one_layer, 2, kind)
    whole = alone(one_layer, 1, kind)
    together = [np.concatenate([result[number] for result in results]) for number in range(2)]
    for name, found, expected in zip(NAMES, together, whole[:2], strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5, err_msg=name)
    for result in results:
        for name, found, expected in zip(NAMES[2:], result[2:], whole[2:], strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("model", ["resnet8-cifar", "timm:efficientnet_b0"])
def test_training_over_a_span_of_all_replicas_matches_the_whole_batch(model):
    results = gloo.in_world(4, spanning, model, 4, 2 if model.startswith("resnet") else 1)
    expected = alone(spanning, model, 1, 2 if model.startswith("resnet") else 1)[0]
    assert len({digest for _, digest, _ in results}) == 1
    for name, value in expected.items():
        if value.dtype.kind == "f":
            difference = np.linalg.norm(results[0][0][name] - value) / max(np.linalg.norm(value), 1e-3)
            # 49 norms over as little as 16 values magnify rounding; a wrong norm would be off by 1.
            assert difference < (1e-5 if model.startswith("resnet") else 1e-2), (name, difference)


def test_a_span_of_two_among_four_shares_statistics_in_pairs():
    results = gloo.in_world(4, one_layer, 2, "plain")
    halves = gloo.in_world(2, one_layer, 1, "plain")
    for pair, half in ((results[:2], halves[0]), (results[2:], halves[1])):
        np.testing.assert_allclose(np.concatenate([r[0] for r in pair]), half[0], rtol=1e-4, atol=2e-5)


def test_every_process_creates_every_group_in_the_same_order():
    """NCCL's communicators are split by all processes at once: one that leaves a group out would hang the others."""
    results = gloo.in_world(4, groups_made, 2, 2)
    assert [made for made, _ in results] == [[[0, 2], [1, 3]]] * 4
    assert [own for _, own in results] == [[0, 2], None, [0, 2], None]


def test_a_span_of_one_changes_nothing_and_an_uneven_span_is_refused():
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert type(span_batchnorm(model, divide(ALONE, stages=1), span=1)[0]) is nn.BatchNorm2d
    with pytest.raises(ConfigError, match="batch norm over 2 replicas: expected a divisor of 1"):
        span_batchnorm(model, divide(ALONE, stages=1), span=2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_training_with_fused_norms_over_two_replicas_matches_the_plain_layers():
    """In Triton's interpreter, with gloo between the processes."""
    script, port = Path(__file__).with_name("interpreted_span_training.py"), str(gloo.free_port())
    paths = os.pathsep.join([str(script.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    results = [json.loads(out) for out, _ in answers]
    assert results[0]["digests"] == results[1]["digests"]
    assert results[0]["digests"][0] != results[0]["digests"][1], "the kernels did not run"
    assert all(result["off"] < 1e-5 for result in results)
