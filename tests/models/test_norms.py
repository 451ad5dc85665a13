"""Replacing batch norm changes the normalisation and nothing else."""

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from falconet.config.options import Model
from falconet.errors import ConfigError
from falconet.models import norms, zoo


def group_norm_in_float64(x, *, groups, eps, scale, shift):
    """Group norm of an N x C x H x W array, by definition."""
    split = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    normal = (split - split.mean(-1, keepdims=True)) / np.sqrt(split.var(-1, keepdims=True) + eps)
    return normal.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def batch_norm(channels, *, eps=1e-5):
    layer = nn.BatchNorm2d(channels, eps=eps)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize(("asked", "used"), [("auto", 3e-2), (0.5, 0.5)])
def test_group_norm_follows_its_definition_with_the_layers_scale_shift_and_eps(asked, used):
    layer = batch_norm(8, eps=3e-2)
    model = norms.apply(nn.Sequential(layer), Model(norm_type="group", norm_num_groups=4, norm_eps=asked))
    x = torch.randn(3, 8, 5, 5)
    scale, shift = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    expected = group_norm_in_float64(x.numpy(), groups=4, eps=used, scale=scale, shift=shift)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_group_norm_keeps_activation_and_dropout_of_a_timm_norm():
    layer = BatchNormAct2d(8, act_layer=nn.SiLU, drop_layer=lambda: nn.Dropout(1.0))
    model = norms.apply(nn.Sequential(layer).eval(), Model(norm_type="group", norm_num_groups=2))
    x = torch.randn(3, 8, 5, 5)
    normal = group_norm_in_float64(x.numpy(), groups=2, eps=1e-5, scale=np.ones(8), shift=np.zeros(8))
    np.testing.assert_allclose(model(x).detach().numpy(), normal / (1 + np.exp(-normal)), rtol=1e-5, atol=1e-5)
    assert not model.train()(x).any()  # everything is dropped, and SiLU of zero is zero


def test_group_norm_takes_over_the_parameters_of_its_layer():
    layer = batch_norm(8).to(torch.float64)
    layer.bias.requires_grad_(False)
    (group,) = norms.apply(nn.Sequential(layer), Model(norm_type="group", norm_num_groups=2))
    assert group.weight is layer.weight
    assert group.bias is layer.bias


def test_group_norm_adds_no_scale_and_shift():
    (group,) = norms.apply(nn.Sequential(nn.BatchNorm2d(4, affine=False)), Model(norm_type="group", norm_num_groups=2))
    assert list(group.parameters()) == []
    assert group(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


def test_removed_norm_leaves_the_activation():
    model = nn.Sequential(batch_norm(8), BatchNormAct2d(8, act_layer=nn.SiLU))
    x = torch.randn(3, 8, 5, 5)
    expected = x * torch.sigmoid(x)
    torch.testing.assert_close(norms.apply(model, Model(norm_type="none"))(x), expected)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "resnet8-cifar"])
def test_default_options_leave_batch_norm_unchanged(name):
    with torch.device("meta"):
        model = zoo.build(name, classes=2, seed=0)
    settings = {(layer.eps, layer.momentum) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)}
    assert settings == {(1e-5, 0.1)}


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "resnet8-cifar"])
def test_eps_and_momentum_reach_every_batch_norm(name):
    with torch.device("meta"):
        model = zoo.build(name, classes=2, seed=0, norm_eps=1e-3, batchnorm_momentum=0.03)
    settings = {(layer.eps, layer.momentum) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)}
    assert settings == {(1e-3, 0.03)}


def test_momentum_is_the_weight_of_the_newest_batch():
    model = norms.apply(nn.Sequential(nn.BatchNorm2d(2)), Model(batchnorm_momentum=0.25))
    x = torch.randn(4, 2, 3, 3)
    model(x)
    torch.testing.assert_close(model[0].running_mean, 0.25 * x.mean((0, 2, 3)))


NORMALISED = [name for name in zoo.names() if not name.startswith("squeezenet")]  # tests/models/test_squeezenet.py


