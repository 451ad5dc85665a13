"""The models are timm's and torchvision's own, under the names of the originals."""

from functools import partial

import pytest
import timm
import torch
import torchvision.models as reference
from torch import nn
from torchvision.models.resnet import Bottleneck

from falconet.errors import ConfigError
from falconet.models import zoo
from falconet.models.norms import Norm
from falconet.models.resnet import ResidualShape
from falconet.models.zoo import EfficientNetShape

ORIGINALS = EfficientNetShape(expand_ratio=4, group_dim=16)

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

# inventory 2.2: expand ratio 6 and group dim 1, expand ratio 4 and group dim 16.
EFFICIENTNET_COUNTS = {
    "efficientnet-b0": (5_288_548, 5_913_796),
    "efficientnet-b1": (7_794_184, 8_332_120),
    "efficientnet-b2": (9_109_994, 9_504_122),
    "efficientnet-b3": (12_233_232, 12_590_896),
    "efficientnet-b4": (19_341_616, 19_328_168),
    "efficientnet-b5": (30_389_784, 28_715_320),
    # The inventory has 39,825,464 for 56 channels in 3 groups of 18, which no convolution can be: ours are 2 of 28.
    "efficientnet-b6": (43_040_704, 39_825_464 + 3 * 3 * 56 * (28 - 18)),
    "efficientnet-b7": (66_347_960, 59_210_264),
}


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


@pytest.mark.parametrize("name", TORCHVISION)
def test_logits_and_parameters_are_those_of_torchvision(name):
    with torch.device("meta"):
        expected = TORCHVISION[name](num_classes=7)
    (eps,) = norm_eps(expected)  # torchvision's differs from timm's in some
    model = on_meta(name, classes=7, norm=Norm(eps=eps))
    assert zoo.count_parameters(model) == zoo.count_parameters(expected)

    torch.manual_seed(1)
    state = {key: random_tensor(value) for key, value in model.state_dict().items()}
    shapes = [value.shape for value in expected.state_dict().values()]
    values = [value.reshape(shape) for value, shape in zip(state.values(), shapes, strict=True)]  # 1 x 1 or linear
    model.load_state_dict(state, assign=True)
    expected.load_state_dict(dict(zip(expected.state_dict(), values, strict=True)), assign=True)

    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    with torch.inference_mode():
        logits, wanted = model.eval()(images), expected.eval()(images)
    assert wanted.std(0).min() > 0
    torch.testing.assert_close(logits / wanted.abs().max(), wanted / wanted.abs().max(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", EFFICIENTNET_COUNTS)
def test_an_efficientnet_has_the_originals_parameters_and_timms_layers(name):
    plain, grouped = EFFICIENTNET_COUNTS[name]
    model = on_meta(name)
    assert zoo.count_parameters(model) == plain
    assert zoo.count_parameters(on_meta(name, shape=ORIGINALS)) == grouped

    with torch.device("meta"):
        timms = timm.create_model(name.replace("-", "_"), drop_path_rate=0.2)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in timms.state_dict().items()}
    assert drop_rates(model) == drop_rates(timms)


def drop_rates(model):
    paths = {name: layer for name, layer in model.named_modules() if type(layer).__name__ == "DropPath"}
    assert paths
    return {name: layer.drop_prob for name, layer in paths.items()}


TIMM = {
    "resnet18": "resnet18",
    "efficientnet-b0": "efficientnet_b0",
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "timm:regnety_002": "regnety_002",
}


@pytest.mark.parametrize(("name", "timm_name"), TIMM.items())
def test_logits_are_timms_with_the_same_state_dict(name, timm_name):
    model = zoo.build(name, classes=5, seed=0).eval()
    timms = timm.create_model(timm_name, num_classes=5).eval()
    timms.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model.double()(images), timms.double()(images), rtol=1e-10, atol=1e-10)


