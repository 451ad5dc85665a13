"""A 1 x 1 convolution and the batch norm after it in Triton, with one pass less forward and three less backward.

Forward, the norm's sums are taken from the convolution's result before it leaves the chip. Backward, the gradient of
the convolution's result is computed where it is used and never stored: one read of its inputs gives both the
gradient of the input and that of the weight, whose sums stay in registers. That is faster with few channels and many
pixels, because memory then takes longer than the products. As in `batchnorm_kernels.py`, programs add in a fixed order,
without atomics: the same input gives the same bits.

All products have channels as rows and pixels as columns. A thread then holds many pixels of few channels, which it
adds up by itself, and a computed tile is an operand that tensor cores read from shared memory.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import ACTIVATIONS, Reached, normed, passed
from falconet.numerics.kernels import FUSED

SIZES = ["count", "tiles", "sums", "elements"]  # compiled once for all values
MERGED = 64  # elements of a program that merges
CHUNK = 32  # sums that it reads at a time


@triton.jit
def _tile_at(tile, count, columns, CHANNELS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """The offsets of a tile's elements, and which of them exist. FULL: all columns do."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = (rows < count)[:, None]
    if not FULL:
        inside = inside & (columns < CHANNELS)[None, :]
    return rows[:, None].to(tl.int64) * CHANNELS + columns[None, :], inside


@triton.jit
def _convolved(x, weight, tile, count, inner, IN: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):
    """A tile of the convolution's result, channels by pixels."""
    offsets, inside = _tile_at(tile, count, inner, IN, ROWS, FULL)
    return tl.dot(weight, tl.trans(tl.load(x + offsets, mask=inside, other=0.0)))


