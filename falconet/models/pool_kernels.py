"""Batch norm, ReLU and the stem's max pool (3 x 3, every second pixel) for channels-last memory.

What is rectified is never stored: the pooled values and, for each, which of the nine won and what it was before the
norm are five eighths of its bytes.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.batchnorm_kernels import GRADIENTS, Gradients, merged, normed, numbers_of, sloped
from falconet.models.channel_tables import WIDTHS, Table, columns_of, loaded, merging, row_of, tile_of
from falconet.numerics.kernels import FUSED

if TYPE_CHECKING:
    from falconet.models.span_kernels import Spanning

TILED = 1024  # elements of a tile
SIZES = ["count", "height", "width", "tiles", "joined"]  # compiled once for all values


@triton.jit
def _place(number, count, height, width, ROWS: tl.constexpr):
    """Numbers of a tile's pixels in their tensor, image, line and column of each, and which exist."""
    pixel = number * ROWS + tl.arange(0, ROWS)
    in_image = pixel % (height * width)
    return pixel, pixel // (height * width), in_image // width, in_image % width, pixel < count


@triton.jit(do_not_specialize=SIZES)
def _pool(y, statistics, z, winners, before, count, height, width, units, UNIT: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`height`, `width`: of y; `count`: pooled pixels."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    pixel, image, line, column, exists = _place(tl.program_id(0), count, (height + 1) // 2, (width + 1) // 2, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    best = tl.zeros((ROWS, COLUMNS), tl.float32)
    raw = tl.zeros((ROWS, COLUMNS), tl.float32)
    winner = tl.full((ROWS, COLUMNS), 9, tl.int32)  # none of the nine is above 0
    for tap in tl.static_range(9):
        down, right = line * 2 - 1 + tap // 3, column * 2 - 1 + tap % 3
        valid = exists & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        inside = valid[:, None] & there[None, :]
        source = (image * height + down).to(tl.int64) * width + right
        x = loaded(y, source[:, None] * channels + columns[None, :], inside)
        v = normed(x, factor, bias, mean)
        wins = inside & ~(v <= best)  # NaN wins too
        best = tl.where(wins, v, best)
        raw = tl.where(wins, x, raw)
        winner = tl.where(wins, tap, winner)
    offsets = pixel[:, None].to(tl.int64) * channels + columns[None, :]
    inside = exists[:, None] & there[None, :]
    tl.store(z + offsets, best.to(z.dtype.element_ty), mask=inside)
    tl.store(winners + offsets, winner.to(tl.uint8), mask=inside)
    tl.store(before + offsets, raw.to(before.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _sum_pooled(dz, dz2, winners, before, g, statistics, partial, count, tiles, units, joined, UNIT: tl.constexpr,
                TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sums of the gradient g of what won, and of g (y - mean); stores g."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    mean = row_of(statistics, 2, channel, channels, there)
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _, offsets, inside = tile_of(tiles - 1 - number, count, wide, columns, there, ROWS)
        d = loaded(dz, offsets, inside)
        if TWO:
            d += loaded(dz2, offsets, inside)
        won = tl.load(winners + offsets, mask=inside, other=9) < 9
        stored = tl.where(won, d, 0.0).to(g.dtype.element_ty)
        tl.store(g + offsets, stored, mask=inside)
        d = stored.to(tl.float32)
        first += d
        second += d * (loaded(before, offsets, inside) - mean)
    out = partial + tl.program_id(0) * wide + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0) * wide, tl.sum(second, 0), mask=there)


@triton.jit
def _of_window(g, winners, down, right, image, lower, far, columns, there, exists, channels):
    """Gradients and winners of pooled pixels; 9 where there is none."""
    valid = exists & (down < lower) & (right < far)
    inside = valid[:, None] & there[None, :]
    offsets = ((image * lower + down).to(tl.int64) * far + right)[:, None] * channels + columns[None, :]
    return loaded(g, offsets, inside), tl.load(winners + offsets, mask=inside, other=9).to(tl.int32)


@triton.jit
def _put(dy, y, d, slopes, image, line, column, height, width, exists, columns, channel, there, channels):
    """The gradient of a pixel, from that of its activation."""
    inside = (exists & (line < height) & (column < width))[:, None] & there[None, :]
    offsets = ((image * height + line).to(tl.int64) * width + column)[:, None] * channels + columns[None, :]
    v = sloped(d, loaded(y, offsets, inside), slopes, channel, channels, there)
    tl.store(dy + offsets, v.to(dy.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _spread_pooled(g, y, winners, slopes, dy, count, height, width, units, UNIT: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of y, for blocks of four pixels: a window's own, and those that it shares with the next windows."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    lower, far = (height + 1) // 2, (width + 1) // 2
    _, image, line, column, exists = _place(tl.program_id(0), count, lower, far, ROWS)
    own, won = _of_window(g, winners, line, column, image, lower, far, columns, there, exists, channels)
    east, won_east = _of_window(g, winners, line, column + 1, image, lower, far, columns, there, exists, channels)
    south, won_south = _of_window(g, winners, line + 1, column, image, lower, far, columns, there, exists, channels)
    last, won_last = _of_window(g, winners, line + 1, column + 1, image, lower, far, columns, there, exists, channels)
    d = tl.where(won == 4, own, 0.0)
    _put(dy, y, d, slopes, image, 2 * line, 2 * column, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 5, own, 0.0) + tl.where(won_east == 3, east, 0.0)
    _put(dy, y, d, slopes, image, 2 * line, 2 * column + 1, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 7, own, 0.0) + tl.where(won_south == 1, south, 0.0)
    _put(dy, y, d, slopes, image, 2 * line + 1, 2 * column, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 8, own, 0.0) + tl.where(won_east == 6, east, 0.0)
    d += tl.where(won_south == 2, south, 0.0) + tl.where(won_last == 0, last, 0.0)
    _put(
        dy, y, d, slopes, image, 2 * line + 1, 2 * column + 1, height, width, exists, columns, channel, there, channels
    )


def forward(y: Tensor, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled activation, which of the nine values of each it is, and what that was before the norm."""
    images, channels, height, width = y.shape
    pooled = (images, channels, (height + 1) // 2, (width + 1) // 2)
    z, winners, before = (
        torch.empty(pooled, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, torch.uint8, y.dtype)
    )
    grid, constants = _walked(y)
    _pool[grid](y, found, z, winners, before, **constants)
    return z, winners, before


def backward(
    dz: Tensor,
    y: Tensor,
    found: Tensor,
    winners: Tensor,
    before: Tensor,
    *,
    dz2: Tensor | None = None,
    span: "Spanning | None" = None,
) -> Gradients:
    """dz + dz2 is the result's gradient."""
    g, dy, summed = torch.empty_like(dz), torch.empty_like(y), Table.of(dz).summed(GRADIENTS)
    partial = summed.partial(2, y.device)
    _sum_pooled[summed.grid](
        dz, dz if dz2 is None else dz2, winners, before, g, found, partial,
        TWO=dz2 is not None, **summed.constants,
    )  # fmt: skip
    own, slopes = merged(partial, 1, found, merging(Table.of(y), partial.shape[1]), span)
    grid, constants = _walked(y)
    _spread_pooled[grid](g, y, winners, slopes, dy, **constants)
    return Gradients(dy, *own)


def _walked(y: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of a pass over the pooled pixels."""
    images, channels, height, width = y.shape
    count = images * ((height + 1) // 2) * ((width + 1) // 2)
    unit = 1 if channels % 8 else 8
    columns = min(WIDTHS, key=lambda width: (-(-channels // width) * width, -width))
    sizes = {"count": count, "height": height, "width": width, "units": channels // unit}
    constants = {**sizes, "UNIT": unit, "ROWS": TILED // columns, "COLUMNS": columns, **FUSED}
    return (-(-count // constants["ROWS"]), -(-channels // columns)), constants
