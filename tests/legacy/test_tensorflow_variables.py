"""Variables of the TensorFlow program, by parts of their names, against the weights of the models themselves."""

import pytest

from falconet.legacy import tensorflow_variables
from falconet.legacy.tensorflow_variables import Network
from falconet.models import zoo
from falconet.models.freezing import STATISTICS, matching
from translations import wrong

NETWORKS = {
    "resnet10": Network("resnet", "10"),
    "resnet34": Network("resnet", "34"),
    "resnet50": Network("resnet", "50"),
    "resnext14": Network("resnext", "14"),
    "resnet20-cifar": Network("resnet", "20", cifar=True),
    "resnet29-cifar": Network("resnet", "29", cifar=True),
    "resnext29-cifar": Network("resnext", "29", cifar=True),
    "efficientnet-b0": Network("efficientnet", "B0"),
    "efficientnet-b3": Network("efficientnet", "B3"),
    "efficientnet-cifar": Network("efficientnet", "CIFAR"),
    "squeezenet": Network("squeezenet", "1.0"),
}


def names_of(model):
    statistics = [name for name, _ in model.named_buffers() if name.endswith(STATISTICS)]
    return [name.replace(".", "/") for name in (*dict(model.named_parameters()), *statistics)]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_of_a_model_has_its_variable(name):
    assert sorted(tensorflow_variables.weights_of(NETWORKS[name])) == sorted(
        names_of(zoo.build(name, classes=10, seed=0))
    )


@pytest.mark.parametrize(("batch_norm", "kind"), [(True, "batch"), (False, "group")])
def test_every_weight_of_a_proxied_model_has_its_variable(batch_norm, kind):
    network = Network("efficientnet", "B0", batch_norm=batch_norm, proxied=True)
    model = zoo.build("efficientnet-b0", classes=10, seed=0, norm_type=kind, norm_num_groups=4, proxy_norm=True)
    assert sorted(tensorflow_variables.weights_of(network)) == sorted(names_of(model))


RESNET = Network("resnet", "50")
GROUPS = Network("resnet", "50", batch_norm=False)
EFFICIENT = Network("efficientnet", "B0", batch_norm=False)
PROXIED = Network("efficientnet", "B0", batch_norm=False, proxied=True)
SQUEEZE = Network("squeezenet", "1.0")
MEANT = [  # a network, parts of names as the original looked for them, the patterns they become
    (RESNET, ["fc1"], ("fc",)),
    (RESNET, ["fc1", "b4"], ("layer4", "fc")),
    (RESNET, ["b3/0"], ("layer3/0",)),
    (RESNET, ["b0"], ("conv1", "bn1")),
    (RESNET, ["b2/3/2/conv"], ("layer2/3/conv2",)),
    (RESNET, ["b2/0/p/batch_norm/gamma"], ("layer2/0/downsample/1/weight",)),
    (RESNET, ["batch_norm"], (".*bn1", ".*bn2", ".*bn3", ".*downsample/1")),
    (RESNET, ["beta"], (".*bn1/bias", ".*bn2/bias", ".*bn3/bias", ".*downsample/1/bias")),
    (RESNET, ["conv/kernel"], (".*conv1", ".*conv2", ".*conv3", ".*downsample/0")),
    (RESNET, ["stage4/unit3", "fc1"], ("layer4/2", "fc")),  # SDK 2.5's names
    (RESNET, ["dense/bias"], ("fc/bias",)),
    (GROUPS, ["GroupNorm/beta"], (".*bn1/bias", ".*bn2/bias", ".*bn3/bias", ".*downsample/1/bias")),
    (EFFICIENT, ["Top"], ("conv_head", "bn2", "classifier")),
    (EFFICIENT, ["block7a", "logits"], ("blocks/6", "classifier")),
    (EFFICIENT, ["block2a/SE"], ("blocks/1/0/se",)),
    (EFFICIENT, ["block1a/c"], ("blocks/0/0/conv_pw", "blocks/0/0/bn2")),
    (EFFICIENT, ["SE/1"], (".*conv_reduce",)),
    (PROXIED, ["proxy"], (".*act",)),
    (PROXIED, ["block1a/b"], ("blocks/0/0/conv_dw", "blocks/0/0/bn1")),
    (PROXIED, ["gamma"], (".*bn3", "blocks/0/0/bn2")),
    (SQUEEZE, ["fire3"], ("features/4",)),
    (SQUEEZE, ["fire9", "finalconv/conv/conv2d"], ("features/12", "classifier")),
    (SQUEEZE, ["fire2e_3"], ("features/3/expand3x3",)),
    (Network("squeezenet", "1.0", cifar=True), ["dense"], ("classifier",)),
]


def test_parts_of_variables_names_become_few_patterns():
    def patterns(case):
        network, fragments = case
        found = tensorflow_variables.find(network, fragments)
        assert found.unknown == ()
        return tensorflow_variables.patterns(found.weights, every=tensorflow_variables.weights_of(network))

    assert wrong([((network, fragments), expected) for network, fragments, expected in MEANT], patterns) == []


@pytest.mark.parametrize("fragments", [["bias"], ["gamma", "2/conv"], ["moving_"], ["kernel"]])
@pytest.mark.parametrize("name", ["resnet10", "resnet29-cifar", "efficientnet-b0"])
def test_the_patterns_match_the_chosen_weights_of_the_model_and_no_others(name, fragments):
    network = NETWORKS[name]
    names = names_of(zoo.build(name, classes=10, seed=0))
    # By hand: the original asked `fragment in variable.name`.
    chosen = {
        ours
        for theirs, ours in tensorflow_variables._variables(network, tensorflow_variables._RELEASES[0])
        if any(fragment in theirs for fragment in fragments)
    }
    found = tensorflow_variables.find(
        network, [fragment for fragment in fragments if fragment != "b2/1" or name != "efficientnet-b0"]
    )
    if not found.unknown:
        patterns = tensorflow_variables.patterns(found.weights, every=tensorflow_variables.weights_of(network))
        dotted = matching([each.replace("/", ".") for each in names], patterns, option="--trainable")
        assert {each.replace(".", "/") for each in dotted} == chosen


def test_an_unknown_fragment_is_answered():
    assert tensorflow_variables.find(RESNET, ["fc1", "fc2"]).unknown == ("fc2",)
    assert tensorflow_variables.meant(RESNET, "fc2") == "; did you mean 'fc1'?"
    assert tensorflow_variables.meant(RESNET, "batch_norm/bta") == "; did you mean 'batch_norm/beta'?"
    assert tensorflow_variables.meant(EFFICIENT, "zzz").startswith(
        "; expected a part of a name such as all/block0/conv/conv2d/kernel"
    )
