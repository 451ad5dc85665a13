"""Replicas give the same update however a global batch is divided, and share batch norm statistics."""

import numpy as np
import pytest
import torch
from torch import nn

import gloo
from falconet.data.preprocessing import Normalise
from falconet.parallel.data_parallel import MEGABYTE, divided, running_statistics
from replica_scenarios import PREPROCESSING, alone, images, messages, model_of, several, train

pytestmark = pytest.mark.dist

RULES = ("sgd", "sgd_combined", "adamw", "rmsprop_tf", "lars")
CALLS = [
    *(("group", rule, 1, 0.05) for rule in RULES),
    ("group", "sgd", 2, 0.05),
    ("group", "sgd_combined", 2, 0.001),  # a bucket for each parameter
    ("group", "sgd", 2, 100.0),  # one bucket for all
    ("unused", "sgd", 1, 0.05),
]


def relative(found, expected):
    difference = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    return difference / max(np.linalg.norm(expected.astype(np.float64)), 1e-30)


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_global_batch_gives_the_same_update(size):
    results = gloo.in_world(size, several, CALLS)
    for number, call in enumerate(CALLS):
        weights, losses, _ = alone(train, *call[:2])
        assert len({result[number][2] for result in results}) == 1, "the replicas drifted apart"
        for result in results:
            found, found_losses, _ = result[number]
            assert found_losses == pytest.approx(losses, rel=1e-5)
            for name, expected in weights.items():
                # Of the whole tensor: an element near 0 is a difference of updates that nearly cancel, and Adam and
                # RMSprop divide by its gradient's own size; there the last bit of a sum is any share of what is left.
                assert relative(found[name], expected) < 2e-6, (call, name)


def test_running_statistics_are_averaged_over_the_replicas():
    results = gloo.in_world(2, several, [("batch", "sgd", 1, 0.05, 1)])
    assert results[0][0][2] == results[1][0][2], "the replicas drifted apart"
    found = results[0][0][0]
    model = model_of("batch")
    inputs = model.conv1.double()(Normalise(PREPROCESSING)(images(0).images).double()).detach()
    halves = [half.transpose(0, 1).flatten(1) for half in inputs.chunk(2)]
    mean = sum(half.mean(1) for half in halves) / 2
    variance = sum(half.var(1) for half in halves) / 2
    np.testing.assert_allclose(found["bn1.running_mean"], 0.1 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["bn1.running_var"], 0.9 + 0.1 * variance, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_replicas_communicate_once_per_update_during_the_last_backward_pass(accumulation):
    trained = sum(p.numel() for p in model_of("batch").parameters())
    statistics = sum(b.numel() for b in model_of("batch").buffers() if b.ndim)
    for sent, before in gloo.in_world(2, messages, accumulation):
        assert sum(sent) == trained + statistics
        assert before == [len(sent)]


def test_buckets_hold_one_dtype_in_order_up_to_their_size():
    sizes = [10, 20, 300, 5, 7, 40]
    types = [torch.float32, torch.float16, torch.float32, torch.float32, torch.float16, torch.float32]
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=t)) for n, t in zip(sizes, types, strict=True)]
    groups = divided(parameters, 200)
    assert [[p.numel() for p in group] for group in groups] == [[10], [20, 7], [300], [5, 40]]
    assert divided(parameters[:1], MEGABYTE) == [[parameters[0]]]


def test_the_statistics_of_frozen_layers_are_not_averaged():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3))
    model[0].track_running_stats = False  # as freezing leaves them
    moving = [model[1].running_mean, model[1].running_var, model[2].running_mean, model[2].running_var]
    assert [id(each) for each in running_statistics(model)] == [id(each) for each in moving]
