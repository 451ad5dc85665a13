"""Batch norm, a residual sum and an activation for channels-last memory in Triton, in two passes each way.

Sums walk the table from its end, which the preceding convolution wrote last and the cache still holds; the next pass
walks from its start, which the sums read last. Program p adds the tiles p, p + P, p + 2 P, ..., and a small kernel
merges the programs' sums in a fixed order: no atomics, so the same input always gives the same bits, on every device.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

import os
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.channel_tables import TILE, Merged, Table, columns_of, loaded, merging, row_of, tile_of
from falconet.numerics.kernels import FUSED

if TYPE_CHECKING:
    from falconet.models.fused.span_kernels import Spanning

MOMENTS, GRADIENTS = 1056, 528  # programs that sum: 8 and 4 per multiprocessor of an H100; others give other bits
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "hard_swish": 3, "relu6": 4, "gelu": 5}
SIZES = ["count", "units", "joined", "tiles", "sums", "elements"]  # compiled once for all values
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # which has no assembly


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) by two approximations, exact to the last bit or two, in half the instructions of a division."""
    if INTERPRETED:
        return tl.sigmoid(v)
    return tl.inline_asm_elementwise(
        """{
        mul.f32 $0, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 $0, $0;
        add.f32 $0, $0, 0f3F800000;
        rcp.approx.ftz.f32 $0, $0;
        }""",
        "=&f,f",
        [v],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def reciprocal(v):
    """1 / v, exact to the last bit or two, in one instruction; a division takes eight."""
    if INTERPRETED:
        return 1.0 / v
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tail(v):
    """exp(-v^2 / 2), and the factor that makes it the probability of a normal variable being |v| or more; to 1e-7.

    By Abramowitz and Stegun's 7.1.26, which shares the density's exponential: a third of the instructions of erf.
    """
    t = reciprocal(1.0 + 0.2316418883 * tl.abs(v))
    series = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    return tl.exp2(v * v * -0.7213475204444817), t * (0.127414796 + t * (-0.142248368 + t * series))


@triton.jit
def activated(v, ACT: tl.constexpr):
    if ACT == 1:
        v = tl.where(v <= 0.0, 0.0, v)  # unlike a maximum, keeps NaN
    if ACT == 2:
        v = v * sigmoid(v)
    if ACT == 3:
        v = v * tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    if ACT == 4:
        v = tl.where(v <= 0.0, 0.0, tl.where(v >= 6.0, 6.0, v))
    if ACT == 5:
        bell, tail = _tail(v)
        beyond = bell * tail
        v = v * tl.where(v < 0.0, beyond, 1.0 - beyond)
    return v


@triton.jit
def passed(v, d, ACT: tl.constexpr):
    """The gradient before the activation, from the gradient after it."""
    if ACT == 1:
        d = tl.where(v > 0.0, d, 0.0)
    if ACT == 2:
        s = sigmoid(v)
        d = d * (s * (1.0 + v * (1.0 - s)))
    if ACT == 3:
        d = d * tl.where(v <= -3.0, 0.0, tl.where(v >= 3.0, 1.0, v * (1.0 / 3.0) + 0.5))
    if ACT == 4:
        d = tl.where((v > 0.0) & (v < 6.0), d, 0.0)
    if ACT == 5:
        bell, tail = _tail(v)
        slope = bell * (tail - 0.3989422804014327 * tl.abs(v))  # at -|v|
        d = d * tl.where(v < 0.0, slope, 1.0 - slope)
    return d


@triton.jit
def numbers_of(statistics, channel, channels, there):
    """Load factor, bias and mean of a norm."""
    return (
        row_of(statistics, 0, channel, channels, there),
        row_of(statistics, 1, channel, channels, there),
        row_of(statistics, 2, channel, channels, there),
    )


@triton.jit(do_not_specialize=SIZES)
def _sum_moments(x, partial, count, units, joined, tiles, UNIT: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum x - pivot and its square. The pivot is the first row of x: around it, variances do not cancel."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    pivot = tl.load(x + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), loop_unroll_factor=4):
        _, offsets, inside = tile_of(tiles - 1 - number, count, wide, columns, there, ROWS)
        v = tl.where(inside, loaded(x, offsets, inside) - pivot, 0.0)
        first += v
        second += v * v
    out = partial + tl.program_id(0) * wide + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0) * wide, tl.sum(second, 0), mask=there)


