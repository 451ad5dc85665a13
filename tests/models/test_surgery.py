"""A padded input changes what the kernel sees and not what it computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from falconet.errors import ConfigError
from falconet.models import padding, zoo
from falconet.models.padding import PaddedConv2d

FIRST_CONVS = {
    "resnet18": "conv1",
    "efficientnet-b0": "conv_stem",
    "mobilenet-v3-small": "conv_stem",
    "resnet8-cifar": "conv1",
    "timm:vit_tiny_patch16_224": "patch_embed.proj",
}


@pytest.mark.parametrize(("name", "first"), FIRST_CONVS.items())
def test_three_channel_weights_give_the_same_logits(name, first):
    side = zoo.image_size(name) if "vit" in name else 64
    plain = zoo.build(name, classes=5, seed=0).eval()
    padded = zoo.build(name, classes=5, seed=1, variant=zoo.Variant(padded_input=True)).eval()
    padded.load_state_dict(plain.state_dict())
    assert [path for path, layer in padded.named_modules() if isinstance(layer, PaddedConv2d)] == [first]
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(padded.double()(images), plain.double()(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
def test_the_kernel_sees_four_channels_and_the_gradient_has_three(monkeypatch, padding_mode):
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


def test_images_that_already_have_four_channels_are_taken():
    conv = nn.Conv2d(3, 6, 3)
    images = torch.randn(2, 3, 9, 9)
    expected = conv(images)
    four = functional.pad(images, (0, 0, 0, 0, 0, 1), value=7.0)  # whatever the fourth holds, its weight is zero
    torch.testing.assert_close(padding.pad_input(nn.Sequential(conv))(four), expected, rtol=1e-6, atol=1e-6)


def test_the_parameters_are_the_same_objects_under_the_same_names():
    model = zoo.build("resnet8-cifar", classes=5, seed=0)
    before = dict(model.named_parameters())
    after = dict(padding.pad_input(model).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_fx_traces_it_for_three_and_for_four_channels():
    model = padding.pad_input(nn.Sequential(nn.Conv2d(3, 6, 3)))
    traced = torch.fx.symbolic_trace(model)
    for channels in (3, 4):
        images = torch.randn(1, channels, 5, 5)
        assert torch.equal(traced(images), model(images))


def test_images_stay_channels_last():
    model = padding.pad_input(nn.Sequential(nn.Conv2d(3, 8, 3))).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert model(images).is_contiguous(memory_format=torch.channels_last)


UNPADDABLE = {
    "timm:tf_efficientnet_b0": "the first convolution 'conv_stem' is Conv2dSame of 3 channels in 1 group(s); "
    "wanted a plain Conv2d of 3 in 1",
    "a model of one channel": "the first convolution '0' is Conv2d of 1 channels in 1 group(s); "
    "wanted a plain Conv2d of 3 in 1",
    "a model without one": "this model has no convolution to pad",
}


@pytest.mark.parametrize(("name", "message"), UNPADDABLE.items())
def test_a_model_that_cannot_be_padded_says_why(name, message):
    with torch.device("meta"):
        models = {
            "timm:tf_efficientnet_b0": lambda: zoo.build("timm:tf_efficientnet_b0", classes=2, seed=0),
            "a model of one channel": lambda: nn.Sequential(nn.Conv2d(1, 2, 3)),
            "a model without one": lambda: nn.Sequential(nn.Linear(3, 2)),
        }
        model = models[name]()
    with pytest.raises(ConfigError) as caught:
        padding.pad_input(model)
    assert str(caught.value) == f"--input-image-padding: {message}"
