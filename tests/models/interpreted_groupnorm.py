"""Run by test_groupnorm in a separate process, because Triton must be imported with its interpreter from the start."""

import itertools
import json

import torch
from torch.nn import functional

from falconet.models.fused import groupnorm_kernels, proxynorm_kernels
from falconet.models.proxynorm import plain_proxy_norm, quantiles

ACTS = {
    "none": lambda v: v,
    "relu": functional.relu,
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "relu6": functional.relu6,
}
SHAPES = {  # N, C, H, W, groups
    "few channels": (2, 6, 5, 7, 3),
    "joined rows and several parts": (2, 8, 36, 36, 2),
    "a short last tile": (3, 40, 9, 9, 4),
    "channels beyond a tile": (1, 130, 3, 3, 13),
    "single pixels": (2, 4, 1, 1, 1),
    "single values": (2, 4, 1, 1, 4),
    "many groups": (1, 256, 2, 3, 64),
}
INPUTS = {"far from zero": (1e3, 1.0), "tiny variance": (1.0, 1e-3), "constant": (2.0, 0.0)}


def errors(shape, act="relu", *, strided, adds=False, two=False, mean=0.0, deviation=1.0):
    """Against float64, each over the largest value."""
    *shape, groups = shape
    noise = torch.Generator().manual_seed(0)

    def drawn(shift, scale):
        return (torch.randn(shape, generator=noise) * scale + shift).contiguous(memory_format=torch.channels_last)

    y, short, dz, dz2 = drawn(mean, deviation), drawn(0.3, 2.0), drawn(0.0, 1.0), drawn(0.0, 1.0)
    weight, bias = (torch.randn(shape[1], generator=noise) for _ in range(2))
    found = groupnorm_kernels.statistics(y, groups, strided=strided, eps=1e-5)
    norm = groupnorm_kernels.GroupNorm(y, found, weight, bias, act, strided)
    z, bits = norm.apply(short if adds else None)
    back = norm.backward(dz, dz2=dz2 if two else None, adds=adds, bits=bits)
    leaves = [t.double().requires_grad_() for t in (y, weight, bias, short)]
    exact = by_group(leaves[0], groups, strided) * leaves[1].view(-1, 1, 1) + leaves[2].view(-1, 1, 1)
    exact = ACTS[act](exact + leaves[3] if adds else exact)
    exact.backward(dz.double() + (dz2.double() if two else 0.0))
    results = {"output": (z, exact), "input": (back.input, leaves[0].grad)}
    results |= {"weight": (back.parameters[0], leaves[1].grad), "bias": (back.parameters[1], leaves[2].grad)}
    results |= {"shortcut": (back.shortcut, leaves[3].grad)} if adds else {}
    return {name: error(a, b.detach()) for name, (a, b) in results.items()}


def proxied_errors(shape, act, *, strided, two=False):
    """Of a norm without scale and shift, and a proxy norm in the place of its activation."""
    *shape, groups = shape
    noise = torch.Generator().manual_seed(0)
    y, dz, dz2 = (torch.randn(shape, generator=noise).contiguous(memory_format=torch.channels_last) for _ in range(3))
    factors, samples = torch.randn(4, shape[1], generator=noise), torch.tensor(quantiles())
    found = groupnorm_kernels.statistics(y, groups, strided=strided, eps=1e-5)
    moments = proxynorm_kernels.moments(factors, samples, act, 0.03)
    norm = groupnorm_kernels.GroupNorm(y, found, factors[0], factors[1], act, strided, moments)
    z, _ = norm.apply()
    back = norm.backward(dz, dz2=dz2 if two else None)
    dfactors = proxynorm_kernels.factor_gradients(factors, samples, moments, back.parameters, act)
    leaves = [t.double().requires_grad_() for t in (y, factors)]
    normal = by_group(leaves[0], groups, strided)
    exact = plain_proxy_norm(normal, leaves[1], samples.double(), activation=act, eps=0.03)
    exact.backward(dz.double() + (dz2.double() if two else 0.0))
    results = {"output": (z, exact), "input": (back.input, leaves[0].grad), "factors": (dfactors, leaves[1].grad)}
    return {name: error(a, b.detach()) for name, (a, b) in results.items()}


def by_group(x, groups, strided):
    order = sorted(range(x.shape[1]), key=lambda channel: channel % groups if strided else channel)
    return functional.group_norm(x[:, order], groups)[:, sorted(range(x.shape[1]), key=order.__getitem__)]


def error(a, b):
    return ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)).item()


def cases(*, strided):
    for name, shape in SHAPES.items():
        yield name, errors(shape, strided=strided)
    for act, adds, two in itertools.product(ACTS, (False, True), (False, True)):
        if not adds or act in ("none", "relu"):
            words = f"{act}{', added' if adds else ''}, {1 + two} gradients"
            yield words, errors(SHAPES["a short last tile"], act, strided=strided, adds=adds, two=two)
    for name, (mean, deviation) in INPUTS.items():
        shape = SHAPES["a short last tile"]
        yield name, errors(shape, "silu", strided=strided, mean=mean, deviation=deviation)
    for act, two in (("silu", False), ("relu", True)):
        yield f"proxy of {act}", proxied_errors(SHAPES["a short last tile"], act, strided=strided, two=two)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: dict(cases(strided=name == "strided")) for name in ("neighbours", "strided")}))
