"""One-pass batch norm against float64 and torch's: how large its error is, and where."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from falconet.models.norms import OnePassBatchNorm2d


def images(mean=0.0, channels=6, dtype=torch.float32, seed=0):
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(8, channels, 7, 7, generator=noise) + mean).to(dtype)


def layer(kind=OnePassBatchNorm2d, **options):
    torch.manual_seed(1)
    made = kind(6, **options)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def exact(norm, x, dy):
    """Output and gradients of input, weight and bias in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    y = functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, norm.eps)
    y.backward(dy.double())
    return [y.detach(), *(t.grad for t in leaves)]


def found(norm, x, dy):
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(dy)
    return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad]


@pytest.mark.parametrize(
    ("mean", "tolerance"),
    [(0.0, 1e-6), (10.0, 5e-5), (100.0, 5e-3)],  # about 1e-7 * (1 + mean^2), where the variance is 1
)
def test_error_grows_with_the_square_of_the_mean(mean, tolerance):
    norm, x, dy = layer(), images(mean), images(seed=2)
    for ours, expected in zip(found(norm, x, dy), exact(norm, x, dy), strict=True):
        assert (ours.double() - expected).abs().max() / expected.abs().max() < tolerance


def test_torchs_batch_norm_is_more_exact_far_from_zero():
    """Which is why one-pass batch norm is not the default."""
    x, dy = images(300.0), images(seed=2)
    errors = [
        (found(norm, x, dy)[0].double() - exact(norm, x, dy)[0]).abs().max().item()
        for norm in (layer(), layer(nn.BatchNorm2d))
    ]
    assert errors[0] > 5 * errors[1]


def test_variance_is_never_negative():
    norm = layer()
    y = norm(torch.full((4, 6, 5, 5), 12345.678))
    assert y.isfinite().all()
    assert (norm.running_var >= 0).all()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_equal_torchs(momentum):
    ours, theirs = layer(momentum=momentum), layer(nn.BatchNorm2d, momentum=momentum)
    for seed in range(3):
        ours(images(seed=seed))
        theirs(images(seed=seed))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(images()), theirs(images()), rtol=1e-4, atol=1e-5)


def test_torchs_checkpoint_loads():
    ours, theirs = OnePassBatchNorm2d(6), layer(nn.BatchNorm2d)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_summed_in_fp32(dtype):
    norm, x, dy = layer(), images(dtype=dtype), images(seed=2, dtype=dtype)
    for ours, expected in zip(found(norm, x, dy), exact(norm, x, dy), strict=True):
        assert (ours.double() - expected).abs().max() / expected.abs().max() < 2 * torch.finfo(dtype).eps
    assert norm.running_mean.dtype == torch.float32


def test_channels_last_memory_is_kept():
    x = images().contiguous(memory_format=torch.channels_last)
    assert layer()(x).is_contiguous(memory_format=torch.channels_last)


def test_norm_works_without_parameters_and_statistics():
    norm = OnePassBatchNorm2d(6, affine=False, track_running_stats=False)
    x = images(3.0)
    for mode in (True, False):
        y = norm.train(mode)(x)
        torch.testing.assert_close(y, functional.batch_norm(x, None, None, training=True), rtol=1e-4, atol=1e-5)


def test_gradient_equals_finite_differences():
    norm = layer().double()  # sums are in fp32, so only to fp32's precision
    x = images().double()[:2, :, :3, :3].requires_grad_()
    y = copy.deepcopy(norm)(x)
    y.square().sum().backward()
    one = torch.zeros_like(x)
    one[0, 1, 2, 1] = 1e-3
    with torch.no_grad():
        up, down = (copy.deepcopy(norm)(x + sign * one).square().sum() for sign in (1, -1))
    assert x.grad[0, 1, 2, 1].item() == pytest.approx(((up - down) / 2e-3).item(), rel=1e-2, abs=1e-2)
