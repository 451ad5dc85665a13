from pathlib import Path

import pytest
import torch
from torch import nn

import interpreting
from falconet.models import zoo
from falconet.models.fused import fusion
from falconet.models.fused.narrow import _TILINGS, NarrowConv, can_compute
from own_convolutions import ERRORS, assert_exact_and_repeatable, relative

CASES = [
    *(f"{inputs} to {outputs}, as in use" for inputs, outputs in _TILINGS),
    *("16 to 16", "16 to 32", "48 to 48", "64 to 64", "48 to 128"),
    *("one pixel", "one column", "one row", "31 x 31", "several tiles"),
    *("crossed, one pixel", "crossed, more rows in a tile than in an image"),
    *("beyond", "a weight in channels-last memory"),
]
EXACT = ["constant", "zero", "huge"]
LAYERS = {"layer with weights in fp16": 5e-4, "layer with weights in fp32": 1e-6}


@pytest.fixture(scope="module")
def interpreted():
    """The kernel's errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_narrow.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted([*CASES, *EXACT, *LAYERS])


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_sums_are_as_exact_as_fp32(case, interpreted):
    assert interpreted[case] < 1e-6


@pytest.mark.run
@pytest.mark.parametrize("case", EXACT)
def test_sums_of_whole_numbers_are_exact(case, interpreted):
    assert interpreted[case] == 0


@pytest.mark.run
@pytest.mark.parametrize("case", LAYERS)
def test_the_layer_computes_what_the_convolution_does(case, interpreted):
    errors = interpreted[case]
    assert errors.pop("weight") < LAYERS[case]
    assert max(errors.values()) < 1e-3


def conv_of(inputs=24, outputs=64, *, kind=nn.Conv2d, **options):
    options = {"kernel_size": 3, "padding": 1, "bias": False, **options}
    return kind(inputs, outputs, **options).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"groups": 8},
        {"inputs": 40},
        {"outputs": 40},
        {"kernel_size": 5, "padding": 2},
        {"stride": 2},
        {"dilation": 2, "padding": 2},
        {"padding": 0},
        {"padding_mode": "circular"},
        {"kind": type("Other", (nn.Conv2d,), {})},
    ],
)
def test_other_convolutions_are_left_alone(options):
    assert not can_compute(conv_of(**options))


@pytest.mark.parametrize(("inputs", "outputs"), _TILINGS)
def test_layers_of_the_table_are_computed(inputs, outputs):
    assert can_compute(conv_of(inputs, outputs))
    assert can_compute(conv_of(inputs, outputs, padding="same"))


@pytest.mark.parametrize("more", [0, 8])
def test_the_convolution_itself_runs_on_the_cpu(more):
    conv, x = conv_of(), torch.randn(2, 24, 6, 6).contiguous(memory_format=torch.channels_last)
    layer = NarrowConv(conv)
    torch.testing.assert_close(layer(nn.functional.pad(x, (0, 0, 0, 0, 0, more))), conv(x))
    assert [*layer.parameters()] == [conv.weight]


def called(model):
    traced = fusion.fuse(model).model
    return [traced.get_submodule(str(node.target)) for node in traced.graph.nodes if node.op == "call_module"]


def test_the_training_pass_of_a_cifar_resnet_has_them():
    layers = [layer for layer in called(zoo.build("resnet20-cifar", classes=10, seed=0)) if type(layer) is NarrowConv]
    assert [layer.conv.in_channels for layer in layers] == 5 * [32]


def test_the_first_convolution_after_speednets_filters_is_one_and_takes_their_padded_channels():
    model = zoo.build("speednet8-cifar", classes=10, seed=0)
    stem, first, *_ = called(model)
    assert isinstance(first, NarrowConv)
    assert (stem.outputs, first.conv) == (32, model.layer1.conv1)


def test_shapes_are_found_without_a_device():
    layer = NarrowConv(conv_of()).to("meta")
    assert layer(torch.empty(2, 32, 7, 6, device="meta")).shape == (2, 64, 7, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), _TILINGS)
@pytest.mark.parametrize(("images", "height", "width"), [(300, 31, 31), (37, 8, 8), (5, 7, 130), (1, 1, 1)])
def test_layer_equals_float64_and_repeats_bit_for_bit(images, height, width, inputs, outputs, dtype):
    torch.manual_seed(0)
    conv, exact = (conv_of(inputs, outputs).to("cuda", kind) for kind in (dtype, torch.float64))
    assert_exact_and_repeatable(NarrowConv, conv, exact, (images, inputs, height, width))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_weights_in_fp32_get_gradients_that_are_not_rounded(dtype):
    torch.manual_seed(0)
    conv = conv_of().cuda()
    x = torch.randn(40, 32, 31, 31, device="cuda").contiguous(memory_format=torch.channels_last)
    x[:, 24:] = 0
    dy = torch.randn(40, 64, 31, 31, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype):
        y = NarrowConv(conv)(x)
    y.backward(dy)
    exact = torch.zeros(conv.weight.shape, dtype=torch.float64, device="cuda", requires_grad=True)
    nn.functional.conv2d(x[:, :24].to(dtype).double(), exact, padding=1).backward(dy.double())
    assert (y.dtype, conv.weight.grad.dtype) == (dtype, torch.float32)
    assert relative(conv.weight.grad, exact.grad) < 1e-4  # of values rounded to bf16, 2e-3


@pytest.mark.gpu
def test_tensors_may_have_more_than_two_billion_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB")
    conv = conv_of().half().cuda()
    x = torch.zeros(600, 24, 240, 240, dtype=torch.float16, device="cuda").to(memory_format=torch.channels_last)
    x[-1] = torch.randn_like(x[-1])
    y = NarrowConv(conv)(x)
    assert y.numel() > 2**31
    y.backward(torch.ones_like(y))
    exact = torch.zeros(conv.weight.shape, dtype=torch.float64, device="cuda", requires_grad=True)
    found = nn.functional.conv2d(x[-1:].double(), exact, padding=1)
    found.backward(torch.ones_like(found))
    assert relative(conv.weight.grad, exact.grad) < 5e-4