def test_every_depthwise_convolution_of_a_grouped_efficientnet_is_grouped_and_it_runs():
    model = zoo.build("efficientnet-b3", classes=3, seed=0, shape=ORIGINALS).eval()
    depthwise = [layer for name, layer in model.named_modules() if name.endswith("conv_dw")]
    per_group = [layer.in_channels // layer.groups for layer in depthwise]
    assert per_group == [20, 24] + [16] * 24  # 40 and 24 channels are no multiples of 16
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_the_expand_ratio_widens_every_stage_after_the_first():
    model = on_meta("efficientnet-b0", shape=EfficientNetShape(expand_ratio=2))
    expands = [layer for name, layer in model.named_modules() if name.endswith("conv_pw") and "blocks.0." not in name]
    assert len(expands) == 15
    assert all(layer.out_channels == 2 * layer.in_channels for layer in expands)


DROPOUT = {
    **dict(zip(EFFICIENTNET_COUNTS, (0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5), strict=True)),
    "mobilenet": 0.2,
    "mobilenet-v3-small": 0.2,
    "mobilenet-v3-large": 0.2,
}


@pytest.mark.parametrize(("name", "rate"), DROPOUT.items())
def test_dropout_before_the_classifier_is_a_module(name, rate):
    model = on_meta(name)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [rate]
    assert model.drop_rate == 0  # else timm would drop a second time


def test_dropout_and_drop_path_act_in_training_alone():
    model = zoo.build("efficientnet-b0", classes=5, seed=0)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


LAST_NORMS = {"resnet18": (8, "bn2"), "resnet50": (16, "bn3"), "resnext50": (16, "bn3"), "resnet20-cifar": (7, "bn2")}
WIDENING = ("layer2.0.bn2", "layer3.0.bn2")  # of the CIFAR networks, whose shortcut pads with zeros


@pytest.mark.parametrize("norm", [Norm(), Norm(kind="group", groups=16)], ids=lambda norm: norm.kind)
@pytest.mark.parametrize(("name", "expected"), LAST_NORMS.items())
def test_the_last_norm_of_each_residual_block_alone_starts_at_zero(name, expected, norm):
    blocks, last = expected
    model = zoo.build(name, classes=2, seed=0, norm=norm)
    kind = nn.GroupNorm if norm.kind == "group" else nn.BatchNorm2d
    scales = {path: layer.weight for path, layer in model.named_modules() if isinstance(layer, kind)}
    zero = [path for path, scale in scales.items() if not scale.any()]
    widening = WIDENING if name.endswith("-cifar") else ()
    lasts = [path for path in scales if path.startswith("layer") and path.endswith(f".{last}")]
    assert zero == [path for path in lasts if path not in widening]
    assert len(zero) == blocks
    assert all((scale == 1).all() for path, scale in scales.items() if path not in zero)


@pytest.mark.parametrize("name", ["resnet8-cifar", "mobilenet-v3-small", "timm:regnety_002"])
def test_the_weights_depend_on_the_seed_and_nothing_else(name):
    first = zoo.build(name, classes=2, seed=5).state_dict()
    torch.rand(3)
    again = zoo.build(name, classes=2, seed=5).state_dict()
    other = zoo.build(name, classes=2, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    zoo.build("resnet8-cifar", classes=2, seed=5)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "resnet8-cifar"])
def test_a_model_is_fp32_on_the_cpu_and_channels_last(name):
    parameters = list(zoo.build(name, classes=2, seed=0, variant=zoo.Variant(padded_input=True)).parameters())
    assert {(each.dtype, each.device.type) for each in parameters} == {(torch.float32, "cpu")}
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in parameters if each.ndim == 4)


SIDES = {
    **dict(zip(EFFICIENTNET_COUNTS, (224, 240, 260, 300, 380, 456, 528, 600), strict=True)),
    "resnet50": 224,
    "mobilenet-v3-large": 224,
    "resnet110-cifar": 32,
    "timm:resnet50": 224,
    "timm:inception_v3": 299,
    "timm:tf_efficientnet_b4": 380,
    "timm:convnext_base.fb_in22k_ft_in1k_384": 384,
}


@pytest.mark.parametrize(("name", "side"), SIDES.items())
def test_the_image_size_is_the_one_the_model_was_designed_for(name, side):
    assert zoo.image_size(name) == side


def test_the_names_are_the_originals_and_the_cifar_residual_networks():
    cifar = tuple(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110))
    ours = {"resnet10", "resnet14", "resnet26", "resnext14", "resnext26", "resnext152", "efficientnet-cifar"}
    bottlenecks = {f"resnet{depth}-cifar" for depth in (11, 29, 38, 47, "56b", 65)}
    grouped = {f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)}
    assert set(zoo.names()) == {*TORCHVISION, *ours, *cifar, *bottlenecks, *grouped, "squeezenet", "squeezenet-cifar"}


def test_parameters_are_counted_without_running_statistics():
    assert zoo.count_parameters(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) == 3 * 4 + 4 + 2 * 4


MISTAKES = {
    "resnet5O": "--model: 'resnet5O' is not a model; did you mean 'resnet50'?",
    "efficientnet_b3": "--model: 'efficientnet_b3' is not a model; did you mean 'efficientnet-b3'?",
    "resnet20": "--model: 'resnet20' is not a model; did you mean 'resnet20-cifar'?",
    "convnext_tiny": "--model: 'convnext_tiny' is not a model; did you mean 'timm:convnext_tiny'?",
    "xyz": "--model: 'xyz' is not a model",
    "timm:resnet5O": "--model: 'timm:resnet5O' is not a model of timm; did you mean 'timm:resnet50'?",
    "timm:resnet50.none": "--model: 'timm:resnet50.none' is not a model of timm; did you mean 'timm:resnet50'?",
}


