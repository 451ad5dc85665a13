"""Models equal timm's and torchvision's, under the names of the originals."""

from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision.models as reference
from torch import nn
from torchvision.models.resnet import Bottleneck

from falconet.errors import ConfigError
from falconet.models import zoo

TORCHVISION = {
    "resnet18": reference.resnet18,
    "resnet34": reference.resnet34,
    "resnet50": reference.resnet50,
    "resnet101": reference.resnet101,
    "resnet152": reference.resnet152,
    "resnext50": reference.resnext50_32x4d,
    "resnext101": partial(reference.ResNet, Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4),
    "efficientnet-b0": reference.efficientnet_b0,
    "efficientnet-b1": reference.efficientnet_b1,
    "efficientnet-b2": reference.efficientnet_b2,
    "efficientnet-b3": reference.efficientnet_b3,
    "efficientnet-b4": reference.efficientnet_b4,
    "efficientnet-b5": reference.efficientnet_b5,
    "efficientnet-b6": reference.efficientnet_b6,
    "efficientnet-b7": reference.efficientnet_b7,
    "mobilenet": reference.mobilenet_v2,
    "mobilenet-v3-small": reference.mobilenet_v3_small,
    "mobilenet-v3-large": reference.mobilenet_v3_large,
}

EFFICIENTNETS = [f"efficientnet-b{size}" for size in range(8)]


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.build(name, classes=options.pop("classes", 1000), seed=0, **options)


