"""Batch norm's running statistics over the micro-batches of an update, against the originals' formulas in float64.

TensorFlow program (inventory 2.2): a statistic's "gradient", moving - batch, is averaged over the micro-batches and
applied once an update with rate 1 - decay. PyTorch and PopART programs: each micro-batch moves them in turn.
"""

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from falconet.legacy.translate import translate
from falconet.models.norms import OnePassBatchNorm2d, move_once

CHANNELS = 3


def updates_of(micro_batches, count=3):
    """Images of some updates, N x C x H x W, with statistics that differ."""
    noise = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(4, CHANNELS, 5, 5, generator=noise) * (1 + batch) + update - batch
            for batch in range(micro_batches)
        ]
        for update in range(count)
    ]


def statistics(images):
    wide = images.double().transpose(0, 1).flatten(1)
    return wide.mean(1), wide.var(1)


def once(updates, *, momentum):
    """moving -= (1 - decay) x mean over micro-batches of (moving - batch), once an update."""
    mean, variance = torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()
    for micro_batches in updates:
        found = [statistics(images) for images in micro_batches]
        mean = mean - momentum * sum(mean - own for own, _ in found) / len(found)
        variance = variance - momentum * sum(variance - own for _, own in found) / len(found)
    return mean, variance


def in_turn(updates, *, momentum):
    mean, variance = torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()
    for images in (each for micro_batches in updates for each in micro_batches):
        own_mean, own_variance = statistics(images)
        mean, variance = (
            (1 - momentum) * mean + momentum * own_mean,
            (1 - momentum) * variance + momentum * own_variance,
        )
    return mean, variance


KINDS = {"torch": nn.BatchNorm2d, "timm": BatchNormAct2d, "one pass": OnePassBatchNorm2d}


@pytest.mark.parametrize("momentum", [0.03, 0.1, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_statistics_move_once_per_update_by_the_mean(kind, micro_batches, momentum):
    updates = updates_of(micro_batches)
    layer = kind(CHANNELS, momentum=momentum)
    model = nn.Sequential(layer)
    move_once(model, micro_batches=micro_batches)
    for batches in updates:
        for images in batches:
            model.train()(images)
        model.eval()(batches[0])  # an evaluation is no micro-batch
    for found, expected in zip((layer.running_mean, layer.running_var), once(updates, momentum=momentum), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-5)


def test_by_default_each_micro_batch_moves_the_statistics():
    updates = updates_of(7)
    layer = nn.BatchNorm2d(CHANNELS, momentum=0.1).train()
    for images in (each for micro_batches in updates for each in micro_batches):
        layer(images)
    found = (layer.running_mean, layer.running_var)
    for own, expected, other in zip(found, in_turn(updates, momentum=0.1), once(updates, momentum=0.1), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(own.double(), other, rtol=0.05)


def test_plain_mean_over_all_batches_is_unchanged():
    updates = updates_of(4)
    layer = nn.BatchNorm2d(CHANNELS, momentum=None)
    model = nn.Sequential(layer)
    move_once(model, micro_batches=4)
    for images in (each for micro_batches in updates for each in micro_batches):
        model.train()(images)
    every = [statistics(images)[0] for micro_batches in updates for images in micro_batches]
    torch.testing.assert_close(layer.running_mean.double(), sum(every) / len(every), rtol=1e-5, atol=1e-5)


OLD = {  # which of the originals' lines ask for it: (program, line)
    ("tf1:train.py", "--dataset imagenet --data-dir d --batch-norm"): True,
    ("tf1:train.py", "--dataset cifar-10 --data-dir d"): True,
    ("tf1:train.py", "--dataset imagenet --data-dir d"): False,  # group norm
    ("pytorch:train.py", "--data generated"): False,
    ("popart:resnet_main.py", "--data-dir d --norm-type BATCH"): False,
}


@pytest.mark.parametrize(("old", "asked"), OLD.items())
def test_dialects_keep_the_behaviour_of_their_programs(old, asked):
    program, line = old
    settings = {setting.option for setting in translate(program, line.split()).settings}
    assert ("batchnorm-per-update" in settings) is asked