@pytest.mark.parametrize(("name", "message"), MISTAKES.items())
@pytest.mark.parametrize("ask", [zoo.image_size, partial(zoo.build, classes=2, seed=0)], ids=["image_size", "build"])
def test_an_unknown_name_is_answered_with_the_nearest(ask, name, message):
    with pytest.raises(ConfigError) as caught:
        ask(name)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["timm:hf-hub:a/b", "timm:hf_hub:a/b", "timm:local-dir:a", "timm:"])
def test_a_model_that_would_be_fetched_is_refused(name):
    with pytest.raises(ConfigError, match=f"--model: '{name}' is not a model of timm"):
        zoo.build(name, classes=2, seed=0)


def test_a_model_for_oblong_images_is_refused():
    with pytest.raises(ConfigError, match=r"wants images of 1024 x 768; only square ones"):
        zoo.image_size("timm:vit_base_patch16_sapiens2")


MISPLACED = {
    "resnet50": (EfficientNetShape(expand_ratio=4), "efficientnet-b0 to efficientnet-b7"),
    "timm:efficientnet_b0": (EfficientNetShape(group_dim=16), "efficientnet-b0 to efficientnet-b7"),
    "mobilenet": (ResidualShape(stride="1x1"), "a resnet or resnext"),
}


@pytest.mark.parametrize(("name", "expected"), MISPLACED.items())
def test_the_shape_of_one_family_on_another_is_refused(name, expected):
    shape, wanted = expected
    with pytest.raises(ConfigError) as caught:
        zoo.build(name, classes=2, seed=0, shape=shape)
    assert str(caught.value) == f"--model: '{name}' has no such shape; wanted {wanted}"


# inventory 2.2, which has a projection in the first block of ResNet-10 too: 64 x 64 weights and a norm of 64 channels.
SHORT_COUNTS = {
    "resnet10": 5_423_016 - 64 * 64 - 2 * 64,
    "resnet14": 10_064_936,
    "resnet26": 15_995_176,
    "resnext14": 9_411_880,
    "resnext26": 15_389_480,
    "resnext152": 59_951_400,
}


@pytest.mark.parametrize(("name", "count"), SHORT_COUNTS.items())
def test_the_depths_that_timm_has_no_name_for_have_the_originals_parameters(name, count):
    assert zoo.count_parameters(on_meta(name)) == count


def test_the_efficientnet_for_cifar_has_the_originals_parameters_and_strides():
    assert zoo.count_parameters(on_meta("efficientnet-cifar", classes=10)) == 1_077_932
    assert zoo.count_parameters(on_meta("efficientnet-cifar", classes=10, shape=ORIGINALS)) == 1_683_420
    model = zoo.build("efficientnet-cifar", classes=10, seed=0)
    assert model.forward_features(torch.zeros(1, 3, 32, 32)).shape[2:] == (4, 4)  # 32 / 2**3, not / 2**5


def test_a_resnext_of_another_width_is_torchvisions():
    with torch.device("meta"):
        expected = reference.ResNet(Bottleneck, [3, 4, 6, 3], groups=16, width_per_group=8)
    model = on_meta("resnext50", shape=ResidualShape(groups=16, group_dim=8))
    assert zoo.count_parameters(model) == zoo.count_parameters(expected)


def test_the_first_convolution_of_a_bottleneck_strides_on_request():
    usual, first = on_meta("resnet50"), on_meta("resnet50", shape=ResidualShape(stride="1x1"))
    for model, strides in ((usual, ((1, 1), (2, 2))), (first, ((2, 2), (1, 1)))):
        block = model.layer2[0]
        assert (block.conv1.stride, block.conv2.stride) == strides
        assert model.layer1[0].conv1.stride == model.layer1[0].conv2.stride == (1, 1)
    assert usual.state_dict().keys() == first.state_dict().keys()


SHAPES = {
    "dropout": (EfficientNetShape(dropout=0.5), lambda model: model.global_pool[1].p == 0.5),
    "drop path": (
        EfficientNetShape(drop_path=0.32),
        lambda model: abs(model.blocks[5][3].drop_path.drop_prob - 0.32 * 14 / 16) < 1e-9,
    ),
    "no squeeze and excitation": (EfficientNetShape(se=False), lambda model: "se" not in str(list(model.state_dict()))),
    "relu": (EfficientNetShape(activation="relu"), lambda model: "SiLU" not in str(model)),
    "divisor": (EfficientNetShape(divisor=16), lambda model: model.blocks[1][0].conv_pwl.out_channels == 32),
    "top": (EfficientNetShape(top_width=640), lambda model: model.conv_head.out_channels == 640),
    "width": (EfficientNetShape(width=2.0), lambda model: model.conv_head.out_channels == 2560),
    "depth": (EfficientNetShape(depth=2.0), lambda model: len(model.blocks[1]) == 4),
}


@pytest.mark.parametrize(("shape", "holds"), SHAPES.values(), ids=SHAPES)
def test_an_efficientnets_shape_is_what_was_asked_for(shape, holds):
    assert holds(on_meta("efficientnet-b0", shape=shape))
