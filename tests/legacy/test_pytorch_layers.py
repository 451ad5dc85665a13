"""Names of the PyTorch program's layers, and regular expressions over them, lead to layers that our models have."""

import pytest
import torch
from torchvision.models import mobilenet_v2, resnet50

from falconet.legacy.layer_names import _names, mobilenet_layer, recomputed_layers
from falconet.legacy.pytorch import MODELS
from falconet.models import zoo


def paths(model):
    return {path.replace(".", "/") for path, _ in model.named_modules()}


@pytest.mark.parametrize("model", MODELS)
def test_every_name_leads_to_a_layer_of_ours(model):
    with torch.device("meta"):
        ours = paths(zoo.build(model, classes=10, seed=0))
    assert {layer for layers in _names(model).values() for layer in layers} <= ours


@pytest.mark.parametrize(("model", "make"), [("resnet50", resnet50), ("mobilenet", mobilenet_v2)])
def test_the_names_are_torchvisions_but_for_additions(model, make):
    with torch.device("meta"):
        theirs = paths(make())
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


@pytest.mark.parametrize(("model", "rule", "layers"), KEPT)
def test_a_rule_of_what_is_kept(model, rule, layers):
    assert list(recomputed_layers(rule, model=model)) == layers


SPLITS = [
    ("mobilenet", "features/7", "blocks/3/0"),
    ("mobilenet", "features/18/0", "conv_head"),
    ("mobilenet-v3-large", "mb_block/7/seq/0", "blocks/3/1"),
    ("mobilenet-v3-large", "mb_block/7/seq/3", "blocks/3/1/conv_dw"),
    ("mobilenet-v3-large", "last_block/4", "conv_head"),
    ("mobilenet-v3-small", "output", "classifier"),
    ("mobilenet-v3-small", "nowhere", None),
]


@pytest.mark.parametrize(("model", "old", "new"), SPLITS)
def test_a_stage_of_a_mobilenet_begins_where_it_did(model, old, new):
    assert mobilenet_layer(old, model=model) == new
