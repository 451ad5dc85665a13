"""A first convolution with few filters, its bias and its activation in one pass, for channels-last memory.

Its filters are fixed, so only the bias has a gradient. For it, the convolution is computed once more, because images
have a tenth of the bytes of the filters' results. A program takes the same pixels of several images: it computes
their places once, by divisions that would take longer than the convolution.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from falconet.models.fused.batchnorm_kernels import ACTIVATIONS, activated, passed
from falconet.numerics.kernels import FUSED

CHANNELS = 4  # of the images, the last of zeros: with 2 x 2 pixels, 16 products for each value
SIZES = ["count", "height", "width", "tiles", "share"]  # compiled once for all values


class Tiling(NamedTuple):
    """The division of all images' pixels."""

    pixels: int  # of a tile
    programs: int  # about as many; of those that sum, others give other bits
    warps: int
    stages: int  # tiles that are loaded at a time


FORWARD = Tiling(pixels=64, programs=2640, warps=4, stages=3)
BACKWARD = Tiling(pixels=128, programs=396, warps=8, stages=3)


@triton.jit
def _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS: tl.constexpr):
    """The weights, 16 x OUTPUTS, in the order of a line of pixels: line, column, channel."""
    place, output = tl.arange(0, 16)[:, None], tl.arange(0, OUTPUTS)[None, :]
    line, column, channel = place // 8, place // 4 % 2, place % 4
    offsets = output * by_output + channel * by_channel + line * by_line + column * by_column
    return tl.load(weight + offsets, mask=(channel < 3) & (output < filters), other=0.0)


@triton.jit
def _places(tiles, height, width, outputs, PIXELS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The offsets of a tile's inputs and results in any image, and which of them exist."""
    pixel = tl.program_id(0) % tiles * PIXELS + tl.arange(0, PIXELS)
    line, column = pixel // (width - 1), pixel % (width - 1)
    place, output = tl.arange(0, 16)[None, :], tl.arange(0, OUTPUTS)[None, :]
    reads = ((line * width + column) * 4)[:, None] + (place // 8 * width * 4 + place % 8)
    exists = (line < height - 1)[:, None]
    return reads, exists, pixel[:, None] * outputs + output, exists & (output < outputs)


@triton.jit
def _convolved(images, reads, exists, weights, biases):
    read = tl.load(images + reads, mask=exists, other=0.0)
    return tl.dot(read, weights, input_precision="ieee") + biases


@triton.jit
def _biases_of(bias, filters, OUTPUTS: tl.constexpr):
    output = tl.arange(0, OUTPUTS)
    return tl.load(bias + output, mask=output < filters, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=SIZES)
def _convolve(images, weight, bias, z, count, height, width, tiles, share, by_output, by_channel, by_line, by_column,
              filters: tl.constexpr, outputs: tl.constexpr, ACT: tl.constexpr,
              PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Convolve; a program takes the same pixels of `share` images. `count`: of images; `tiles`: per image."""
    weights = _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS)
    weights = weights.to(images.dtype.element_ty)
    biases = _biases_of(bias, filters, OUTPUTS)
    reads, exists, offsets, inside = _places(tiles, height, width, outputs, PIXELS, OUTPUTS)
    kept = (tl.arange(0, OUTPUTS) < filters)[None, :]
    first = tl.program_id(0) // tiles * share
    for number in tl.range(tl.minimum(share, count - first), num_stages=STAGES):
        image = (first + number).to(tl.int64)
        v = _convolved(images + image * (height * width * 4), reads, exists, weights, biases)
        z_image = z + image * ((height - 1) * (width - 1) * outputs)
        v = tl.where(kept, activated(v, ACT), 0.0)  # so that no more than the filters' are computed
        tl.store(z_image + offsets, v.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _sum_bias(images, weight, bias, dz, partial, count, height, width, tiles, share,
              by_output, by_channel, by_line, by_column,
              filters: tl.constexpr, outputs: tl.constexpr, ACT: tl.constexpr,
              PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Sum the gradient before the activation."""
    weights = _weights_of(weight, filters, by_output, by_channel, by_line, by_column, OUTPUTS)
    weights = weights.to(images.dtype.element_ty)
    biases = _biases_of(bias, filters, OUTPUTS)
    reads, exists, offsets, inside = _places(tiles, height, width, outputs, PIXELS, OUTPUTS)
    output = tl.arange(0, OUTPUTS)
    kept = exists & (output < filters)[None, :]
    first = tl.program_id(0) // tiles * share
    total = tl.zeros((PIXELS, OUTPUTS), tl.float32)
    for number in tl.range(tl.minimum(share, count - first), num_stages=STAGES):
        image = (first + number).to(tl.int64)
        v = _convolved(images + image * (height * width * 4), reads, exists, weights, biases)
        dz_image = dz + image * ((height - 1) * (width - 1) * outputs)
        d = tl.load(dz_image + offsets, mask=inside, other=0.0).to(tl.float32)
        total += passed(v, d, ACT)
    total = tl.where(kept, total, 0.0)
    tl.store(partial + tl.program_id(0) * outputs + output, tl.sum(total, 0), mask=output < outputs)


def forward(images: Tensor, conv: nn.Conv2d, *, act: str, outputs: int) -> Tensor:  # N x 4 x H x W
    """act(conv(images)), N x outputs x H-1 x W-1; the convolution reads the first three channels.

    Outputs beyond those of the convolution are the activation of 0.
    """
    count, _, height, width = images.shape
    shape = (count, outputs, height - 1, width - 1)
    z = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    programs, constants = _walked(images, conv, act, outputs, FORWARD)
    _convolve[(programs,)](images, conv.weight, conv.bias, z, **constants)
    return z


def bias_gradient(dz: Tensor, images: Tensor, conv: nn.Conv2d, *, act: str) -> Tensor:
    programs, constants = _walked(images, conv, act, dz.shape[1], BACKWARD)
    partial = torch.empty((programs, dz.shape[1]), device=images.device)
    _sum_bias[(programs,)](images, conv.weight, conv.bias, dz, partial, **constants)
    return partial[:, : conv.out_channels].sum(0)


def _walked(images: Tensor, conv: nn.Conv2d, act: str, outputs: int, tiling: Tiling) -> tuple[int, dict[str, int]]:
    """Programs and constants of a pass over the pixels of the result."""
    count, _, height, width = images.shape
    tiles = -(-(height - 1) * (width - 1) // tiling.pixels)  # of an image
    share = max(1, -(-count * tiles // tiling.programs))  # images of a program
    by_output, by_channel, by_line, by_column = conv.weight.stride()
    sizes = {"count": count, "height": height, "width": width, "tiles": tiles, "share": share}
    channels = {"filters": conv.out_channels, "outputs": outputs, "OUTPUTS": max(16, triton.next_power_of_2(outputs))}
    strides = {"by_output": by_output, "by_channel": by_channel, "by_line": by_line, "by_column": by_column}
    shape = {"PIXELS": tiling.pixels, "STAGES": tiling.stages, "num_warps": tiling.warps}
    return tiles * -(-count // share), {**sizes, **channels, **strides, "ACT": ACTIVATIONS[act], **shape, **FUSED}
