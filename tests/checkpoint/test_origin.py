"""What a weights file says, or its names show, about the model that it is for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from falconet.checkpoint.foreign import WeightsFile
from falconet.checkpoint.origin import find_origin, own_origin
from falconet.models import zoo


def renamed(name, classes=10, **options):
    """Weights of ours as akamaster's program has them."""
    state = zoo.build(name, classes=classes, seed=0, **options).state_dict()
    return {key.replace("fc.", "linear."): tensor for key, tensor in state.items() if "num_batches" not in key}


def options_of(weights, model=None):
    return find_origin(WeightsFile(Path("w.pt"), weights, {}), model=model).options


def test_akamasters_cifar_networks_pad_on_both_sides():
    weights = renamed("resnet20-cifar")
    assert options_of(weights) == options_of(weights, "resnet20-cifar") == {"shortcut-padding": "both"}
    assert options_of(weights, "resnet50") == options_of(weights, "mobilenet") == {}


def test_other_cifar_networks_are_not_taken_for_them():
    assert options_of(zoo.build("resnet20-cifar", classes=10, seed=0).state_dict()) == {}, "ours"
    assert options_of(renamed("resnet20-cifar", shortcut_type="B")) == {}, "projections have no zero channels"
    assert options_of(renamed("resnet29-cifar")) == {}, "bottlenecks"


@pytest.mark.parametrize(
    ("name", "eps"),
    [("mobilenet_v2", None), ("mobilenet_v3_small", 1e-3), ("efficientnet_b0", None), ("efficientnet_b5", 1e-3)],
)
def test_torchvisions_epsilon_is_known(name, eps):
    import torchvision

    with torch.device("meta"):
        model = getattr(torchvision.models, name)(weights=None)
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    assert options_of(model.state_dict()) == ({} if eps is None else {"norm-eps": str(eps)})
    assert norm.eps == (eps or 1e-5)


ARGUMENTS = {
    "a network of photos": (
        {"model": "resnet50", "data": "imagenet", "norm_type": "batch", "norm_eps": 1e-5, "lr": 0.1},
        {"model": "resnet50", "norm-type": "batch", "data": "imagenet"},
    ),
    "group norm": (
        {"model": "resnet18", "norm_type": "group", "norm_eps": 1e-6, "norm_num_groups": 8, "data": "generated"},
        {"model": "resnet18", "norm-type": "group", "norm-eps": "1e-06", "norm-num-groups": "8"},
    ),
    "strided group norm": (
        {"model": "resnet18", "norm_type": "group", "enable_fast_groupnorm": True},
        {"model": "resnet18", "norm-type": "group", "norm-grouping": "strided"},
    ),
    "a grouped EfficientNet": (
        {"model": "efficientnet-b4", "efficientnet_expand_ratio": 4, "efficientnet_group_dim": 16},
        {"model": "efficientnet-b4", "efficientnet-expand-ratio": "4", "efficientnet-group-dim": "16"},
    ),
    "unlike values": ({"model": "resnet50", "norm_type": ["x"], "data": 3}, {"model": "resnet50"}),
    "a model of another program": ({"model": "vit_base", "norm_type": "group"}, {}),
    "no text": ({"model": ["resnet50"]}, {}),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_beside_the_weights_become_options(case):
    arguments, expected = ARGUMENTS[case]
    file = WeightsFile(Path("w.pt"), {"w": torch.ones(1)}, arguments)
    assert find_origin(file, model=None).options == expected


def test_another_model_on_the_line_discards_the_arguments():
    file = WeightsFile(Path("w.pt"), {"w": torch.ones(1)}, {"model": "resnet50", "norm_type": "group"})
    assert find_origin(file, model="resnet18").options == {}
    assert find_origin(file, model="resnet50").options == {"model": "resnet50", "norm-type": "group"}


def test_a_run_gives_what_it_stated_about_its_model():
    stated = {
        "lr": ("0.1", "command line"),
        "norm-eps": ("0.01", "pretrained weights"),
        "bottleneck-stride": ("1x1", "command line"),
        "zero-init": ("last", "config photos"),
        "padding": ("symmetric", "default"),
        "model": ("resnet50", "config photos"),
    }
    config = {name: {"value": value, "source": source} for name, (value, source) in stated.items()}
    run = SimpleNamespace(model="resnet50", config=config)
    expected = {"model": "resnet50", "norm-eps": "0.01", "bottleneck-stride": "1x1"}
    assert own_origin(run, model=None).options == own_origin(run, model="resnet50").options == expected
    assert own_origin(run, model="resnet18").options == {}


def test_the_line_about_it_leaves_out_what_the_command_line_sets():
    origin = find_origin(
        WeightsFile(Path("w.pt"), {"w": torch.ones(1)}, {"model": "resnet50", "norm_type": "group"}), model=None
    )
    everywhere = {"model": "pretrained weights", "norm-type": "pretrained weights"}
    assert origin.line(everywhere) == "w.pt was trained with: --model resnet50 --norm-type group"
    assert origin.line(everywhere | {"model": "command line"}) == "w.pt was trained with: --norm-type group"
    assert origin.line({}) is None
