"""Run by test_pointwise in a separate process, because Triton must be imported with its interpreter from the start."""

import copy
import json

import torch
from torch import nn

from falconet.models.fused import batchnorm_kernels, layers, pointwise, pointwise_kernels
from falconet.models.fused.layers import FusedNorm
from falconet.models.fused.pointwise_kernels import Tiling

NAMES = ("weight", "norm's weight", "norm's bias", "running mean", "running variance")


def branch(inputs, outputs, noise):
    conv, norm = nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
    for tensor in (conv.weight, norm.weight, norm.bias):
        tensor.data.copy_(torch.randn(tensor.shape, generator=noise))
    return conv, norm


def of_a_short_tile():
    """Whether the weight's gradient is finite in fp16 where that of pixels that do not exist would not be."""
    noise = torch.Generator().manual_seed(0)

    def images(channels, scale):
        drawn = torch.randn(3, channels, 5, 5, generator=noise) * scale
        return drawn.half().contiguous(memory_format=torch.channels_last)

    x, y = images(16, 1.0), images(24, 1.0) + 30
    dz = (y - 30) * 3000  # so that the slope of a value is -3,000, and of one that is 30 too small 90,000
    found = batchnorm_kernels.statistics(y, torch.ones(24), torch.zeros(24), None, eps=1e-5)
    reached, slopes, _ = batchnorm_kernels.sum_gradients(dz, y, found, act="none")
    weight = torch.randn(24, 16, 1, 1, generator=noise) / 100
    dx, dw = pointwise_kernels.backward(reached, y, found, slopes.found, x, weight)
    return {"not finite": float(not (dx.isfinite().all() and dw.isfinite().all()))}


def errors(inputs, outputs, *, side=5, act=None, shortcut=None, forks=False, mean=0.0):
    """Relative errors against float64, by what was computed. `shortcut`: input channels of its convolution, or 0."""
    noise = torch.Generator().manual_seed(0)
    (conv, norm), (other, other_norm) = branch(inputs, outputs, noise), branch(shortcut or 8, outputs, noise)
    layer = FusedNorm(norm, act=act, shortcut_norm=other_norm if shortcut else None, forks=forks)
    layer.conv, layer.shortcut_conv = conv, other if shortcut else None

    def images(channels, shift=0.0):
        drawn = torch.randn(3, channels, side, side, generator=noise) + shift
        return drawn.contiguous(memory_format=torch.channels_last)

    given = [images(inputs, mean)] + ([images(shortcut or outputs)] if shortcut is not None else [])
    dz = images(outputs)
    plain = copy.deepcopy(layer).double()
    results = []
    for each, leaves in ((layer, given), (plain, [t.double() for t in given])):
        leaves = [t.requires_grad_() for t in leaves]
        z = each(*leaves)
        total = z[0] + 2 * z[1] if forks else z
        total.backward(dz.to(total.dtype))
        branches = [(each.conv, each.norm), *([(each.shortcut_conv, each.shortcut_norm)] if shortcut else [])]
        found = {f"input {n}": leaf.grad for n, leaf in enumerate(leaves)} | {"output": total.detach()}
        for n, (c, m) in enumerate(branches):
            values = (c.weight.grad, m.weight.grad, m.bias.grad, m.running_mean, m.running_var)
            found |= {f"{name} {n}": value for name, value in zip(NAMES, values, strict=True)}
        results.append(found)
    ours, exact = results
    return {name: relative(ours[name].double(), exact[name]) for name in exact}


def relative(value, exact):
    return ((value - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    layers.fits = lambda x, *norms: x.dtype == torch.float32
    pointwise.fits = lambda conv, x: x.dtype == torch.float32
    pointwise.NOISE, pointwise.SIDE = 1 << 10, 5  # fewer programs, which take turns here
    pointwise_kernels._forward_tiling = lambda inputs, outputs: (64, Tiling(16, 2, 4, 3))
    pointwise_kernels._backward_tiling = lambda widths, reads: Tiling(16, 2, 4, 3)
    relu = nn.ReLU()
    print(
        json.dumps(
            {
                "few channels": errors(8, 16),
                "whole tiles": errors(64, 64, side=4, act=relu),
                "one pixel of an image": errors(16, 24, side=1),
                "channels in two parts": errors(24, 144, act=nn.SiLU()),
                "many inputs": errors(96, 24, act=nn.Hardswish()),
                "too many for one gradient": errors(136, 264, side=2, act=relu),
                "two gradients": errors(16, 40, forks=True),
                "added": errors(16, 32, act=relu, shortcut=0),
                "added, two gradients": errors(16, 32, act=relu, shortcut=0, forks=True),
                "two convolutions": errors(16, 32, act=relu, shortcut=24, forks=True),
                "one gradient by cuDNN": errors(16, 264, side=2, act=relu, shortcut=136),
                "a short tile in fp16": of_a_short_tile(),
                "huge mean": errors(16, 24, mean=100.0),
            }
        )
    )
