"""Which layers are frozen, and that names are answered."""

import pytest
import torch
from torch import nn

from falconet.errors import ConfigError
from falconet.models import zoo
from falconet.models.freezing import count_trained, freeze, train_only
from falconet.models.norms import Norm


def frozen_weights(model):
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


# The names of timm's modules stand in the order in which they run, so what is frozen can be told from the list.
FIRST = {
    "resnet18": ("layer3/0", ("conv1", "bn1", "layer1", "layer2")),
    "resnet8-cifar": ("layer2.0", ("conv1", "bn1", "layer1")),
    "efficientnet-b0": (
        "blocks/5/3",
        ("conv_stem", "bn1", *(f"blocks.{n}." for n in range(5)), *(f"blocks.5.{n}." for n in range(3))),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_all_weights_before_the_layer_are_frozen_and_no_others(name):
    before, early = FIRST[name]
    model = zoo.build(name, classes=10, seed=0)
    freeze(model, before=before)
    assert frozen_weights(model) == {each for each, _ in model.named_parameters() if each.startswith(early)}


def test_a_block_can_be_frozen_in_part():
    model = zoo.build("resnet18", classes=10, seed=0)
    layers = freeze(model, before="layer4/1/conv2")
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.rpartition(".")[0] for name in trained} == {"layer4.1.conv2", "layer4.1.bn2", "fc"}
    assert model.layer4[1].bn1 in layers
    assert model.layer4[1] not in layers


class Scaled(nn.Module):
    """A block with a weight of its own beside its layers."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)
        self.factor, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.late(self.early(x) * self.factor) + self.shift


def test_a_weight_of_no_layer_is_frozen_by_its_place():
    model = nn.Sequential(Scaled())
    freeze(model, before="0/late")
    assert frozen_weights(model) == {"0.early.weight", "0.early.bias", "0.factor"}


def test_a_layer_that_runs_again_later_is_trained():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.shared(self.other(self.shared(x)))

    model = Twice()
    assert freeze(model, before="other") == []
    assert frozen_weights(model) == set()


def test_without_a_name_and_from_the_first_layer_on_nothing_is_frozen():
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    assert freeze(model, before=None) == []
    assert freeze(model, before="conv1") == []
    assert frozen_weights(model) == set()


REFUSED = {
    "layer9/0": "--fine-tune-first-trainable-layer: 'layer9/0' is no layer; the nearest are 'layer3/0'",
    "blocks/5/3": "is no layer; the nearest are ",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_a_wrong_name_is_answered_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        freeze(zoo.build("resnet8-cifar", classes=10, seed=0), before=name)


def test_a_layer_after_all_weights_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(ConfigError, match="'1' leaves no weights to train; wanted an earlier layer"):
        freeze(model, before="1")


# What matches is trained; batch norm's statistics are named, and frozen, like weights.
ONLY = {
    ("fc",): ({"fc.weight", "fc.bias"}, set()),
    ("layer3", "fc/bias"): (
        {f"layer3.0.{name}" for name in ("conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight")}
        | {"layer3.0.bn2.bias", "fc.bias"},
        {"layer3.0.bn1", "layer3.0.bn2"},
    ),
    ("bn1/bias", ".*running_mean"): (
        {"bn1.bias"},
        {"bn1", *(f"layer{stage}.0.bn{number}" for stage in (1, 2, 3) for number in (1, 2))},
    ),
}


@pytest.mark.parametrize("patterns", ONLY)
def test_only_what_a_pattern_matches_is_trained(patterns):
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    train_only(model, patterns)
    trained, tracked = ONLY[patterns]
    every = {name for name, _ in model.named_parameters()}
    assert frozen_weights(model) == every - trained
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert {name for name, layer in norms.items() if layer.track_running_stats} == tracked
    assert count_trained(model) == sum(model.get_parameter(name).numel() for name in trained)


@pytest.mark.parametrize("stable", [True, False])
def test_frozen_statistics_keep_their_bits_and_the_batch_is_normalised_all_the_same(stable):
    model = zoo.build("resnet8-cifar", classes=10, seed=0, norm=Norm(stable=stable)).train()
    free = zoo.build("resnet8-cifar", classes=10, seed=0, norm=Norm(stable=stable)).train()
    train_only(model, ["fc"])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), free(images))  # as in training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert not torch.equal(model.eval()(images), free.eval()(images))  # whose statistics have moved


def test_statistics_alone_are_no_training():
    with pytest.raises(
        ConfigError, match=r"--trainable: '\.\*running_var' matches batch norm's statistics alone; wanted"
    ):
        train_only(zoo.build("resnet8-cifar", classes=10, seed=0), [".*running_var"])
