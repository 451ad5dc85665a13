"""Weights that patterns match, weights that are frozen, and the answers to wrong names."""

import pytest
import torch
from torch import nn

from falconet.errors import ConfigError
from falconet.models import zoo
from falconet.models.depth import depths, rate_shares
from falconet.models.freezing import Frozen, Hold, count_trained, frozen_before, frozen_by, matching, trained_by


def freeze(model, *, before):
    frozen = frozen_before(model, before)
    frozen.set(model)
    return frozen


def train_only(model, patterns, **options):
    frozen = trained_by(model, patterns, **options)
    frozen.set(model)
    return frozen


def frozen_weights(model):
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


# timm lists its modules in the order in which they run, so the frozen ones can be found in that list.
FIRST = {
    "resnet18": ("layer3/0", ("conv1", "bn1", "layer1", "layer2")),
    "resnet8-cifar": ("layer2.0", ("conv1", "bn1", "layer1")),
    "efficientnet-b0": (
        "blocks/5/3",
        ("conv_stem", "bn1", *(f"blocks.{n}." for n in range(5)), *(f"blocks.5.{n}." for n in range(3))),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_exactly_the_weights_before_the_layer_are_frozen(name):
    before, early = FIRST[name]
    model = zoo.build(name, classes=10, seed=0)
    freeze(model, before=before)
    assert frozen_weights(model) == {each for each, _ in model.named_parameters() if each.startswith(early)}


def test_block_can_be_frozen_in_part():
    model = zoo.build("resnet18", classes=10, seed=0)
    layers = freeze(model, before="layer4/1/conv2").layers
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.rpartition(".")[0] for name in trained} == {"layer4.1.conv2", "layer4.1.bn2", "fc"}
    assert "layer4.1.bn1" in layers
    assert "layer4.1" not in layers


class Scaled(nn.Module):
    """A block with weights outside of its layers."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)
        self.factor, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.late(self.early(x) * self.factor) + self.shift


def test_weight_outside_of_layers_is_frozen_by_its_position():
    model = nn.Sequential(Scaled())
    freeze(model, before="0/late")
    assert frozen_weights(model) == {"0.early.weight", "0.early.bias", "0.factor"}


def test_layer_that_runs_again_later_is_trained():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.shared(self.other(self.shared(x)))

    model = Twice()
    assert freeze(model, before="other") == Frozen()
    assert frozen_weights(model) == set()


def test_first_layer_or_no_layer_freezes_nothing():
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    assert freeze(model, before=None) == Frozen()
    assert freeze(model, before="conv1") == Frozen()
    assert frozen_weights(model) == set()


REFUSED = {
    "layer9/0": "'layer9/0' is not a layer; the nearest are 'layer3/0'",
    "blocks/5/3": "is not a layer; the nearest are ",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_wrong_layer_is_answered_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        freeze(zoo.build("resnet8-cifar", classes=10, seed=0), before=name)


def test_layer_after_all_weights_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(ConfigError, match="'1' leaves no weights to train; expected an earlier layer"):
        freeze(model, before="1")


# Patterns, the trained weights, and the norms whose statistics move; statistics are named and frozen like weights.
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
def test_only_matching_weights_are_trained(patterns):
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    train_only(model, patterns)
    trained, tracked = ONLY[patterns]
    every = {name for name, _ in model.named_parameters()}
    assert frozen_weights(model) == every - trained
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert {name for name, layer in norms.items() if layer.track_running_stats} == tracked
    assert count_trained(model) == sum(model.get_parameter(name).numel() for name in trained)


@pytest.mark.parametrize("stable", [True, False])
def test_frozen_statistics_do_not_change_where_the_batch_is_normalised_as_in_tensorflow(stable):
    model = zoo.build("resnet8-cifar", classes=10, seed=0, disable_stable_batchnorm=not stable).train()
    free = zoo.build("resnet8-cifar", classes=10, seed=0, disable_stable_batchnorm=not stable).train()
    assert not train_only(model, ["fc"], evaluates=False).layers
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), free(images))  # runs as in training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert not torch.equal(model.eval()(images), free.eval()(images))  # whose statistics have changed


def test_pattern_of_statistics_only_is_refused():
    with pytest.raises(ConfigError, match=r"'\.\*running_var' matches only batch norm's statistics; expected weights"):
        train_only(zoo.build("resnet8-cifar", classes=10, seed=0), [".*running_var"])


NAMES = ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer1.0.bn1.bias", "fc.weight", "fc.bias"]

MEANT = {
    ("fc",): {"fc.weight", "fc.bias"},
    ("layer1",): {"layer1.0.conv1.weight", "layer1.0.bn1.bias"},
    ("layer1/0/conv1",): {"layer1.0.conv1.weight"},
    (".*bias",): {"bn1.bias", "layer1.0.bn1.bias", "fc.bias"},
    (".*bn1/bias",): {"bn1.bias", "layer1.0.bn1.bias"},
    ("bn1",): {"bn1.weight", "bn1.bias"},  # only the model's, because a pattern matches a whole name
    ("conv1", "fc/bias"): {"conv1.weight", "fc.bias"},
    (): set(),
}


@pytest.mark.parametrize(("patterns", "expected"), MEANT.items())
def test_pattern_matches_weights_by_name_or_layer(patterns, expected):
    assert matching(NAMES, patterns) == expected


WRONG = {
    "layer4": "'layer4' matches no layer and no weight; the nearest are 'layer1', 'layer1/0'",
    ".*/conv9/.*": "matches no layer and no weight; the nearest are ",
    "(": "'(' is not a regular expression: missing ), unterminated subpattern at position 0",
}


@pytest.mark.parametrize(("pattern", "message"), WRONG.items())
def test_pattern_without_a_match_is_answered_with_the_nearest(pattern, message):
    with pytest.raises(ConfigError) as refused:
        matching(NAMES, ["fc", pattern])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# What is asked for, of which model, and the parts of the model that still train.
ASKED = {
    ("resnet18", "1"): ("layer", "fc"),
    ("resnet18", "3"): ("layer3", "layer4", "fc"),
    ("resnet18", "backbone"): ("fc",),
    ("resnet18", "layer[12]"): ("conv1", "bn1", "layer3", "layer4", "fc"),
    ("resnet8-cifar", "2"): ("layer2", "layer3", "fc"),
    ("efficientnet-b0", "8"): ("classifier",),
    ("mobilenet-v3-small", "backbone"): ("classifier",),
    ("squeezenet", "backbone"): ("classifier",),
    ("timm:vit_tiny_patch16_224", "12"): ("blocks.11", "norm", "head"),
}


@pytest.mark.parametrize(("name", "what"), ASKED)
def test_the_first_stages_or_what_matches_is_frozen(name, what):
    model = zoo.build(name, classes=10, seed=0)
    frozen_by(model, what).set(model)
    every = {each for each, _ in model.named_parameters()}
    assert every - frozen_weights(model) == {each for each in every if each.startswith(ASKED[name, what])}


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "9": "got 9, expected 1 to 4: the model has 4 stages before its classifier",
        "0": "got 0, expected 1 to 4",
        "layr1": "'layr1' matches no layer and no weight; the nearest are 'layer1'",
        ".*": r"'\.\*' leaves no weights to train",
    }.items(),
)
def test_freezing_nothing_or_everything_is_refused(what, message):
    with pytest.raises(ConfigError, match=message):
        frozen_by(zoo.build("resnet8-cifar", classes=10, seed=0), what)


def test_frozen_layers_run_as_in_evaluation():
    model = zoo.build("efficientnet-b0", classes=10, seed=0, efficientnet_drop_path=0.5)
    hold = Hold(model, train_only(model, ["classifier"]))
    features = {}
    model.bn2.register_forward_hook(lambda *given: features.setdefault(model.classifier.training, given[2]))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model.train()
    hold.at(0)
    model(images)
    model.eval()(images)
    assert torch.equal(features[True], features[False])  # no batch statistics, no dropped paths
    assert model.train().classifier.training


def test_unfreezing_trains_everything_as_if_nothing_had_been_frozen():
    model, changes = zoo.build("resnet8-cifar", classes=10, seed=0), []
    hold = Hold(model, frozen_by(model, "backbone"), until=3, changed=lambda: changes.append(count_trained(model)))
    for update in range(5):
        model.train()
        hold.at(update)
        assert model.layer1[0].bn1.training == model.layer1[0].bn1.track_running_stats == (update >= 3)
    assert changes == [model.fc.weight.numel() + 10, zoo.count_parameters(model)]


def test_weights_that_freeze_later_do_so_even_before_the_first_update_that_is_counted():
    model, changes = zoo.build("resnet8-cifar", classes=10, seed=0), []
    hold = Hold(model, frozen_by(model, "backbone"), since=0, changed=lambda: changes.append(count_trained(model)))
    hold.at(5)
    assert changes == [model.fc.weight.numel() + 10]
    assert not model.layer1[0].bn1.training


def test_no_gradient_is_computed_below_the_first_trained_layer():
    model = zoo.build("resnet8-cifar", classes=10, seed=0).train()
    frozen_by(model, "3").set(model)
    seen = []
    model.layer2.register_forward_hook(lambda *given: seen.append(given[2].requires_grad))
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    assert seen == [False]


def test_depths_and_shares_of_the_rate_are_timms():
    from timm.optim import param_groups_layer_decay

    model = zoo.build("resnet18", classes=10, seed=0)
    shares = rate_shares(model, 0.75)
    names = {weight: name for name, weight in model.named_parameters()}
    for group in param_groups_layer_decay(model, layer_decay=0.75):
        for weight in group["params"]:
            assert shares[names[weight]] == pytest.approx(group["lr_scale"], rel=1e-12)
    assert shares["fc.weight"] == 1.0
    assert depths(model, names.values(), by_block=False)["layer4.1.bn2.bias"] == 4
