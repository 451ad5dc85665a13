"""Grouped 3 x 3 convolutions of channels-last memory in Triton: forward, and the gradients of input and weight.

Groups are narrow, so the work is to move bytes. A program is one warp; it takes 16 channels of adjacent columns and
walks down the image: every row is read from memory once (its left and right neighbours come from the cache), and the
rows of the result to which it adds stay in registers, as do the weights. Groups of 4 and 8 channels fill parts of a
tensor core's 16 x 16 product; the rest is zeros.

The channels of a product are ordered so that a thread reads from memory, in one piece, what the tensor core takes
from it, and writes what it gets: nothing is exchanged between threads. Thread t of four holds adjacent
channels t * VEC + 4 * step + 2 * half + j, which are number 8 * half + 2 * t + j of product `step`.

The weight's gradient sums over pixels instead, which takes an exchange through shared memory. Every program keeps the
sums of nine taps; a second kernel merges those of all programs in a fixed order: no atomics, so the same input always
gives the same bits, on every device.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

PIXELS = 16  # of a row, for each program: what a tensor core takes
SUMMED = 32  # of a row, where pixels are summed
ROWS = 14  # that a program walks, at most; strips of more rows leave multiprocessors without work at the end
PROGRAMS = 132 * 20  # that sum a weight's gradient: 20 for each multiprocessor of an H100; a constant: it changes bits
ONE_WARP = {"num_warps": 1, "num_stages": 1, **FUSED}
SIZES = ["height", "width", "out_height", "out_width", "lanes", "tiles", "strips", "rows", "walkers", "sums", "chunks",
         "of_output", "of_input", "of_row", "of_column"]  # compiled once for all values  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _pack(weight, packed, of_output, of_input, of_row, of_column, chunks, GROUP: tl.constexpr, STEPS: tl.constexpr):
    """Pack the weights of a tap in the order of a warp's threads; the second half is for the input's gradient.

    `of_...`: strides of the weight.
    """
    tap, chunk, backward = tl.program_id(0) % 9, tl.program_id(0) // 9, tl.program_id(1)
    lane, piece = tl.arange(0, 32)[:, None], tl.arange(0, 8)[None, :]
    half, j, tile = piece // 2 % 2, piece % 2, piece // 4
    n = chunk * 16 + lane // 8 * 4 + 2 * tile + lane // 4 % 2
    for step in tl.static_range(STEPS):
        k = chunk // STEPS * (16 * STEPS) + lane % 4 * (4 * STEPS) + 4 * step + 2 * half + j
        if backward == 1:
            at = k * of_output + n % GROUP * of_input + (2 - tap // 3) * of_row + (2 - tap % 3) * of_column
        else:
            at = n * of_output + k % GROUP * of_input + tap // 3 * of_row + tap % 3 * of_column
        value = tl.load(weight + at, mask=k // GROUP == n // GROUP, other=0.0)
        number = ((backward * chunks + chunk) * 9 + tap) * STEPS + step
        tl.store(packed + number * 256 + lane * 8 + piece, value.to(packed.dtype.element_ty))


@triton.jit
def _weights(packed, STEPS: tl.constexpr):
    """The right operands of nine taps."""
    at = tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = ()
    for number in tl.static_range(9 * STEPS):
        threads = tl.reshape(tl.load(packed + number * 256 + at), (8, 4, 2, 2, 2))  # n, t, tile, half, j
        found += (tl.reshape(threads.permute(3, 1, 4, 2, 0), (16, 16)),)
    return found


@triton.jit
def _operand(tile, P: tl.constexpr):
    return tl.reshape(tl.reshape(tile, (P, 4, 2, 2)).permute(0, 2, 1, 3), (P, 16))


@triton.jit
def _add(total, tile, weights, tap: tl.constexpr, STEPS: tl.constexpr, P: tl.constexpr):
    """total + tile * weights."""
    if STEPS == 1:
        total = tl.dot(_operand(tile, P), weights[tap], total)
    else:
        first, second = tl.split(tl.reshape(tile, (P, 4, 2, 4)).permute(0, 1, 3, 2))
        total = tl.dot(_operand(first, P), weights[2 * tap], total)
        total = tl.dot(_operand(second, P), weights[2 * tap + 1], total)
    return total


@triton.jit
def _add_row(total, tiles, weights, row: tl.constexpr, P: tl.constexpr):
    """`total` plus the products of a row's left, middle and right pixels."""
    for column in tl.static_range(3):
        total = _add(total, tiles[column], weights, 3 * row + column, 1, P)
    return total


