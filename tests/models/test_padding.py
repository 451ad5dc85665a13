"""SAME padding against TensorFlow's own description of it, worked out window by window."""

import numpy as np
import pytest
import torch
from torch import nn

from falconet.models import padding, splits, zoo
from falconet.models.padding import SameConv2d, SameMaxPool2d, SamePaddedConv2d

SAME = zoo.Variant(padding="same")


def windows(size, *, kernel, stride):
    """Where each window begins: ceil(size / stride) of them, centred, by the smaller half towards the beginning."""
    count = (size + stride - 1) // stride
    total = max(kernel - (size % stride or stride), 0)
    return [place * stride - total // 2 for place in range(count)]


def taken(image, down, right, kernel, *, outside):  # C x H x W
    """A window of it, with `outside` where there is nothing."""
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
def test_a_convolution_sees_tensorflows_windows(kernel, stride, size):
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
def test_a_maximum_counts_nothing_that_was_padded(size):
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


@pytest.mark.parametrize(("name", "expected"), KINDS.items())
def test_exactly_what_strides_over_more_than_a_pixel_is_padded_so(name, expected):
    model = zoo.build(name, classes=3, seed=0, variant=SAME)
    found = {path for path, layer in model.named_modules() if isinstance(layer, SameConv2d | SameMaxPool2d)}
    assert found == expected
    plain = zoo.build(name, classes=3, seed=0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())


def test_images_of_odd_sides_are_padded_alike_on_both():
    """Where symmetric padding is what SAME means, the logits are the same: 7 x 7 by stride 2 of 33 pixels."""
    images = torch.randn(2, 3, 33, 33)  # 17, 9, 5, 3, 2 pixels later
    plain, same = (zoo.build("resnet18", classes=3, seed=0, variant=each).eval() for each in (zoo.Variant(), SAME))
    torch.testing.assert_close(same(images), plain(images))
    assert not torch.allclose(same(images[..., :32, :32]), plain(images[..., :32, :32]))


def test_a_fourth_channel_changes_nothing():
    images = torch.randn(2, 3, 32, 32)
    same, both = (
        zoo.build("resnet18", classes=3, seed=0, variant=zoo.Variant(padding="same", padded_input=four)).eval()
        for four in (False, True)
    )
    assert isinstance(both.get_submodule("conv1"), SamePaddedConv2d)
    torch.testing.assert_close(both(images), same(images))


def test_stages_change_no_bit():
    model = zoo.build("efficientnet-cifar", classes=3, seed=0, variant=SAME).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    value = (images,)
    for stage in splits.split(model, ["blocks/3"]):
        given = stage.module.eval()(*value)
        value = given if isinstance(given, tuple) else (given,)
    assert torch.equal(value[0], expected)


def test_a_convolution_that_does_more_is_left_alone():
    class Own(nn.Conv2d):
        pass

    model = nn.Sequential(Own(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 3, padding=1))
    padding.pad_as_tensorflow(model)
    assert [type(layer) for layer in model] == [Own, nn.Conv2d, nn.Conv2d]
