"""Run by test_depthwise in a separate process, because Triton must be imported with its interpreter from the start."""

import json

import torch
from torch import nn
from torch.nn import functional

from falconet.models.fused import depthwise, depthwise_kernels
from falconet.models.fused.depthwise_kernels import Geometry, Tile
from falconet.models.fused.own_convolution import OwnConv
from falconet.models.padding import SameConv2d


def errors(shape, *, kernel, stride, above=None, below=None, dtype=torch.float32, tile=None):
    """Relative errors against float64 of the result and both gradients; padding is symmetric unless given."""
    above, below = (kernel // 2, kernel // 2) if above is None else (above, below)
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=noise), torch.randn(shape[1], 1, kernel, kernel, generator=noise)
    leaves = [t.to(dtype).double().requires_grad_() for t in (x, weight)]
    padded = functional.pad(leaves[0], (above, below, above, below))
    exact = functional.conv2d(padded, leaves[1], stride=stride, groups=shape[1])
    dy = torch.randn(exact.shape, generator=noise).to(dtype)
    exact.backward(dy.double())
    x, dy = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, dy))
    geometry = Geometry(*shape, kernel, stride, above, above, *exact.shape[2:])
    taps = depthwise_kernels.transposed(weight, dtype)
    results = {
        "output": (depthwise_kernels.forward(x, taps, geometry, tile=tile), exact.detach()),
        "input": (depthwise_kernels.input_gradient(dy, taps, geometry, tile=tile), leaves[0].grad),
        "weight": (depthwise_kernels.weight_gradient(x, dy, geometry, dtype=torch.float32, tile=tile), leaves[1].grad),
    }
    if stride == 1:
        dx, dweight = depthwise_kernels.gradients(x, dy, taps, geometry, dtype=torch.float32)
        results |= {"input, at once": (dx, leaves[0].grad), "weight, at once": (dweight, leaves[1].grad)}
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in results.items()}


def layer_errors(conv, shape):
    """Those of the layer that takes a convolution's place, against the convolution."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=noise).contiguous(memory_format=torch.channels_last)
    results = []
    for layer in (conv, depthwise.DepthwiseConv(conv)):
        conv.weight.grad, leaf = None, x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append((y.detach(), leaf.grad, conv.weight.grad))
    return {
        name: ((a - b).norm() / a.norm()).item()
        for name, a, b in zip(("output", "input", "weight"), *results, strict=True)
        if a is not None
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    OwnConv._fits = lambda self, x: True
    torch.manual_seed(0)
    found = {
        f"{kernel} x {kernel}, stride {stride}": errors((2, 24, 5, 6), kernel=kernel, stride=stride)
        for kernel in (3, 5)
        for stride in (1, 2)
    }
    found["SAME padding of an even side"] = errors((1, 8, 8, 8), kernel=3, stride=2, above=0, below=1)
    found["SAME padding, 5 x 5"] = errors((1, 8, 8, 8), kernel=5, stride=2, above=1, below=2)
    found["no padding"] = errors((1, 8, 7, 8), kernel=3, stride=2, above=0, below=0)
    found["one pixel"] = errors((3, 8, 1, 1), kernel=5, stride=1)
    found["fp16"] = errors((2, 16, 6, 6), kernel=3, stride=1, dtype=torch.float16)
    found["one column of eight channels"] = errors((2, 16, 6, 6), kernel=3, stride=1, tile=Tile(1, 8))
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    found["layer"] = layer_errors(conv, (2, 8, 6, 7))
    found["layer with SAME padding"] = layer_errors(SameConv2d(8, 8, 3, 2, groups=8, bias=False), (2, 8, 6, 8))
    found["layer whose weight is frozen"] = layer_errors(conv.requires_grad_(False), (2, 8, 6, 7))
    depthwise_kernels.STRIP, depthwise_kernels.SUMMING = 3, 40
    found["strips"] = errors((3, 16, 8, 5), kernel=3, stride=1)
    found["strips, stride 2"] = errors((3, 16, 11, 5), kernel=5, stride=2)
    print(json.dumps(found))