def random_tensor(like):
    """Plausible weights for any shape, a running variance above zero among them; float64 hides no difference."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.ndim == 1:
        return torch.rand(like.shape, dtype=torch.float64) + 0.5
    return torch.randn(like.shape).double() / like[0].numel() ** 0.5


def norm_eps(model):
    return {layer.eps for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)}


# Deeper and wider by the same formulas; their parameters and layers are compared without computing, too.
LARGE = {"efficientnet-b5", "efficientnet-b6", "efficientnet-b7", "resnet152", "resnext101"}


@pytest.mark.run
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in TORCHVISION])
def test_logits_and_parameters_equal_torchvisions(name):
    with torch.device("meta"):
        theirs = TORCHVISION[name](num_classes=7)
    (eps,) = norm_eps(theirs)  # torchvision's differs from timm's in some
    model = on_meta(name, classes=7, norm_eps=eps)
    assert zoo.count_parameters(model) == zoo.count_parameters(theirs)

    torch.manual_seed(1)
    state = {key: random_tensor(value) for key, value in model.state_dict().items()}
    shapes = [value.shape for value in theirs.state_dict().values()]
    values = [value.reshape(shape) for value, shape in zip(state.values(), shapes, strict=True)]  # 1 x 1 or linear
    model.load_state_dict(state, assign=True)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), values, strict=True)), assign=True)

    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    with torch.inference_mode():
        logits, expected = model.eval()(images), theirs.eval()(images)
    assert expected.std(0).min() > 0
    torch.testing.assert_close(logits / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-10)


TIMM = {
    "resnet18": "resnet18",
    "efficientnet-b0": "efficientnet_b0",
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "timm:regnety_002": "regnety_002",
}


@pytest.mark.parametrize(("name", "timm_name"), TIMM.items())
def test_logits_equal_timms_with_the_same_state_dict(name, timm_name):
    model = zoo.build(name, classes=5, seed=0).eval()
    timms = timm.create_model(timm_name, num_classes=5).eval()
    timms.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model.double()(images), timms.double()(images), rtol=1e-10, atol=1e-10)


DROPOUT = {
    **dict(zip(EFFICIENTNETS, (0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5), strict=True)),
    "mobilenet": 0.2,
    "mobilenet-v3-small": 0.2,
    "mobilenet-v3-large": 0.2,
}


@pytest.mark.run
@pytest.mark.parametrize(("name", "rate"), DROPOUT.items())
def test_dropout_before_the_classifier_is_a_module(name, rate):
    model = on_meta(name)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [rate]
    assert model.drop_rate == 0  # else timm would drop a second time


@pytest.mark.parametrize("name", ["resnet8-cifar", "mobilenet-v3-small", "timm:regnety_002"])
def test_weights_depend_only_on_the_seed(name):
    first = zoo.build(name, classes=2, seed=5).state_dict()
    torch.rand(3)
    again = zoo.build(name, classes=2, seed=5).state_dict()
    other = zoo.build(name, classes=2, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_building_leaves_the_global_generator_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    zoo.build("resnet8-cifar", classes=2, seed=5)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "resnet8-cifar"])
def test_model_is_fp32_on_the_cpu_and_channels_last(name):
    parameters = list(zoo.build(name, classes=2, seed=0, input_image_padding=True).parameters())
    assert {(each.dtype, each.device.type) for each in parameters} == {(torch.float32, "cpu")}
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in parameters if each.ndim == 4)


SIDES = {
    **dict(zip(EFFICIENTNETS, (224, 240, 260, 300, 380, 456, 528, 600), strict=True)),
    "resnet50": 224,
    "mobilenet-v3-large": 224,
    "resnet110-cifar": 32,
    "timm:resnet50": 224,
    "timm:inception_v3": 299,
    "timm:tf_efficientnet_b4": 380,
    "timm:convnext_base.fb_in22k_ft_in1k_384": 384,
}


@pytest.mark.parametrize(("name", "side"), SIDES.items())
def test_image_size_is_the_one_the_model_was_designed_for(name, side):
    assert zoo.image_size(name) == side


def test_names_are_the_originals_and_the_cifar_networks():
    cifar = tuple(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110))
    ours = {"resnet10", "resnet14", "resnet26", "resnext14", "resnext26", "resnext152", "efficientnet-cifar"}
    bottlenecks = {f"resnet{depth}-cifar" for depth in (11, 29, 38, 47, "56b", 65)}
    grouped = {f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)}
    others = {"squeezenet", "squeezenet-cifar", "speednet8-cifar", "speednet11-cifar"}
    assert set(zoo.names()) == {*TORCHVISION, *ours, *cifar, *bottlenecks, *grouped, *others}


def test_running_statistics_are_not_counted_as_parameters():
    assert zoo.count_parameters(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) == 3 * 4 + 4 + 2 * 4


MISTAKES = {
    "resnet5O": "'resnet5O' is not a model; did you mean 'resnet50'?",
    "efficientnet_b3": "'efficientnet_b3' is not a model; did you mean 'efficientnet-b3'?",
    "resnet20": "'resnet20' is not a model; did you mean 'resnet20-cifar'?",
    "convnext_tiny": "'convnext_tiny' is not a model; did you mean 'timm:convnext_tiny'?",
    "tf_efficientnet_lite0": "'tf_efficientnet_lite0' is not a model; did you mean 'timm:tf_efficientnet_lite0'?",
    "xyz": "'xyz' is not a model",
    "timm:resnet5O": "'timm:resnet5O' is not a model of timm; did you mean 'timm:resnet50'?",
    "timm:resnext": "'timm:resnext' is not a model of timm; did you mean 'timm:resnext26ts'?",
    "timm:resnet50.none": "'timm:resnet50.none' is not a model of timm; did you mean 'timm:resnet50'?",
}


@pytest.mark.parametrize(("name", "message"), MISTAKES.items())
@pytest.mark.parametrize("ask", [zoo.image_size, partial(zoo.build, classes=2, seed=0)], ids=["image_size", "build"])
def test_unknown_model_is_answered_with_the_nearest(ask, name, message):
    with pytest.raises(ConfigError) as caught:
        ask(name)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["timm:hf-hub:a/b", "timm:hf_hub:a/b", "timm:local-dir:a", "timm:"])
def test_model_that_timm_would_download_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}' is not a model of timm"):
        zoo.build(name, classes=2, seed=0)


def test_model_for_oblong_images_is_refused(monkeypatch):
    oblong = SimpleNamespace(input_size=(3, 1024, 768))  # as timm 1.0.30 has some, and 1.0.29 has none
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: oblong)
    with pytest.raises(ConfigError, match=r"takes images of 1024 x 768; expected a model for square images"):
        zoo.image_size("timm:resnet18d")


def test_wide_head_has_the_originals_parameters():
    """Counted from its rows by hand: nothing but the head differs from timm's, which has 2,542,856 and 5,483,032."""
    small = zoo.count_parameters(zoo.build("mobilenet-v3-small", classes=1000, seed=0, mobilenet_wide_head=True))
    assert small == 2_542_856 - (576 * 1024 + 1024 + 1024 * 1000) + 576 * 1280 + 1280 * 1000
    large = zoo.count_parameters(zoo.build("mobilenet-v3-large", classes=1000, seed=0, mobilenet_wide_head=True))
    assert large == 5_483_032 - 1280
    model = zoo.build("mobilenet-v3-small", classes=5, seed=0, mobilenet_wide_head=True)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
