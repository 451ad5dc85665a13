"""Run by test_fused_layers in a process of its own: Triton must be imported with its interpreter from the start."""

import itertools
import json

import torch
from torch import nn
from torch.nn import functional

from falconet.models.fused import batchnorm_kernels, layers, pool_kernels, stem_kernels
from falconet.models.fused.excitation_kernels import Excitation
from falconet.models.padding import SameMaxPool2d

ACTS = {
    "none": lambda v: v,
    "relu": functional.relu,
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "relu6": functional.relu6,
    "gelu": functional.gelu,
}
SHAPES = {  # N, C, H, W
    "one row": (1, 24, 1, 1),
    "few channels": (2, 6, 5, 7),
    "a short last tile": (3, 16, 19, 19),
    "several programs": (2, 8, 70, 70),
    "channels beyond a tile": (4, 144, 9, 9),
}
INPUTS = {"random": (0.0, 1.0), "huge mean": (1e3, 1.0), "tiny variance": (1.0, 1e-3), "constant": (2.0, 0.0)}


def errors(shape, act="relu", adds=0, two=False, mean=0.0, deviation=1.0):
    """Relative errors against float64, by what was computed."""
    noise = torch.Generator().manual_seed(0)

    def drawn(shift, scale):
        return (torch.randn(shape, generator=noise) * scale + shift).contiguous(memory_format=torch.channels_last)

    y, short, dz, dz2 = drawn(mean, deviation), drawn(0.3, 2.0), drawn(0.0, 1.0), drawn(0.0, 1.0)
    c = shape[1]
    weight, bias, weight2, bias2 = (torch.randn(c, generator=noise) for _ in range(4))
    running = batchnorm_kernels.Running(torch.zeros(c), torch.ones(c), torch.tensor(4), 0.1)
    found = batchnorm_kernels.statistics(y, weight, bias, running, eps=1e-5)
    found2 = batchnorm_kernels.statistics(short, weight2, bias2, None, eps=1e-5) if adds == 2 else None
    z, bits = batchnorm_kernels.normalise(y, found, act=act, shortcut=short if adds else None, shortcut_found=found2)
    what = batchnorm_kernels.Added(short if adds == 2 else None, found2, bits) if adds else None
    reached, own, others = batchnorm_kernels.sum_gradients(dz, y, found, act=act, dz2=dz2 if two else None, added=what)
    dy, dshort = batchnorm_kernels.spread_gradients(
        reached, y, found, own.found, *((short, others.found) if others is not None else ())
    )
    leaves = [t.double().requires_grad_() for t in (y, short, weight, bias, weight2, bias2)]
    mean_, variance_ = torch.zeros(c).double(), torch.ones(c).double()
    exact = _norm(leaves[0], mean_, variance_, leaves[2], leaves[3])
    if adds:
        exact = exact + (_norm(leaves[1], None, None, leaves[4], leaves[5]) if adds == 2 else leaves[1])
    exact = ACTS[act](exact)
    exact.backward(dz.double() + (dz2.double() if two else 0.0))
    results = {
        "output": (z, exact), "input": (dy, leaves[0].grad), "weight": (own.own[0], leaves[2].grad),
        "bias": (own.own[1], leaves[3].grad), "running mean": (running.mean, mean_),
        "running variance": (running.variance, variance_),
    }  # fmt: skip
    if adds == 1:
        results["shortcut"] = (reached.dz, leaves[1].grad)
    if adds == 2:
        results |= {
            "shortcut": (dshort, leaves[1].grad), "shortcut weight": (others.own[0], leaves[4].grad),
            "shortcut bias": (others.own[1], leaves[5].grad),
        }  # fmt: skip
    assert int(running.batches) == 5
    return {name: _error(a, b.detach()) for name, (a, b) in results.items()}


