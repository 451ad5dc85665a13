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
