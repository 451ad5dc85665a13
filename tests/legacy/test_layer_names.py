"""Layer names of the originals, and regular expressions over them, become layers of our models."""

import re

import pytest
import torch
from torchvision.models import mobilenet_v2, resnet50

from falconet.errors import ConfigError
from falconet.legacy.layer_names import (
    _names,
    legal_splits,
    mobilenet_layer,
    pytorch_layer,
    recomputed_layers,
    tensorflow_layer,
)
from falconet.legacy.pytorch_training import MODELS
from falconet.models import zoo
from translations import wrong


def layers(name):
    with torch.device("meta"):
        return {path.replace(".", "/") for path, _ in zoo.build(name, classes=10, seed=0).named_modules()}


PYTORCH = [
    ("resnet50", "layer2/block3/bn", "layer2/3/bn1"),
    ("resnet50", "layer1/conv", "layer1/0/conv1"),
    ("resnet50", "layer0", "conv1"),
    ("resnet50", "layer3/0", "layer3/0"),
    ("resnet50", "avgpool", "global_pool"),
    ("resnet50", "layer4/0/downsample_0", "layer4/0/downsample/0"),
    ("resnet50", "add", "layer1/0/act3"),
    ("resnet50", "add_13", "layer4/0/act3"),  # 3 + 4 + 6 blocks before the fourth layer
    ("resnet18", "add_7", "layer4/1/act2"),
    ("efficientnet-b4", "add_1", "blocks/1/1"),  # add is in stage 0, which has 2 blocks
    ("efficientnet-b4", "add_3", "blocks/1/3"),
    ("efficientnet-b4", "blocks/3/0/bn2", "blocks/3/0/bn2"),
    ("mobilenet-v3-large", "mb_block/2/seq/0", "blocks/1/1"),
    ("mobilenet-v3-large", "mb_block/7/seq/0", "blocks/3/1"),
    ("mobilenet-v3-large", "mb_block/11/seq/0", "blocks/4/1"),
    ("mobilenet-v3-small", "mb_block/10/seq/0", "blocks/4/2"),
    ("mobilenet-v3-large", "first_block/0", "conv_stem"),
]


@pytest.mark.run
def test_layers_of_the_pytorch_program_are_layers_of_ours():
    cases = [((model, old), new) for model, old, new in PYTORCH]
    assert wrong(cases, lambda case: pytorch_layer(case[1], model=case[0])) == []
    known = {model: layers(model) for model, *_ in PYTORCH}
    assert [(model, new) for model, _, new in PYTORCH if new not in known[model]] == []


TENSORFLOW = [
    ("resnet", "50", "b1/2/relu", "layer1/2/act3"),
    ("resnet", "50", "stage1/unit3/relu", "layer1/2/act3"),
    ("resnet", "50", "b3/0/relu", "layer3/0/act3"),
    ("resnet", "50", "b3/5", "layer3/5"),
    ("resnet", "18", "b4/1/relu", "layer4/1/act2"),
    ("resnext", "101", "b3/3/relu", "layer3/3/act3"),
    ("efficientnet", "B0", "block2a/SE", "blocks/1/0/se"),
    ("efficientnet", "B0", "block1a/c", "blocks/0/0/conv_pw"),
    ("efficientnet", "B0", "block4a", "blocks/3/0"),
    ("efficientnet", "B0", "block5c", "blocks/4/2"),
    ("efficientnet", "B4", "block6c", "blocks/5/2"),
    ("efficientnet", "B0", "Top", "conv_head"),
    ("squeezenet", "1.0", "fire4", "features/5"),
    ("squeezenet", "1.0", "fire5", "features/7"),
    ("squeezenet", "1.0", "fire9", "features/12"),
]


def test_splits_of_the_tensorflow_program_are_layers_of_ours():
    cases = [((family, size, old), new) for family, size, old, new in TENSORFLOW]
    assert wrong(cases, lambda case: tensorflow_layer(case[2], family=case[0], size=case[1])) == []


FAMILIES = {
    "resnet18": ("resnet", "18"),
    "resnet26": ("resnet", "26"),
    "resnet50": ("resnet", "50"),
    "resnext101": ("resnext", "101"),
    "efficientnet-b0": ("efficientnet", "B0"),
    "efficientnet-b3": ("efficientnet", "B3"),
    "efficientnet-b4": ("efficientnet", "B4"),
    "squeezenet": ("squeezenet", "1.0"),
}


