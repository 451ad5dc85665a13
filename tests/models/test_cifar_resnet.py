"""The CIFAR residual networks have the published sizes and compute what He et al. wrote."""

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock as TorchvisionBlock
from torchvision.models.resnet import Bottleneck as TorchvisionBottleneck

from falconet.models import zoo
from falconet.models.cifar_resnet import BasicBlock, Bottleneck, CifarResNet, ZeroPadShortcut

PUBLISHED = {8: 75_290, 14: 172_506, 20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962}


@pytest.mark.parametrize(("depth", "parameters"), PUBLISHED.items())
def test_parameters_are_the_published_ones(depth, parameters):
    with torch.device("meta"):
        model = zoo.build(f"resnet{depth}-cifar", classes=10, seed=0)
    assert zoo.count_parameters(model) == parameters
    weighted = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(weighted) == depth


BOTTLENECKS = {11: 127_642, 29: 313_114, 38: 405_850, 47: 498_586, 56: 591_322, 65: 684_058}


@pytest.mark.parametrize(("depth", "parameters"), BOTTLENECKS.items())
def test_bottleneck_networks_have_the_originals_parameters(depth, parameters):
    with torch.device("meta"):
        model = zoo.build("resnet56b-cifar" if depth == 56 else f"resnet{depth}-cifar", classes=10, seed=0)
    assert zoo.count_parameters(model) == parameters
    projections = sum("downsample" in name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    weighted = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert (len(weighted), projections) == (depth + 3, 3)


@pytest.mark.parametrize(("wide", "parameters"), [(False, 1_293_786), (True, 4_775_754)])
def test_resnexts_have_the_originals_parameters(wide, parameters):
    with torch.device("meta"):
        model = zoo.build("resnext29-cifar", classes=10, seed=0, resnext_wide=wide)
    assert zoo.count_parameters(model) == parameters
    assert {layer.groups for name, layer in model.named_modules() if name.endswith("conv2")} == {32}


@pytest.mark.parametrize(("channels", "stride"), [(64, 1), (32, 2)])
def test_bottleneck_equals_torchvisions(channels, stride):
    block = Bottleneck(channels, inner=16, out_channels=64, stride=stride, groups=1).eval()
    projected = block.downsample if stride == 2 else None
    expected = TorchvisionBottleneck(channels, 16, stride=stride, downsample=projected).eval()
    expected.load_state_dict(block.state_dict())
    x = torch.randn(2, channels, 9, 9)
    torch.testing.assert_close(block(x), expected(x))


def test_basic_block_equals_torchvisions():
    block = BasicBlock(16, out_channels=16, stride=1).eval()
    expected = TorchvisionBlock(16, 16).eval()
    expected.load_state_dict(block.state_dict())
    x = torch.randn(2, 16, 9, 9)
    torch.testing.assert_close(block(x), expected(x))


def test_widening_block_equals_torchvisions_with_the_same_shortcut():
    block = BasicBlock(16, out_channels=32, stride=2).eval()
    expected = TorchvisionBlock(16, 32, stride=2, downsample=block.downsample).eval()
    expected.load_state_dict(block.state_dict())
    x = torch.randn(2, 16, 9, 9)
    torch.testing.assert_close(block(x), expected(x))


@pytest.mark.parametrize("side", [8, 9])
def test_shortcut_takes_every_second_pixel_and_appends_zero_channels(side):
    x = np.random.default_rng(0).normal(size=(2, 3, side, side))
    expected = np.concatenate([x[:, :, ::2, ::2], np.zeros((2, 5, (side + 1) // 2, (side + 1) // 2))], axis=1)
    out = ZeroPadShortcut(added_channels=5, stride=2)(torch.from_numpy(x))
    np.testing.assert_array_equal(out.numpy(), expected)


def test_new_network_consists_of_shortcuts_and_widening_blocks():
    model = CifarResNet(20, classes=10).eval()
    images = torch.randn(2, 3, 32, 32)
    x = torch.relu(model.bn1(model.conv1(images)))
    widened = model.layer3[0](model.layer2[0](x))
    torch.testing.assert_close(model(images), model.fc(widened.mean((2, 3))))


def test_convolutions_start_with_hes_spread():
    weight = zoo.build("resnet20-cifar", classes=10, seed=0).get_parameter("layer3.0.conv1.weight")  # 32 -> 64
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)


@pytest.mark.parametrize("side", [8, 9, 15, 32, 33])
def test_any_image_from_8_x_8_is_accepted(side):
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    assert model(torch.randn(2, 3, side, side)).shape == (2, 10)


def test_traced_network_is_the_same_function():
    model = zoo.build("resnet14-cifar", classes=10, seed=0, input_image_padding=True)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # so that no residual branch is zero
    images = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images), rtol=0, atol=0)


def test_layers_are_named_as_in_torchvision():
    names = dict(zoo.build("resnet8-cifar", classes=10, seed=0).named_modules())
    assert {"conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1", "layer2.0.downsample", "layer3.0.bn2", "fc"} <= set(names)
