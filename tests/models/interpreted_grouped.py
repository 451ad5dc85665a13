"""Run by test_grouped in a separate process, because Triton must be imported with its interpreter from the start."""

import json

import torch
from torch import nn
from torch.nn import functional

from falconet.models.fused import grouped, grouped_kernels
from falconet.models.fused.grouped_kernels import Geometry
from falconet.models.fused.own_convolution import OwnConv


def errors(shape, *, group, stride):
    """Relative errors against float64 of the result and both gradients, as far as there are kernels for them."""
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=noise), torch.randn(shape[1], group, 3, 3, generator=noise)
    leaves = [t.half().double().requires_grad_() for t in (x, weight)]
    exact = functional.conv2d(*leaves, stride=stride, padding=1, groups=shape[1] // group)
    dy = torch.randn(exact.shape, generator=noise).half()
    exact.backward(dy.double())
    x, dy = (t.half().contiguous(memory_format=torch.channels_last) for t in (x, dy))
    sizes, packed = Geometry(*shape, group, stride), grouped_kernels.pack(weight, torch.float16)
    results = {"input": (grouped_kernels.input_gradient(dy, packed, sizes), leaves[0].grad)}
    if stride == 1:
        results |= {
            "output": (grouped_kernels.forward(x, packed, sizes), exact.detach()),
            "weight": (grouped_kernels.weight_gradient(x, dy, weight, sizes), leaves[1].grad),
        }
    return {name: relative(a.double(), b) for name, (a, b) in results.items()}


def relative(value, exact):
    return ((value - exact).norm() / exact.norm()).item()


def layer_errors(conv, shape):
    """Those of the layer that takes a convolution's place, against the convolution in float32."""
    noise = torch.Generator().manual_seed(0)
    x, results = torch.randn(shape, generator=noise).half().contiguous(memory_format=torch.channels_last), []
    for layer, dtype in ((conv, torch.float32), (grouped.GroupedConv(conv), torch.float16)):
        conv.half().to(dtype)
        conv.weight.grad, leaf = None, x.to(dtype).requires_grad_()
        y = layer(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).half().to(dtype))
        results.append([t.float() for t in (y.detach(), leaf.grad, conv.weight.grad)])
    return {name: relative(b, a) for name, a, b in zip(("output", "input", "weight"), *results, strict=True)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    OwnConv._fits = lambda self, x: x.dtype == torch.float16
    found = {f"groups of {group}": errors((1, 16, 4, 5), group=group, stride=1) for group in (4, 8, 16)}
    found |= {f"groups of {group}, stride 2": errors((1, 32, 5, 4), group=group, stride=2) for group in (8, 16, 32)}
    found["one pixel"], found["one pixel, stride 2"] = (errors((2, 16, 1, 1), group=8, stride=n) for n in (1, 2))
    for group, stride in ((4, 1), (8, 1), (8, 2)):
        conv = nn.Conv2d(16, 16, 3, stride, 1, groups=16 // group, bias=False).to(memory_format=torch.channels_last)
        found[f"layer with groups of {group}, stride {stride}"] = layer_errors(conv, (2, 16, 4, 4))
    grouped_kernels.ROWS, grouped_kernels.PROGRAMS = 2, 2
    found["strips"] = errors((5, 16, 5, 9), group=4, stride=1)
    found["strips, stride 2"] = errors((3, 16, 7, 9), group=8, stride=2)
    print(json.dumps(found))
