"""Batch norm, a residual sum and an activation for channels-last memory in Triton, in two passes each way.

A tensor is a table of rows (images x pixels) by channels. Sums walk it from its end, which the convolution before wrote
last and the cache still holds; the pass after them walks from its start, which the sums read last. Every program adds
the tiles p, p + P, p + 2 P, ..., and a small kernel merges the programs' sums in a fixed order: no atomics, so the same
input always gives the same bits, on every device.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

TILE = 4096  # elements: rows by channels
WIDTHS = (16, 32, 64, 128)  # channels of a tile
PROGRAMS = 792  # of a pass that sums: six for each multiprocessor of an H100; a constant, because it changes bits
MERGED = 16  # channels of a program that merges
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "hard_swish": 3, "relu6": 4}


@triton.jit
def _act(v, ACT: tl.constexpr):
    if ACT == 1:
        v = tl.maximum(v, 0.0)
    if ACT == 2:
        v = v * tl.sigmoid(v)
    if ACT == 3:
        v = v * tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    if ACT == 4:
        v = tl.minimum(tl.maximum(v, 0.0), 6.0)
    return v


@triton.jit
def _slope(v, d, ACT: tl.constexpr):
    """The gradient before the activation, from that after it."""
    if ACT == 1:
        d = tl.where(v > 0.0, d, 0.0)
    if ACT == 2:
        s = tl.sigmoid(v)
        d = d * (s + v * s * (1.0 - s))
    if ACT == 3:
        d = d * tl.where(v <= -3.0, 0.0, tl.where(v >= 3.0, 1.0, v * (1.0 / 3.0) + 0.5))
    if ACT == 4:
        d = tl.where((v > 0.0) & (v < 6.0), d, 0.0)
    return d


@triton.jit
def _tile(tile, count, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a tile, offsets of its elements, and which of them exist."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < count)[:, None] & (columns < channels)[None, :]
    return rows, columns, rows[:, None].to(tl.int64) * channels + columns[None, :], inside


@triton.jit
def _row(values, line, columns, channels):
    """A line of a table with a number for each channel, to be spread over a tile's rows."""
    return tl.load(values + line * channels + columns, mask=columns < channels, other=0.0)[None, :]


@triton.jit
def _normed(v, statistics, columns, channels):
    """The norm of a tile; the mean is taken off first, because a product with a large one would lose digits."""
    v = (v - _row(statistics, 2, columns, channels)) * _row(statistics, 0, columns, channels)
    return v + _row(statistics, 1, columns, channels)