def gated_errors(shape, act="silu", *, mean=0.0, deviation=1.0):
    """Of a norm, its activation, and a product with what becomes of each image's means."""
    noise = torch.Generator().manual_seed(0)
    y, dz = (torch.randn(shape, generator=noise).contiguous(memory_format=torch.channels_last) for _ in range(2))
    y = y * deviation + mean
    weight, bias = (torch.randn(shape[1], generator=noise) for _ in range(2))
    found = batchnorm_kernels.statistics(y, weight, bias, None, eps=1e-5)
    norm = Excitation(y, found, act)
    sums = norm.sums()
    means = sums[0, :, :, None, None].clone().requires_grad_()
    gate = torch.sigmoid(3 * means)
    z, back = norm.apply(gate.detach()), norm.gate_sums(dz)
    (dmeans,) = torch.autograd.grad(gate, means, back[0, :, :, None, None])
    own = norm.backward(dz, gate.detach(), dmeans, (sums, back))
    leaves = [t.double().requires_grad_() for t in (y, weight, bias)]
    inner = ACTS[act](functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, 1e-5))
    exact = inner * torch.sigmoid(3 * inner.mean((2, 3), keepdim=True))
    exact.backward(dz.double())
    results = {"output": (z, exact), "input": (own.input, leaves[0].grad)}
    results |= {"weight": (own.weight, leaves[1].grad), "bias": (own.bias, leaves[2].grad)}
    return {name: _error(a, b.detach()) for name, (a, b) in results.items()}


def pooled_errors(shape, two, *, pool=None, mean=0.0, deviation=1.0):
    """Of the max pool of a rectified norm; few different numbers, so that some of the nine are equal."""
    pool = pool or nn.MaxPool2d(3, 2, 1)
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(-3, 4, shape, generator=noise).float().contiguous(memory_format=torch.channels_last)
    y = y * deviation + mean
    weight, bias = (torch.randn(shape[1], generator=noise) for _ in range(2))
    weight[0] = 0.0
    found = batchnorm_kernels.statistics(y, weight, bias, None, eps=1e-5)
    padding = layers._padding(pool, y)
    z, *won = pool_kernels.forward(y, found, padding)
    dz, dz2 = (torch.randn(z.shape, generator=noise).contiguous(memory_format=torch.channels_last) for _ in range(2))
    own = pool_kernels.backward(dz, y, found, *won, dz2=dz2 if two else None, padding=padding)
    leaves = [t.double().requires_grad_() for t in (y, weight, bias)]
    inner = functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, 1e-5)
    exact = pool(functional.relu(inner))
    exact.backward(dz.double() + (dz2.double() if two else 0.0))
    results = {"output": (z, exact), "input": (own.input, leaves[0].grad)}
    results |= {"weight": (own.weight, leaves[1].grad), "bias": (own.bias, leaves[2].grad)}
    return {name: _error(a, b.detach()) for name, (a, b) in results.items()}


def halved_errors(shape, act, two):
    """Of a norm of the largest of 2 x 2 pixels; small whole numbers, so that some of the four are equal."""
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(-3, 4, shape, generator=noise).float().contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=noise) for _ in range(2))
    pooled, winners, partial = pool_kernels.halve(y)
    found = batchnorm_kernels.numbers(pooled, partial, weight, bias, None, eps=1e-5)
    z, _ = batchnorm_kernels.normalise(pooled, found, act=act)
    dz, dz2 = (torch.randn(z.shape, generator=noise).contiguous(memory_format=torch.channels_last) for _ in range(2))
    reached, slopes, _ = batchnorm_kernels.sum_gradients(dz, pooled, found, act=act, dz2=dz2 if two else None)
    dy = pool_kernels.spread_halved(reached, pooled, found, slopes.found, winners, shape=y.shape)
    leaves = [t.double().requires_grad_() for t in (y, weight, bias)]
    inner = functional.batch_norm(functional.max_pool2d(leaves[0], 2), None, None, *leaves[1:], True, 0.1, 1e-5)
    exact = ACTS[act](inner)
    exact.backward(dz.double() + (dz2.double() if two else 0.0))
    results = {"output": (z, exact), "input": (dy, leaves[0].grad), "at once": (_at_once(y, found, act), exact)}
    results |= {"weight": (slopes.own[0], leaves[1].grad), "bias": (slopes.own[1], leaves[2].grad)}
    return {name: _error(a, b.detach()) for name, (a, b) in results.items()}


def _at_once(y, found, act):
    """In one pass, with the numbers that the norm has found."""
    return pool_kernels.halve_normed(y, found, act=act)


