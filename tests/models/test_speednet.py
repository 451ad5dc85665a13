"""SpeedNets against torch's functions, their whitening against the images it was made from, and runs that keep it."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from falconet.cli import main
from falconet.models import speednet, zoo
from falconet.models.depth import classifier, orthogonal_names


def small(name="speednet8-cifar", **options):
    return zoo.build(name, classes=10, seed=3, speednet_widths=(24, 32, 40), **options)


def images(count=64, side=32):
    drawn = torch.Generator().manual_seed(5)
    coarse = torch.randn(count, 3, side // 2, side // 2, generator=drawn)
    return F.interpolate(coarse, side, mode="bilinear") + 0.1 * torch.randn(count, 3, side, side, generator=drawn)


def reference(weights, x, *, is_deep, act):
    """The published forward pass in training mode, written with torch's functions."""

    def norm(y, prefix):
        mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
        shift = weights[f"{prefix}.bias"][:, None, None]
        return (y - mean[:, None, None]) / (variance[:, None, None] + 1e-12).sqrt() + shift

    x = act(F.conv2d(x, weights["conv1.weight"], weights["conv1.bias"]))
    for stage in ("layer1", "layer2", "layer3"):
        x = F.conv2d(x, weights[f"{stage}.conv1.weight"], padding="same")
        x = first = act(norm(F.max_pool2d(x, 2), f"{stage}.bn1"))
        x = act(norm(F.conv2d(x, weights[f"{stage}.conv2.weight"], padding="same"), f"{stage}.bn2"))
        if is_deep:
            x = act(norm(F.conv2d(x, weights[f"{stage}.conv3.weight"], padding="same"), f"{stage}.bn3") + first)
    x = F.max_pool2d(x, 3).flatten(1)
    return F.linear(x, weights["fc.weight"]) / x.shape[1]


@pytest.mark.parametrize("name", speednet.NAMES)
@pytest.mark.parametrize(("activation", "act"), [("gelu", F.gelu), ("silu", F.silu)])
def test_logits_are_those_of_the_published_network(name, activation, act):
    model = small(name, speednet_activation=activation).double().train()
    x = images(8).double()
    found = reference(dict(model.named_parameters()), x, is_deep=name == "speednet11-cifar", act=act)
    torch.testing.assert_close(model(x), found, rtol=1e-9, atol=1e-12)


def test_default_widths_give_the_published_numbers_of_weights():
    # 24 x 12 + 24, six convolutions, six shifts and scales, 256 x 10
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert zoo.count_parameters(zoo.build("speednet8-cifar", classes=10, seed=0)) == (
        24 * 12 + 24 + convolutions + 2 * (2 * 64 + 4 * 256) + 2560
    )


def test_stages_pass_their_input_on_at_first():
    model = small()
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(model.layer1.conv1(x), x)
    grown = model.layer2.conv1(torch.randn(2, 24, 8, 8))
    assert grown.shape[1] == 32
    assert model.fc.weight.std().item() == pytest.approx(1.0, abs=1e-5)


def test_scales_of_norms_and_whitening_filters_are_fixed():
    fixed = {name for name, weight in small().named_parameters() if not weight.requires_grad}
    norms = {f"layer{stage}.bn{number}.weight" for stage in (1, 2, 3) for number in (1, 2)}
    assert fixed == {"conv1.weight", *norms}
    assert small(speednet_whitening=False).conv1.weight.requires_grad


def test_whitened_patches_have_no_correlation_and_a_mean_square_of_almost_one():
    model, x = small(), images(256)
    model.whiten([x[:100], x[100:]])
    filters = model.conv1.weight.detach().double()
    torch.testing.assert_close(filters[:12], -filters[12:])
    responses = F.conv2d(x.double(), filters[:12]).movedim(1, 0).reshape(12, -1)
    moments = responses @ responses.T / responses.shape[1]
    columns = x.double().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    variances = torch.linalg.eigvalsh(columns.T @ columns / len(columns))
    torch.testing.assert_close(moments, torch.diag(variances / (variances + 5e-4)), rtol=0, atol=1e-5)


def test_filters_of_a_padded_input_see_the_three_colours():
    plain, padded, x = small(), small(input_image_padding=True), images(16)
    for model in (plain, padded):
        model.whiten([x])
    torch.testing.assert_close(padded.eval()(x), plain.eval()(x))


def test_only_filters_between_the_first_and_the_classifier_are_orthogonalised():
    model = small()
    assert classifier(model) == {"fc.weight"}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert orthogonal_names(model) & trained == {
        f"layer{stage}.conv{number}.weight" for stage in (1, 2, 3) for number in (1, 2)
    }


def test_images_that_shrink_to_nothing_are_refused_in_one_line(capsys):
    assert main(["train", "--model", "speednet8-cifar", "--data", "digits", "--plan"]) == 2
    assert "got 8, expected at least 9 for speednet8-cifar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speednet-widths", "8", "16"], "--speednet-widths: got 2, expected three"),
        (["--model", "resnet8-cifar", "--speednet-activation", "silu"], "'resnet8-cifar' is not a SpeedNet"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message, capsys):
    assert main(["train", "--plan", "--data", "generated", "--model", "speednet8-cifar", *arguments]) == 2
    assert message in capsys.readouterr().err


TRAIN = (
    "train --data generated --model speednet8-cifar --speednet-widths 24 24 24 --image-size 16 --classes 4"
    " --iterations 3 --micro-batch-size 8 --warmup-epoch 0 --threads 1 --dataloader-workers 0 --device cpu --no-report"
    " --checkpoints-kept all --optimizer muon --lr 0.02 --muon-rescale --lr-share fc=10 .*/bias=2"
)


def test_a_restored_run_keeps_its_filters_and_equals_one_without_interruption(tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert main([*TRAIN.split(), "--epoch", "2", "--run-dir", str(whole)]) == 0
    name = "checkpoints/speednet8-cifar_generated"
    first, last = (load_file(whole / f"{name}_{epoch}" / "model.safetensors") for epoch in (1, 2))
    assert torch.equal(first["conv1.weight"][:12], -first["conv1.weight"][12:])  # which random filters are not
    assert main(["restore", str(whole / f"{name}_1"), "--run-dir", str(again), "--no-report"]) == 0
    for file in ("model", "optimizer"):
        expected, found = (load_file(run / f"{name}_2" / f"{file}.safetensors") for run in (whole, again))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert torch.equal(first["conv1.weight"], last["conv1.weight"])
    assert not torch.equal(first["conv1.bias"], last["conv1.bias"])


def test_norms_can_be_replaced_and_models_traced():
    model = small(norm_type="group", norm_num_groups=8)
    assert sum(isinstance(layer, nn.GroupNorm) for layer in model.modules()) == 6
    traced = torch.fx.symbolic_trace(small().eval())
    x = images(2)
    torch.testing.assert_close(traced(x), small().eval()(x))
