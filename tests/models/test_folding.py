"""Folded norms: the same predictions in every family of networks, from the weights of the moment."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import interpreting
from falconet.config.options import Model
from falconet.models import zoo
from falconet.models.folding import FoldedConv2d, fold
from falconet.numerics.precision import REGIMES
from falconet.numerics.recompute import recompute
from falconet.parallel import batchnorm

NETWORKS = {  # batch norms
    "resnet18": 20,
    "resnet50": 53,
    "resnext50": 53,
    "efficientnet-b0": 49,
    "mobilenet": 52,
    "mobilenet-v3-large": 46,
    "mobilenet-v3-small": 34,
    "resnet20-cifar": 19,
    "resnet29-cifar": 31,
    "resnext29-cifar": 31,
    "timm:regnety_002": 44,
    "timm:seresnet50": 53,
    "timm:tf_efficientnet_b0": 49,  # SAME padding
}
# A folded weight is rounded once more, to 2^-24 of itself, and 53 layers add what they were given: 3e-6 on average if
# all errors had one sign. A forgotten epsilon, mean or shortcut changes logits by more than 1e-2.
TOLERANCE = 2e-5  # of the largest logit


def images(side=64, count=4):
    noise = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=noise).contiguous(memory_format=torch.channels_last)


def trained(model):
    """Norms with numbers of their own, as after a training; some channels are off."""
    noise = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3, generator=noise)
            layer.running_var.uniform_(0.3, 3, generator=noise)
            layer.weight.data.uniform_(-0.2, 1, generator=noise).clamp_(min=0)
            layer.bias.data.normal_(0, 0.3, generator=noise)
    return model.eval()


def built(name, **options):
    return trained(zoo.build_model(Model(model=name, **options), classes=10, seed=0))


def difference(found, expected):
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_norm_of_a_network_is_folded_and_predicts_the_same(name):
    model = built(name)
    found = fold(model, torch.float32)
    assert found.folded == found.norms == NETWORKS[name]
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in found.model.modules())
    with torch.inference_mode():
        expected, folded = model(images()), found.model(images())
    assert difference(folded, expected) < TOLERANCE
    assert torch.equal(folded.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(
    "options",
    [
        {"model": "resnet18", "input_image_padding": True},
        {"model": "resnet18", "padding": "same"},
        {"model": "resnet18", "padding": "same", "input_image_padding": True},
        {"model": "resnet18", "disable_stable_batchnorm": True},
        {"model": "efficientnet-b0", "disable_stable_batchnorm": True},
        {"model": "efficientnet-b0", "efficientnet_drop_path": 0.2},
    ],
    ids=str,
)
def test_variants_of_layers_are_folded_too(options):
    model = built(options.pop("model"), **options)
    found = fold(model, torch.float32)
    assert found.folded == found.norms > 0
    with torch.inference_mode():
        assert difference(found.model(images()), model(images())) < TOLERANCE


@pytest.mark.parametrize("name", ["resnet20-cifar", "efficientnet-b0"])
def test_norms_that_spanned_replicas_in_training_give_the_same_bits(name):
    plain, spanning = built(name), built(name)
    kinds = batchnorm._kinds()
    for layer in spanning.modules():
        if type(layer) in kinds:
            layer.__class__, layer.span = kinds[type(layer)], None
    found = [fold(model, torch.float32) for model in (plain, spanning)]
    assert found[0].folded == found[1].folded
    assert torch.equal(found[0].model(images(32)), found[1].model(images(32)))
    assert all(hasattr(layer, "span") for layer in spanning.modules() if isinstance(layer, nn.BatchNorm2d))


def test_a_model_that_recomputes_in_training_gives_the_same_bits():
    plain, recomputing = built("resnet20-cifar"), built("resnet20-cifar")
    recompute(recomputing, ["layer1/.*", "layer2/.*"])
    found = [fold(model, torch.float32) for model in (plain, recomputing)]
    assert found[0].folded == found[1].folded == 19
    assert torch.equal(found[0].model(images(8)), found[1].model(images(8)))


@pytest.mark.parametrize("options", [{"norm_type": "group", "norm_num_groups": 8}, {"norm_type": "none"}], ids=str)
def test_a_model_without_batch_norm_stays_as_it_is(options):
    model = built("resnet18", **options)
    assert fold(model, torch.float32).model is model


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet18", "efficientnet-b0"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32.32", 1e-4), ("16.16", 2e-2)])
def test_gpu_group_norms_are_fused_for_predictions(model, precision, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    regime, device = REGIMES[precision], torch.device("cuda")
    plain = regime.prepare(built(model, norm_type="group", norm_num_groups=8), device)
    found = fold(plain, regime.formats(device)["activations"])
    assert found.model is not plain
    with torch.inference_mode():
        fused, expected = (regime.run(each, images().cuda()) for each in (found.model, plain))
    assert difference(fused, expected) < tolerance


def test_a_model_that_cannot_be_traced_stays_as_it_is():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)) if x.sum() > 0 else x

    model = Branching().eval()
    assert fold(model, torch.float32).model is model


class Odd(nn.Module):
    """What cannot be folded beside what can."""

    def __init__(self):
        super().__init__()
        self.before = nn.BatchNorm2d(3)  # of the images
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)
        self.twice, self.norm3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.batch = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        x = functional.gelu(self.norm1(self.conv1(self.before(x))))
        y = self.conv2(x)
        y = self.norm2(y) + y.relu()  # the convolution's output is used again
        return self.batch(self.norm3(self.twice(self.twice(y)))).mean((2, 3))


def test_what_cannot_be_folded_stays():
    torch.manual_seed(0)
    model = Odd()
    for layer in (model.before, model.norm1, model.norm2, model.norm3):
        layer.running_mean.fill_(0.5)
        layer.running_var.fill_(2.0)
    found = fold(model.eval(), torch.float32)
    assert (found.folded, found.norms) == (1, 5)
    with torch.inference_mode():
        assert difference(found.model(images(8)), model(images(8))) < 1e-4  # the last norm divides by a small deviation


def test_a_factor_beyond_the_format_is_not_folded():
    """A channel that never varied: its factor is finite in fp32 and infinite in fp16."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-12)).eval()
    model[1].running_var.fill_(0.0)
    assert (fold(model, torch.float16).folded, fold(model, torch.float32).folded) == (0, 1)