@triton.jit
def _store(at, total, column, width, P: tl.constexpr):
    tile = tl.reshape(tl.reshape(total, (P, 2, 4, 2)).permute(0, 2, 1, 3), (P, 16))
    tl.store(at, tile.to(at.dtype.element_ty), mask=(column < width)[:, None])


@triton.jit
def _place(tile, lanes, width, P: tl.constexpr):
    """Image and column of a tile's lanes; missing lanes are outside the image."""
    lane = tile * P + tl.arange(0, P)
    return (lane // width).to(tl.int64), tl.where(lane < lanes, lane % width, width + 1)


@triton.jit
def _start(tensor, image, column, channel, height, width, channels, COUNT: tl.constexpr, VEC: tl.constexpr):
    """Pointers to each lane's channels in the first row of its image; a thread takes VEC of them."""
    i = tl.arange(0, COUNT)
    taken = i // VEC * VEC + i % VEC
    return tensor + ((image * height * width + column) * channels + channel)[:, None] + taken[None, :]


@triton.jit
def _load(at, row, column, shift: tl.constexpr, height, width, channels):
    """A tile of one row of pixels; zeros outside the image."""
    there = tl.where((row >= 0) & (row < height), width, 0)
    inside = (column > 0) & (column <= there) if shift < 0 else column + shift < there
    return tl.load(at + (row * width + shift) * channels, mask=inside[:, None], other=0.0)


@triton.jit
def _sides(at, row, column, height, width, channels):
    return (
        _load(at, row, column, -1, height, width, channels),
        _load(at, row, column, 1, height, width, channels),
    )


@triton.jit(do_not_specialize=SIZES)
def _convolve(x, packed, y, height, width, lanes, strips, rows, chunks, P: tl.constexpr):
    """Convolve with stride 1: row t of the input adds to rows t - 1, t and t + 1 of the result."""
    channels = chunks * 16
    chunk, rest = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    image, column = _place(rest // strips, lanes, width, P)
    weights = _weights(packed + chunk * (9 * 256), 1)
    at = _start(x, image, column, chunk * 16, height, width, channels, 16, 4)
    out = _start(y, image, column, chunk * 16, height, width, channels, 16, 4)
    start = rest % strips * rows
    end = tl.minimum(start + rows, height)
    begin = tl.maximum(start - 1, 0)
    until = tl.minimum(end + 1, height)
    above, beside = tl.zeros((P, 16), tl.float32), tl.zeros((P, 16), tl.float32)
    middle = _load(at, begin, column, 0, until, width, channels)
    sides = _sides(at, begin, column, until, width, channels)
    next_middle = _load(at, begin + 1, column, 0, until, width, channels)
    for t in range(begin, until):
        later_middle = _load(at, t + 2, column, 0, until, width, channels)
        next_sides = _sides(at, t + 1, column, until, width, channels)
        tiles = (sides[0], middle, sides[1])
        above = _add_row(above, tiles, weights, 2, P)
        _store(out + (t - 1) * width * channels, above, column, tl.where(t > start, width, 0), P)
        above = _add_row(beside, tiles, weights, 1, P)
        beside = _add_row(tl.zeros((P, 16), tl.float32), tiles, weights, 0, P)
        middle, next_middle, sides = next_middle, later_middle, next_sides
    _store(out + (end - 1) * width * channels, above, column, tl.where(until == end, width, 0), P)


@triton.jit(do_not_specialize=SIZES)
def _spread(dy, packed, dx, height, width, out_height, out_width, lanes, strips, rows, chunks,
            STEPS: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """The input's gradient for stride 2. Row 2 t gets only row t of dy, which also adds to rows 2 t - 1 and 2 t + 1.

    Columns work in the same way; the weights are rotated by half a turn.
    """
    channels = chunks * 16
    chunk, rest = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    image, column = _place(rest // strips, lanes, out_width, P)
    weights = _weights(packed + chunk * (9 * 256 * STEPS), STEPS)
    first = chunk // STEPS * (16 * STEPS)
    at = _start(dy, image, column, first, out_height, out_width, channels, 16 * STEPS, 4 * STEPS)
    out = _start(dx, image, 2 * column, chunk * 16, height, width, channels, 16, 4)
    start = rest % strips * rows
    end = tl.minimum(start + rows, out_height)
    until = tl.minimum(end + 1, out_height)
    zeros = tl.zeros((P, 16), tl.float32)
    left, right = zeros, zeros  # of the odd row above
    tile = _load(at, start, column, 0, until, out_width, channels)
    other = _load(at, start, column, 1, until, out_width, channels)
    for t in range(start, end + 1):
        next_tile = _load(at, t + 1, column, 0, until, out_width, channels)
        next_other = _load(at, t + 1, column, 1, until, out_width, channels)
        row = out + (2 * t - 1) * width * channels
        there = tl.where((t > start) & (2 * t - 1 < height), width, 0)
        left = _add(left, tile, weights, 7, STEPS, P)
        _store(row, left, 2 * column, there, P)
        right = _add(_add(right, tile, weights, 6, STEPS, P), other, weights, 8, STEPS, P)
        _store(row + channels, right, 2 * column + 1, there, P)
        row += width * channels
        there = tl.where(t < end, width, 0)
        left = _add(zeros, tile, weights, 4, STEPS, P)
        _store(row, left, 2 * column, there, P)
        right = _add(_add(zeros, tile, weights, 3, STEPS, P), other, weights, 5, STEPS, P)
        _store(row + channels, right, 2 * column + 1, there, P)
        left = _add(zeros, tile, weights, 1, STEPS, P)
        right = _add(_add(zeros, tile, weights, 0, STEPS, P), other, weights, 2, STEPS, P)
        tile, other = next_tile, next_other


@triton.jit
def _row(at, row, column, height, width, channels):
    """The left, middle and right pixels of a row."""
    return (
        _load(at, row, column, -1, height, width, channels),
        _load(at, row, column, 0, height, width, channels),
        _load(at, row, column, 1, height, width, channels),
    )


@triton.jit
def _products(sums, turned, d, row: tl.constexpr):
    """The nine sums after a row's left, middle and right pixels, times d, were added to three of them."""
    found = ()
    for tap in tl.static_range(9):
        if tap // 3 == row:
            found += (tl.dot(turned[tap % 3], d, sums[tap]),)
        else:
            found += (sums[tap],)
    return found


@triton.jit(do_not_specialize=SIZES)
def _sum_products(x, dy, partial, height, width, lanes, tiles, walkers, chunks, GROUP: tl.constexpr, P: tl.constexpr):
    """Sum the weight's gradient for stride 1 over the tiles of pixels p, p + walkers, p + 2 walkers, ..."""
    channels = chunks * 16
    chunk, walker = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sums = ()
    for _ in tl.static_range(9):
        sums += (tl.zeros((16, 16), tl.float32),)
    for tile in range(walker, tiles, walkers):
        image, column = _place(tile, lanes, width, P)
        at = _start(x, image, column, chunk * 16, height, width, channels, 16, 8)
        of = _start(dy, image, column, chunk * 16, height, width, channels, 16, 8)
        above = tl.zeros((P, 16), dy.dtype.element_ty)
        beside = _load(of, 0, column, 0, height, width, channels)
        below = _load(of, 1, column, 0, height, width, channels)
        row = _row(at, 0, column, height, width, channels)
        for t in range(height):
            next_below = _load(of, t + 2, column, 0, height, width, channels)
            next_row = _row(at, t + 1, column, height, width, channels)
            turned = (tl.trans(row[0]), tl.trans(row[1]), tl.trans(row[2]))
            sums = _products(sums, turned, below, 0)
            sums = _products(sums, turned, beside, 1)
            sums = _products(sums, turned, above, 2)
            above, beside, below, row = beside, below, next_below, next_row
    i, o = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    out = partial + walker.to(tl.int64) * (9 * GROUP) * channels + i % GROUP * channels + chunk * 16 + o
    for tap in tl.static_range(9):
        tl.store(out + tap * GROUP * channels, sums[tap], mask=i // GROUP == o // GROUP)


@triton.jit(do_not_specialize=SIZES)
def _merge_products(partial, gradient, of_output, of_input, of_row, of_column, sums, chunks,
                    GROUP: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Add the programs' sums in a fixed order; `of_...`: strides of the gradient."""
    channels = chunks * 16
    wide = 9 * GROUP * channels
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    for start in tl.range(0, sums, LINES, loop_unroll_factor=4):
        line = start + tl.arange(0, LINES)
        there = (line < sums)[:, None] & (place < wide)[None, :]
        total += tl.load(partial + line[:, None].to(tl.int64) * wide + place[None, :], mask=there, other=0.0)
    output, within, tap = place % channels, place // channels % GROUP, place // channels // GROUP
    at = output * of_output + within * of_input + tap // 3 * of_row + tap % 3 * of_column
    tl.store(gradient + at, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=place < wide)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution with a padding of one pixel; `group`: channels per group."""

    images: int
    channels: int
    height: int
    width: int
    group: int
    stride: int

    @property
    def out_height(self) -> int:
        return (self.height - 1) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width - 1) // self.stride + 1

    @property
    def lanes(self) -> int:
        """The number of columns of the result in all images."""
        return self.images * self.out_width

    @property
    def chunks(self) -> int:
        return self.channels // 16

    @property
    def strips(self) -> tuple[int, int]:
        """The number of strips, and the rows of each."""
        count = triton.cdiv(self.out_height, ROWS)
        return count, triton.cdiv(self.out_height, count)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack weights in the kernels' order: for the forward pass, and for the input's gradient."""
    channels, group = weight.shape[:2]
    chunks, steps = channels // 16, triton.cdiv(group, 16)
    packed = torch.empty((2, chunks, 9, steps, 256), dtype=dtype, device=weight.device)
    _pack[(chunks * 9, 2)](weight, packed, *weight.stride(), chunks, GROUP=group, STEPS=steps, **ONE_WARP)
    return packed


def forward(x: Tensor, packed: Tensor, sizes: Geometry) -> Tensor:
    """The convolution, for stride 1 and groups of at most 16 channels."""
    return _convolved(x, packed[0], sizes)


def input_gradient(dy: Tensor, packed: Tensor, sizes: Geometry) -> Tensor:
    """The input's gradient, for stride 1 and groups of at most 16 channels, or stride 2."""
    if sizes.stride == 1:
        return _convolved(dy, packed[1], sizes)
    shape = (sizes.images, sizes.channels, sizes.height, sizes.width)
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    strips, rows = sizes.strips
    _spread[(triton.cdiv(sizes.lanes, PIXELS) * strips * sizes.chunks,)](
        dy, packed[1], dx, sizes.height, sizes.width, sizes.out_height, sizes.out_width, sizes.lanes, strips, rows,
        sizes.chunks, STEPS=triton.cdiv(sizes.group, 16), P=PIXELS, **ONE_WARP,
    )  # fmt: skip
    return dx


def _convolved(source: Tensor, packed: Tensor, sizes: Geometry) -> Tensor:
    result, (strips, rows) = torch.empty_like(source), sizes.strips
    _convolve[(triton.cdiv(sizes.lanes, PIXELS) * strips * sizes.chunks,)](
        source, packed, result, sizes.height, sizes.width, sizes.lanes, strips, rows, sizes.chunks, P=PIXELS,
        **ONE_WARP,
    )  # fmt: skip
    return result


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, sizes: Geometry) -> Tensor:
    """The weight's gradient in its format and strides, for stride 1 and groups of at most 16 channels."""
    tiles = triton.cdiv(sizes.lanes, SUMMED)
    walkers = min(max(PROGRAMS // sizes.chunks, 1), tiles)
    wide = 9 * sizes.group * sizes.channels
    partial, gradient = torch.empty((walkers, wide), device=x.device), torch.empty_like(weight)
    _sum_products[(sizes.chunks * walkers,)](
        x, dy, partial, sizes.height, sizes.width, sizes.lanes, tiles, walkers, sizes.chunks,
        GROUP=sizes.group, P=SUMMED, **ONE_WARP,
    )  # fmt: skip
    _merge_products[(triton.cdiv(wide, 64),)](
        partial, gradient, *gradient.stride(), walkers, sizes.chunks, GROUP=sizes.group, LINES=16, COLUMNS=64, **FUSED
    )
    return gradient
