from pathlib import Path

import pytest
import torch
from torch import nn

import interpreting
from falconet.models import zoo
from falconet.models.fused import fusion, pointwise
from falconet.models.fused.layers import FusedNorm
from falconet.models.fused.pointwise import can_compute

CASES = [
    *("few channels", "whole tiles", "one pixel of an image", "channels in two parts", "many inputs"),
    *("too many for one gradient", "two gradients", "added", "added, two gradients", "two convolutions"),
    *("one gradient by cuDNN", "a short tile in fp16", "huge mean"),
]
ROUNDED = {"huge mean": 1e-3}  # of the convolution's result in fp32, whose deviation is small beside its mean


@pytest.fixture(scope="module")
def interpreted():
    """The errors of a norm with its convolution by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_pointwise.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted(CASES)


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_a_norm_with_its_convolution_is_as_exact_as_fp32(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < ROUNDED.get(case, 1e-5), what


def conv_of(inputs=64, outputs=256, *, kind=nn.Conv2d, **options):
    return kind(inputs, outputs, options.pop("kernel_size", 1), **{"bias": False, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"inputs": 60},
        {"outputs": 100},
        {"inputs": 2048},
        {"outputs": 2048},
        {"kernel_size": 3, "padding": 1},
        {"stride": 2},
        {"padding": 1},
        {"groups": 2},
        {"kind": type("Other", (nn.Conv2d,), {})},
    ],
)
def test_other_convolutions_stay_as_they_are(options):
    assert can_compute(conv_of())
    assert not can_compute(conv_of(**options))


def joined(model):
    layers = [each for each in fusion.fuse(model).model.modules() if isinstance(each, FusedNorm)]
    return [
        (conv.in_channels, conv.out_channels)
        for layer in layers
        for conv in (layer.conv, layer.shortcut_conv)
        if conv is not None
    ]


def test_narrow_convolutions_of_a_resnet_are_left_to_their_norms():
    found = joined(zoo.build("resnet50", classes=10, seed=0))
    assert found.count((64, 256)) == 4  # one of them is the first shortcut's


def test_a_convolution_whose_result_is_used_elsewhere_stays_as_it_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) * y

    assert joined(Model()) == []
    assert joined(nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))) == [(8, 8)]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.0])
def test_a_trial_accepts_only_what_agrees(wrong):
    right, other = torch.arange(1.0, 5.0), torch.tensor([1.0, 2.0, 3.0, wrong])
    assert pointwise._agree((right, right), (right * 1.001, right), what="it")
    with pytest.warns(UserWarning, match="compiles it to wrong results"):
        assert not pointwise._agree((right, right), (other, right), what="it")


@pytest.mark.gpu
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    from falconet.models.fused import pointwise_kernels

    def wrong(*given):
        dx, dw = right(*given)
        return dx, dw.flip(0)

    right = pointwise_kernels.backward
    monkeypatch.setattr(pointwise_kernels, "backward", wrong)
    pointwise._tried_backward.cache_clear()
    layer = FusedNorm(nn.BatchNorm2d(64, device="cuda"))
    layer.conv = nn.Conv2d(32, 64, 1, bias=False, device="cuda", dtype=torch.float16)
    x = torch.randn(2, 32, 9, 9, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    with pytest.warns(UserWarning, match="the gradients of 32 to 64 channels"):
        layer(x).float().square().sum().backward()
    assert layer.conv.weight.grad is not None
    pointwise._tried_backward.cache_clear()


ACTS = {"relu": nn.ReLU(), "silu": nn.SiLU(), "none": None}
GPU_CASES = [
    *((inputs, outputs, act, False) for inputs, outputs in ((64, 256), (24, 144), (256, 64)) for act in ACTS),
    *((8, 8, "relu", True), (16, 16, "relu", True), (16, 64, "relu", False), (64, 24, "none", True)),
    *((24, 72, "silu", False), (72, 24, "none", True), (72, 40, "none", True), (40, 120, "relu", False)),
    *((40, 240, "silu", False), (240, 80, "none", True), (80, 200, "silu", False), (80, 184, "silu", False)),
    *((32, 16, "none", False), (16, 96, "silu", False), (144, 24, "none", False), (240, 40, "none", True)),
    *((32, 192, "silu", False), (32, 192, "silu", True), (192, 32, "none", False), (112, 112, "relu", True)),
    *((64, 64, "relu", False), (64, 128, "relu", False), (128, 256, "none", True), (256, 128, "relu", True)),
    *((80, 480, "silu", False), (96, 24, "none", True), (112, 672, "silu", False), (144, 40, "none", True)),
    *((48, 24, "none", True), (24, 24, "none", False), (144, 32, "none", True), (192, 56, "none", True)),
    *((56, 336, "silu", False), (160, 960, "silu", False), (120, 40, "none", False), (184, 80, "none", False)),
    *((200, 80, "none", False), (256, 512, "none", False)),
    *((256, 256, "relu", False), (128, 512, "none", False), (256, 1024, "none", True), (64, 256, "none", True)),
]


@pytest.mark.parametrize("name", ["resnet50", "resnext50", "efficientnet-b0", "efficientnet-b4", "mobilenet-v3-large"])
def test_the_widths_of_a_network_are_tried_on_a_gpu(name):
    assert set(joined(zoo.build(name, classes=10, seed=0))) <= {case[:2] for case in GPU_CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "act", "forks"), GPU_CASES)
def test_on_a_gpu_it_computes_what_the_layers_do_and_repeats_it(inputs, outputs, act, forks, dtype):
    noise = torch.Generator("cuda").manual_seed(0)

    def images(channels):
        drawn = torch.randn(5, channels, 91, 89, device="cuda", generator=noise)
        return drawn.to(dtype).contiguous(memory_format=torch.channels_last)

    x, dz = images(inputs), images(outputs)
    bound = 4e-3 if dtype == torch.float16 else 3e-2  # some values fall on the other side of an activation's edge
    conv = nn.Conv2d(inputs, outputs, 1, bias=False, device="cuda").to(memory_format=torch.channels_last)
    conv.weight.data = conv.weight.to(dtype).float()
    results = []
    for kind in (torch.float64, dtype, dtype):
        layer = FusedNorm(nn.BatchNorm2d(outputs, device="cuda"), act=ACTS[act], forks=forks)
        layer.conv, leaf = conv.to(kind), x.to(kind, copy=True).requires_grad_()
        layer.norm.to(torch.float64 if kind == torch.float64 else torch.float32)
        conv.weight.grad = None
        z = layer(leaf)
        z = z[0] + z[1].flip(0) if forks else z
        z.backward(dz.to(kind))
        gradients = (leaf.grad, conv.weight.grad, layer.norm.weight.grad, layer.norm.bias.grad)
        results.append([t.double() for t in (z.detach(), *gradients, layer.norm.running_var)])
        conv.double()
    exact, ours, again = results
    for a, b, c in zip(exact, ours, again, strict=True):
        assert ((a - b).norm() / a.norm()).item() < bound
        assert torch.equal(b, c)