@pytest.mark.run
@pytest.mark.parametrize("kind", ["group", "none"])
@pytest.mark.parametrize("name", [*NORMALISED, "timm:regnety_002", "timm:densenet121", "timm:resnetv2_50"])
def test_every_batch_norm_is_replaced_in_every_model(name, kind):
    model = zoo.build(name, classes=2, seed=0, norm_type=kind, norm_num_groups=8)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert any(isinstance(layer, nn.GroupNorm) for layer in model.modules()) == (kind == "group")


@pytest.mark.parametrize("kind", ["group", "none"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "mobilenet-v3-small", "timm:regnety_002"])
def test_model_with_another_norm_runs_forward_and_backward(name, kind):
    model = zoo.build(name, classes=2, seed=0, norm_type=kind, norm_num_groups=8)
    logits = model(torch.randn(2, 3, 32, 32))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["group", "none"])
def test_replaced_norm_keeps_training_mode(kind, training):
    model = nn.Sequential(BatchNormAct2d(8)).train(training)
    assert norms.apply(model, Model(norm_type=kind, norm_num_groups=2))[0].training == training


GROUPS = {
    "resnet8-cifar": "the 16 channels of layer 'bn1'; 16 divides every layer",
    "efficientnet-b0": "the 16 channels of layer 'blocks.0.0.bn2'; 8 divides every layer",
}


@pytest.mark.parametrize(("name", "message"), GROUPS.items())
def test_groups_that_do_not_divide_the_channels_are_refused(name, message):
    with torch.device("meta"):
        model = zoo.build(name, classes=2, seed=0)
    with pytest.raises(ConfigError) as caught:
        norms.apply(model, Model(norm_type="group", norm_num_groups=32))
    assert str(caught.value) == f"--norm-num-groups: got 32, which does not divide {message}"
    assert not any(isinstance(layer, nn.GroupNorm) for layer in model.modules())  # nothing half done


NOTHING_TO_CHANGE = {
    "--norm-type": Model(norm_type="group"),
    "--norm-eps": Model(norm_eps=0.1),
    "--batchnorm-momentum": Model(batchnorm_momentum=0.1),
    "--disable-stable-batchnorm": Model(disable_stable_batchnorm=True),
}


@pytest.mark.parametrize(("option", "options"), NOTHING_TO_CHANGE.items())
def test_option_without_a_norm_to_change_is_refused(option, options):
    with pytest.raises(ConfigError) as caught:
        norms.apply(nn.Sequential(nn.LayerNorm(4)), options)
    assert str(caught.value) == f"{option}: this model has no 2d batch norm to change; leave the option out"


def test_model_without_batch_norm_accepts_default_options():
    model = nn.Sequential(nn.LayerNorm(4))
    assert norms.apply(model, Model()) is model


GROUP = {"norm_type": "group", "norm_num_groups": 8}


@pytest.mark.parametrize("name", ["resnet8-cifar", "mobilenet-v3-small"])
@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        (
            {"norm_type": "group", "norm_num_groups": 8, "enable_fast_groupnorm": True},
            {"norm_type": "group", "norm_num_groups": 8},
        ),
        ({"disable_stable_batchnorm": True}, {}),
    ],
)
def test_fast_norms_equal_plain_ones_and_load_their_checkpoints(name, changed, plain):
    fast = zoo.build(name, classes=5, seed=0, **changed).train()
    slow = zoo.build(name, classes=5, seed=1, **plain).train()
    slow.load_state_dict(fast.state_dict())
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected = slow(x)
    torch.manual_seed(3)
    torch.testing.assert_close(fast(x), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fast.eval()(x), slow.eval()(x), rtol=1e-3, atol=1e-4)


def test_convolutions_get_biases_in_place_of_norms():
    model = zoo.build("resnet8-cifar", classes=10, seed=0, norm_type="none", conv_bias=True)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.bias is not None and not layer.bias.any() for layer in convolutions)
    bare = zoo.build("resnet8-cifar", classes=10, seed=0, norm_type="none")
    added = zoo.count_parameters(model) - zoo.count_parameters(bare)
    assert added == sum(layer.out_channels for layer in convolutions)
