"""SqueezeNet equals torchvision's, and its bypass the paper's."""

import pytest
import torch
from torchvision.models import squeezenet1_0

from falconet.errors import ConfigError
from falconet.models import splits, zoo


def test_squeezenet_equals_torchvisions():
    model, theirs = zoo.build("squeezenet", classes=1000, seed=3), squeezenet1_0()
    assert zoo.count_parameters(model) == zoo.count_parameters(theirs) == 1_248_424
    theirs.load_state_dict(model.state_dict())  # so its published weights fit as well
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize("name", zoo.SQUEEZENETS)
def test_bypass_adds_the_input_of_every_second_fire_module(name):
    """Fire 3, 5, 7 and 9 by the names of torchvision's layers, against the sum worked out beside the model."""
    plain, bypassed = (zoo.build(name, classes=5, seed=0, squeezenet_bypass=bypass).eval() for bypass in (False, True))
    assert all(torch.equal(value, bypassed.state_dict()[key]) for key, value in plain.state_dict().items())
    x = expected = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        for number, layer in enumerate(plain.features):
            expected = expected + layer(expected) if number in (4, 7, 9, 12) else layer(expected)
        torch.testing.assert_close(bypassed(x), plain.classifier(expected).flatten(1))
        assert not torch.equal(bypassed(x), plain(x))


@pytest.mark.parametrize("name", zoo.SQUEEZENETS)
def test_smaller_images_than_the_smallest_are_refused(name):
    model, least = zoo.build(name, classes=5, seed=0).eval(), zoo.SMALLEST_SIDE[name]
    zoo.check_image_size(name, least)
    assert model(torch.randn(1, 3, least, least)).shape == (1, 5)
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 3, least - 1, least - 1))
    with pytest.raises(ConfigError, match=f"got {least - 1}, expected at least {least} for {name}"):
        zoo.check_image_size(name, least - 1)


def test_cifar_network_shrinks_small_images_less():
    """For 32 x 32 images its last map is 4 x 4, torchvision's a single pixel."""
    x = torch.randn(1, 3, 32, 32)
    sides = {name: zoo.build(name, classes=5, seed=0).features(x).shape[-1] for name in zoo.SQUEEZENETS}
    assert sides == {"squeezenet": 1, "squeezenet-cifar": 4}
    # 96 filters of 3 x 3 instead of 7 x 7 of 3 channels, 10 classes instead of 1000 with 513 numbers each.
    cifar = zoo.count_parameters(zoo.build("squeezenet-cifar", classes=10, seed=0))
    assert cifar == 1_248_424 - 96 * 3 * (49 - 9) - 990 * 513


@pytest.mark.parametrize("bypass", [False, True])
def test_stages_are_bit_for_bit_equal(bypass):
    whole, model = (zoo.build("squeezenet-cifar", classes=5, seed=0, squeezenet_bypass=bypass) for _ in range(2))
    stages = [stage.module for stage in splits.split(model, ["features/4", "features/9/expand3x3", "classifier/1"])]
    x = torch.randn(2, 3, 16, 16)
    gradients = []
    for modules in ([whole], stages):
        torch.manual_seed(0)
        values = (x,)
        for module in modules:
            values = module(*values)
            values = values if isinstance(values, tuple) else (values,)
        values[0].square().sum().backward()
        gradients.append({name: weight.grad for module in modules for name, weight in module.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.run
@pytest.mark.parametrize("name", zoo.SQUEEZENETS)
@pytest.mark.parametrize("bypass", [False, True])
def test_a_network_overfits_a_few_images(name, bypass):
    """With torchvision's initial weights and a relu after ten logits it hardly ever does (docs/maintaining/log.md)."""
    torch.manual_seed(0)
    model = zoo.build(name, classes=4, seed=0, squeezenet_bypass=bypass).eval()  # without dropout
    images, labels = torch.randn(8, 3, 24, 24), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.386, abs=0.01)  # of 4 equally likely classes
    assert min(losses) < 0.75  # it jumps, and another processor's rounding moves where to


def test_initial_weights_have_the_originals_spread():
    """Glorot's, which keeps the variance of activations and gradients about equal; biases are 0."""
    for layer in zoo.build("squeezenet", classes=1000, seed=0).modules():
        if isinstance(layer, torch.nn.Conv2d):
            pixels = layer.weight[0, 0].numel()
            spread = (2 / (pixels * (layer.in_channels + layer.out_channels))) ** 0.5
            assert layer.weight.std().item() == pytest.approx(spread, rel=0.08)
            assert not layer.bias.any()


def test_group_norm_is_refused():
    with pytest.raises(ConfigError, match="--norm-type: this model has no 2d batch norm to change"):
        zoo.build("squeezenet", classes=5, seed=0, norm_type="group")
