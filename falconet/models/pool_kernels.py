"""Batch norm, ReLU and the stem's max pool (3 x 3, every second pixel) for channels-last memory.

What is rectified is never stored: the pooled values and, for each, which of the nine won are a third of its bytes.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.batchnorm_kernels import (
    PROGRAMS,
    SUMMED,
    TILE,
    WIDTHS,
    Gradients,
    Table,
    columns_of,
    loaded,
    merged,
    normed,
    row_of,
    sloped,
)
from falconet.numerics.kernels import FUSED

SIZES = ["count", "height", "width", "tiles"]  # compiled once for all values


@triton.jit
def _place(number, count, height, width, ROWS: tl.constexpr):
    """Numbers of a tile's pixels in their tensor, image, line and column of each, and which exist."""
    pixel = number * ROWS + tl.arange(0, ROWS)
    in_image = pixel % (height * width)
    return pixel, pixel // (height * width), in_image // width, in_image % width, pixel < count


@triton.jit(do_not_specialize=SIZES)
def _pool(y, statistics, z, winners, count, height, width, units, UNIT: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`height`, `width`: of y; `count`: pooled pixels."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    pixel, image, line, column, exists = _place(tl.program_id(0), count, (height + 1) // 2, (width + 1) // 2, ROWS)
    factor, bias, mean = (
        row_of(statistics, 0, channel, channels, there),
        row_of(statistics, 1, channel, channels, there),
        row_of(statistics, 2, channel, channels, there),
    )
    best = tl.zeros((ROWS, COLUMNS), tl.float32)
    winner = tl.full((ROWS, COLUMNS), 9, tl.int32)  # none of the nine is above 0
    for tap in tl.static_range(9):
        down, right = line * 2 - 1 + tap // 3, column * 2 - 1 + tap % 3
        valid = exists & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        inside = valid[:, None] & there[None, :]
        source = (image * height + down).to(tl.int64) * width + right
        v = normed(loaded(y, source[:, None] * channels + columns[None, :], inside), factor, bias, mean)
        wins = inside & ((v > best) | (v != v))
        best = tl.where(wins, v, best)
        winner = tl.where(wins, tap, winner)
    offsets = pixel[:, None].to(tl.int64) * channels + columns[None, :]
    inside = exists[:, None] & there[None, :]
    tl.store(z + offsets, best.to(z.dtype.element_ty), mask=inside)
    tl.store(winners + offsets, winner.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _sum_pooled(dz, dz2, y, winners, g, statistics, partial, count, height, width, tiles, units, UNIT: tl.constexpr,
                TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sums of the gradient g of what won, and of g (y - mean); stores g."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    mean = row_of(statistics, 2, channel, channels, there)
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        pixel, image, line, column, exists = _place(
            tiles - 1 - number, count, (height + 1) // 2, (width + 1) // 2, ROWS
        )  # fmt: skip
        offsets = pixel[:, None].to(tl.int64) * channels + columns[None, :]
        inside = exists[:, None] & there[None, :]
        d = loaded(dz, offsets, inside)
        if TWO:
            d += loaded(dz2, offsets, inside)
        winner = tl.load(winners + offsets, mask=inside, other=9).to(tl.int32)
        won = inside & (winner < 9)
        stored = tl.where(won, d, 0.0).to(g.dtype.element_ty)
        tl.store(g + offsets, stored, mask=inside)
        d = stored.to(tl.float32)
        down, right = (line * 2 - 1)[:, None] + winner // 3, (column * 2 - 1)[:, None] + winner % 3
        source = ((image * height)[:, None] + down).to(tl.int64) * width + right
        first += d
        second += d * tl.where(won, loaded(y, source * channels + columns[None, :], won) - mean, 0.0)
    out = partial + tl.program_id(0) * channels + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0) * channels, tl.sum(second, 0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _spread_pooled(g, y, winners, slopes, dy, count, height, width, units, UNIT: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of y, of which up to four windows hold a pixel; `count`: pixels of y."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    pixel, image, line, column, exists = _place(tl.program_id(0), count, height, width, ROWS)
    lower, far = (height + 1) // 2, (width + 1) // 2
    d = tl.zeros((ROWS, COLUMNS), tl.float32)
    for window in tl.static_range(4):
        down, right = (line + 1) // 2 - window // 2, (column + 1) // 2 - window % 2
        tap_down, tap_right = line + 1 - 2 * down, column + 1 - 2 * right
        valid = exists & (tap_down < 3) & (tap_right < 3) & (down >= 0) & (down < lower) & (right >= 0) & (right < far)
        inside = valid[:, None] & there[None, :]
        offsets = ((image * lower + down).to(tl.int64) * far + right)[:, None] * channels + columns[None, :]
        winner = tl.load(winners + offsets, mask=inside, other=9).to(tl.int32)
        d += tl.where(winner == (tap_down * 3 + tap_right)[:, None], loaded(g, offsets, inside), 0.0)
    offsets = pixel[:, None].to(tl.int64) * channels + columns[None, :]
    inside = exists[:, None] & there[None, :]
    v = sloped(d, loaded(y, offsets, inside), slopes, channel, channels, there)
    tl.store(dy + offsets, v.to(dy.dtype.element_ty), mask=inside)


def _shape(y: Tensor) -> dict[str, int]:
    channels = y.shape[1]
    unit = 1 if channels % 8 else 8
    width = min(WIDTHS, key=lambda width: (-(-channels // width) * width, -width))
    return {
        "height": y.shape[2],
        "width": y.shape[3],
        "units": channels // unit,
        "UNIT": unit,
        "COLUMNS": width,
    } | FUSED


def forward(y: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The pooled activation, and which of the nine values of each is it."""
    images, channels, height, width = y.shape
    shape, pooled = _shape(y), (images, channels, (height + 1) // 2, (width + 1) // 2)
    z, winners = (
        torch.empty(pooled, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, torch.uint8)
    )
    rows, count = TILE // 2 // shape["COLUMNS"], z.numel() // channels
    _pool[(-(-count // rows), -(-channels // shape["COLUMNS"]))](y, found, z, winners, count, ROWS=rows, **shape)
    return z, winners


def backward(dz: Tensor, y: Tensor, found: Tensor, winners: Tensor, *, dz2: Tensor | None = None) -> Gradients:
    """dz + dz2 is the result's gradient."""
    shape, channels = _shape(y), y.shape[1]
    columns, count = -(-channels // shape["COLUMNS"]), dz.numel() // channels
    rows = SUMMED // shape["COLUMNS"]
    tiles = -(-count // rows)
    programs = max(1, min(PROGRAMS // columns, tiles))
    partial, g = torch.empty((2, programs, channels), device=y.device), torch.empty_like(dz)
    _sum_pooled[(programs, columns)](
        dz, dz if dz2 is None else dz2, y, winners, g, found, partial, count,
        tiles=tiles, TWO=dz2 is not None, ROWS=rows, **shape,
    )  # fmt: skip
    grid, constants = Table.of(y).merged
    own, slopes = merged(partial, 1, found, (grid, {**constants, "sums": programs}))
    dy, count, rows = torch.empty_like(y), y.numel() // channels, TILE // 2 // shape["COLUMNS"]
    _spread_pooled[(-(-count // rows), columns)](g, y, winners, slopes, dy, count, ROWS=rows, **shape)
    return Gradients(dy, *own)
