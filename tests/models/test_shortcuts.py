"""Shortcuts and first layers of the originals' residual networks, by parameters and by what they compute."""

import pytest
import torch
from torch import nn

from falconet.models import zoo
from falconet.models.norms import Norm
from falconet.models.resnet import ResidualShape

# The TensorFlow program's own figures for ImageNet: a projection at the beginning of every stage.
TENSORFLOW = {"resnet10": 5_423_016, "resnet18": 11_693_736, "resnet34": 21_801_896, "resnet50": 25_557_032}
# Two projections, 16 to 32 and 32 to 64 channels, and their norms: 512 + 64 + 2,048 + 128 more than with option A.
CIFAR = {
    "A": 269_722,
    "auto": 269_722,
    "B": 269_722 + 2_752,
    # Also 16 to 16 at the beginning of the first stage ...
    "stages": 269_722 + 2_752 + 256 + 32,
    # ... and in the two later blocks of each stage: 2 x (256 + 32 + 1,024 + 64 + 4,096 + 128).
    "C": 269_722 + 2_752 + 256 + 32 + 2 * 5_600,
}


def built(name, **changes):
    return zoo.build(name, classes=1000 if "cifar" not in name else 10, seed=0, shape=ResidualShape(**changes))


@pytest.mark.parametrize(("name", "count"), TENSORFLOW.items())
def test_a_projection_a_stage_is_the_tensorflow_programs(name, count):
    assert zoo.count_parameters(built(name, shortcut="stages")) == count


@pytest.mark.parametrize(("kind", "count"), CIFAR.items())
def test_a_kind_of_shortcut_has_its_parameters(kind, count):
    assert zoo.count_parameters(built("resnet20-cifar", shortcut=kind)) == count


def test_nothing_changes_where_nothing_is_asked_for():
    usual = zoo.build("resnet18", classes=1000, seed=0).state_dict()
    same = built("resnet18").state_dict()
    assert usual.keys() == same.keys()
    assert all(torch.equal(usual[name], same[name]) for name in usual)


def test_option_a_passes_every_second_pixel_and_appends_zeros():
    """A bottleneck network, whose projections are all taken away: 25,557,032 less their weights and norms."""
    model = built("resnet50", shortcut="A")
    projections = sum(a * b + 2 * b for a, b in ((64, 256), (256, 512), (512, 1024), (1024, 2048)))
    assert zoo.count_parameters(model) == 25_557_032 - projections
    x = torch.arange(2 * 256 * 4 * 4, dtype=torch.float32).reshape(2, 256, 4, 4)
    passed = model.layer2[0].downsample(x)
    assert torch.equal(passed[:, :256], x[:, :, ::2, ::2])
    assert passed.shape == (2, 512, 2, 2)
    assert not passed[:, 256:].any()
    assert model.layer2[0].bn3.weight.min() == 1  # the appended channels live


@pytest.mark.parametrize(
    ("name", "stem", "side", "after"), [("resnet18", "cifar", 32, 32), ("resnet20-cifar", "imagenet", 224, 56)]
)
def test_the_first_layers_are_those_of_the_data(name, stem, side, after):
    model = built(name, stem=stem)
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    model.eval()(torch.zeros(1, 3, side, side))
    assert seen == [after]
    assert model.conv1.kernel_size == {"cifar": (3, 3), "imagenet": (7, 7)}[stem]


def test_without_norms_convolutions_may_have_biases():
    model = zoo.build("resnet8-cifar", classes=10, seed=0, norm=Norm(kind="none", biases=True))
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.bias is not None and not layer.bias.any() for layer in convolutions)
    bare = zoo.build("resnet8-cifar", classes=10, seed=0, norm=Norm(kind="none"))
    added = zoo.count_parameters(model) - zoo.count_parameters(bare)
    assert added == sum(layer.out_channels for layer in convolutions)


def test_the_same_seed_draws_the_same_projections():
    one, two = (built("resnet20-cifar", shortcut="C").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
