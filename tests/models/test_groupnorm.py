"""Fast and strided group norm against float64 and torch's group norm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import interpreting
from falconet.models.groupnorm import (
    FastGroupNorm,
    StridedGroupNorm,
    group_norm,
    plain_group_norm,
    plain_strided_group_norm,
    strided_group_norm,
)

CASES = ("few channels", "several tiles", "channels beyond a tile", "single pixels", "many groups", "far from zero")
SHAPES = [(2, 6, 5, 7, 3), (3, 40, 9, 9, 4), (1, 130, 3, 3, 13), (2, 8, 70, 70, 2), (2, 4, 1, 1, 1), (1, 256, 2, 3, 32)]
NAMES = ("output", "input's gradient", "weight's gradient", "bias's gradient")


def case(shape, dtype):
    n, c, h, w, groups = shape
    noise = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(n, c, h, w, generator=noise) for _ in range(2))
    weight, bias = (torch.randn(c, generator=noise) for _ in range(2))
    x, dy = ((t.to(dtype)).contiguous(memory_format=torch.channels_last) for t in (x, dy))
    return x, dy, weight, bias, groups


def exact(x, dy, weight, bias, groups):
    """Output and the three gradients in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = functional.group_norm(leaves[0], groups, leaves[1], leaves[2], 1e-5)
    y.backward(dy.double())
    return [y.detach(), *(t.grad for t in leaves)]


def check_close(found, expected, tolerance):
    for name, one, other in zip(NAMES, found, expected, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= tolerance, (name, error.item())


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_groupnorm.py"))


@pytest.mark.run
@pytest.mark.parametrize("grouping", ["neighbours", "strided"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_exact_as_fp32(case, grouping, interpreted):
    # At 1000 fp32's spacing is 6e-5; sums of squares around 0 would lose a variance of 1 altogether.
    tolerance = 3e-4 if case == "far from zero" else 1e-6
    for name, error in zip(NAMES, interpreted[grouping][case], strict=True):
        assert error < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_function_is_exact_up_to_rounding(dtype):
    x, dy, weight, bias, groups = case(SHAPES[1], dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = group_norm(x, groups, weight, bias, eps=1e-5)
    y.backward(dy)
    assert y.dtype == dtype
    expected = exact(x, dy, weight, bias, groups)
    check_close([y.detach(), *(t.grad for t in leaves)], expected, 4 * torch.finfo(dtype).eps)


def test_torchs_checkpoint_loads_and_gives_the_same_output():
    torch.manual_seed(0)
    theirs, ours = nn.GroupNorm(4, 8, eps=1e-3), FastGroupNorm(4, 8, eps=1e-3)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 3, 3)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_autocast_keeps_the_type_of_the_input():
    layer = FastGroupNorm(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 4, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_activation_follows_the_norm():
    layer = FastGroupNorm(2, 4)
    layer.act = nn.ReLU(inplace=True)
    x = torch.randn(1, 4, 2, 2)
    torch.testing.assert_close(layer(x), plain_group_norm(x, 2, layer.weight, layer.bias, eps=1e-5).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (8, 64, 112, 112, 32), (8, 2048, 7, 7, 32)])
def test_gpu_result_is_exact_up_to_rounding(shape, dtype):
    x, dy, weight, bias, groups = (t.cuda() if isinstance(t, torch.Tensor) else t for t in case(shape, dtype=dtype))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = group_norm(*leaves[:1], groups, *leaves[1:], eps=1e-5)
    y.backward(dy)
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = [y.detach(), *(t.grad for t in leaves)]
    check_close(found, exact(x, dy, weight, bias, groups), max(5e-6, 2 * torch.finfo(dtype).eps))


@pytest.mark.gpu
@pytest.mark.parametrize(("scales", "shifts"), [(True, False), (False, True), (False, False)])
def test_gpu_norm_may_lack_scale_and_shift(scales, shifts):
    x, dy, weight, bias, groups = (
        t.cuda() if isinstance(t, torch.Tensor) else t for t in case(SHAPES[1], torch.float32)
    )
    given = [weight if scales else None, bias if shifts else None]
    x.requires_grad_()
    found, expected = (compute(x, groups, *given, eps=1e-5) for compute in (group_norm, plain_group_norm))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    slopes = [torch.autograd.grad(y, x, dy)[0] for y in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_strided_groups_equal_group_norm_of_reordered_channels(memory):
    torch.manual_seed(0)
    layer = StridedGroupNorm(3, 12, eps=1e-3)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(4, 12, 5, 7).to(memory_format=memory).requires_grad_()
    order = sorted(range(12), key=lambda channel: channel % 3)  # group 0: channels 0, 3, 6, 9
    theirs = nn.functional.group_norm(
        x.detach().double()[:, order], 3, layer.weight.double()[order], layer.bias.double()[order], 1e-3
    )
    ours = layer(x)
    torch.testing.assert_close(ours.double()[:, order], theirs, rtol=1e-5, atol=1e-5)
    assert ours.is_contiguous(memory_format=memory)
    slope = torch.randn_like(ours)
    ours.backward(slope)
    wide = x.detach().double().requires_grad_()
    strided_exactly(wide, layer).backward(slope.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert layer(x.detach().half()).dtype == torch.float16


def strided_exactly(x, layer):
    """By the definition: every G-th channel."""
    groups = [slice(first, None, layer.num_groups) for first in range(layer.num_groups)]
    y = torch.empty_like(x)
    for group in groups:
        variance, mean = torch.var_mean(x[:, group], dim=(1, 2, 3), correction=0, keepdim=True)
        y[:, group] = (x[:, group] - mean) / (variance + layer.eps).sqrt()
    return y * layer.weight.double().view(-1, 1, 1) + layer.bias.double().view(-1, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], (8, 512, 28, 28, 32)])
def test_gpu_strided_groups_equal_the_plain_function(shape, dtype):
    x, dy, weight, bias, groups = (t.cuda() if isinstance(t, torch.Tensor) else t for t in case(shape, dtype=dtype))
    results = []
    for compute, kind in ((strided_group_norm, dtype), (plain_strided_group_norm, torch.float32)):
        leaves = [t.detach().to(k).requires_grad_() for t, k in ((x, kind), (weight, weight.dtype), (bias, bias.dtype))]
        y = compute(leaves[0], groups, *leaves[1:], eps=1e-5)
        y.backward(dy.to(kind))
        results.append([y.detach(), *(t.grad for t in leaves)])
    check_close(results[0], [t.double() for t in results[1]], max(5e-6, 2 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("norm", [FastGroupNorm, StridedGroupNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_meta_tensors_are_accepted(norm, dtype):
    """Recomputation and pipelines work out memory and shapes on the meta device."""
    images = torch.empty(2, 8, 4, 4, dtype=dtype, device="meta")
    out = norm(4, 8, device="meta")(images)
    assert (out.shape, out.dtype, out.device) == (images.shape, dtype, images.device)