def peak_errors(shape, *, broken=()):
    """Of the largest value of each channel; small whole numbers, so that some pixels are equal.

    `broken`: pixels, by number, that are NaN in a channel of their own; those of the result are counted as errors
    where torch has none, or the other way round.
    """
    noise = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, shape, generator=noise).float().contiguous(memory_format=torch.channels_last)
    for channel, pixel in enumerate(broken):
        x[-1, channel, pixel // shape[3], pixel % shape[3]] = torch.nan
    peaks, dz = pool_kernels.peak(x), torch.randn(shape[:2], generator=noise)
    dx, leaf = pool_kernels.spread_peak(dz, x, peaks), x.double().requires_grad_()
    exact = torch.amax(leaf, dim=(2, 3))
    exact.backward(dz.double())
    results = {"output": (peaks, exact.detach()), "input": (dx, leaf.grad)}
    found = {name: _error(*(torch.nan_to_num(each) for each in pair)) for name, pair in results.items()}
    assert int(exact.isnan().sum()) == len(broken)
    return found | {f"NaN of the {name}": int((a.isnan() != b.isnan()).sum()) for name, (a, b) in results.items()}


def stem_errors(side, act, outputs):
    """Of a convolution of images with fixed filters, its bias and its activation."""
    noise = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(3, 24, 2)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    images = torch.randn(5, 4, side, side + 1, generator=noise).contiguous(memory_format=torch.channels_last)
    z = stem_kernels.forward(images, conv, act=act, outputs=outputs)
    assert not z[:, 24:].any()
    dz = torch.randn(z.shape, generator=noise).contiguous(memory_format=torch.channels_last)
    dbias = stem_kernels.bias_gradient(dz, images, conv, act=act)
    exact = ACTS[act](conv.double()(images[:, :3].double()))
    exact.backward(dz[:, :24].double())
    return {"output": _error(z[:, :24], exact.detach()), "bias": _error(dbias, conv.bias.grad)}


def _norm(x, mean, variance, weight, bias):
    if x.numel() == x.shape[1]:  # torch refuses to train on one row
        return (
            (x - x) * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
            if mean is None
            else _one_row(x, mean, variance, weight, bias)
        )
    return functional.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)


def _one_row(x, mean, variance, weight, bias):
    mean.lerp_(x.detach().flatten(), 0.1)
    variance.mul_(0.9)
    return (x - x) * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def _error(a, b):
    return ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = errors(shape)
    for act, adds, two in itertools.product(ACTS, (0, 1, 2), (False, True)):
        if adds and act not in ("none", "relu"):
            continue
        found[f"{act}, {adds} added, {1 + two} gradients"] = errors(SHAPES["few channels"], act, adds, two)
    for name, shape in SHAPES.items():
        if name != "one row":
            found[f"{name}, gated"] = gated_errors(shape)
    for side, two in ((9, False), (12, True)):
        found[f"{side} pixels, pooled"] = pooled_errors((2, 24, side, side), two)
    for height, width, two in ((12, 9, False), (9, 10, True), (2, 12, True)):
        shape, same = (2, 24, height, width), SameMaxPool2d(3, 2)
        found[f"{height} x {width} pixels, pooled with SAME padding"] = pooled_errors(shape, two, pool=same)
    for side, act, two in ((9, "gelu", False), (12, "relu", True), (13, "none", True)):
        found[f"{side} pixels, halved, {act}"] = halved_errors((2, 24, side, side + 1), act, two)
    found["channels beyond a tile, halved"] = halved_errors((3, 144, 7, 7), "gelu", False)
    found["more images than a program takes, halved"] = halved_errors((11, 272, 3, 5), "gelu", False)
    found["peaks"] = peak_errors((3, 300, 3, 4))
    found["peaks of NaN"] = peak_errors((3, 300, 3, 4), broken=(0, 5, 11))
    for side, act, outputs in ((9, "gelu", 24), (32, "silu", 32)):
        found[f"{side} pixels, stem"] = stem_errors(side, act, outputs)
    few = stem_kernels.BACKWARD._replace(programs=2)  # of two images each, the last of one
    stem_kernels.FORWARD = stem_kernels.BACKWARD = few
    found["several images of a program, stem"] = stem_errors(9, "gelu", 32)
    for name, (mean, deviation) in INPUTS.items():
        drawn = {"mean": mean, "deviation": deviation}
        found[name] = errors(SHAPES["a short last tile"], "silu", **drawn)
        found[f"{name}, added"] = errors(SHAPES["few channels"], "none", 2, **drawn)
        found[f"{name}, gated"] = gated_errors(SHAPES["a short last tile"], **drawn)
        found[f"{name}, pooled"] = pooled_errors((2, 24, 9, 9), True, **drawn)
    print(json.dumps(found))