@triton.jit
def _sum_moments(x, pivot, partial, count, channels, tiles,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Sums of x - pivot and of its square. The pivot is a row of x: around it, variances do not cancel."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    middle = tl.load(pivot + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.program_id(0), tiles, PROGRAMS):
        _, _, offsets, inside = _tile(tiles - 1 - number, count, channels, ROWS, COLUMNS)
        v = tl.where(inside, tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - middle, 0.0)
        first += v
        second += v * v
    out = partial + tl.program_id(0) * channels + columns
    tl.store(out, tl.sum(first, 0), mask=columns < channels)
    tl.store(out + PROGRAMS * channels, tl.sum(second, 0), mask=columns < channels)


@triton.jit
def _merge_moments(partial, pivot, weight, bias, running_mean, running_variance, batches, statistics,
                   count, channels, tiles, eps, momentum, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
                   COLUMNS: tl.constexpr, TRACKS: tl.constexpr):  # fmt: skip
    """The norm's numbers from the programs' sums, and the running statistics; variances around each program's mean."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    number = tl.arange(0, PROGRAMS)
    there = partial + number[:, None] * channels + columns[None, :]
    first = tl.load(there, mask=inside[None, :], other=0.0)
    second = tl.load(there + PROGRAMS * channels, mask=inside[None, :], other=0.0)
    # Program 0 has the last tile, which may be short.
    short = tl.where(number == 0, tiles * ROWS - count, 0)
    size = ((tiles - number + PROGRAMS - 1) // PROGRAMS * ROWS - short).to(tl.float32)[:, None]
    offset = tl.sum(first, 0) / count
    own = first / size
    away = own - offset[None, :]
    variance = tl.maximum(tl.sum(second - first * own + away * away * size, 0) / count, 0.0)
    mean = offset + tl.load(pivot + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(variance + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0) * inverse
    tl.store(statistics + columns, factor, mask=inside)
    tl.store(statistics + channels + columns, tl.load(bias + columns, mask=inside, other=0.0), mask=inside)
    tl.store(statistics + 2 * channels + columns, mean, mask=inside)
    tl.store(statistics + 3 * channels + columns, inverse, mask=inside)
    if TRACKS:
        unbiased = variance * (count / tl.maximum(count - 1, 1).to(tl.float32))
        old_mean = tl.load(running_mean + columns, mask=inside, other=0.0)
        old_variance = tl.load(running_variance + columns, mask=inside, other=0.0)
        tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(running_variance + columns, old_variance + momentum * (unbiased - old_variance), mask=inside)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _normalise(y, statistics, shortcut, shortcut_statistics, z, bits, count, channels,
               ACT: tl.constexpr, ADDS: tl.constexpr, KEEPS: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """act(norm(y) + shortcut); ADDS 0: no shortcut, 1: as it is, 2: normalised. KEEPS: the signs, as bits."""
    rows, columns, offsets, inside = _tile(tl.program_id(0), count, channels, ROWS, COLUMNS)
    v = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32)
    v = _normed(v, statistics, columns, channels)
    if ADDS > 0:
        s = tl.load(shortcut + offsets, mask=inside, other=0.0).to(tl.float32)
        if ADDS == 2:
            s = _normed(s, shortcut_statistics, columns, channels)
        v += s
    tl.store(z + offsets, _act(v, ACT).to(z.dtype.element_ty), mask=inside)
    if KEEPS:
        eights = tl.reshape((v > 0.0).to(tl.int32), (ROWS, COLUMNS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        bytes_of_row = (channels + 7) // 8
        place = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        there = (rows < count)[:, None] & (place < bytes_of_row)[None, :]
        out = bits + rows[:, None].to(tl.int64) * bytes_of_row + place[None, :]
        tl.store(out, tl.sum(eights, 2).to(tl.uint8), mask=there)


@triton.jit
def _of_image(values, rows, columns, inside, channels, pixels):
    """A tile of numbers that every image has one of for each channel."""
    return tl.load(values + (rows // pixels)[:, None] * channels + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _gradient(dz, dz2, y, bits, g, statistics, gate, dmean, rows, columns, offsets, inside, count, channels, pixels,
              ACT: tl.constexpr, TWO: tl.constexpr, KEPT: tl.constexpr, STORES: tl.constexpr, GATED: tl.constexpr,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of the sum of norm and shortcut, and y, for one tile. KEPT: the signs are read, not found from y."""
    d = tl.load(dz + offsets, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        d = d * _of_image(gate, rows, columns, inside, channels, pixels).to(tl.float32)
        d += _of_image(dmean, rows, columns, inside, channels, pixels).to(tl.float32)
    if TWO:
        d += tl.load(dz2 + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32)
    if KEPT:
        bytes_of_row = (channels + 7) // 8
        place = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        there = (rows < count)[:, None] & (place < bytes_of_row)[None, :]
        eights = tl.load(bits + rows[:, None].to(tl.int64) * bytes_of_row + place[None, :], mask=there, other=0)
        on = tl.reshape((eights.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (ROWS, COLUMNS))
        d = tl.where(on > 0, d, 0.0)
    elif ACT > 0:
        d = _slope(_normed(v, statistics, columns, channels), d, ACT)
    if STORES:
        stored = d.to(g.dtype.element_ty)
        tl.store(g + offsets, stored, mask=inside)
        d = stored.to(tl.float32)  # the shortcut gets it rounded: one gradient, not two
    return d, v


@triton.jit
def _sum_gradients(dz, dz2, y, bits, g, statistics, gate, dmean, shortcut, shortcut_statistics, partial,
                   count, channels, pixels, tiles, ACT: tl.constexpr, TWO: tl.constexpr, KEPT: tl.constexpr,
                   STORES: tl.constexpr, GATED: tl.constexpr, DOWN: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Sums of the gradient g, of g (y - mean) and, DOWN, of g (shortcut - its mean). STORES: g, for later use."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean = _row(statistics, 2, columns, channels)
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    if DOWN:
        shortcut_mean = _row(shortcut_statistics, 2, columns, channels)
        third = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.program_id(0), tiles, PROGRAMS):
        rows, columns, offsets, inside = _tile(tiles - 1 - number, count, channels, ROWS, COLUMNS)
        d, v = _gradient(dz, dz2, y, bits, g, statistics, gate, dmean, rows, columns, offsets, inside, count, channels,
                         pixels, ACT, TWO, KEPT, STORES, GATED, ROWS, COLUMNS)  # fmt: skip
        first += d
        second += d * (v - mean)
        if DOWN:
            s = tl.load(shortcut + offsets, mask=inside, other=0.0).to(tl.float32)
            third += d * (s - shortcut_mean)
    out = partial + tl.program_id(0) * channels + columns
    tl.store(out, tl.sum(first, 0), mask=columns < channels)
    tl.store(out + PROGRAMS * channels, tl.sum(second, 0), mask=columns < channels)
    if DOWN:
        tl.store(out + 2 * PROGRAMS * channels, tl.sum(third, 0), mask=columns < channels)


@triton.jit
def _merge_gradients(partial, line, statistics, slopes, dweight, dbias, count, channels,
                     PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Gradients of weight and bias, and a, b, mean, c of dy = a g + b (y - mean) + c; `line`: of the second sums."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    there = partial + tl.arange(0, PROGRAMS)[:, None] * channels + columns[None, :]
    first = tl.sum(tl.load(there, mask=inside[None, :], other=0.0), 0)
    second = tl.sum(tl.load(there + line * PROGRAMS * channels, mask=inside[None, :], other=0.0), 0)
    factor = tl.load(statistics + columns, mask=inside, other=0.0)
    mean = tl.load(statistics + 2 * channels + columns, mask=inside, other=0.0)
    inverse = tl.load(statistics + 3 * channels + columns, mask=inside, other=0.0)
    tl.store(slopes + columns, factor, mask=inside)
    tl.store(slopes + channels + columns, -factor * inverse * inverse * (second / count), mask=inside)
    tl.store(slopes + 2 * channels + columns, mean, mask=inside)
    tl.store(slopes + 3 * channels + columns, -factor * (first / count), mask=inside)
    tl.store(dweight + columns, second * inverse, mask=inside)
    tl.store(dbias + columns, first, mask=inside)


@triton.jit
def _sloped(d, v, slopes, columns, channels):
    """a d + b (v - mean) + c."""
    away = v - _row(slopes, 2, columns, channels)
    d = d * _row(slopes, 0, columns, channels) + away * _row(slopes, 1, columns, channels)
    return d + _row(slopes, 3, columns, channels)


@triton.jit
def _spread_gradients(dz, dz2, y, bits, statistics, gate, dmean, slopes, dy, shortcut, shortcut_slopes, dshortcut,
                      count, channels, pixels, ACT: tl.constexpr, TWO: tl.constexpr, KEPT: tl.constexpr,
                      GATED: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of y, and that of a shortcut with a norm."""
    rows, columns, offsets, inside = _tile(tl.program_id(0), count, channels, ROWS, COLUMNS)
    d, v = _gradient(dz, dz2, y, bits, dy, statistics, gate, dmean, rows, columns, offsets, inside, count, channels,
                     pixels, ACT, TWO, KEPT, False, GATED, ROWS, COLUMNS)  # fmt: skip
    tl.store(dy + offsets, _sloped(d, v, slopes, columns, channels).to(dy.dtype.element_ty), mask=inside)
    if DOWN:
        s = tl.load(shortcut + offsets, mask=inside, other=0.0).to(tl.float32)
        s = _sloped(d, s, shortcut_slopes, columns, channels)
        tl.store(dshortcut + offsets, s.to(dshortcut.dtype.element_ty), mask=inside)


@triton.jit
def _sum_images(dz, y, statistics, out, channels, pixels, scale,
                ACT: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sums over each image's pixels of act(norm(y)), times `scale`; WEIGHTED: of its product with dz."""
    image, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = image.to(tl.int64) * pixels * channels
    for tile in range(0, (pixels + ROWS - 1) // ROWS):
        _, _, offsets, inside = _tile(tile, pixels, channels, ROWS, COLUMNS)
        v = tl.load(y + start + offsets, mask=inside, other=0.0).to(tl.float32)
        v = _act(_normed(v, statistics, columns, channels), ACT)
        if WEIGHTED:
            v *= tl.load(dz + start + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, v, 0.0)
    values = (tl.sum(total, 0) * scale).to(out.dtype.element_ty)
    tl.store(out + image * channels + columns, values, mask=columns < channels)


@triton.jit
def _excite(y, statistics, gate, z, count, channels, pixels,
            ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """act(norm(y)) times the gate of each image and channel."""
    rows, columns, offsets, inside = _tile(tl.program_id(0), count, channels, ROWS, COLUMNS)
    v = tl.load(y + offsets, mask=inside, other=0.0).to(tl.float32)
    v = _act(_normed(v, statistics, columns, channels), ACT)
    v *= _of_image(gate, rows, columns, inside, channels, pixels).to(tl.float32)
    tl.store(z + offsets, v.to(z.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Table:
    """A channels-last tensor as rows by channels, and how it is divided into tiles and programs."""

    count: int  # rows
    channels: int

    @classmethod
    def of(cls, x: Tensor) -> "Table":
        return cls(x.numel() // x.shape[1], x.shape[1])

    @property
    def width(self) -> int:
        """Channels of a tile: the widest that leaves the least unused."""
        return min(WIDTHS, key=lambda width: (-(-self.channels // width) * width, -width))

    @property
    def rows(self) -> int:
        return TILE // self.width

    @property
    def tiles(self) -> int:
        return -(-self.count // self.rows)

    @property
    def columns(self) -> int:
        return -(-self.channels // self.width)

    @property
    def programs(self) -> int:
        """Of each column, in a pass that sums; a power of two."""
        most = max(1, min(PROGRAMS // self.columns, self.tiles))
        return 1 << (most.bit_length() - 1)

    @property
    def summed(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a pass that sums."""
        return (self.programs, self.columns), {**self.walked[1], "PROGRAMS": self.programs}

    @property
    def walked(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Those of a pass over all elements; rows come first, because a grid's second number ends at 65,535."""
        return (self.tiles, self.columns), {"ROWS": self.rows, "COLUMNS": self.width, **FUSED}

    @property
    def merged(self) -> tuple[tuple[int], dict[str, int]]:
        return (-(-self.channels // MERGED),), {"PROGRAMS": self.programs, "COLUMNS": MERGED, **FUSED}


class Running(NamedTuple):
    """The running statistics that a batch moves; `momentum`: the weight of the newest."""

    mean: Tensor
    variance: Tensor
    batches: Tensor  # 0-d int64
    momentum: float


def statistics(x: Tensor, weight: Tensor, bias: Tensor, running: Running | None, *, eps: float) -> Tensor:
    """4 x C: weight / deviation, bias, mean, 1 / deviation; moves the running statistics."""
    table = Table.of(x)
    partial = torch.empty((2, table.programs, table.channels), device=x.device)
    found = torch.empty((4, table.channels), device=x.device)
    grid, constants = table.summed
    _sum_moments[grid](x, x, partial, table.count, table.channels, table.tiles, **constants)
    grid, constants = table.merged
    mean, variance, batches, momentum = running or (found, found, found, 0.0)
    _merge_moments[grid](
        partial, x, weight, bias, mean, variance, batches, found, table.count, table.channels, table.tiles, eps,
        momentum, ROWS=table.rows, TRACKS=running is not None, **constants,
    )  # fmt: skip
    return found


def normalise(
    y: Tensor, found: Tensor, *, act: str, shortcut: Tensor | None = None, shortcut_found: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """act(norm(y) + shortcut), and the signs of the sum as bits if the backward pass needs them."""
    table, z = Table.of(y), torch.empty_like(y)
    keeps = shortcut is not None and act == "relu"
    bits = torch.empty((table.count, -(-table.channels // 8)), dtype=torch.uint8, device=y.device) if keeps else None
    adds = 0 if shortcut is None else 1 if shortcut_found is None else 2
    grid, constants = table.walked
    _normalise[grid](
        y, found, y if shortcut is None else shortcut, found if shortcut_found is None else shortcut_found, z,
        z if bits is None else bits, table.count, table.channels,
        ACT=ACTIVATIONS[act], ADDS=adds, KEEPS=keeps, **constants,
    )  # fmt: skip
    return z, bits


class Gradients(NamedTuple):
    """Of one norm's input, weight and bias."""

    input: Tensor
    weight: Tensor
    bias: Tensor


class Added(NamedTuple):
    """What was added to a norm before the activation, in the backward pass."""

    shortcut: Tensor | None = None  # with a norm of its own
    found: Tensor | None = None  # and its statistics
    bits: Tensor | None = None  # signs of the sum


class Gated(NamedTuple):
    """What the result was multiplied by for each image and channel, in the backward pass."""

    gate: Tensor  # N x C
    dmean: Tensor  # N x C: what each pixel gets from the gate's own gradient


def backward(
    dz: Tensor,
    y: Tensor,
    found: Tensor,
    *,
    act: str,
    dz2: Tensor | None = None,
    added: Added | None = None,
    gated: Gated | None = None,
) -> tuple[Gradients, Gradients | Tensor | None]:
    """Of the norm, and of what was added to it: its norm's, or its gradient; dz + dz2 is the result's gradient."""
    table, kind = Table.of(y), ACTIVATIONS[act]
    shortcut, other_found, bits = added or Added()
    down, two, kept = other_found is not None, dz2 is not None, bits is not None
    stores = added is not None and (kept or two)  # else the shortcut's gradient is dz itself
    partial = torch.empty((3 if down else 2, table.programs, table.channels), device=y.device)
    g = torch.empty_like(y) if stores else dz
    other, other_statistics = (shortcut, other_found) if down else (y, found)
    gate, dmean = gated or (dz, dz)
    pixels = y.shape[2] * y.shape[3]
    grid, constants = table.summed
    _sum_gradients[grid](
        dz, dz2 if two else dz, y, bits if kept else dz, g, found, gate, dmean, other, other_statistics, partial,
        table.count, table.channels, pixels, table.tiles,
        ACT=kind, TWO=two, KEPT=kept, STORES=stores, GATED=gated is not None, DOWN=down, **constants,
    )  # fmt: skip
    own, slopes = _merged(partial, 1, found, table)
    others, other_slopes = _merged(partial, 2, other_statistics, table) if down else (own, slopes)
    dy, dother = torch.empty_like(y), torch.empty_like(y) if down else y
    two, kept, kind = (False, False, 0) if stores else (two, kept, kind)  # g has them already
    grid, constants = table.walked
    _spread_gradients[grid](
        g, dz2 if two else g, y, bits if kept else g, found, gate, dmean, slopes, dy, other, other_slopes, dother,
        table.count, table.channels, pixels,
        ACT=kind, TWO=two, KEPT=kept, GATED=gated is not None, DOWN=down, **constants,
    )  # fmt: skip
    if added is None:
        return Gradients(dy, *own), None
    return Gradients(dy, *own), Gradients(dother, *others) if down else g


def _merged(partial: Tensor, line: int, found: Tensor, table: Table) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Gradients of weight and bias, and the slopes."""
    dweight, dbias = torch.empty((2, table.channels), device=found.device).unbind()
    slopes = torch.empty((4, table.channels), device=found.device)
    grid, constants = table.merged
    _merge_gradients[grid](partial, line, found, slopes, dweight, dbias, table.count, table.channels, **constants)
    return (dweight, dbias), slopes


def image_means(y: Tensor, found: Tensor, *, act: str) -> Tensor:
    """N x C x 1 x 1: the mean of act(norm(y)) over each image's pixels, in y's format."""
    return _image_sums(y, y, found, act=act, weighted=False, scale=1.0 / (y.shape[2] * y.shape[3]))


def gate_gradients(dz: Tensor, y: Tensor, found: Tensor, *, act: str) -> Tensor:
    """N x C x 1 x 1: the gradient of what act(norm(y)) was multiplied by."""
    return _image_sums(dz, y, found, act=act, weighted=True, scale=1.0)


def _image_sums(dz: Tensor, y: Tensor, found: Tensor, *, act: str, weighted: bool, scale: float) -> Tensor:
    table = Table.of(y)
    images, channels, height, width = y.shape
    out = torch.empty((images, channels, 1, 1), dtype=y.dtype, device=y.device)
    _sum_images[(images, table.columns)](
        dz, y, found, out, channels, height * width, scale, ACT=ACTIVATIONS[act], WEIGHTED=weighted, **table.walked[1]
    )
    return out


def excite(y: Tensor, found: Tensor, gate: Tensor, *, act: str) -> Tensor:
    """act(norm(y)) times the gate, N x C x 1 x 1."""
    table, z = Table.of(y), torch.empty_like(y)
    grid, constants = table.walked
    pixels = y.shape[2] * y.shape[3]
    _excite[grid](y, found, gate, z, table.count, table.channels, pixels, ACT=ACTIVATIONS[act], **constants)
    return z
