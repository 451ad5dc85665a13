"""`falconet models`: names, parameters and input sizes, against published numbers."""

import re

import pytest

from falconet.config.options import MODELS

# torchvision's figures; for CIFAR the networks of He et al. with parameterless shortcuts (0.27 and 1.7 million), whose
# convolutions, norms and head add up to these.
PUBLISHED = {
    "resnet18": (11_689_512, 224),
    "resnet50": (25_557_032, 224),
    "resnet152": (60_192_808, 224),
    "resnext101": (44_177_704, 224),
    "efficientnet-b0": (5_288_548, 224),
    "efficientnet-b4": (19_341_616, 380),
    "mobilenet-v3-large": (5_483_032, 224),
    "squeezenet": (1_248_424, 224),
    "resnet20-cifar": (269_722, 32),
    "resnet110-cifar": (1_727_962, 32),
}


@pytest.fixture
def table(falconet):
    answer = falconet("models")
    assert answer.code == 0, answer.err
    return {
        name: (int(parameters.replace(",", "")), int(size))
        for name, parameters, size in re.findall(r"^(\S+) +([\d,]+) +(\d+) x \3(?:  \S+)?$", answer.out, re.M)
    }


def test_every_model_is_listed_with_published_parameter_counts(table):
    assert list(table) == list(MODELS)
    assert {name: table[name] for name in PUBLISHED} == PUBLISHED


def test_models_names_published_weights(falconet):
    lines = falconet("models").out.splitlines()
    assert any(line.startswith("resnet50 ") and line.endswith("  resnet50.tv_in1k") for line in lines)
    assert any(line.startswith("resnet10 ") and line.endswith("224 x 224") for line in lines)


def test_models_takes_no_options(falconet):
    answer = falconet("models --data digits")
    assert answer.code == 2
    assert answer.err.startswith("falconet models: unknown option --data")
    assert answer.err.count("\n") == 1
