"""ResNets and ResNeXts: depths, shortcuts and stems, by their parameters and by what they compute."""

import pytest
import torch
import torchvision.models as reference
from torch import nn
from torchvision.models.resnet import Bottleneck

from falconet.models import zoo

# The TensorFlow program's figures for ImageNet: a projection at the start of every stage.
TENSORFLOW = {"resnet10": 5_423_016, "resnet18": 11_693_736, "resnet34": 21_801_896, "resnet50": 25_557_032}
# Two projections, 16 to 32 and 32 to 64 channels, and their norms: 512 + 64 + 2,048 + 128 more than with option A.
CIFAR = {
    "A": 269_722,
    "auto": 269_722,
    "B": 269_722 + 2_752,
    # Also 16 to 16 at the start of the first stage ...
    "stages": 269_722 + 2_752 + 256 + 32,
    # ... and in the two later blocks of each stage: 2 x (256 + 32 + 1,024 + 64 + 4,096 + 128).
    "C": 269_722 + 2_752 + 256 + 32 + 2 * 5_600,
}


def built(name, **changes):
    return zoo.build(name, classes=1000 if "cifar" not in name else 10, seed=0, **changes)


@pytest.mark.parametrize(("name", "count"), TENSORFLOW.items())
def test_one_projection_per_stage_gives_the_tensorflow_programs_parameters(name, count):
    assert zoo.count_parameters(built(name, shortcut_type="stages")) == count


@pytest.mark.parametrize(("kind", "count"), CIFAR.items())
def test_each_kind_of_shortcut_has_its_parameters(kind, count):
    assert zoo.count_parameters(built("resnet20-cifar", shortcut_type=kind)) == count


def test_default_options_change_nothing():
    usual = zoo.build("resnet18", classes=1000, seed=0).state_dict()
    same = built("resnet18").state_dict()
    assert usual.keys() == same.keys()
    assert all(torch.equal(usual[name], same[name]) for name in usual)


def test_shortcut_a_takes_every_second_pixel_and_appends_zeros():
    """A bottleneck network, whose projections are all taken away: 25,557,032 less their weights and norms."""
    model = built("resnet50", shortcut_type="A")
    projections = sum(a * b + 2 * b for a, b in ((64, 256), (256, 512), (512, 1024), (1024, 2048)))
    assert zoo.count_parameters(model) == 25_557_032 - projections
    x = torch.arange(2 * 256 * 4 * 4, dtype=torch.float32).reshape(2, 256, 4, 4)
    passed = model.layer2[0].downsample(x)
    assert torch.equal(passed[:, :256], x[:, :, ::2, ::2])
    assert passed.shape == (2, 512, 2, 2)
    assert not passed[:, 256:].any()
    assert model.layer2[0].bn3.weight.min() == 1  # the appended channels live


@pytest.mark.parametrize(
    ("name", "stem", "side", "after"), [("resnet18", "cifar", 32, 32), ("resnet20-cifar", "imagenet", 224, 56)]
)
def test_stem_can_be_replaced(name, stem, side, after):
    model = built(name, stem=stem)
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    model.eval()(torch.zeros(1, 3, side, side))
    assert seen == [after]
    assert model.conv1.kernel_size == {"cifar": (3, 3), "imagenet": (7, 7)}[stem]


def test_projections_depend_only_on_the_seed():
    one, two = (built("resnet20-cifar", shortcut_type="C").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def on_meta(name, **options):
    with torch.device("meta"):
        return zoo.build(name, classes=options.pop("classes", 1000), seed=0, **options)


LAST_NORMS = {"resnet18": (8, "bn2"), "resnet50": (16, "bn3"), "resnext50": (16, "bn3"), "resnet20-cifar": (7, "bn2")}
WIDENING = ("layer2.0.bn2", "layer3.0.bn2")  # of the CIFAR networks, whose shortcut pads with zeros


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("name", "expected"), LAST_NORMS.items())
def test_only_the_last_norm_of_each_block_starts_at_zero(name, expected, norm):
    blocks, last = expected
    model = zoo.build(name, classes=2, seed=0, norm_type=norm, norm_num_groups=16)
    kind = nn.GroupNorm if norm == "group" else nn.BatchNorm2d
    scales = {path: layer.weight for path, layer in model.named_modules() if isinstance(layer, kind)}
    zero = [path for path, scale in scales.items() if not scale.any()]
    widening = WIDENING if name.endswith("-cifar") else ()
    lasts = [path for path in scales if path.startswith("layer") and path.endswith(f".{last}")]
    assert zero == [path for path in lasts if path not in widening]
    assert len(zero) == blocks
    assert all((scale == 1).all() for path, scale in scales.items() if path not in zero)


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
def test_other_depths_than_timms_have_the_originals_parameters(name, count):
    assert zoo.count_parameters(on_meta(name)) == count


def test_resnext_of_another_width_has_torchvisions_parameters():
    with torch.device("meta"):
        expected = reference.ResNet(Bottleneck, [3, 4, 6, 3], groups=16, width_per_group=8)
    model = on_meta("resnext50", resnext_groups=16, resnext_group_dim=8)
    assert zoo.count_parameters(model) == zoo.count_parameters(expected)


def test_stride_can_move_to_the_first_convolution_of_a_bottleneck():
    usual, first = on_meta("resnet50"), on_meta("resnet50", bottleneck_stride="1x1")
    for model, strides in ((usual, ((1, 1), (2, 2))), (first, ((2, 2), (1, 1)))):
        block = model.layer2[0]
        assert (block.conv1.stride, block.conv2.stride) == strides
        assert model.layer1[0].conv1.stride == model.layer1[0].conv2.stride == (1, 1)
    assert usual.state_dict().keys() == first.state_dict().keys()
