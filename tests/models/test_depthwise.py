from pathlib import Path

import pytest
import torch
from torch import nn

import interpreting
from falconet.models.fused.depthwise import DepthwiseConv, can_compute
from falconet.models.padding import SameConv2d
from own_convolutions import ERRORS, assert_exact_and_repeatable, gradients, relative

CASES = [
    *(f"{kernel} x {kernel}, stride {stride}" for kernel in (3, 5) for stride in (1, 2)),
    *("SAME padding of an even side", "SAME padding, 5 x 5", "no padding", "one pixel", "fp16"),
    *("layer", "layer with SAME padding", "layer whose weight is frozen"),
    *("one column of eight channels", "strips", "strips, stride 2"),
]


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_depthwise.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted(CASES)


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_exact_as_fp32(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < (5e-4 if case == "fp16" and what != "weight" else 1e-6), what


def conv_of(channels=16, kernel=3, kind=nn.Conv2d, **options):
    options = {"padding": kernel // 2, "groups": channels, "bias": False, **options}
    return kind(channels, channels, kernel, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"groups": 4},
        {"channels": 12},
        {"kernel": 7},
        {"stride": 3},
        {"stride": (1, 2)},
        {"dilation": 2},
        {"padding": "same"},
        {"padding": 3},
        {"padding_mode": "circular"},
        {"kind": type("Other", (nn.Conv2d,), {})},
    ],
)
def test_other_convolutions_are_left_alone(options):
    assert not can_compute(conv_of(**options))
    assert can_compute(conv_of())
    assert can_compute(conv_of(kernel=5, stride=2, kind=SameConv2d, padding=0))


def test_the_convolution_itself_runs_on_the_cpu():
    conv, x = conv_of(), torch.randn(2, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    layer = DepthwiseConv(conv)
    assert torch.equal(layer(x), conv(x))
    assert [*layer.parameters()] == [conv.weight]


def test_shapes_are_found_without_a_device():
    layer = DepthwiseConv(conv_of(stride=2)).to("meta")
    assert layer(torch.empty(2, 16, 7, 6, device="meta")).shape == (2, 16, 4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("shape", [(5, 24, 33, 40), (3, 144, 70, 12)])
def test_layer_equals_float64_and_repeats_bit_for_bit(shape, kernel, stride, dtype):
    torch.manual_seed(0)
    conv, exact = (conv_of(shape[1], kernel, stride=stride).to("cuda", kind) for kind in (dtype, torch.float64))
    assert_exact_and_repeatable(DepthwiseConv, conv, exact, shape)


@pytest.mark.gpu
def test_weights_in_fp32_get_gradients_in_fp32():
    torch.manual_seed(0)
    conv = conv_of(24, 5).cuda()
    x = torch.randn(4, 24, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = gradients(conv, conv, x, torch.ones(4, 24, 20, 20, device="cuda"))
    with torch.autocast("cuda", torch.float16):
        y = DepthwiseConv(conv)(x)
    conv.weight.grad, x.grad = None, None
    y.backward(torch.ones_like(y))
    assert y.dtype == torch.float16
    assert conv.weight.grad.dtype == torch.float32
    for a, b in zip((y, x.grad, conv.weight.grad), expected, strict=True):
        assert relative(a, b.double()) < 1e-3


@pytest.mark.gpu
def test_tensors_may_have_more_than_two_billion_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB")
    conv = conv_of(8, 3).half().cuda()
    images = torch.empty(2200, 8, 352, 352, dtype=torch.float16, device="cuda", memory_format=torch.channels_last)
    assert images.numel() > 2**31
    images[:-1] = 0
    images[-1] = torch.randn_like(images[-1])
    with torch.no_grad():
        y = DepthwiseConv(conv)(images)
        torch.testing.assert_close(y[-1:], conv(images[-1:]), rtol=1e-2, atol=1e-2)
        assert not y[-2].any()
