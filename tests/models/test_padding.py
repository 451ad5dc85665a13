"""SAME padding against TensorFlow's definition, window by window, and the padded first convolution."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from falconet.errors import ConfigError
from falconet.models import padding, splits, zoo
from falconet.models.padding import PaddedConv2d, SameConv2d, SameMaxPool2d, SamePaddedConv2d


def windows(size, *, kernel, stride):
    """Where each window starts: ceil(size / stride) of them, centred, with the smaller half of the padding first."""
    count = (size + stride - 1) // stride
    total = max(kernel - (size % stride or stride), 0)
    return [place * stride - total // 2 for place in range(count)]


def taken(image, down, right, kernel, *, outside):  # C x H x W
    """One window of the image, filled with `outside` beyond its edges."""
    found = np.full((image.shape[0], kernel, kernel), outside)
    for row in range(kernel):
        for column in range(kernel):
            y, x = down + row, right + column
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                found[:, row, column] = image[:, y, x]
    return found


GEOMETRIES = [(3, 2), (5, 2), (7, 2), (3, 3), (2, 2), (3, 4)]
SIZES = [(8, 8), (9, 9), (7, 10), (3, 4)]


@pytest.mark.parametrize(("kernel", "stride"), GEOMETRIES)
@pytest.mark.parametrize("size", SIZES)
def test_convolution_has_tensorflows_windows(kernel, stride, size):
    image, weight = torch.randn(2, *size, dtype=torch.float64), torch.randn(3, 2, kernel, kernel, dtype=torch.float64)
    conv = SameConv2d(2, 3, kernel, stride=stride, bias=False, dtype=torch.float64)
    conv.weight = nn.Parameter(weight)
    expected = [
        [
            np.einsum("ochw,chw->o", weight.numpy(), taken(image.numpy(), down, right, kernel, outside=0.0))
            for right in windows(size[1], kernel=kernel, stride=stride)
        ]
        for down in windows(size[0], kernel=kernel, stride=stride)
    ]
    found = conv(image[None])[0].detach().permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_max_pooling_ignores_the_padding(size):
    image = -torch.rand(2, *size, dtype=torch.float64) - 1  # below the zeros that other paddings have
    expected = [
        [
            taken(image.numpy(), down, right, 3, outside=-np.inf).max(axis=(1, 2))
            for right in windows(size[1], kernel=3, stride=2)
        ]
        for down in windows(size[0], kernel=3, stride=2)
    ]
    found = SameMaxPool2d(3, 2)(image[None])[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(found, np.array(expected))


KINDS = {
    "resnet18": {"conv1", "maxpool", *(f"layer{stage}.0.conv1" for stage in (2, 3, 4))},
    "resnet50": {"conv1", "maxpool", *(f"layer{stage}.0.conv2" for stage in (2, 3, 4))},
    "efficientnet-b0": {"conv_stem", *(f"blocks.{stage}.0.conv_dw" for stage in (1, 2, 3, 5))},
    "resnet8-cifar": {"layer2.0.conv1", "layer3.0.conv1"},
}


@pytest.mark.run
@pytest.mark.parametrize(("name", "expected"), KINDS.items())
def test_exactly_the_striding_layers_get_same_padding(name, expected):
    model = zoo.build(name, classes=3, seed=0, padding="same")
    found = {path for path, layer in model.named_modules() if isinstance(layer, SameConv2d | SameMaxPool2d)}
    assert found == expected
    plain = zoo.build(name, classes=3, seed=0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())


def test_same_padding_of_odd_sides_is_symmetric():
    """Where symmetric padding is what SAME means, the logits are the same: 7 x 7 by stride 2 of 33 pixels."""
    images = torch.randn(2, 3, 33, 33)  # 17, 9, 5, 3, 2 pixels later
    plain, same = (zoo.build("resnet18", classes=3, seed=0, padding=each).eval() for each in ("symmetric", "same"))
    torch.testing.assert_close(same(images), plain(images))
    assert not torch.allclose(same(images[..., :32, :32]), plain(images[..., :32, :32]))


def test_same_padding_works_with_a_fourth_channel():
    images = torch.randn(2, 3, 32, 32)
    same, both = (
        zoo.build("resnet18", classes=3, seed=0, padding="same", input_image_padding=four).eval()
        for four in (False, True)
    )
    assert isinstance(both.get_submodule("conv1"), SamePaddedConv2d)
    torch.testing.assert_close(both(images), same(images))


def test_stages_are_bit_for_bit_equal():
    model = zoo.build("efficientnet-cifar", classes=3, seed=0, padding="same").eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    value = (images,)
    for stage in splits.split(model, ["blocks/3"]):
        given = stage.module.eval()(*value)
        value = given if isinstance(given, tuple) else (given,)
    assert torch.equal(value[0], expected)


def test_other_convolutions_keep_their_padding():
    class Own(nn.Conv2d):
        pass

    model = nn.Sequential(Own(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 3, padding=1))
    padding.pad_as_tensorflow(model)
    assert [type(layer) for layer in model] == [Own, nn.Conv2d, nn.Conv2d]


FIRST_CONVS = {
    "resnet18": "conv1",
    "efficientnet-b0": "conv_stem",
    "mobilenet-v3-small": "conv_stem",
    "resnet8-cifar": "conv1",
    "timm:vit_tiny_patch16_224": "patch_embed.proj",
}


@pytest.mark.run
@pytest.mark.parametrize(("name", "first"), FIRST_CONVS.items())
def test_padded_input_gives_the_same_logits(name, first):
    side = zoo.image_size(name) if "vit" in name else 64
    plain = zoo.build(name, classes=5, seed=0).eval()
    padded = zoo.build(name, classes=5, seed=1, input_image_padding=True).eval()
    padded.load_state_dict(plain.state_dict())
    assert [path for path, layer in padded.named_modules() if isinstance(layer, PaddedConv2d)] == [first]
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(padded.double()(images), plain.double()(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
def test_kernel_gets_four_channels_and_the_gradient_has_three(monkeypatch, padding_mode):
    conv = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=True, padding_mode=padding_mode)
    images = torch.randn(2, 3, 9, 9)
    expected = conv(images)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), conv.weight)
    seen = []

    def spy(images, weight, *rest):
        seen.append((images.shape[1], weight.shape[1]))
        return convolve(images, weight, *rest)

    convolve = functional.conv2d
    padded = padding.pad_input(nn.Sequential(conv))
    monkeypatch.setattr("torch.nn.modules.conv.F.conv2d", spy)
    out = padded(images)
    (grad,) = torch.autograd.grad(out.square().sum(), conv.weight)
    assert seen == [(4, 4)]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad)


def test_images_with_four_channels_are_accepted():
    conv = nn.Conv2d(3, 6, 3)
    images = torch.randn(2, 3, 9, 9)
    expected = conv(images)
    four = functional.pad(images, (0, 0, 0, 0, 0, 1), value=7.0)  # whatever the fourth holds, its weight is zero
    torch.testing.assert_close(padding.pad_input(nn.Sequential(conv))(four), expected, rtol=1e-6, atol=1e-6)


def test_padded_input_keeps_parameters_and_their_names():
    model = zoo.build("resnet8-cifar", classes=5, seed=0)
    before = dict(model.named_parameters())
    after = dict(padding.pad_input(model).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_padded_convolution_is_traceable_for_three_and_four_channels():
    model = padding.pad_input(nn.Sequential(nn.Conv2d(3, 6, 3)))
    traced = torch.fx.symbolic_trace(model)
    for channels in (3, 4):
        images = torch.randn(1, channels, 5, 5)
        assert torch.equal(traced(images), model(images))


def test_padded_convolution_keeps_channels_last():
    model = padding.pad_input(nn.Sequential(nn.Conv2d(3, 8, 3))).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert model(images).is_contiguous(memory_format=torch.channels_last)


UNPADDABLE = {
    "timm:tf_efficientnet_b0": "the first convolution 'conv_stem' is Conv2dSame with 3 channels in 1 group(s); "
    "expected a plain Conv2d with 3 channels in 1 group",
    "a model of one channel": "the first convolution '0' is Conv2d with 1 channels in 1 group(s); "
    "expected a plain Conv2d with 3 channels in 1 group",
    "a model without one": "this model has no convolution to pad",
}


@pytest.mark.parametrize(("name", "message"), UNPADDABLE.items())
def test_model_that_cannot_be_padded_is_refused(name, message):
    with torch.device("meta"):
        models = {
            "timm:tf_efficientnet_b0": lambda: zoo.build("timm:tf_efficientnet_b0", classes=2, seed=0),
            "a model of one channel": lambda: nn.Sequential(nn.Conv2d(1, 2, 3)),
            "a model without one": lambda: nn.Sequential(nn.Linear(3, 2)),
        }
        model = models[name]()
    with pytest.raises(ConfigError) as caught:
        padding.pad_input(model)
    assert str(caught.value) == message
