"""Fast and strided group norm against float64 and torch's group norm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import interpreting
from falconet.models.groupnorm import (
    FastGroupNorm,
    FusedGroupNorm,
    StridedGroupNorm,
    group_norm,
    plain_group_norm,
    plain_strided_group_norm,
    strided_group_norm,
)
from falconet.models.proxynorm import ProxyNorm

CASES = (
    *("few channels", "joined rows and several parts", "a short last tile", "channels beyond a tile", "many groups"),
    *("single pixels", "single values", "far from zero", "tiny variance", "constant"),
    *(f"{act}, {n} gradients" for act in ("none", "relu", "silu", "hard_swish", "relu6") for n in (1, 2)),
    *(f"{act}, added, {n} gradients" for act in ("none", "relu") for n in (1, 2)),
    *("proxy of silu", "proxy of relu"),
)
# The input's own rounding is that large a part of its deviation; of a single value, only epsilon is left to divide by.
ROUNDED = {"far from zero": 1e-4, "tiny variance": 1e-4, "single values": 0.1}
SHAPES = [(2, 6, 5, 7, 3), (3, 40, 9, 9, 4), (1, 130, 3, 3, 13), (2, 8, 70, 70, 2), (2, 4, 1, 1, 1), (1, 256, 2, 3, 32)]


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
    """Of an output and its gradients, in order."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error <= tolerance, (number, error.item())


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_groupnorm.py"))


@pytest.mark.run
@pytest.mark.parametrize("grouping", ["neighbours", "strided"])
def test_all_cases_are_known(grouping, interpreted):
    assert sorted(interpreted[grouping]) == sorted(CASES)


@pytest.mark.run
@pytest.mark.parametrize("grouping", ["neighbours", "strided"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_exact_as_fp32(case, grouping, interpreted):
    for what, error in interpreted[grouping][case].items():
        assert error < ROUNDED.get(case, 2e-6), what


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


ACTS = {"relu": nn.ReLU, "silu": nn.SiLU, "hard_swish": nn.Hardswish, "relu6": nn.ReLU6, "none": nn.Identity}


def followed(kind, groups, channels, act):
    """A norm with scale and shift, and what follows it, as one layer."""
    layer = FusedGroupNorm(kind(groups, channels), act=ACTS[act]())
    for weight in layer.parameters():
        nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return layer


def passed(layer, x, shortcut, dy, *, dtype):
    """The result, and the gradients of input, shortcut, weight and bias; the result goes to `forks` layers."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, shortcut) if t is not None]
    results = layer(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    layer.zero_grad()
    torch.autograd.backward(results, [dy.to(dtype)] * len(results))
    return [results[0].detach(), *(t.grad for t in leaves), *(t.grad for t in layer.parameters())]


FOLLOWED = [  # shape, dtype, activation, whether there is a shortcut, and a second layer that takes the result
    (SHAPES[1], torch.float32, "relu", True, True),
    (SHAPES[4], torch.float32, "relu", False, False),
    ((4, 512, 14, 14, 32), torch.bfloat16, "relu", True, False),
    ((8, 24, 28, 28, 4), torch.float16, "relu", True, True),
    ((8, 24, 28, 28, 4), torch.float16, "none", True, False),
    ((8, 24, 28, 28, 4), torch.float16, "relu", False, True),
    ((8, 24, 28, 28, 4), torch.float16, "silu", False, False),
    ((8, 24, 28, 28, 4), torch.float16, "hard_swish", False, False),
    ((8, 24, 28, 28, 4), torch.float16, "relu6", False, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GroupNorm, StridedGroupNorm])
@pytest.mark.parametrize(("shape", "dtype", "act", "adds", "forks"), FOLLOWED)
def test_gpu_norms_with_what_follows_are_exact_up_to_rounding(shape, act, adds, forks, kind, dtype):
    x, dy, _, _, groups = (t.cuda() if isinstance(t, torch.Tensor) else t for t in case(shape, dtype=dtype))
    shortcut = torch.randn_like(x) if adds else None
    layer, exact = followed(kind, groups, shape[1], act).cuda(), followed(kind, groups, shape[1], act).cuda().double()
    layer.forks = exact.forks = forks
    found, again = (passed(layer, x, shortcut, dy, dtype=dtype) for _ in range(2))
    right = passed(exact, x, shortcut, dy, dtype=torch.float64)
    for number, (one, other, repeated) in enumerate(zip(found, right, again, strict=True)):
        # A rectified value near 0 may fall on the other side.
        error = (one.double() - other).norm() / other.norm()
        assert error <= max(2e-6, 2 * torch.finfo(dtype).eps), number
        assert torch.equal(one, repeated), "the same input gave other bits"


@pytest.mark.gpu
def test_more_elements_than_32_bits_count_are_normalised():
    count = 2**31 // (64 * 256 * 256) + 2
    x = torch.randn(count, 64, 256, 256, device="cuda", dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    layer = FusedGroupNorm(nn.GroupNorm(32, 64), act=nn.ReLU()).cuda()
    with torch.no_grad():
        z = layer(x, x)
    torch.testing.assert_close(z[-1].float(), (2 * x[-1].float()).relu(), rtol=0.02, atol=0.02)
    del z
    x.requires_grad_()
    layer(x).backward(x.detach())
    assert x.grad[-1].float().abs().mean() > 0.01
    assert x.grad[-1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("kind", [FastGroupNorm, StridedGroupNorm])
def test_gpu_proxy_norm_is_part_of_the_norm(kind, activation):
    x, dy, _, _, groups = (t.cuda() if isinstance(t, torch.Tensor) else t for t in case(SHAPES[1], torch.float32))
    results = []
    for dtype in (torch.float32, torch.float64):
        norm = kind(groups, x.shape[1], affine=False)
        norm.act = ProxyNorm(x.shape[1], activation=activation)
        for number, weight in enumerate(norm.parameters()):
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))
        results.append(passed(FusedGroupNorm(norm).cuda().to(dtype), x, None, dy, dtype=dtype))
    check_close(results[0], results[1], 5e-6)