@triton.jit(do_not_specialize=SIZES)
def _convolve(x, weight, y, partial, count, tiles, IN: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr,
              COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute the convolution, and the sums of y - pivot and its square; the pivot is the first row of y."""
    inner, columns = tl.arange(0, INNER), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < OUT
    full: tl.constexpr = IN == INNER
    w = tl.load(weight + columns[:, None] * IN + inner[None, :], mask=there[:, None] & (inner < IN)[None, :], other=0.0)
    w = w.to(x.dtype.element_ty)
    head = _convolved(x, w, 0, count, inner, IN, ROWS, full).to(y.dtype.element_ty).to(tl.float32)
    pivot = tl.sum(tl.where((tl.arange(0, ROWS) == 0)[None, :], head, 0.0), 1)[:, None]
    first, second = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = tiles - 1 - number  # from the end, which the preceding norm wrote last
        h = _convolved(x, w, tile, count, inner, IN, ROWS, full).to(y.dtype.element_ty)
        offsets, inside = _tile_at(tile, count, columns, OUT, ROWS, OUT % COLUMNS == 0)
        tl.store(y + offsets, tl.trans(h), mask=inside)
        v = tl.where((tile * ROWS + tl.arange(0, ROWS) < count)[None, :], h.to(tl.float32) - pivot, 0.0)
        first += tl.sum(v, 1)
        second += tl.sum(v * v, 1)
    out = partial + tl.program_id(0) * OUT + columns
    tl.store(out, first, mask=there)
    tl.store(out + tl.num_programs(0) * OUT, second, mask=there)


@triton.jit
def _line(values, line, columns, OUT: tl.constexpr):
    return tl.load(values + line * OUT + columns, mask=columns < OUT, other=0.0)[None, :]


@triton.jit
def _numbers(statistics, slopes, columns, OUT: tl.constexpr):
    """Load the numbers of a norm's backward pass: factor, slope, constant, mean and bias."""
    b, mean = _line(slopes, 1, columns, OUT), _line(slopes, 2, columns, OUT)
    return _line(slopes, 0, columns, OUT), b, _line(slopes, 3, columns, OUT), mean, _line(statistics, 1, columns, OUT)


@triton.jit
def _gradient(dz, dz2, y, tile, count, columns, a, b, c, mean, bias, OUT: tl.constexpr, ACT: tl.constexpr,
              TWO: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """A tile of the gradient of the convolution's result."""
    offsets, inside = _tile_at(tile, count, columns, OUT, ROWS, FULL)
    d = tl.load(dz + offsets, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        d += tl.load(dz2 + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32)
    if ACT > 0:
        d = passed(normed(v, a, bias, mean), d, ACT)
    d = d * a + (v - mean) * b + c
    return tl.where(inside, d, 0.0).to(y.dtype.element_ty)  # a missing pixel may have inf, and the product NaN


@triton.jit
def _weight_at(outer, inner, IN: tl.constexpr, OUT: tl.constexpr):
    """The offsets of a weight's elements, input by output channels, and which of them exist."""
    return outer[None, :] * IN + inner[:, None], (outer < OUT)[None, :] & (inner < IN)[:, None]


@triton.jit(do_not_specialize=SIZES)
def _convolve_back(dz, dz2, y, statistics, slopes, x, weight, dx, partial, count, tiles,
                   IN: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, REST: tl.constexpr,
                   ACT: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute the gradient of x and this program's part of the weight's. REST: result channels beyond OUTER, or 0."""
    inner, outer = tl.arange(0, INNER), tl.arange(0, OUTER)
    at, known = _weight_at(outer, inner, IN, OUT)
    w = tl.load(weight + at, mask=known, other=0.0).to(x.dtype.element_ty)
    a, b, c, mean, bias = _numbers(statistics, slopes, outer, OUT)
    dw = tl.zeros((INNER, OUTER), tl.float32)
    if REST > 0:
        more = OUTER + tl.arange(0, REST)
        at2, known2 = _weight_at(more, inner, IN, OUT)
        w2 = tl.load(weight + at2, mask=known2, other=0.0).to(x.dtype.element_ty)
        a2, b2, c2, mean2, bias2 = _numbers(statistics, slopes, more, OUT)
        dw2 = tl.zeros((INNER, REST), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        offsets, inside = _tile_at(tile, count, inner, IN, ROWS, IN == INNER)
        given = tl.trans(tl.load(x + offsets, mask=inside, other=0.0))
        d = _gradient(dz, dz2, y, tile, count, outer, a, b, c, mean, bias, OUT, ACT, TWO, ROWS, OUTER <= OUT)
        back = tl.dot(w, tl.trans(d))
        dw = tl.dot(given, d, dw)
        if REST > 0:
            d2 = _gradient(dz, dz2, y, tile, count, more, a2, b2, c2, mean2, bias2, OUT, ACT, TWO, ROWS,
                           OUTER + REST == OUT)  # fmt: skip
            back = tl.dot(w2, tl.trans(d2), back)
            dw2 = tl.dot(given, d2, dw2)
        tl.store(dx + offsets, tl.trans(back.to(dx.dtype.element_ty)), mask=inside)
    out = partial + tl.program_id(0) * (OUT * IN)
    tl.store(out + at, dw, mask=known)
    if REST > 0:
        tl.store(out + at2, dw2, mask=known2)


@triton.jit(do_not_specialize=SIZES)
def _merge_weights(partial, dw, sums, elements, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((CHUNK, SIZE), tl.float32)
    for start in tl.range(0, sums, CHUNK, loop_unroll_factor=4):
        lines = start + tl.arange(0, CHUNK)
        inside = (lines < sums)[:, None] & (at < elements)[None, :]
        total += tl.load(partial + lines[:, None] * elements + at[None, :], mask=inside, other=0.0)
    tl.store(dw + at, tl.sum(total, 0).to(dw.dtype.element_ty), mask=at < elements)


class Tiling(NamedTuple):
    """The division of a pass; the number of programs is what an H200 runs at once, and any other gives other bits."""

    rows: int  # pixels of a tile
    stages: int  # tiles in flight, and one
    warps: int
    programs: int

    def of(self, x: Tensor) -> tuple[int, dict[str, int]]:
        """The number of programs and the constants for an input."""
        count = x.numel() // x.shape[1]
        tiles = -(-count // self.rows)
        sizes = {"count": count, "tiles": tiles, "ROWS": self.rows, "STAGES": self.stages, "num_warps": self.warps}
        return min(self.programs, tiles), sizes | FUSED


def _power(number: int, least: int) -> int:
    return max(least, triton.next_power_of_2(number))


def _forward_tiling(inputs: int, outputs: int) -> tuple[int, Tiling]:
    """The columns of a program and the rest of the tiling, the fastest of about ten on an H200."""
    if outputs <= 64:
        return 64, Tiling(64, 3, 4, 528 if inputs <= 128 else 132)
    if inputs > 128:
        return 128, Tiling(64, 3, 8, 132)
    if outputs <= 128 or outputs > 256:
        return 128, Tiling(64, 4, 8, 264)
    return 256, Tiling(32, 3, 4, 396 if inputs <= 64 else 264)


def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution's result, and the programs' sums for `batchnorm_kernels.numbers`."""
    outputs, inputs = weight.shape[:2]
    shape = (x.shape[0], outputs, *x.shape[2:])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    columns, tiling = _forward_tiling(inputs, outputs)
    across = -(-outputs // columns)
    programs, constants = tiling._replace(programs=max(1, tiling.programs // across)).of(x)
    partial = torch.empty((2, programs, outputs), device=x.device)
    _convolve[programs, across](
        x, weight, y, partial, IN=inputs, OUT=outputs, INNER=_power(inputs, 16), COLUMNS=columns, **constants
    )
    return y, partial


class _Widths(NamedTuple):
    """The widths of a backward pass: input channels, first and other result channels, as powers of two."""

    inner: int  # at least 64, the rows of the smallest product of four warps
    outer: int
    rest: int

    @classmethod
    def of(cls, inputs: int, outputs: int) -> "_Widths":
        inner, whole = _power(inputs, 64), _power(outputs, 16)
        if 128 < outputs <= 192:  # Triton 3.6 computes wrong results for 64 and 32, or 32 and 16, with four warps
            return cls(inner, 128, 16 if outputs <= 144 else 64)
        return cls(inner, whole, 0)

    @property
    def weights(self) -> int:
        return self.inner * (self.outer + self.rest)


def can_go_back(inputs: int, outputs: int) -> bool:
    """Whether the weight's gradient fits the registers of one program."""
    widths = _Widths.of(inputs, outputs)
    return widths.outer <= 256 and widths.weights <= 128 * 256


def _backward_tiling(widths: _Widths, *, reads: int) -> Tiling:
    """The tiling that was fastest of about ten on an H200. `reads`: tensors of the result's size."""
    if widths.weights > 64 * 256:
        return Tiling(32, 3 if reads == 2 else 2, 8, 132)
    if widths.inner > 64:
        return Tiling(64, 3, 4, 264) if widths.inner == 128 and widths.outer <= 64 else Tiling(64, 3, 8, 132)
    if widths.rest > 0:
        return Tiling(32, 3, 4, 264)
    if widths.outer == 256:
        return Tiling(64 if reads == 2 else 32, 3, 8, 132)
    return Tiling(32 if widths.outer == 128 else 64, 3, 4, 396)


def backward(
    reached: Reached, y: Tensor, found: Tensor, slopes: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    outputs, inputs = weight.shape[:2]
    widths = _Widths.of(inputs, outputs)
    programs, constants = _backward_tiling(widths, reads=2 if reached.dz2 is None else 3).of(x)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    partial = torch.empty((programs, outputs, inputs), device=x.device)
    dz, dz2, _, act = reached
    _convolve_back[programs,](
        dz, dz if dz2 is None else dz2, y, found, slopes, x, weight, dx, partial,
        IN=inputs, OUT=outputs, INNER=widths.inner, OUTER=widths.outer, REST=widths.rest,
        ACT=ACTIVATIONS[act], TWO=dz2 is not None, **constants,
    )  # fmt: skip
    elements = inputs * outputs
    _merge_weights[-(-elements // MERGED),](partial, dw, programs, elements, CHUNK=CHUNK, SIZE=MERGED, **FUSED)
    return dx, dw
