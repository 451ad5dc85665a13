"""The weight's gradient of dense 3 x 3 convolutions of few channels, stride 1 and padding 1, in Triton.

With few channels and many pixels, the work is to move bytes: from memory once, and as seldom as possible within the
chip. A program takes adjacent rows of all images, tile by tile, and keeps its sums of products in registers until
it has seen all of its pixels; a second kernel merges the sums of all programs in a fixed order: no atomics, so the same
input always gives the same bits.

One product of a tile gives all taps. Its operands have a column for each channel of each shift: either x is
shifted by nine taps, or x by three columns and dy by three rows. The latter moves fewer bytes into
shared memory, but its products have the square of three times the channels, of which tensor cores take whole blocks.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.narrow import Tiling
from falconet.numerics.kernels import FUSED

MERGED = 64  # sums of products that a program merges
WARPGROUP = 64  # rows of the smallest product of Hopper's tensor cores
SIZES = ["height", "width", "rows", "share", "sums", "of_output", "of_input", "of_row", "of_column"]  # compiled once


@triton.jit(do_not_specialize=SIZES)
def _sum_products(x, dy, partial, height, width, rows, share,
                  IN: tl.constexpr, STRIDE: tl.constexpr, OUT: tl.constexpr, CROSSED: tl.constexpr, SPAN: tl.constexpr,
                  INNER: tl.constexpr, OUTER: tl.constexpr, TURNED: tl.constexpr,
                  LINES: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Sum over `share` rows of pixels. SPAN: columns of x's operand in this program; STRIDE: channels of x in memory.

    `rows`: rows of all images. TURNED: x's operand gives the rows of the product.
    """
    pixel = tl.arange(0, LINES * COLUMNS)
    line, column = pixel // COLUMNS, tl.program_id(2) * COLUMNS + pixel % COLUMNS
    outer, inner = tl.arange(0, OUTER), tl.arange(0, INNER)
    place = tl.program_id(1) * SPAN + inner  # tap by tap, and a tap's channels
    right = place // IN % 3 - 1
    if CROSSED:  # x at row t meets dy at the rows t + 1, t and t - 1
        taps: tl.constexpr = 3
        down, up = tl.zeros((INNER,), tl.int32), outer // OUT - 1
    else:
        taps: tl.constexpr = 9
        down, up = place // IN // 3 - 1, tl.zeros((OUTER,), tl.int32)
    outer_known, inner_known = outer < 9 // taps * OUT, (inner < SPAN) & (place < taps * IN)

    seen = (column < width)[:, None]
    sides = column[:, None] + right[None, :]
    x_seen = seen & inner_known[None, :] & (sides >= 0) & (sides < width)
    dy_seen = seen & outer_known[None, :]
    at = (line * width + column)[:, None]
    x_at = at * STRIDE + ((down * width + right) * STRIDE + place % IN)[None, :]
    dy_at = at * OUT + (outer % OUT - up * width * OUT)[None, :]
    if PIECE < 8:  # direct copies of 16 bytes at a time bypass the L1 cache, too
        x_at = tl.max_contiguous(x_at, (1, PIECE))
        if CROSSED:
            dy_at = tl.max_contiguous(dy_at, (1, PIECE))

    start = tl.program_id(0) * share
    end = tl.minimum(start + share, rows)
    x += start.to(tl.int64) * width * STRIDE
    dy += start.to(tl.int64) * width * OUT
    first = start % height  # row of its image
    total = tl.zeros((INNER, OUTER) if TURNED else (OUTER, INNER), tl.float32)
    for row in tl.range(start, end, LINES, num_stages=STAGES):
        y = first + line
        y = tl.where(y < height, y, y - height)
        y = tl.where(row + line < end, y, -2)
        x_row, dy_row = y[:, None] + down[None, :], y[:, None] - up[None, :]
        v = tl.load(x + x_at, mask=x_seen & (x_row >= 0) & (x_row < height), other=0.0)
        d = tl.load(dy + dy_at, mask=dy_seen & (dy_row >= 0) & (dy_row < height), other=0.0)
        total = tl.dot(tl.trans(v), d, total) if TURNED else tl.dot(tl.trans(d), v, total)
        x += LINES * width * STRIDE
        dy += LINES * width * OUT
        first += LINES
        first = tl.where(first < height, first, first - height)

    program = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    out = partial + program.to(tl.int64) * (9 * IN * OUT)
    outer_at = outer % OUT * (9 * IN) + outer // OUT * (3 * IN)
    if TURNED:
        tl.store(out + place[:, None] + outer_at[None, :], total, mask=inner_known[:, None] & outer_known[None, :])
    else:
        tl.store(out + outer_at[:, None] + place[None, :], total, mask=outer_known[:, None] & inner_known[None, :])