@pytest.mark.parametrize(("model", "size"), FAMILIES.items())
def test_every_legal_split_is_a_layer_of_ours_and_every_block_can_be_split(model, size):
    splits = legal_splits(family=size[0], size=size[1])
    known = layers(model)
    assert set(splits.values()) <= known
    pattern = {"res": r"layer\d/\d+", "squ": r"features/([3-5]|[7-9]|10|12)", "eff": r"blocks/\d/\d+"}[model[:3]]
    blocks = {name for name in known if re.fullmatch(pattern, name)}
    covered = {"/".join(name.split("/")[: pattern.count("/") + 1]) for name in splits.values()}
    assert blocks <= covered


def test_the_splits_of_a_cifar_network_are_its_own():
    assert tensorflow_layer("b2/0/relu", family="resnet", size="20", cifar=True) == "layer2/0/relu2"
    assert set(legal_splits(family="resnet", size="20", cifar=True).values()) <= layers("resnet20-cifar")
    assert tensorflow_layer("b2/2/relu", family="resnet", size="29", cifar=True) == "layer2/2/relu3"
    assert set(legal_splits(family="resnext", size="29", cifar=True).values()) <= layers("resnext29-cifar")
    assert set(legal_splits(family="resnet", size="56", cifar=True).values()) <= layers("resnet56b-cifar")
    assert set(legal_splits(family="efficientnet", size="CIFAR").values()) <= layers("efficientnet-cifar")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tensorflow_layer("b1/3/relu", family="resnet", size="50"),
            "--pipeline-splits: 'b1/3/relu' is not a split of resnet 50; did you mean",
        ),
        (lambda: pytorch_layer("add_16", model="resnet50"), "add_16: resnet50 has 16 additions, add to add_15"),
        (
            lambda: pytorch_layer("mb_block/15/seq/0", model="mobilenet-v3-large"),
            "mb_block/15/seq/0: mobilenet-v3-large has 15 blocks",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_known_ones(call, message):
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(message)


@pytest.mark.run
@pytest.mark.parametrize("model", MODELS)
def test_every_name_becomes_a_layer_of_ours(model):
    assert {layer for found in _names(model).values() for layer in found} <= layers(model)


@pytest.mark.parametrize(("model", "make"), [("resnet50", resnet50), ("mobilenet", mobilenet_v2)])
def test_the_names_are_torchvisions_except_for_additions(model, make):
    with torch.device("meta"):
        theirs = {path.replace(".", "/") for path, _ in make().named_modules()}
    assert {name for name in _names(model) if not name.startswith("add")} <= theirs


KEPT = [
    ("resnet18", "add.*", [f"layer{stage}/{block}/act2" for stage in range(1, 5) for block in range(2)]),
    ("resnet50", "add_1|add_3", ["layer1/1/act3", "layer2/0/act3"]),
    ("resnet50", ".*conv.*", [".*conv.*"]),  # the example of the documents: the names are the same
    ("resnet50", "layer2/0/relu", ["layer2/0/act1", "layer2/0/act2", "layer2/0/act3"]),  # one module, called thrice
    ("resnet50", "(avgpool|fc)", ["(avgpool|fc)", "global_pool"]),
    ("resnet50", "(", ["("]),  # refused where it is used
    ("efficientnet-b0", "add_1", ["blocks/2/1"]),
    ("mobilenet", "features/2/conv/1/0", ["blocks/1/0/conv_dw"]),
    ("mobilenet", "add", ["blocks/1/1"]),  # the first block with a shortcut
    ("mobilenet-v3-small", "mb_block/[12]/seq/0", ["blocks/1/0/conv_pw", "blocks/1/1/conv_pw"]),
    ("mobilenet-v3-large", "mb_block/3/seq/6", ["blocks/2/0/se"]),
]


def test_rules_of_recomputation_name_layers_of_ours():
    cases = [((model, rule), kept) for model, rule, kept in KEPT]
    assert wrong(cases, lambda case: list(recomputed_layers(case[1], model=case[0]))) == []


SPLITS = [
    ("mobilenet", "features/7", "blocks/3/0"),
    ("mobilenet", "features/18/0", "conv_head"),
    ("mobilenet-v3-large", "mb_block/7/seq/0", "blocks/3/1"),
    ("mobilenet-v3-large", "mb_block/7/seq/3", "blocks/3/1/conv_dw"),
    ("mobilenet-v3-large", "last_block/4", "conv_head"),
    ("mobilenet-v3-small", "output", "classifier"),
    ("mobilenet-v3-small", "nowhere", None),
]


def test_stages_of_a_mobilenet_start_where_they_did():
    cases = [((model, old), new) for model, old, new in SPLITS]
    assert wrong(cases, lambda case: mobilenet_layer(case[1], model=case[0])) == []
