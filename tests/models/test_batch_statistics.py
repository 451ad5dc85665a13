"""Running statistics that do not fit a batch are noticed, and those that do are not."""

import pytest
import torch
from torch import nn

from falconet.models import zoo
from falconet.models.batch_statistics import misfit
from falconet.models.resnet import side_of_zeros


def images(seed=0, count=64, side=16):
    """Smooth coloured patterns: what neighbouring pixels share matters to a convolution."""
    noise = torch.randn(count, 3, side // 4, side // 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, size=side, mode="bilinear")


def settled(name="resnet20-cifar", **options):
    """A network whose running statistics are those of such images."""
    model = zoo.build(name, classes=10, seed=0, **options)
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)  # channels that differ, as in a trained network
            nn.init.normal_(layer.bias, 0, 0.5)
            layer.momentum = None
    with torch.no_grad():
        for seed in range(1, 5):
            model(images(seed))
    return model


@pytest.fixture(scope="module")
def model():
    return settled()


SILENT = {
    "other images": lambda: images(9),
    "a few": lambda: images(9, count=4),
    "one": lambda: images(9, count=1),
    "red and blue exchanged": lambda: images(9).flip(1),
    "a little brighter": lambda: images(9) * 1.2 + 0.1,
    "another size": lambda: images(9, side=24),
}


@pytest.mark.parametrize("case", SILENT)
def test_images_like_those_of_training_fit(model, case):
    batch = SILENT[case]()
    assert misfit(model, lambda: model(batch)) is None


SCALED = {"bytes": (58, "larger"), "not divided by the deviation": (0.22, "smaller"), "divided twice": (4.4, "larger")}


@pytest.mark.parametrize("case", SCALED)
def test_pixels_of_another_scale_do_not_fit(model, case):
    factor, size = SCALED[case]
    found = misfit(model, lambda: model(images(9) * factor))
    assert found is not None
    assert found.what == "pixels"
    stated = float(found.text.partition("values ")[2].partition(" times")[0])
    assert f"times {size} than in the training" in found.text
    assert stated == pytest.approx(max(factor, 1 / factor), rel=0.15)


def test_zero_channels_on_the_wrong_side_do_not_fit():
    right = settled(shortcut_padding="both")
    wrong = zoo.build("resnet20-cifar", classes=10, seed=0, shortcut_padding="back")
    wrong.load_state_dict(right.state_dict())
    assert misfit(right, lambda: right(images(9))) is None
    found = misfit(wrong, lambda: wrong(images(9)))
    assert found is not None
    assert (found.what, found.side) == ("shortcuts", "both")
    assert side_of_zeros(wrong) == "back", "as it was"


@pytest.mark.parametrize("options", [{}, {"norm_type": "group", "norm_num_groups": 8}], ids=["untrained", "group norm"])
def test_a_network_without_statistics_is_not_judged(options):
    model = zoo.build("resnet8-cifar", classes=10, seed=0, **options)
    assert misfit(model, lambda: model(images(9) * 255)) is None


def test_the_check_leaves_the_model_and_the_random_numbers_alone(model):
    model.train()
    model.layer1.eval()  # as frozen layers are
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    misfit(model, lambda: model(images(9)))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.train()