@triton.jit(do_not_specialize=SIZES)
def _merge_products(partial, gradient, sums, of_output, of_input, of_row, of_column,
                    IN: tl.constexpr, OUT: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Add the programs' sums in a fixed order; `of_...`: strides of the gradient."""
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = place < 9 * IN * OUT
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    for start in tl.range(0, sums, LINES, loop_unroll_factor=4):
        line = start + tl.arange(0, LINES)
        at = partial + line[:, None].to(tl.int64) * (9 * IN * OUT) + place[None, :]
        total += tl.load(at, mask=(line < sums)[:, None] & known[None, :], other=0.0)
    tap = place // IN % 9
    at = place // (9 * IN) * of_output + place % IN * of_input + tap // 3 * of_row + tap % 3 * of_column
    tl.store(gradient + at, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=known)


@dataclass(frozen=True)
class _Division:
    """The division of all images' pixels among tiles and programs."""

    lines: int  # rows of a tile
    columns: int  # pixels of each
    across: int  # tiles beside each other
    share: int  # rows of a program
    programs: int  # that take different rows

    @classmethod
    def of(cls, images: int, height: int, width: int, tiling: Tiling) -> "_Division":
        columns = min(triton.next_power_of_2(width), tiling.pixels)
        lines = min(tiling.pixels // columns, 1 << height.bit_length() - 1)  # no more than an image has
        columns = tiling.pixels // lines
        rows, across = images * height, triton.cdiv(width, columns)
        share = triton.cdiv(triton.cdiv(rows * across, tiling.programs), lines) * lines
        return cls(lines, columns, across, share, triton.cdiv(rows, share))


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """The weight's gradient in its format and strides; further channels of x are left out."""
    return merge(sum_products(x, dy, weight.shape[1], tiling), weight)


def sum_products(x: Tensor, dy: Tensor, inputs: int, tiling: Tiling) -> Tensor:
    """The programs' sums, programs x outputs x taps x inputs; `inputs`: channels of x that count."""
    assert tiling.span % 8 == 0  # else elements are read one by one
    images, stride, height, width = x.shape
    outputs, shifts = dy.shape[1], 3 if tiling.crossed else 9
    division = _Division.of(images, height, width, tiling)
    outer = triton.next_power_of_2(outputs * 9 // shifts)
    inner = max(triton.next_power_of_2(tiling.span), 16 if outer >= WARPGROUP else WARPGROUP)
    partial = torch.empty((division.programs * division.across, outputs, 9, inputs), device=x.device)
    _sum_products[division.programs, triton.cdiv(inputs * shifts, tiling.span), division.across](
        x, dy, partial, height, width, images * height, division.share,
        IN=inputs, STRIDE=stride, OUT=outputs, CROSSED=tiling.crossed, SPAN=tiling.span,
        INNER=inner, OUTER=outer, TURNED=outer < WARPGROUP, LINES=division.lines, COLUMNS=division.columns,
        PIECE=tiling.piece, STAGES=tiling.stages, num_warps=tiling.warps, **FUSED,
    )  # fmt: skip
    return partial


def merge(partial: Tensor, weight: Tensor) -> Tensor:
    """The total of the programs' sums, in the weight's format and strides."""
    sums, outputs, _, inputs = partial.shape
    gradient = torch.empty_like(weight)
    _merge_products[(triton.cdiv(gradient.numel(), MERGED),)](
        partial, gradient, sums, *gradient.stride(), IN=inputs, OUT=outputs, LINES=16, COLUMNS=MERGED, **FUSED
    )
    return gradient
