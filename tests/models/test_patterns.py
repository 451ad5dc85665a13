"""Which weights a regular expression means, and how one that means none is answered."""

import pytest

from falconet.errors import ConfigError
from falconet.models.freezing import matching

NAMES = ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer1.0.bn1.bias", "fc.weight", "fc.bias"]

MEANT = {
    ("fc",): {"fc.weight", "fc.bias"},
    ("layer1",): {"layer1.0.conv1.weight", "layer1.0.bn1.bias"},
    ("layer1/0/conv1",): {"layer1.0.conv1.weight"},
    (".*bias",): {"bn1.bias", "layer1.0.bn1.bias", "fc.bias"},
    (".*bn1/bias",): {"bn1.bias", "layer1.0.bn1.bias"},
    ("bn1",): {"bn1.weight", "bn1.bias"},  # of the model itself alone: a pattern is for a whole name
    ("conv1", "fc/bias"): {"conv1.weight", "fc.bias"},
    (): set(),
}


@pytest.mark.parametrize(("patterns", "expected"), MEANT.items())
def test_a_pattern_means_weights_by_their_names_or_their_layers(patterns, expected):
    assert matching(NAMES, patterns, option="--x") == expected


WRONG = {
    "layer4": "--x: 'layer4' matches no layer and no weight; the nearest are 'layer1', 'layer1/0'",
    ".*/conv9/.*": "matches no layer and no weight; the nearest are ",
    "(": "--x: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
}


@pytest.mark.parametrize(("pattern", "message"), WRONG.items())
def test_one_that_means_nothing_is_refused_with_the_nearest_names(pattern, message):
    with pytest.raises(ConfigError) as refused:
        matching(NAMES, ["fc", pattern], option="--x")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
