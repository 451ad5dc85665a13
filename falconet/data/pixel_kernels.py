"""Work on pixels on the device in one Triton launch each: picking and moving images, and making model input of bytes.

Torch takes fifteen launches for the first, and three for the second, with two copies in float32.
"""
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
def _normalise_levels(
    images, scale, shift, out, count, OUT: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
):
    """Normalise bytes. OUT: channels of the result, 0 beyond three; CHANNELS: at least as many, a power of two."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    colours = (pixel < count)[:, None] & (channel < 3)[None, :]
    levels = tl.load(images + pixel[:, None] * 3 + channel[None, :], mask=colours, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=channel < 3, other=0.0)[None, :]
    values = levels * factor + tl.load(shift + channel, mask=channel < 3, other=0.0)[None, :]
    places = out + pixel[:, None] * OUT + channel[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=(pixel < count)[:, None] & (channel < OUT)[None, :])


def normalise(images: Tensor, scale: Tensor, shift: Tensor, *, dtype: torch.dtype, channels: int = 3) -> Tensor:
    """Normalise N x 3 x H x W, uint8, channels-last; the result has `channels`, those beyond three being 0."""
    number, _, height, width = images.shape
    shape = (number, channels, height, width)
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    count = number * height * width
    _normalise_levels[(-(-count // PIXELS),)](
        images, scale, shift, out, count, OUT=channels, CHANNELS=max(4, channels), PIXELS=PIXELS, **FUSED
    )
    return out


@triton.jit
def _reflected(place, side):
    place = tl.abs(place)
    return tl.where(place < side, place, 2 * (side - 1) - place)


@triton.jit(do_not_specialize=["side"])
def _pick(images, moves, out, side, REFLECTS: tl.constexpr, PIXELS: tl.constexpr):
    """Pick some pixels of one image per program. Offsets within an image fit in 32 bits."""
    image = tl.program_id(0).to(tl.int64)
    number, down = tl.load(moves + 4 * image), tl.load(moves + 4 * image + 1).to(tl.int32)
    right, mirrored = tl.load(moves + 4 * image + 2).to(tl.int32), tl.load(moves + 4 * image + 3)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    row, column = pixel // side, pixel % side
    from_row = row - down
    from_column = tl.where(mirrored != 0, side - 1 - column, column) - right
    if REFLECTS:
        from_row, from_column = _reflected(from_row, side), _reflected(from_column, side)
    exists = pixel < side * side
    inside = exists & (from_row >= 0) & (from_row < side) & (from_column >= 0) & (from_column < side)
    source = images + number * side * side * 3 + (from_row * side + from_column) * 3
    target = out + image * side * side * 3 + pixel * 3
    for colour in tl.static_range(3):
        tl.store(target + colour, tl.load(source + colour, mask=inside, other=0), mask=exists)


def pick(images: Tensor, moves: Tensor, *, reflects: bool, out: Tensor) -> None:  # N x S x S x 3; M x 4; M x S x S x 3
    """Write images by number, each moved down and right, then mirrored; `moves` has these four as int64."""
    side = images.shape[1]
    _pick[(len(moves), -(-side * side // PIXELS))](images, moves, out, side, REFLECTS=reflects, PIXELS=PIXELS, **FUSED)
