"""Pixels to model input on the device in one Triton launch; torch takes three, with two copies in float32."""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

PIXELS = 1024  # per program


@triton.jit(do_not_specialize=["count"])
def _normalise(images, scale, shift, out, count, OUT: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """OUT: channels of the result, those beyond three are 0; CHANNELS: as many or more, a power of two."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    colours = (pixel < count)[:, None] & (channel < 3)[None, :]
    levels = tl.load(images + pixel[:, None] * 3 + channel[None, :], mask=colours, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=channel < 3, other=0.0)[None, :]
    values = levels * factor + tl.load(shift + channel, mask=channel < 3, other=0.0)[None, :]
    places = out + pixel[:, None] * OUT + channel[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=(pixel < count)[:, None] & (channel < OUT)[None, :])


def normalise(images: Tensor, scale: Tensor, shift: Tensor, *, dtype: torch.dtype, channels: int = 3) -> Tensor:
    """images: N x 3 x H x W, uint8, channels-last; the result has `channels`, of which those beyond three are 0."""
    number, _, height, width = images.shape
    shape = (number, channels, height, width)
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    count = number * height * width
    _normalise[(-(-count // PIXELS),)](
        images, scale, shift, out, count, OUT=channels, CHANNELS=max(4, channels), PIXELS=PIXELS, **FUSED
    )
    return out


@triton.jit(do_not_specialize=["count", "height", "width"])
def _blocks(images, scale, shift, out, count, height, width, BORDER: tl.constexpr, AFTER: tl.constexpr,
            PIXELS: tl.constexpr):  # fmt: skip
    """A pixel of the result is a block of 2 x 2; blocks outside of the image are 0, as is each fourth channel."""
    tall, wide = height // 2 + BORDER + AFTER, width // 2 + BORDER + AFTER
    block = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image, place = block // (tall * wide), block % (tall * wide)
    down, right = (place // wide - BORDER) * 2, (place % wide - BORDER) * 2
    channel = tl.arange(0, 16)
    line = down[:, None] + (channel // 8)[None, :]
    column = right[:, None] + (channel // 4 % 2)[None, :]
    colour = channel % 4
    exists = (block < count)[:, None] & (line >= 0) & (line < height) & (column >= 0) & (column < width)
    exists = exists & (colour < 3)[None, :]
    offsets = ((image[:, None] * height + line).to(tl.int64) * width + column) * 3 + colour[None, :]
    levels = tl.load(images + offsets, mask=exists, other=0).to(tl.float32)
    factor = tl.load(scale + colour, mask=colour < 3, other=0.0)[None, :]
    values = levels * factor + tl.load(shift + colour, mask=colour < 3, other=0.0)[None, :]
    values = tl.where(exists, values, 0.0)
    places = out + block[:, None].to(tl.int64) * 16 + channel[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=(block < count)[:, None])


def blocks(images: Tensor, scale: Tensor, shift: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The same as N x 16 x H/2 + 3 x W/2 + 3: blocks of 2 x 2 pixels, with a border of two before and one after."""
    number, _, height, width = images.shape
    shape = (number, 16, height // 2 + 3, width // 2 + 3)
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    count = out.numel() // 16
    _blocks[(-(-count // 256),)](
        images, scale, shift, out, count, height, width, BORDER=2, AFTER=1, PIXELS=256, **FUSED
    )
    return out