def test_folding_leaves_the_model_as_it_was():
    model = built("resnet18").train()
    model.bn1.eval()  # frozen
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    folded = fold(model, torch.float16).model
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(weight.requires_grad for weight in folded.parameters())


@pytest.mark.parametrize("name", ["resnet20-cifar", "speednet8-cifar"])
def test_the_weights_are_those_of_the_moment(name):
    model = built(name)
    folded, given = fold(model, torch.float32).model, images(32)
    before = folded(given)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(each.abs().mul(0.5).to(each.dtype))
    assert torch.equal(folded(given), before)
    assert difference(fold(model, torch.float32).model(given), model(given)) < TOLERANCE


def test_the_same_weights_give_the_same_bits():
    first, second = (fold(built("resnet20-cifar"), torch.float32).model(images(8)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("precision", ["16.16", "16.32", "bf16.bf16", "bf16.32"])
def test_half_precision_is_folded_in_fp32_and_rounded_once(precision):
    """As close to fp32 as the model is that is not folded: its 20 norms round activations that these do not."""
    regime, device = REGIMES[precision], torch.device("cpu")
    exact = built("resnet18")(images())
    model = regime.prepare(built("resnet18"), device)
    kind = regime.formats(device)["activations"]
    folded = fold(model, kind).model
    assert {weight.dtype for weight in folded.parameters()} == {kind}
    with torch.inference_mode():
        errors = [difference(regime.run(each, images()), exact) for each in (folded, model)]
    assert errors[0] < max(1.5 * errors[1], TOLERANCE)


def test_in_place_activations_do_not_change_the_images():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    given = images(8)
    kept = given.clone()
    fold(model, torch.float32).model(given)
    assert torch.equal(given, kept)


CASES = [
    *("none", "relu", "silu", "hard_swish", "relu6", "silu, excited"),
    *("none, added", "relu, added", "none, one for all added", "relu, one for all added"),
]


@pytest.fixture(scope="module")
def interpreted():
    """How far the CUDA path is from the other, by case, with Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_folding.py"))


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_the_pass_after_a_convolution_computes_what_the_layers_do(case, interpreted):
    assert interpreted[case] < 1e-6


@cache
def exact_scores(name):
    """Scores in float64, which the CPU convolves group by group: threads would wait for each other at every channel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return built(name).double()(images().double())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32.32", "16.16", "bf16.32"])
@pytest.mark.parametrize("name", ["resnet50", "resnext50", "efficientnet-b0", "mobilenet-v3-large", "mobilenet"])
def test_a_folded_network_is_close_on_a_gpu(name, precision):
    device, regime = torch.device("cuda", 0), REGIMES[precision]
    with torch.inference_mode():
        expected = exact_scores(name)
        model = regime.prepare(built(name), device)
        folded = fold(model, regime.formats(device)["activations"])
        assert folded.folded == folded.norms
        errors = [difference(regime.run(each, images().to(device)).cpu(), expected) for each in (folded.model, model)]
    assert errors[0] < max(2 * errors[1], 1e-3 if precision == "32.32" else 0)  # fp32 convolutions may use TF32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudnn_has_one_kernel_for_a_convolution_its_sum_and_its_relu(dtype):
    folded = fold(built("resnet50").cuda(), dtype).model
    with torch.inference_mode():
        folded(images().cuda())
    layers = [layer for layer in folded.modules() if isinstance(layer, FoldedConv2d) and layer.kind == "relu"]
    assert len(layers) == 49  # all but the projections of four shortcuts
    assert all(layer._has_engine for layer in layers)