@triton.jit
def _merged(partial, line, sums, columns, inside, channels, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """The totals of the programs' first sums and of those of a later line."""
    first, second = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
    for start in tl.range(0, sums, CHUNK, loop_unroll_factor=2):
        lines = start + tl.arange(0, CHUNK)
        there = (lines < sums)[:, None] & inside[None, :]
        offsets = lines[:, None] * channels + columns[None, :]
        first += tl.load(partial + offsets, mask=there, other=0.0)
        second += tl.load(partial + line * sums * channels + offsets, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=SIZES)
def _merge_moments(partial, x, weight, bias, running_mean, running_variance, batches, statistics,
                   count, sums, channels, eps, momentum,
                   CHUNK: tl.constexpr, COLUMNS: tl.constexpr, TRACKS: tl.constexpr):  # fmt: skip
    """Compute the norm's numbers from the programs' sums; move the running statistics. `count`: values per channel."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    mean, variance = merged_moments(partial, x, count, sums, columns, inside, channels, CHUNK, COLUMNS)
    store_numbers(mean, variance, count, weight, bias, running_mean, running_variance, batches, statistics,
                  columns, inside, channels, eps, momentum, TRACKS)  # fmt: skip


@triton.jit
def merged_moments(partial, x, count, sums, columns, inside, channels, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and variance from the programs' sums."""
    first, second = _merged(partial, 1, sums, columns, inside, channels, CHUNK, COLUMNS)
    offset = first / count
    variance = tl.maximum(second / count - offset * offset, 0.0)
    mean = offset + tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    return mean, tl.where(mean == mean, variance, mean)  # a maximum drops NaN


@triton.jit
def store_numbers(mean, variance, count, weight, bias, running_mean, running_variance, batches, statistics,
                  columns, inside, channels, eps, momentum, TRACKS: tl.constexpr):  # fmt: skip
    """Store factor, bias, mean and 1 / deviation, and move the running statistics."""
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
def normed(v, factor, bias, mean):
    """The norm of a tile; the mean is subtracted first, because a product with a large one would lose digits."""
    return (v - mean) * factor + bias


@triton.jit(do_not_specialize=SIZES)
def _normalise(y, statistics, shortcut, shortcut_statistics, z, bits, count, units, joined, UNIT: tl.constexpr,
               ACT: tl.constexpr, ADDS: tl.constexpr, KEEPS: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """act(norm(y) + shortcut). ADDS 0: no shortcut, 1: plain, 2: normalised. KEEPS: store the signs as bits."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    rows, offsets, inside = tile_of(tl.program_id(0), count, channels * joined, columns, there, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    v = normed(loaded(y, offsets, inside), factor, bias, mean)
    if ADDS > 0:
        s = loaded(shortcut, offsets, inside)
        if ADDS == 2:
            factor, bias, mean = numbers_of(shortcut_statistics, channel, channels, there)
            s = normed(s, factor, bias, mean)
        v += s
    tl.store(z + offsets, activated(v, ACT).to(z.dtype.element_ty), mask=inside)
    if KEEPS:
        store_signs(bits, v, rows, count, channels * joined, ROWS, COLUMNS)


@triton.jit
def store_signs(bits, v, rows, count, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the signs of a tile, eight per byte."""
    eights = tl.reshape((v > 0.0).to(tl.int32), (ROWS, COLUMNS // 8, 8)) << tl.arange(0, 8)[None, None, :]
    places, kept = bits_of(rows, count, wide, COLUMNS)
    tl.store(bits + places, tl.sum(eights, 2).to(tl.uint8), mask=kept)


@triton.jit
def bits_of(rows, count, wide, COLUMNS: tl.constexpr):
    """Offsets of a tile's bytes of signs, and which of them exist."""
    in_row = (wide + 7) // 8
    place = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    there = (rows < count)[:, None] & (place < in_row)[None, :]
    return rows[:, None].to(tl.int64) * in_row + place[None, :], there


@triton.jit
def gradient(dz, dz2, y, bits, rows, offsets, inside, factor, bias, mean, count, wide,
              ACT: tl.constexpr, TWO: tl.constexpr, KEPT: tl.constexpr,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of the sum of norm and shortcut, and y, for one tile. KEPT: the signs were stored."""
    d = loaded(dz, offsets, inside)
    if TWO:
        d += loaded(dz2, offsets, inside)
    v = loaded(y, offsets, inside)
    if KEPT:
        places, kept = bits_of(rows, count, wide, COLUMNS)
        eights = tl.load(bits + places, mask=kept, other=0)
        on = tl.reshape((eights.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (ROWS, COLUMNS))
        d = tl.where(on > 0, d, 0.0)
    elif ACT > 0:
        d = passed(normed(v, factor, bias, mean), d, ACT)
    return d, v


@triton.jit(do_not_specialize=SIZES)
def _sum_gradients(dz, dz2, y, bits, g, statistics, shortcut, shortcut_statistics, partial,
                   count, units, joined, tiles, UNIT: tl.constexpr, ACT: tl.constexpr, TWO: tl.constexpr,
                   KEPT: tl.constexpr, STORES: tl.constexpr, DOWN: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum the gradient g, g (y - mean) and, if DOWN, g (shortcut - its mean). STORES: store g for later use."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    if DOWN:
        shortcut_mean = row_of(shortcut_statistics, 2, channel, channels, there)
        third = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), loop_unroll_factor=1 if STORES else 2):
        rows, offsets, inside = tile_of(tiles - 1 - number, count, wide, columns, there, ROWS)
        d, v = gradient(dz, dz2, y, bits, rows, offsets, inside, factor, bias, mean, count, wide,
                         ACT, TWO, KEPT, ROWS, COLUMNS)  # fmt: skip
        if STORES:
            stored = d.to(g.dtype.element_ty)
            tl.store(g + offsets, stored, mask=inside)
            d = stored.to(tl.float32)  # the shortcut gets it rounded: one gradient, not two
        first += d
        second += d * (v - mean)
        if DOWN:
            third += d * (loaded(shortcut, offsets, inside) - shortcut_mean)
    out = partial + tl.program_id(0) * wide + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0) * wide, tl.sum(second, 0), mask=there)
    if DOWN:
        tl.store(out + 2 * tl.num_programs(0) * wide, tl.sum(third, 0), mask=there)


@triton.jit(do_not_specialize=[*SIZES, "line"])
def _merge_gradients(partial, line, statistics, slopes, dweight, dbias, count, sums, channels,
                     CHUNK: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Gradients of weight and bias, and a, b, mean, c of dy = a g + b (y - mean) + c; `line`: where second sums are."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    first, second = _merged(partial, line, sums, columns, inside, channels, CHUNK, COLUMNS)
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
def sloped(d, v, slopes, channel, channels, there):
    """a d + b (v - mean) + c."""
    away = v - row_of(slopes, 2, channel, channels, there)
    d = d * row_of(slopes, 0, channel, channels, there) + away * row_of(slopes, 1, channel, channels, there)
    return d + row_of(slopes, 3, channel, channels, there)


@triton.jit(do_not_specialize=SIZES)
def _spread_gradients(dz, dz2, y, bits, statistics, slopes, dy, shortcut, shortcut_slopes, dshortcut,
                      count, units, joined, UNIT: tl.constexpr, ACT: tl.constexpr, TWO: tl.constexpr,
                      KEPT: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradients of y and of a shortcut with a norm."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    rows, offsets, inside = tile_of(tl.program_id(0), count, wide, columns, there, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    d, v = gradient(dz, dz2, y, bits, rows, offsets, inside, factor, bias, mean, count, wide,
                     ACT, TWO, KEPT, ROWS, COLUMNS)  # fmt: skip
    tl.store(dy + offsets, sloped(d, v, slopes, channel, channels, there).to(dy.dtype.element_ty), mask=inside)
    if DOWN:
        s = sloped(d, loaded(shortcut, offsets, inside), shortcut_slopes, channel, channels, there)
        tl.store(dshortcut + offsets, s.to(dshortcut.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _expand(values, out, elements, channels, SIZE: tl.constexpr):
    """Copy each image's value per channel to all of its pixels; `elements`: values of an image."""
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    image = tl.program_id(0).to(tl.int64)
    v = tl.load(values + image * channels + at % channels, mask=at < elements)
    tl.store(out + image * elements + at, v, mask=at < elements)


def dense(gradient: Tensor) -> Tensor:
    """Make a gradient dense in channels-last memory; that of a mean is expanded, which torch copies slowly."""
    images, channels, height, width = gradient.shape
    if gradient.stride() != (channels, 1, 0, 0):
        return gradient.contiguous(memory_format=torch.channels_last)
    out = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    elements = channels * height * width
    _expand[(images, -(-elements // TILE))](gradient, out, elements, channels, SIZE=TILE, **FUSED)
    return out


class Running(NamedTuple):
    """The running statistics that a batch moves; `momentum`: the weight of the newest batch."""

    mean: Tensor
    variance: Tensor
    batches: Tensor  # 0-d int64
    momentum: float


def statistics(
    x: Tensor, weight: Tensor, bias: Tensor, running: Running | None, *, eps: float, span: "Spanning | None" = None
) -> Tensor:
    """Compute weight / deviation, bias, mean and 1 / deviation, 4 x C, and move the running statistics."""
    summed = Table.of(x).summed(MOMENTS)
    partial = summed.partial(2, x.device)
    _sum_moments[summed.grid](x, partial, **summed.constants)
    return numbers(x, partial, weight, bias, running, eps=eps, span=span)


def numbers(
    x: Tensor,
    partial: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running | None,
    *,
    eps: float,
    span: "Spanning | None" = None,
) -> Tensor:
    """The result of `statistics`, from each program's sums of x and its square around the first row."""
    if span is not None:
        return span.numbers(x, partial, weight, bias, running, eps=eps)
    table, found = Table.of(x), torch.empty((4, x.shape[1]), device=x.device)
    mean, variance, batches, momentum = running or (found, found, found, 0.0)
    grid, constants = merging(table, partial.shape[1])
    _merge_moments[grid](
        partial, x, weight, bias, mean, variance, batches, found,
        eps=eps, momentum=momentum, TRACKS=running is not None, **constants,
    )  # fmt: skip
    return found


def normalise(
    y: Tensor, found: Tensor, *, act: str, shortcut: Tensor | None = None, shortcut_found: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """act(norm(y) + shortcut), and the signs of the sum as bits if the backward pass needs them."""
    table, z = Table.of(y), torch.empty_like(y)
    keeps = shortcut is not None and act == "relu"
    bits = torch.empty((table.count, -(-table.wide // 8)), dtype=torch.uint8, device=y.device) if keeps else None
    adds = 0 if shortcut is None else 1 if shortcut_found is None else 2
    grid, constants = table.walked
    _normalise[grid](
        y, found, y if shortcut is None else shortcut, found if shortcut_found is None else shortcut_found, z,
        z if bits is None else bits, ACT=ACTIVATIONS[act], ADDS=adds, KEEPS=keeps, **constants,
    )  # fmt: skip
    return z, bits


class Gradients(NamedTuple):
    """The gradients of one norm's input, weight and bias."""

    input: Tensor
    weight: Tensor
    bias: Tensor


class Added(NamedTuple):
    """Facts for the backward pass about the value added to a norm before the activation."""

    shortcut: Tensor | None = None  # only if it has a norm
    found: Tensor | None = None  # and its statistics
    bits: Tensor | None = None  # signs of the sum


class Reached(NamedTuple):
    """The gradient that reaches a norm: dz + dz2 where the activation passes it on."""

    dz: Tensor
    dz2: Tensor | None = None
    bits: Tensor | None = None  # signs of the sum that was rectified; None: found from the norm
    act: str = "none"


class Slopes(NamedTuple):
    """A norm's gradients of weight and bias, and a, b, mean, c of dy = a g + b (y - mean) + c."""

    own: tuple[Tensor, Tensor]
    found: Tensor


def sum_gradients(
    dz: Tensor,
    y: Tensor,
    found: Tensor,
    *,
    act: str,
    dz2: Tensor | None = None,
    added: Added | None = None,
    span: "Spanning | None" = None,
) -> tuple[Reached, Slopes, Slopes | None]:
    """The gradient at the norm, its slopes and those of the shortcut's norm; dz + dz2 is the result's gradient.

    If a value was added to the norm, the gradient at the norm is that value's gradient, too.
    """
    table, kind = Table.of(y), ACTIVATIONS[act]
    shortcut, other_found, bits = added or Added()
    down, two, kept = other_found is not None, dz2 is not None, bits is not None
    stores = added is not None and (kept or two)  # else the shortcut's gradient is dz itself
    summed = table.summed(GRADIENTS)
    partial = summed.partial(3 if down else 2, y.device)
    g = torch.empty_like(y) if stores else dz
    other, other_statistics = (shortcut, other_found) if down else (y, found)
    _sum_gradients[summed.grid](
        dz, dz2 if two else dz, y, bits if kept else dz, g, found, other, other_statistics, partial,
        ACT=kind, TWO=two, KEPT=kept, STORES=stores, DOWN=down, **summed.constants,
    )  # fmt: skip
    own = Slopes(*merged(partial, 1, found, summed.merged, span))
    others = Slopes(*merged(partial, 2, other_statistics, summed.merged, span)) if down else None
    return Reached(g) if stores else Reached(dz, dz2, bits, act), own, others


def spread_gradients(
    reached: Reached,
    y: Tensor,
    found: Tensor,
    slopes: Tensor,
    shortcut: Tensor | None = None,
    shortcut_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of a shortcut with a norm."""
    down = shortcut is not None
    dz, dz2, bits, act = reached
    dy, dother = torch.empty_like(y), torch.empty_like(y) if down else y
    grid, constants = Table.of(y).walked
    _spread_gradients[grid](
        dz, dz if dz2 is None else dz2, y, dz if bits is None else bits, found, slopes, dy,
        shortcut if down else y, shortcut_slopes if down else slopes, dother,
        ACT=ACTIVATIONS[act], TWO=dz2 is not None, KEPT=bits is not None, DOWN=down, **constants,
    )  # fmt: skip
    return dy, dother


def merged(
    partial: Tensor, line: int, found: Tensor, how: Merged, span: "Spanning | None" = None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """This replica's gradients of weight and bias, and the slopes."""
    gradients = torch.empty((2, partial.shape[-1]), device=found.device)
    slopes = torch.empty((4, partial.shape[-1]), device=found.device)
    grid, constants = how
    _merge_gradients[grid](partial, line, found, slopes, *gradients, **constants)
    if span is not None:
        span.mend_slopes(slopes, gradients, found)
    return tuple(gradients), slopes
