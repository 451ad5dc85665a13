"""Consecutive stages equal the whole model: outputs, gradients, statistics and names."""

import copy
import itertools

import pytest
import torch
from torch import nn

from falconet.errors import ConfigError
from falconet.models import splits, zoo
from falconet.numerics.segments import trace

# Every name of the zoo; those of a family that only differ in depth and width are slow.
QUICK = {
    "resnet18": ("layer2/0", "layer3/1/conv2"),
    "resnet50": ("layer1/2", "layer3/5/conv2", "layer4/0/downsample"),
    "efficientnet-b0": ("blocks/1/1/conv_pw", "blocks/3/0/bn2", "blocks/4/1"),
    "mobilenet": ("blocks/2/0", "blocks/4/1/bn2"),
    "mobilenet-v3-small": ("blocks/2/1/se", "blocks/4"),
    "resnet8-cifar": ("layer1.0.conv2", "layer2.0.bn2", "fc"),
}


def legal_names(model):
    """Every layer that a stage may start with, in running order."""
    return list(splits.beginnings(trace(model)))


REST = [name for name in zoo.names() if name not in QUICK]


def step(modules, x):
    """Two micro-batches forward and backward through modules one after the other."""
    torch.manual_seed(7)
    outputs = []
    for part in (x, x + 1):
        values = (part,)
        for module in modules:
            values = module(*values)
            values = values if isinstance(values, tuple) else (values,)
        outputs.append(values[0])
        outputs[-1].square().mean().backward()
    return outputs


def check(name, names, size=32):
    whole = zoo.build(name, classes=5, seed=0).train()
    cut = splits.split(copy.deepcopy(whole), names)
    modules = [stage.module for stage in cut]
    assert len(cut) == len(names) + 1
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(step(modules, x), step([whole], x), strict=True):
        assert torch.equal(mine, theirs)
    gradients = {key: weight.grad for module in modules for key, weight in module.named_parameters()}
    for key, weight in whole.named_parameters():
        assert torch.equal(gradients.pop(key), weight.grad), key
    assert not gradients
    state = {key: value for module in modules for key, value in module.state_dict().items()}
    assert sum(len(module.state_dict()) for module in modules) == len(whole.state_dict())
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    for module in (*modules, whole):
        module.eval()  # dropout, drop path and batch norm change with it
    with torch.no_grad():
        values = (x,)
        for module in modules:
            values = module(*values)
            values = values if isinstance(values, tuple) else (values,)
        assert torch.equal(values[0], whole(x))


@pytest.mark.run
@pytest.mark.parametrize(("name", "names"), QUICK.items())
def test_stages_equal_the_whole_model(name, names):
    check(name, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_stages_equal_the_whole_model_for_the_rest_of_the_zoo(name):
    legal = [each for each in legal_names(zoo.build(name, classes=5, seed=0)) if "/" in each and "drop" not in each]
    check(name, [legal[len(legal) // 5], legal[len(legal) // 2], legal[4 * len(legal) // 5]])


def test_stages_equal_the_whole_model_for_a_model_of_timm():
    check("timm:regnetx_002", ["s2/b1/conv2", "s3/b2"])


@pytest.mark.run
def test_model_can_be_split_at_every_layer_but_the_first():
    model = zoo.build("resnet8-cifar", classes=5, seed=0)
    first, *names = legal_names(model)
    assert first == "conv1"
    assert len(names) > 30
    for name in names:
        stages = splits.split(model, [name])
        assert sum(len(list(stage.module.parameters())) for stage in stages) == len(list(model.parameters()))


MISTAKES = {
    "layer9/0": "'layer9/0' is not a layer; the nearest are 'layer3/0', 'layer2/0', 'layer1/0'",
    "conv1": "'conv1' is the model's first layer, and a split names the first layer of a later stage",
    "layer2/0 layer1/0": "'layer1/0' runs before 'layer2/0' does, which is given before it; expected",
    "layer2 layer2/0": "'layer2/0' starts where 'layer2' does, which is given before it; expected one",
    "layer2/0/bn1 layer2/0/relu1 layer2/0/conv2": "the stage from 'layer2/0/relu1' to "
    "'layer2/0/relu1' would have no weights to train",
}


@pytest.mark.parametrize(("names", "message"), MISTAKES.items())
def test_wrong_split_is_answered_with_valid_ones(names, message):
    with pytest.raises(ConfigError) as refused:
        splits.split(zoo.build("resnet8-cifar", classes=5, seed=0), names.split())
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


COSTS = [5.0, 1.0, 1.0, 3.0, 1.0, 1.0, 2.0, 2.0]


def scaled(count):
    return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(count)))


@pytest.mark.parametrize("stages", range(2, 9))
def test_balance_minimises_the_slowest_stage(stages):
    found = splits.balanced(COSTS, [True] * 8, at=range(1, 8), count=stages)

    def slowest(places):
        return max(sum(COSTS[begin:end]) for begin, end in itertools.pairwise([0, *places, len(COSTS)]))

    every = [slowest(places) for places in itertools.combinations(range(1, 8), stages - 1)]
    assert len(found) == stages - 1
    assert slowest(found) == min(every)


def test_every_balanced_stage_has_weights():
    alone = [number in (0, 5) for number in range(8)]
    assert splits.balanced(COSTS, alone, at=range(1, 8), count=2) == (3,)
    assert splits.balanced(COSTS, alone, at=range(6, 8), count=2) is None
    assert splits.balanced(COSTS, alone, at=range(1, 8), count=3) is None


def test_balanced_splits_are_valid_and_leave_the_model_unchanged():
    model = zoo.build("resnet8-cifar", classes=5, seed=0)
    names = splits.balance(model, 4, example=torch.zeros(2, 3, 16, 16))
    assert len(splits.split(model, names)) == 4
    assert model.training
    assert int(model.bn1.num_batches_tracked) == 0


def test_more_stages_than_possible_splits_are_refused():
    with pytest.raises(ConfigError, match="got auto:4, expected at most auto:3 for this model"):
        splits.balance(scaled(3), 4, example=torch.zeros(1, 3, 8, 8))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.mean() > 0 else self.b(-x)


class Moody(Branching):
    def forward(self, x):
        x = self.b(self.a(x))
        return nn.functional.dropout(x, 0.5, self.training)


class Twice(Branching):
    def forward(self, x):
        return self.a(self.b(self.a(x)))


class Idle(Branching):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.a(x))


REFUSED = {
    Branching: "Branching cannot be traced: ",
    Moody: "Moody behaves differently in training outside of its layers",
    Twice: "'a.weight' is used by stage 0 and by stage 1; expected a split elsewhere",
    Idle: "'c.weight' is not used in the forward pass, so no stage has it",
}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items())
def test_model_that_cannot_be_split_is_refused_in_one_line(kind, message):
    with pytest.raises(ConfigError) as refused:
        splits.split(kind(), ["b"])
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
