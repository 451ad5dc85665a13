"""EfficientNets have timm's layers and the originals' sizes and variations."""

import pytest
import timm
import torch

from falconet.models import zoo

ORIGINALS = {"efficientnet_expand_ratio": 4, "efficientnet_group_dim": 16}

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


@pytest.mark.run
@pytest.mark.parametrize("name", EFFICIENTNET_COUNTS)
def test_efficientnet_has_the_originals_parameters_and_timms_layers(name):
    plain, grouped = EFFICIENTNET_COUNTS[name]
    model = on_meta(name)
    assert zoo.count_parameters(model) == plain
    assert zoo.count_parameters(on_meta(name, **ORIGINALS)) == grouped

    with torch.device("meta"):
        timms = timm.create_model(name.replace("-", "_"), drop_path_rate=0.2)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in timms.state_dict().items()}
    assert drop_rates(model) == drop_rates(timms)


def drop_rates(model):
    paths = {name: layer for name, layer in model.named_modules() if type(layer).__name__ == "DropPath"}
    assert paths
    return {name: layer.drop_prob for name, layer in paths.items()}


def test_group_size_reaches_every_depthwise_convolution():
    model = zoo.build("efficientnet-b3", classes=3, seed=0, **ORIGINALS).eval()
    depthwise = [layer for name, layer in model.named_modules() if name.endswith("conv_dw")]
    per_group = [layer.in_channels // layer.groups for layer in depthwise]
    assert per_group == [20, 24] + [16] * 24  # 40 and 24 channels are no multiples of 16
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_expansion_ratio_widens_every_stage_after_the_first():
    model = on_meta("efficientnet-b0", efficientnet_expand_ratio=2)
    expands = [layer for name, layer in model.named_modules() if name.endswith("conv_pw") and "blocks.0." not in name]
    assert len(expands) == 15
    assert all(layer.out_channels == 2 * layer.in_channels for layer in expands)


def test_dropout_and_drop_path_act_only_in_training():
    model = zoo.build("efficientnet-b0", classes=5, seed=0)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


def test_cifar_efficientnet_has_the_originals_parameters_and_strides():
    assert zoo.count_parameters(on_meta("efficientnet-cifar", classes=10)) == 1_077_932
    assert zoo.count_parameters(on_meta("efficientnet-cifar", classes=10, **ORIGINALS)) == 1_683_420
    model = zoo.build("efficientnet-cifar", classes=10, seed=0)
    assert model.forward_features(torch.zeros(1, 3, 32, 32)).shape[2:] == (4, 4)  # 32 / 2**3, not / 2**5


VARIATIONS = {
    "dropout": ({"efficientnet_dropout": 0.5}, lambda model: model.global_pool[1].p == 0.5),
    "drop path": (
        {"efficientnet_drop_path": 0.32},
        lambda model: abs(model.blocks[5][3].drop_path.drop_prob - 0.32 * 14 / 16) < 1e-9,
    ),
    "no squeeze and excitation": ({"efficientnet_se": False}, lambda model: "se" not in str(list(model.state_dict()))),
    "relu": ({"efficientnet_activation": "relu"}, lambda model: "SiLU" not in str(model)),
    "divisor": ({"efficientnet_depth_divisor": 16}, lambda model: model.blocks[1][0].conv_pwl.out_channels == 32),
    "top": ({"efficientnet_top_width": 640}, lambda model: model.conv_head.out_channels == 640),
    "width": ({"efficientnet_width": 2.0}, lambda model: model.conv_head.out_channels == 2560),
    "depth": ({"efficientnet_depth": 2.0}, lambda model: len(model.blocks[1]) == 4),
}


@pytest.mark.parametrize(("options", "holds"), VARIATIONS.values(), ids=VARIATIONS)
def test_option_changes_the_architecture(options, holds):
    assert holds(on_meta("efficientnet-b0", **options))
