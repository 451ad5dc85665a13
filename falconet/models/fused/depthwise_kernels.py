"""Depthwise convolutions of channels-last memory in Triton: forward, and the gradients of input and weight.

A thread takes a few adjacent channels of a few adjacent columns and walks down the image: every row is read
once, and the rows of the result to which it adds stay in registers. Threads are numbered over images, columns and
channels together, so that all have work with any number of channels. Sums are in fp32 and have a fixed
order: no atomics, so the same input always gives the same bits, on every device.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803, N806

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

STRIP = 32  # rows that a thread walks, at most; each strip reads the rows of its border again
SUMMING = 132 * 512  # threads that sum a weight's gradient: four warps for each scheduler of an H100; changes bits
SIZES = ["height", "width", "out_height", "out_width", "top", "left", "groups", "lanes", "strips", "rows"]


@triton.jit
def _taps(weight, group, first, step, groups, live, K: tl.constexpr, VEC: tl.constexpr):
    """The weights of each thread's channels, by tap; `first` and `step` may rotate the kernel by half a turn."""
    at = weight + (group * VEC)[:, None] + tl.arange(0, VEC)[None, :]
    taps = ()
    for tap in tl.static_range(K * K):
        taps += (tl.load(at + (first + step * tap) * (groups * VEC), mask=live[:, None], other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _zeros(COUNT: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros((LANES, VEC), tl.float32),)
    return zeros


@triton.jit
def _loaded(row, column, width, channels, COUNT: tl.constexpr):
    """Tiles of adjacent columns; zeros outside the image, whose width counts as 0 for rows above and below it."""
    tiles = ()
    for j in tl.static_range(COUNT):
        inside = (column + j).to(tl.uint32) < width.to(tl.uint32)  # one comparison: columns before the first are huge
        tiles += (tl.load(row + j * channels, mask=inside[:, None], other=0.0),)
    return tiles


@triton.jit
def _store(row, column, width, channels, tiles, FIRST: tl.constexpr, COUNT: tl.constexpr):
    for j in tl.static_range(COUNT):
        inside = (column + j).to(tl.uint32) < width.to(tl.uint32)
        tl.store(row + j * channels, tiles[FIRST + j].to(row.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _place(tile, lanes, groups, across, LANES: tl.constexpr):
    """The image, first column and channels of each thread, and whether it exists."""
    lane = tile * LANES + tl.arange(0, LANES)
    rest = lane // groups
    return (rest // across).to(tl.int64), rest % across, lane % groups, lane < lanes


@triton.jit
def _start(tensor, image, column, group, height, width, channels, VEC: tl.constexpr):
    """Pointers to each thread's elements in the first row of its image."""
    pixel = image * height * width + column
    return tensor + (pixel * channels + group * VEC)[:, None] + tl.arange(0, VEC)[None, :]


@triton.jit
def _rows(at, t, column, height, width, channels, top, until, S: tl.constexpr, COUNT: tl.constexpr):
    """The S rows of the input that a row of the result is the first to need."""
    tiles = ()
    for s in tl.static_range(S):
        row = S * t + s - top
        there = tl.where((row >= 0) & (row < height) & (t < until), width, 0)
        tiles += _loaded(at + row * width * channels, column, there, channels, COUNT)
    return tiles


@triton.jit(do_not_specialize=[*SIZES, "first", "step"])
def _convolve(x, weight, y, height, width, out_height, out_width, top, left, groups, lanes, strips, rows, first, step,
              K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Compute P columns of the result per thread; sums of row t - m are at m * P when row t's inputs are read."""
    M: tl.constexpr = (K - 1) // S
    COLUMNS: tl.constexpr = S * (P - 1) + K
    channels = groups * VEC
    strip = tl.program_id(0) % strips
    image, place, group, live = _place(tl.program_id(0) // strips, lanes, groups, (out_width + P - 1) // P, LANES)
    out_column = tl.where(live, place * P, out_width)
    column = tl.where(live, out_column * S - left, width)
    taps = _taps(weight, group, first, step, groups, live, K, VEC)
    at = _start(x, image, column, group, height, width, channels, VEC)
    out = _start(y, image, out_column, group, out_height, out_width, channels, VEC)
    start = strip * rows
    end = tl.minimum(start + rows, out_height)
    begin = tl.maximum(start, top // S)
    until = tl.minimum(end + M, (height - 1 + top) // S + 1)
    sums = _zeros((M + 1) * P, LANES, VEC)
    tiles = _rows(at, begin, column, height, width, channels, top, until, S, COLUMNS)
    for t in range(begin, until):
        following = _rows(at, t + 1, column, height, width, channels, top, until, S, COLUMNS)
        added = ()
        for i in tl.static_range((M + 1) * P):
            total = sums[i]
            for s in tl.static_range(S):
                if S * (i // P) + s < K:
                    for kx in tl.static_range(K):
                        v = tiles[s * COLUMNS + S * (i % P) + kx].to(tl.float32)
                        total += v * taps[(S * (i // P) + s) * K + kx]
            added += (total,)
        there = tl.where(t - M >= start, out_width, 0)
        _store(out + (t - M) * out_width * channels, out_column, there, channels, added, M * P, P)
        sums = _zeros(P, LANES, VEC) + added[: M * P]
        tiles = following
    for t in range(until, end + M):  # below the image
        there = tl.where(t - M >= start, out_width, 0)
        _store(out + (t - M) * out_width * channels, out_column, there, channels, sums, M * P, P)
        sums = _zeros(P, LANES, VEC) + sums[: M * P]


@triton.jit(do_not_specialize=SIZES)
def _spread(dy, weight, dx, height, width, out_height, out_width, top, left, groups, lanes, strips, rows,
            K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Compute S x P columns of the input's gradient per thread; a row of dy adds to K rows from S * row - top on."""
    M: tl.constexpr = (K - 1) // S
    COLUMNS: tl.constexpr = P + M
    channels = groups * VEC
    strip = tl.program_id(0) % strips
    across = (width + left + S * P - 1) // (S * P)
    image, place, group, live = _place(tl.program_id(0) // strips, lanes, groups, across, LANES)
    column = tl.where(live, place * P - M, out_width)
    in_column = tl.where(live, place * (S * P) - left, width)
    taps = _taps(weight, group, 0, 1, groups, live, K, VEC)
    at = _start(dy, image, column, group, out_height, out_width, channels, VEC)
    out = _start(dx, image, in_column, group, height, width, channels, VEC)
    start = strip * rows
    end = tl.minimum(start + rows, (height + top + S - 1) // S)
    begin = tl.maximum(start - M, 0)
    sums = _zeros(K * S * P, LANES, VEC)
    tiles = _rows(at, begin, column, out_height, out_width, channels, 0, end, 1, COLUMNS)
    for t in range(begin, end):
        following = _rows(at, t + 1, column, out_height, out_width, channels, 0, end, 1, COLUMNS)
        added = ()
        for i in tl.static_range(K * S * P):  # row ky, then column w of the thread
            total = sums[i]
            for m in tl.static_range(M + 1):
                if S * m + i % (S * P) % S < K:
                    v = tiles[i % (S * P) // S + M - m].to(tl.float32)
                    total += v * taps[i // (S * P) * K + S * m + i % (S * P) % S]
            added += (total,)
        for s in tl.static_range(S):
            row = S * t + s - top
            there = tl.where((t >= start) & (row >= 0) & (row < height), width, 0)
            _store(out + row * width * channels, in_column, there, channels, added, s * S * P, S * P)
        sums = added[S * S * P :] + _zeros(S * S * P, LANES, VEC)
        tiles = following


@triton.jit(do_not_specialize=[*SIZES, "items", "slots"])
def _sum_products(x, dy, partial, height, width, out_height, out_width, top, left, groups, lanes, strips, rows,
                  items, slots, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, VEC: tl.constexpr,
                  LANES: tl.constexpr):  # fmt: skip
    """Sum for the weight's gradient over the items slot, slot + slots, ...: P columns of one image each."""
    M: tl.constexpr = (K - 1) // S
    COLUMNS: tl.constexpr = S * (P - 1) + K
    channels = groups * VEC
    strip = tl.program_id(0) % strips
    lane = tl.program_id(0) // strips * LANES + tl.arange(0, LANES)
    group, slot, live = lane % groups, lane // groups, lane < lanes
    across = (out_width + P - 1) // P
    start = strip * rows
    end = tl.minimum(start + rows, out_height)
    begin = tl.maximum(start, top // S)
    until = tl.minimum(end + M, (height - 1 + top) // S + 1)
    sums = _zeros(K * K, LANES, VEC)
    for number in range(0, (items + slots - 1) // slots):
        item = number * slots + slot
        taken = live & (item < items)
        image = (item // across).to(tl.int64)
        out_column = tl.where(taken, item % across * P, out_width)
        column = tl.where(taken, out_column * S - left, width)
        at = _start(x, image, column, group, height, width, channels, VEC)
        out = _start(dy, image, out_column, group, out_height, out_width, channels, VEC)
        window = ()  # the rows t - 1, t - 2, ... of dy
        for m in tl.static_range(M):
            row = begin - 1 - m
            there = tl.where((row >= start) & (row < end), out_width, 0)
            past = _loaded(out + row * out_width * channels, out_column, there, channels, P)
            for p in tl.static_range(P):
                window += (past[p].to(tl.float32),)
        tiles = _rows(at, begin, column, height, width, channels, top, until, S, COLUMNS)
        arriving = _rows(out, begin, out_column, out_height, out_width, channels, 0, end, 1, P)
        for t in range(begin, until):
            following = _rows(at, t + 1, column, height, width, channels, top, until, S, COLUMNS)
            next_arriving = _rows(out, t + 1, out_column, out_height, out_width, channels, 0, end, 1, P)
            whole = ()
            for p in tl.static_range(P):
                whole += (arriving[p].to(tl.float32),)
            whole += window
            added = ()
            for tap in tl.static_range(K * K):
                total = sums[tap]
                for p in tl.static_range(P):
                    v = tiles[tap // K % S * COLUMNS + S * p + tap % K].to(tl.float32)
                    total += v * whole[tap // K // S * P + p]
                added += (total,)
            sums = added
            window = whole[: M * P]
            tiles = following
            arriving = next_arriving
    _store_sums(partial, sums, strip * slots + slot, group, live, channels, K, VEC)


@triton.jit(do_not_specialize=[*SIZES, "items", "slots"])
def _spread_and_sum(x, dy, weight, dx, partial, height, width, out_height, out_width, top, left, groups, lanes, strips,
                    rows, items, slots, K: tl.constexpr, P: tl.constexpr, VEC: tl.constexpr,
                    LANES: tl.constexpr):  # fmt: skip
    """Compute both gradients for stride 1, which need the same elements of dy for each pixel of x."""
    COLUMNS: tl.constexpr = P + K - 1
    channels = groups * VEC
    strip = tl.program_id(0) % strips
    lane = tl.program_id(0) // strips * LANES + tl.arange(0, LANES)
    group, slot, live = lane % groups, lane // groups, lane < lanes
    across = (width + P - 1) // P
    start = strip * rows
    end = tl.minimum(start + rows, height)
    taps = _taps(weight, group, 0, 1, groups, live, K, VEC)
    sums = _zeros(K * K, LANES, VEC)
    for number in range(0, (items + slots - 1) // slots):
        item = number * slots + slot
        taken = live & (item < items)
        image = (item // across).to(tl.int64)
        in_column = tl.where(taken, item % across * P, width)
        column = tl.where(taken, in_column + left - (K - 1), out_width)
        at = _start(dy, image, column, group, out_height, out_width, channels, VEC)
        into = _start(x, image, in_column, group, height, width, channels, VEC)
        out = _start(dx, image, in_column, group, height, width, channels, VEC)
        window = ()  # the rows above those that arrive, the nearest first
        for m in tl.static_range(1, K):
            past = _rows(at, start + top - m, column, out_height, out_width, channels, 0, out_height, 1, COLUMNS)
            for j in tl.static_range(COLUMNS):
                window += (past[j].to(tl.float32),)
        arriving = _rows(at, start + top, column, out_height, out_width, channels, 0, out_height, 1, COLUMNS)
        tiles = _rows(into, start, in_column, height, width, channels, 0, end, 1, P)
        for row in range(start, end):
            below = row + top + 1
            next_arriving = _rows(at, below, column, out_height, out_width, channels, 0, out_height, 1, COLUMNS)
            following = _rows(into, row + 1, in_column, height, width, channels, 0, end, 1, P)
            whole = ()
            for j in tl.static_range(COLUMNS):
                whole += (arriving[j].to(tl.float32),)
            whole += window
            spread = ()
            for p in tl.static_range(P):
                total = tl.zeros((LANES, VEC), tl.float32)
                for tap in tl.static_range(K * K):
                    total += whole[tap // K * COLUMNS + p + K - 1 - tap % K] * taps[tap]
                spread += (total,)
            there = tl.where(row < end, width, 0)
            _store(out + row * width * channels, in_column, there, channels, spread, 0, P)
            added = ()
            for tap in tl.static_range(K * K):
                total = sums[tap]
                for p in tl.static_range(P):
                    total += tiles[p].to(tl.float32) * whole[tap // K * COLUMNS + p + K - 1 - tap % K]
                added += (total,)
            sums = added
            window = whole[: (K - 1) * COLUMNS]
            arriving = next_arriving
            tiles = following
    _store_sums(partial, sums, strip * slots + slot, group, live, channels, K, VEC)


@triton.jit
def _store_sums(partial, sums, line, group, live, channels, K: tl.constexpr, VEC: tl.constexpr):
    there = partial + (line.to(tl.int64) * (K * K) * channels + group * VEC)[:, None] + tl.arange(0, VEC)[None, :]
    for tap in tl.static_range(K * K):
        tl.store(there + tap * channels, sums[tap], mask=live[:, None])


@triton.jit(do_not_specialize=["count", "channels"])
def _merge(partial, dweight, count, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add `count` rows of taps x channels to the weight's gradient, channels x taps."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < TAPS * channels
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = partial + rows[:, None].to(tl.int64) * (TAPS * channels) + columns[None, :]
        total += tl.load(at, mask=(rows < count)[:, None] & inside[None, :], other=0.0)
    out = dweight + columns % channels * TAPS + columns // channels
    tl.store(out, tl.sum(total, 0).to(dweight.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    """The share of a thread, and the number of threads in a program."""

    columns: int  # of the result
    channels: int
    lanes: int = 128

    @property
    def constants(self) -> dict[str, int | bool]:
        sizes = {"P": self.columns, "VEC": self.channels, "LANES": self.lanes}
        return {**sizes, "num_warps": self.lanes // 32, **FUSED}


# The fastest of those tried on an H200, on the layers of EfficientNet-B0, B4 and MobileNetV3 (docs/maintaining/log.md).
# Four columns would save a tenth of the forward pass of 5 x 5 kernels with stride 2, and take twice as long to compile.
FORWARD = {(3, 1): Tile(4, 2), (3, 2): Tile(2, 4), (5, 1): Tile(4, 2), (5, 2): Tile(2, 2)}
SPREAD = {3: Tile(1, 4), 5: Tile(2, 2)}
SUMMED = {(3, 1): Tile(2, 4), (3, 2): Tile(2, 4), (5, 1): Tile(4, 2), (5, 2): Tile(4, 2)}
BOTH = Tile(4, 2)  # gradients of 3 x 3 kernels


@dataclass(frozen=True)
class Geometry:
    """The sizes of a depthwise convolution."""

    images: int
    channels: int
    height: int
    width: int
    kernel: int
    stride: int
    top: int  # padding above
    left: int
    out_height: int
    out_width: int

    def turned(self) -> "Geometry":
        """The convolution, of stride 1, that computes the input's gradient."""
        return Geometry(
            self.images, self.channels, self.out_height, self.out_width, self.kernel, 1,
            self.kernel - 1 - self.top, self.kernel - 1 - self.left, self.height, self.width,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.height, self.width, self.out_height, self.out_width, self.top, self.left)


def _strips(rows: int) -> tuple[int, int]:
    """The number of strips, and the rows of each."""
    strips = -(-rows // STRIP)
    return strips, -(-rows // strips)


def transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight, C x 1 x K x K, as taps by channels, so that adjacent threads read adjacent weights."""
    taps = torch.empty((weight[0].numel(), weight.shape[0]), dtype=dtype, device=weight.device)
    return taps.copy_(weight.detach().flatten(1).t())


def forward(x: Tensor, taps: Tensor, shape: Geometry, *, tile: Tile | None = None, turn: bool = False) -> Tensor:
    """The convolution; `taps`: see `transposed`; `turn` rotates the kernel by half a turn."""
    tile = tile or FORWARD[shape.kernel, shape.stride]
    y = torch.empty(
        (shape.images, shape.channels, shape.out_height, shape.out_width),
        dtype=x.dtype, device=x.device, memory_format=torch.channels_last,
    )  # fmt: skip
    groups = shape.channels // tile.channels
    lanes = shape.images * -(-shape.out_width // tile.columns) * groups
    strips, rows = _strips(shape.out_height)
    first, step = (shape.kernel**2 - 1, -1) if turn else (0, 1)
    _convolve[(-(-lanes // tile.lanes) * strips,)](
        x, taps, y, *shape.sizes, groups, lanes, strips, rows, first, step,
        K=shape.kernel, S=shape.stride, **tile.constants,
    )  # fmt: skip
    return y


def input_gradient(dy: Tensor, taps: Tensor, shape: Geometry, *, tile: Tile | None = None) -> Tensor:
    if shape.stride == 1:
        return forward(dy, taps, shape.turned(), tile=tile, turn=True)
    tile = tile or SPREAD[shape.kernel]
    dx = torch.empty(
        (shape.images, shape.channels, shape.height, shape.width),
        dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last,
    )  # fmt: skip
    groups = shape.channels // tile.channels
    across = -(-(shape.width + shape.left) // (shape.stride * tile.columns))
    lanes = shape.images * across * groups
    strips, rows = _strips(-(-(shape.height + shape.top) // shape.stride))
    _spread[(-(-lanes // tile.lanes) * strips,)](
        dy, taps, dx, *shape.sizes, groups, lanes, strips, rows, K=shape.kernel, S=shape.stride, **tile.constants
    )
    return dx


def weight_gradient(x: Tensor, dy: Tensor, shape: Geometry, *, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """The weight's gradient, C x 1 x K x K."""
    tile = tile or SUMMED[shape.kernel, shape.stride]
    summed = _Summed.of(shape, tile, rows=shape.out_height, columns=shape.out_width)
    partial = torch.empty((summed.lines, shape.kernel**2, shape.channels), device=x.device)
    _sum_products[summed.grid(tile)](
        x, dy, partial, *shape.sizes, *summed.sizes, K=shape.kernel, S=shape.stride, **tile.constants
    )
    return _merged(partial, shape, dtype)


def gains_at_once(shape: Geometry) -> bool:
    """Whether one pass for both gradients is faster than two; for 5 x 5 it would need too many registers."""
    return shape.kernel == 3 and shape.stride == 1


def gradients(
    x: Tensor, dy: Tensor, taps: Tensor, shape: Geometry, *, dtype: torch.dtype, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight, for stride 1, in one pass."""
    tile = tile or BOTH
    dx, summed = torch.empty_like(x), _Summed.of(shape, tile, rows=shape.height, columns=shape.width)
    partial = torch.empty((summed.lines, shape.kernel**2, shape.channels), device=x.device)
    _spread_and_sum[summed.grid(tile)](
        x, dy, taps, dx, partial, *shape.sizes, *summed.sizes, K=shape.kernel, **tile.constants
    )
    return dx, _merged(partial, shape, dtype)


class _Summed(NamedTuple):
    """The division of the images among the threads of a pass that sums."""

    groups: int  # of channels
    strips: int
    rows: int  # of a strip
    items: int  # neighbouring columns of an image
    slots: int  # threads for each group and strip, which take every slots-th item

    @classmethod
    def of(cls, shape: Geometry, tile: Tile, *, rows: int, columns: int) -> "_Summed":
        groups, (strips, rows) = shape.channels // tile.channels, _strips(rows)
        items = shape.images * -(-columns // tile.columns)
        slots = max(1, min(SUMMING // (groups * strips), items))
        return cls(groups, strips, rows, items, -(-items // -(-items // slots)))  # as few as take no longer

    @property
    def lines(self) -> int:
        return self.strips * self.slots

    def grid(self, tile: Tile) -> tuple[int]:
        return (-(-self.slots * self.groups // tile.lanes) * self.strips,)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.groups, self.slots * self.groups, self.strips, self.rows, self.items, self.slots)


def _merged(partial: Tensor, shape: Geometry, dtype: torch.dtype) -> Tensor:
    dweight = torch.empty((shape.channels, 1, shape.kernel, shape.kernel), dtype=dtype, device=partial.device)
    few = len(partial) <= 256
    merging = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4} if few else {"ROWS": 512, "COLUMNS": 8, "num_warps": 8}
    _merge[(-(-partial[0].numel() // merging["COLUMNS"]),)](
        partial, dweight, len(partial), shape.channels, TAPS=shape.kernel**2, **merging, **FUSED
    )
    return dweight
