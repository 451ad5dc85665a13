from pathlib import Path

import pytest
import torch
from torch import nn

import interpreting
from falconet.models import zoo
from falconet.models.fused import fusion
from falconet.models.fused.grouped import GroupedConv, can_compute
from own_convolutions import ERRORS, assert_exact_and_repeatable, gradients, relative

CASES = [
    *("groups of 4", "groups of 8", "groups of 16"),
    *("groups of 8, stride 2", "groups of 16, stride 2", "groups of 32, stride 2"),
    *("one pixel", "one pixel, stride 2", "strips", "strips, stride 2"),
]
LAYERS = [f"layer with groups of {group}, stride {stride}" for group, stride in ((4, 1), (8, 1), (8, 2))]


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_grouped.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted([*CASES, *LAYERS])


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_sums_are_as_exact_as_fp32_and_results_as_fp16(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < (1e-6 if what == "weight" else 5e-4), what


@pytest.mark.run
@pytest.mark.parametrize("case", LAYERS)
def test_the_layer_computes_what_the_convolution_does(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < 5e-4, what


def conv_of(channels=64, group=4, *, kind=nn.Conv2d, **options):
    options = {"kernel_size": 3, "padding": 1, "bias": False, "groups": channels // group, **options}
    return kind(channels, options.pop("out_channels", channels), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"group": 1},
        {"group": 64},
        {"channels": 24},
        {"out_channels": 128},
        {"kernel_size": 5, "padding": 2},
        {"group": 32},  # cuDNN's are faster
        {"stride": 2},
        {"stride": 3},
        {"stride": (1, 2)},
        {"dilation": 2},
        {"padding": "same"},
        {"padding": 0},
        {"padding_mode": "circular"},
        {"kind": type("Other", (nn.Conv2d,), {})},
    ],
)
def test_other_convolutions_are_left_alone(options):
    assert not can_compute(conv_of(**options))
    assert can_compute(conv_of())
    assert can_compute(conv_of(256, 32, stride=2))


def test_the_convolution_itself_runs_on_the_cpu():
    conv, x = conv_of(), torch.randn(2, 64, 6, 6).contiguous(memory_format=torch.channels_last)
    layer = GroupedConv(conv)
    assert torch.equal(layer(x), conv(x))
    assert [*layer.parameters()] == [conv.weight]


def test_the_training_pass_of_a_resnext_has_them():
    traced = fusion.fuse(zoo.build("resnext50", classes=10, seed=0)).model
    called = [traced.get_submodule(str(node.target)) for node in traced.graph.nodes if node.op == "call_module"]
    assert sum(isinstance(layer, GroupedConv) for layer in called) == 14  # of 16; the last two have groups of 32


def test_shapes_are_found_without_a_device():
    layer = GroupedConv(conv_of(group=8, stride=2)).to("meta")
    assert layer(torch.empty(2, 64, 7, 6, device="meta")).shape == (2, 64, 4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(("group", "stride"), [(4, 1), (8, 1), (16, 1), (8, 2), (16, 2), (32, 2)])
@pytest.mark.parametrize("shape", [(5, 64, 33, 40), (3, 96, 70, 12), (2, 128, 7, 7)])
def test_layer_equals_float64_and_repeats_bit_for_bit(shape, group, stride, dtype):
    torch.manual_seed(0)
    conv, exact = (conv_of(shape[1], group, stride=stride).to("cuda", kind) for kind in (dtype, torch.float64))
    assert_exact_and_repeatable(GroupedConv, conv, exact, shape)


@pytest.mark.gpu
def test_weights_in_fp32_get_gradients_in_fp32():
    torch.manual_seed(0)
    conv = conv_of(64, 8).cuda()
    x = torch.randn(4, 64, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = gradients(conv, conv, x, torch.ones(4, 64, 20, 20, device="cuda"))
    conv.weight.grad, x.grad = None, None
    with torch.autocast("cuda", torch.float16):
        y = GroupedConv(conv)(x)
    y.backward(torch.ones_like(y))
    for a, b in zip((y, x.grad, conv.weight.grad), expected, strict=True):
        assert relative(a, b.double()) < 2e-3
    assert (y.dtype, x.grad.dtype, conv.weight.grad.dtype) == (torch.float16, torch.float32, torch.float32)


@pytest.mark.gpu
def test_tensors_may_have_more_than_two_billion_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB")
    conv = conv_of(128, 4).half().cuda()
    images = torch.empty(300, 128, 240, 240, dtype=torch.float16, device="cuda", memory_format=torch.channels_last)
    assert images.numel() > 2**31
    images[:-1] = 0
    images[-1] = torch.randn_like(images[-1])
    with torch.no_grad():
        y = GroupedConv(conv)(images)
        torch.testing.assert_close(y[-1:], conv(images[-1:]), rtol=1e-2, atol=1e-2)
        assert not y[-2].any()
