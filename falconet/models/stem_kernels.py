"""A first convolution with few filters, its bias and its activation in one pass, for channels-last memory.

Its filters are fixed, so nothing but the bias has a gradient, for which the convolution is computed once more: images
are a tenth of the bytes of what the filters make of them.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from falconet.models.batchnorm_kernels import ACTIVATIONS, activated, passed
from falconet.numerics.kernels import FUSED

CHANNELS = 4  # of the images, the last of zeros: with 2 x 2 pixels, 16 products for each value
PIXELS = 128  # of a tile
PROGRAMS = 1056  # that sum; others give other bits
SIZES = ["count", "height", "width", "tiles"]  # compiled once for all values


@triton.jit
def _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS: tl.constexpr):
    """16 x OUTPUTS, in the order of a line of pixels: line, column, channel."""
    place, output = tl.arange(0, 16)[:, None], tl.arange(0, OUTPUTS)[None, :]
    line, column, channel = place // 8, place // 4 % 2, place % 4
    offsets = output * by_output + channel * by_channel + line * by_line + column * by_column
    return tl.load(weight + offsets, mask=(channel < 3) & (output < filters), other=0.0)


@triton.jit
def _tile(images, weights, bias, number, count, height, width, filters, outputs,
          PIXELS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """The convolution with its bias for a tile, offsets of the results, and which of them exist."""
    pixel = number * PIXELS + tl.arange(0, PIXELS)
    in_image = pixel % ((height - 1) * (width - 1))
    image, line, column = pixel // ((height - 1) * (width - 1)), in_image // (width - 1), in_image % (width - 1)
    corner = ((image * height + line).to(tl.int64) * width + column) * 4
    place = tl.arange(0, 16)
    offsets = corner[:, None] + (place // 8 * width * 4 + place % 8)[None, :]
    read = tl.load(images + offsets, mask=(pixel < count)[:, None], other=0.0)
    output = tl.arange(0, OUTPUTS)
    v = tl.dot(read, weights.to(read.dtype), input_precision="ieee")
    v += tl.load(bias + output, mask=output < filters, other=0.0).to(tl.float32)[None, :]
    inside = (pixel < count)[:, None] & (output < outputs)[None, :]
    return v, pixel[:, None].to(tl.int64) * outputs + output[None, :], inside


@triton.jit(do_not_specialize=SIZES)
def _convolve(images, weight, bias, z, count, height, width, by_output, by_channel, by_line, by_column,
              filters: tl.constexpr, outputs: tl.constexpr, ACT: tl.constexpr,
              PIXELS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """`count`: pixels of the result."""
    weights = _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS)
    v, offsets, inside = _tile(
        images, weights, bias, tl.program_id(0), count, height, width, filters, outputs, PIXELS, OUTPUTS
    )
    tl.store(z + offsets, activated(v, ACT).to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _sum_bias(images, weight, bias, dz, partial, count, height, width, tiles, by_output, by_channel, by_line, by_column,
              filters: tl.constexpr, outputs: tl.constexpr, ACT: tl.constexpr,
              PIXELS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Sums of the gradient before the activation."""
    weights = _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS)
    total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        v, offsets, inside = _tile(
            images, weights, bias, number, count, height, width, filters, outputs, PIXELS, OUTPUTS
        )
        d = tl.load(dz + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, passed(v, d, ACT), 0.0)
    output = tl.arange(0, OUTPUTS)
    tl.store(partial + tl.program_id(0) * outputs + output, tl.sum(total, 0), mask=output < outputs)


def forward(images: Tensor, conv: nn.Conv2d, *, act: str, outputs: int) -> Tensor:  # N x 4 x H x W
    """act(conv(images)), N x outputs x H-1 x W-1; the convolution reads the first three channels.

    Outputs beyond those of the convolution are what the activation makes of 0.
    """
    count, _, height, width = images.shape
    shape = (count, outputs, height - 1, width - 1)
    z = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    tiles, constants = _walked(images, conv, act, outputs)
    _convolve[(tiles,)](images, conv.weight, conv.bias, z, **constants)
    return z


def bias_gradient(dz: Tensor, images: Tensor, conv: nn.Conv2d, *, act: str) -> Tensor:
    tiles, constants = _walked(images, conv, act, dz.shape[1])
    partial = torch.empty((min(PROGRAMS, tiles), dz.shape[1]), device=images.device)
    _sum_bias[(len(partial),)](images, conv.weight, conv.bias, dz, partial, tiles=tiles, **constants)
    return partial[:, : conv.out_channels].sum(0)


def _walked(images: Tensor, conv: nn.Conv2d, act: str, outputs: int) -> tuple[int, dict[str, int]]:
    """Tiles and constants of a pass over the pixels of the result."""
    count = len(images) * (images.shape[2] - 1) * (images.shape[3] - 1)
    by_output, by_channel, by_line, by_column = conv.weight.stride()
    sizes = {"count": count, "height": images.shape[2], "width": images.shape[3]}
    channels = {"filters": conv.out_channels, "outputs": outputs, "OUTPUTS": max(16, triton.next_power_of_2(outputs))}
    strides = {"by_output": by_output, "by_channel": by_channel, "by_line": by_line, "by_column": by_column}
    constants = {"ACT": ACTIVATIONS[act], "PIXELS": PIXELS, **FUSED}
    return -(-count // PIXELS), {**sizes, **channels, **strides, **constants}
