"""Run by test_narrow in a separate process, because Triton must be imported with its interpreter from the start.

All in fp16: the interpreter multiplies the bits of bf16 as if they were whole numbers.
"""

import json

import torch
from torch import nn
from torch.nn import functional

from falconet.models.fused import narrow, narrow_kernels
from falconet.models.fused.narrow import Tiling

FLAT = Tiling(crossed=False, span=9 * 24, pixels=32, warps=4, stages=1, piece=8, programs=3)
CROSSED = FLAT._replace(crossed=True, span=3 * 16)
SHAPES = {
    (16, 16): CROSSED,
    (16, 32): FLAT._replace(span=144),  # x makes the rows of the product
    (48, 48): FLAT,
    (64, 64): FLAT._replace(span=192),
    (48, 128): FLAT._replace(span=72, pixels=16),
}
SIDES = {"one pixel": (1, 1), "one column": (5, 1), "one row": (1, 9), "31 x 31": (31, 31), "several tiles": (3, 70)}


def given(images, inputs, outputs, side, *, more=0):
    """An input with `more` channels than the weight takes, a gradient of the result, and a weight."""
    noise = torch.Generator().manual_seed(0)
    shapes = (images, inputs + more, *side), (images, outputs, *side)
    x, dy = (torch.randn(shape, generator=noise).half() for shape in shapes)
    weight = torch.empty(outputs, inputs, 3, 3)
    return *(t.contiguous(memory_format=torch.channels_last) for t in (x, dy)), weight


def error(x, dy, weight, tiling):
    """Relative error against float64."""
    exact = torch.zeros(weight.shape, dtype=torch.float64, requires_grad=True)
    functional.conv2d(x[:, : weight.shape[1]].double(), exact, padding=1).backward(dy.double())
    found = narrow_kernels.weight_gradient(x, dy, weight, tiling)
    assert (found.dtype, found.stride()) == (weight.dtype, weight.stride())
    return relative(found, exact.grad)


def relative(value, exact):
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def constant(x, dy):
    """Whole numbers, so that products and sums are exact."""
    given_x, given_dy, weight = given(2, 16, 64, (6, 4))
    return error(given_x.fill_(x), given_dy.fill_(dy), weight, FLAT._replace(span=144))


def beyond():
    """What lies outside of x and dy does not count, nor do further channels: there it is not a number."""
    x, dy, weight = given(4, 24, 64, (5, 3), more=8)
    x[:, 24:] = torch.nan
    for t in (x, dy):
        t[0] = t[3] = torch.nan
    return error(x[1:3], dy[1:3], weight, FLAT)


def of_a_layer(weights):
    """Those of the layer that takes a convolution's place, with eight further channels, against float64."""
    x, dy, _ = given(2, 24, 64, (5, 7), more=8)
    x[:, 24:] = 0
    conv = nn.Conv2d(24, 64, 3, padding=1, bias=False).to(weights)
    leaf, exact = x.clone().requires_grad_(), conv.weight.detach().double().requires_grad_()
    y = narrow.NarrowConv(conv).convolved(leaf)
    y.backward(dy)
    other = x.double().requires_grad_()
    expected = functional.conv2d(other[:, :24], exact, padding=1)
    expected.backward(dy.double())
    assert conv.weight.grad.dtype == weights
    return {
        "output": relative(y, expected),
        "input": relative(leaf.grad[:, :24], other.grad[:, :24]),
        "weight": relative(conv.weight.grad, exact.grad),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    narrow_kernels.MERGED = 512  # fewer programs, which take turns here
    found = {}
    for (inputs, outputs), tiling in narrow._TILINGS.items():
        found[f"{inputs} to {outputs}, as in use"] = error(*given(2, inputs, outputs, (5, 7)), tiling)
    for (inputs, outputs), tiling in SHAPES.items():
        found[f"{inputs} to {outputs}"] = error(*given(2, inputs, outputs, (7, 5)), tiling)
    for name, side in SIDES.items():
        found[name] = error(*given(1, 24, 64, side, more=8), FLAT)
    found["crossed, one pixel"] = error(*given(2, 16, 16, (1, 1)), CROSSED)
    found["crossed, more rows in a tile than in an image"] = error(*given(5, 16, 16, (3, 3)), CROSSED)
    found["constant"], found["zero"] = constant(3, -0.5), constant(3, 0)
    found["huge"] = constant(65504, 1024)
    found["beyond"] = beyond()
    weight = torch.empty(64, 24, 3, 3).contiguous(memory_format=torch.channels_last)
    found["a weight in channels-last memory"] = error(*given(2, 24, 64, (4, 4))[:2], weight, FLAT)
    for name, weights in (("fp16", torch.float16), ("fp32", torch.float32)):
        found[f"layer with weights in {name}"] = of_a_layer(weights)
    print(json.dumps(found))
