"""Initial weights against the formulas of the originals, layer by layer."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision import models as torchvision_models

from falconet.models import init, zoo


def layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}


def built(name, *, classes=100, seed=0, **options):
    return zoo.build(name, classes=classes, seed=seed, **options)


class Expected(NamedTuple):
    """A distribution around zero."""

    share_below: Callable[[Tensor], Tensor]
    deviation: float
    bound: float = math.inf


def normal_of(deviation):
    return Expected(lambda x: torch.special.ndtr(x / deviation), deviation)


def truncated(deviation):
    """A normal that ends at two of its deviations; what is left has less of one, by the closed form."""
    within = math.erf(2 / math.sqrt(2))
    left = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / within)

    def share_below(x):
        return (torch.special.ndtr(x / deviation) - (1 - within) / 2) / within

    return Expected(share_below, deviation * left, 2 * deviation)


def scaled(variance):
    """TensorFlow's VarianceScaling, which divides by the same number."""
    return truncated(math.sqrt(variance) / 0.87962566103423978)


def uniform(bound):
    return Expected(lambda x: (x + bound) / (2 * bound), bound / math.sqrt(3), bound)


def distance(weight, expected):
    """Kolmogorov's, times the root of the number: above 2.4 once in 50,000 times."""
    values = weight.detach().flatten().double().sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    below = expected.share_below(values)
    return math.sqrt(len(values)) * torch.maximum(below - steps[:-1], steps[1:] - below).max().item()


def fans(layer):
    """As TensorFlow counts them: by the kernel's shape, which has a group's share of the inputs and all outputs."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    field = math.prod(layer.kernel_size)
    return field * layer.in_channels // layer.groups, field * layer.out_channels


def lecun(layer):
    return uniform(math.sqrt(6 / sum(fans(layer)))) if isinstance(layer, nn.Linear) else scaled(1 / fans(layer)[0])


def he(layer):
    if isinstance(layer, nn.Linear):
        return uniform(math.sqrt(6 / sum(fans(layer))))
    return scaled(2 / fans(layer)[0] if layer.groups > 1 else 2 / fans(layer)[1])


def glorot(layer):
    return uniform(math.sqrt(6 / sum(fans(layer))))


def channels(layer):
    counts = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else None
    return uniform(math.sqrt(6 / sum(counts or (layer.in_channels, layer.out_channels))))


def normal(layer):
    return normal_of(0.01 if isinstance(layer, nn.Linear) else math.sqrt(2 / fans(layer)[1]))


def torchs(layer):
    return uniform(1 / math.sqrt(fans(layer)[0]))


FORMULAS = {"lecun": lecun, "he": he, "glorot": glorot, "channels": channels, "normal": normal, "uniform": torchs}
MODELS = ["resnet8-cifar", "resnext11-cifar", "efficientnet-cifar"]


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_follows_its_formula(name, kind):
    for path, layer in layers(built(name, weight_init=kind)).items():
        expected, weight = FORMULAS[kind](layer), layer.weight.detach()
        assert distance(weight, expected) < 2.4, path
        assert weight.abs().max() <= expected.bound * (1 + 1e-6), path
        assert weight.std().item() == pytest.approx(expected.deviation, rel=5 / math.sqrt(2 * weight.numel())), path


@pytest.mark.parametrize("kind", [kind for kind in FORMULAS if kind != "uniform"])
def test_biases_start_at_zero(kind):
    biases = [layer.bias for layer in layers(built("efficientnet-cifar", weight_init=kind)).values()]
    assert sum(bias is not None for bias in biases) > 1
    assert all(not bias.any() for bias in biases if bias is not None)


def test_truncation_is_compensated():
    assert truncated(1.0).deviation == pytest.approx(init.LEFT, abs=1e-12)


@pytest.mark.parametrize("kind", ["auto", *FORMULAS])
def test_weights_depend_on_the_seed(kind):
    first, again, other = (built("resnet8-cifar", weight_init=kind, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if "conv" in key or key == "fc.weight"]
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("kind", ["lecun", "channels"])
def test_norm_type_does_not_change_weights(kind):
    batch, group = (
        zoo.build("resnet8-cifar", classes=5, seed=0, weight_init=kind, **norm).state_dict()
        for norm in ({}, {"norm_type": "group", "norm_num_groups": 4})
    )
    assert all(torch.equal(batch[key], group[key]) for key in group)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_default_weights_follow_torchvisions_rule(name):
    """Normal of variance 2 / fan-out, torch's default classifier: the distributions of torchvision's constructor."""
    ours, theirs = layers(zoo.build(name, classes=1000, seed=0)), layers(getattr(torchvision_models, name)())
    for key, layer in theirs.items():
        mine, other = ours[key].weight.detach().flatten(), layer.weight.detach().flatten()
        assert mine.std().item() == pytest.approx(other.std().item(), rel=8 / math.sqrt(2 * len(mine)) + 1e-3)
    assert distance(ours["fc"].bias, uniform(1 / math.sqrt(ours["fc"].in_features))) < 2.4


def scales(model):
    """Names of norms whose scale starts at zero; all others are one."""
    norms = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert all(weight.unique().tolist() in ([0.0], [1.0]) for weight in norms.values())
    return {name for name, weight in norms.items() if not weight.any()}


BLOCKS = (3, 4, 6, 3)
RESNET50 = {
    "none": set(),
    "last": {f"layer{stage}.{block}.bn3" for stage, count in enumerate(BLOCKS, 1) for block in range(count)},
    "identity": {f"layer{stage}.{block}.bn3" for stage, count in enumerate(BLOCKS, 1) for block in range(1, count)},
}
RESNET50["auto"] = RESNET50["last"]  # timm's
RESNET50["shortcut"] = RESNET50["identity"] | {f"layer{stage}.0.downsample.1" for stage in range(1, 5)}


@pytest.mark.parametrize(("kind", "expected"), RESNET50.items())
def test_chosen_norms_start_at_zero(kind, expected):
    assert scales(built("resnet50", classes=2, zero_init=kind)) == expected


CIFAR = {
    "none": set(),
    "last": {"layer1.0.bn2"},  # the two others append channels of zeros
    "identity": {"layer1.0.bn2"},
    "auto": {"layer1.0.bn2"},
}


@pytest.mark.parametrize(("kind", "expected"), CIFAR.items())
def test_block_that_appends_zero_channels_starts_at_one(kind, expected):
    assert scales(built("resnet8-cifar", classes=2, zero_init=kind)) == expected


def test_added_projections_are_drawn_like_other_layers():
    model = built("resnet8-cifar", shortcut_type="C", weight_init="channels", zero_init="shortcut")
    assert scales(model) == {f"layer{stage}.0.downsample.1" for stage in (1, 2, 3)}
    found = layers(model)["layer1.0.downsample.0"].weight
    assert 0.9 * math.sqrt(6 / 32) < found.abs().max() <= math.sqrt(6 / 32)
