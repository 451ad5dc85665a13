"""Re-estimated batch-norm statistics, against the closed form."""

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from falconet.data.buffers import Batch
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.evaluation.running_statistics import reestimate
from falconet.numerics.precision import REGIMES

PREPROCESSING = Preprocessing(image_size=4, resize=4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
BATCHES = 5


def pixels():
    return np.random.default_rng(0).integers(0, 256, (BATCHES, 6, 3, 4, 4), dtype=np.uint8)


def batches():
    return [Batch(torch.from_numpy(images), torch.zeros(6, dtype=torch.int64), None) for images in pixels()]


def measure(model):
    reestimate(model, batches(), normalise=Normalise(PREPROCESSING), regime=REGIMES["32.32"])


def normalised():
    """BATCHES x N x C x H x W, float64."""
    mean, std = (np.reshape(x, (3, 1, 1)) for x in (PREPROCESSING.mean, PREPROCESSING.std))
    return (pixels() / 255 - mean) / std


def spoilt(layer):
    """A layer with statistics of other data."""
    layer.running_mean.fill_(100.0)
    layer.running_var.fill_(1e-6)
    layer.num_batches_tracked.fill_(1000)
    return layer


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_statistics_are_the_plain_mean_over_batches(kind):
    layer = spoilt(kind(3))
    measure(nn.Sequential(layer))
    inputs = normalised()
    np.testing.assert_allclose(layer.running_mean, inputs.mean((1, 3, 4)).mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.running_var, inputs.var((1, 3, 4), ddof=1).mean(0), rtol=1e-5)
    assert layer.num_batches_tracked == BATCHES


def test_a_later_layer_sees_the_earlier_one_in_training_mode():
    second = spoilt(nn.BatchNorm2d(3))
    measure(nn.Sequential(spoilt(nn.BatchNorm2d(3)), nn.ReLU(), second))
    inputs = normalised()
    centred = inputs - inputs.mean((1, 3, 4), keepdims=True)
    hidden = np.maximum(centred / np.sqrt(inputs.var((1, 3, 4), keepdims=True) + 1e-5), 0)
    np.testing.assert_allclose(second.running_mean, hidden.mean((1, 3, 4)).mean(0), rtol=1e-5)
    np.testing.assert_allclose(second.running_var, hidden.var((1, 3, 4), ddof=1).mean(0), rtol=1e-5)


def test_momenta_are_restored_and_the_model_is_in_evaluation_mode():
    layers = [nn.BatchNorm2d(3, momentum=momentum) for momentum in (0.1, 0.3, None)]
    model = nn.Sequential(*layers).train()
    measure(model)
    assert [layer.momentum for layer in layers] == [0.1, 0.3, None]
    assert not any(module.training for module in model.modules())


def test_nothing_else_changes_and_dropout_is_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5), nn.BatchNorm2d(3), nn.GroupNorm(1, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model)
    first = model.state_dict()
    changed = {name for name, tensor in first.items() if not torch.equal(tensor, before[name])}
    assert changed == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert all(parameter.grad is None for parameter in model.parameters())
    first = {name: tensor.clone() for name, tensor in first.items()}
    measure(model)
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
