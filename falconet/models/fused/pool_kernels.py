"""Max pools next to a batch norm, for channels-last memory: after the norm and its ReLU, or before the norm.

After, as in the stem of a ResNet (3 x 3, every second pixel): rectified values are never stored; the pooled values and,
for each, which of the nine won and its value before the norm are five eighths of their bytes. ABOVE and LEFT are the
pixels of padding before the image: 1 or, as TensorFlow pads even sides, 0. Before (2 x 2): the pass that halves the
image also computes the norm's sums, and its gradient is written where the winners were. Also the largest value of each
channel, with which SpeedNet ends.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import (
    ACTIVATIONS,
    GRADIENTS,
    MOMENTS,
    Gradients,
    Reached,
    activated,
    gradient,
    merged,
    normed,
    numbers_of,
    sloped,
)
from falconet.models.fused.channel_tables import LEAST, WIDTHS, Table, columns_of, loaded, merging, row_of, tile_of
from falconet.numerics.kernels import FUSED

if TYPE_CHECKING:
    from falconet.models.fused.span_kernels import Spanning

TILED = 1024  # elements of a tile
WIDE = 256  # channels of a program that looks at all pixels of an image


class Spreading(NamedTuple):
    """The division of the work for the gradient of a 2 x 2 pool."""

    elements: int  # of a tile
    widths: Sequence[int]  # channels that a tile may have
    warps: int
    stages: int  # tiles that are loaded at a time
    share: int  # images of a program


SPREADING = Spreading(elements=1024, widths=(*WIDTHS, 256), warps=4, stages=3, share=4)
SIZES = ["count", "images", "height", "width", "tiles", "share", "joined"]  # compiled once for all values


@triton.jit
def _place(number, count, height, width, ROWS: tl.constexpr):
    """The indices of a tile's pixels in their tensor, their image, line and column, and which of them exist."""
    pixel = number * ROWS + tl.arange(0, ROWS)
    in_image = pixel % (height * width)
    return pixel, pixel // (height * width), in_image // width, in_image % width, pixel < count


@triton.jit(do_not_specialize=SIZES)
def _pool(y, statistics, z, winners, before, count, height, width, units, UNIT: tl.constexpr, ABOVE: tl.constexpr,
          LEFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute the pooled activation; `height`, `width`: of y; `count`: pooled pixels."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    pixel, image, line, column, exists = _place(tl.program_id(0), count, (height + 1) // 2, (width + 1) // 2, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    best = tl.zeros((ROWS, COLUMNS), tl.float32)
    raw = tl.zeros((ROWS, COLUMNS), tl.float32)
    winner = tl.full((ROWS, COLUMNS), 9, tl.int32)  # none of the nine is above 0
    for tap in tl.static_range(9):
        down, right = line * 2 - ABOVE + tap // 3, column * 2 - LEFT + tap % 3
        valid = exists & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        inside = valid[:, None] & there[None, :]
        source = (image * height + down).to(tl.int64) * width + right
        x = loaded(y, source[:, None] * channels + columns[None, :], inside)
        v = normed(x, factor, bias, mean)
        wins = inside & ((v > best) | (v != v))  # NaN wins, and stays
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
    """Sum the winners' gradient g and g (y - mean); store g."""
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
    """The gradients and winners of pooled pixels; 9 for missing ones."""
    valid = exists & (down >= 0) & (down < lower) & (right >= 0) & (right < far)
    inside = valid[:, None] & there[None, :]
    offsets = ((image * lower + down).to(tl.int64) * far + right)[:, None] * channels + columns[None, :]
    return loaded(g, offsets, inside), tl.load(winners + offsets, mask=inside, other=9).to(tl.int32)


@triton.jit
def _put(dy, y, d, slopes, image, line, column, height, width, exists, columns, channel, there, channels):
    """Store the gradient of a pixel, from that of its activation."""
    valid = exists & (line >= 0) & (line < height) & (column >= 0) & (column < width)
    inside = valid[:, None] & there[None, :]
    offsets = ((image * height + line).to(tl.int64) * width + column)[:, None] * channels + columns[None, :]
    v = sloped(d, loaded(y, offsets, inside), slopes, channel, channels, there)
    tl.store(dy + offsets, v.to(dy.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _spread_pooled(g, y, winners, slopes, dy, count, height, width, units, UNIT: tl.constexpr, ABOVE: tl.constexpr,
                   LEFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute y's gradient for blocks of four pixels: a window's own, and those that it shares with the next windows.

    Without padding before the image, the first blocks begin before it and have no window of their own.
    """
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    lower, far = (height + 1) // 2, (width + 1) // 2
    _, image, line, column, exists = _place(tl.program_id(0), count, lower + 1 - ABOVE, far + 1 - LEFT, ROWS)
    line, column = line - 1 + ABOVE, column - 1 + LEFT
    own, won = _of_window(g, winners, line, column, image, lower, far, columns, there, exists, channels)
    east, won_east = _of_window(g, winners, line, column + 1, image, lower, far, columns, there, exists, channels)
    south, won_south = _of_window(g, winners, line + 1, column, image, lower, far, columns, there, exists, channels)
    last, won_last = _of_window(g, winners, line + 1, column + 1, image, lower, far, columns, there, exists, channels)
    top, left = 2 * line + 1 - ABOVE, 2 * column + 1 - LEFT
    d = tl.where(won == 4, own, 0.0)
    _put(dy, y, d, slopes, image, top, left, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 5, own, 0.0) + tl.where(won_east == 3, east, 0.0)
    _put(dy, y, d, slopes, image, top, left + 1, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 7, own, 0.0) + tl.where(won_south == 1, south, 0.0)
    _put(dy, y, d, slopes, image, top + 1, left, height, width, exists, columns, channel, there, channels)
    d = tl.where(won == 8, own, 0.0) + tl.where(won_east == 6, east, 0.0)
    d += tl.where(won_south == 2, south, 0.0) + tl.where(won_last == 0, last, 0.0)
    _put(dy, y, d, slopes, image, top + 1, left + 1, height, width, exists, columns, channel, there, channels)


@triton.jit
def _largest(y, image, line, column, height, width, columns, channels, inside):
    """The largest of 2 x 2 pixels, and which it is; the first of equal ones, as in torch."""
    corner = ((image * height + 2 * line).to(tl.int64) * width + 2 * column)[:, None] * channels + columns[None, :]
    best = loaded(y, corner, inside)
    winner = tl.zeros_like(best).to(tl.int32)
    for tap in tl.static_range(1, 4):
        v = loaded(y, corner + (tap // 2 * width + tap % 2) * channels, inside)
        wins = (v > best) | (v != v)  # NaN wins, and stays
        best = tl.where(wins, v, best)
        winner = tl.where(wins, tap, winner)
    return best, winner


@triton.jit(do_not_specialize=SIZES)
def _halve(y, pooled, winners, partial, count, height, width, tiles, units, UNIT: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Pool and sum the pooled pixels and their squares around the first, as for a norm; `count`: pooled pixels."""
    channels = units * UNIT
    columns, _, there = columns_of(channels, 1, COLUMNS)
    lower, far = height // 2, width // 2
    origin = tl.zeros((1,), tl.int32)
    pivot, _ = _largest(y, origin, origin, origin, height, width, columns, channels, there[None, :])
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        pixel, image, line, column, exists = _place(tiles - 1 - number, count, lower, far, ROWS)
        inside = exists[:, None] & there[None, :]
        best, winner = _largest(y, image, line, column, height, width, columns, channels, inside)
        offsets = pixel[:, None].to(tl.int64) * channels + columns[None, :]
        tl.store(pooled + offsets, best.to(pooled.dtype.element_ty), mask=inside)
        tl.store(winners + offsets, winner.to(tl.uint8), mask=inside)
        v = tl.where(inside, best - pivot, 0.0)
        first += v
        second += v * v
    out = partial + tl.program_id(0) * channels + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0) * channels, tl.sum(second, 0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _halve_normed(y, statistics, z, count, height, width, units, UNIT: tl.constexpr, ACT: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute act(norm(pool(y))) for a norm whose numbers are known."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    pixel, image, line, column, exists = _place(tl.program_id(0), count, height // 2, width // 2, ROWS)
    inside = exists[:, None] & there[None, :]
    best, _ = _largest(y, image, line, column, height, width, columns, channels, inside)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    v = activated(normed(best, factor, bias, mean), ACT)
    tl.store(z + pixel[:, None].to(tl.int64) * channels + columns[None, :], v.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _spread_halved(dz, dz2, pooled, winners, statistics, slopes, dy, images, height, width, tiles, share, units,
                   UNIT: tl.constexpr, ACT: tl.constexpr, TWO: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute y's gradient for blocks of four pixels; an odd last line or column, in no window, gets zeros.

    A program takes the same blocks of `share` images, so it computes their places in an image and loads their channels'
    numbers once. `tiles`: per image.
    """
    channels = units * UNIT
    columns, channel, there = columns_of(channels, 1, COLUMNS)
    lower, far, across = height // 2, width // 2, (width + 1) // 2
    block = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    line, column = block // across, block % across
    inside = ((line < lower) & (column < far))[:, None] & there[None, :]
    offsets = ((line * far + column) * channels)[:, None] + columns[None, :]
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    away = row_of(slopes, 1, channel, channels, there)
    rest = row_of(slopes, 3, channel, channels, there)
    first = tl.program_id(0) // tiles * share
    for number in tl.range(tl.minimum(share, images - first), num_stages=STAGES):
        image = (first + number).to(tl.int64)
        start = image * (lower * far * channels)
        winner = tl.load(winners + start + offsets, mask=inside, other=4)
        d, v = gradient(dz + start, dz2 + start, pooled + start, dz, block, offsets, inside, factor, bias, mean,
                        images, channels, ACT, TWO, False, ROWS, COLUMNS)  # fmt: skip
        d = (d * factor + (v - mean) * away + rest).to(dy.dtype.element_ty)  # as `sloped`, whose a is the norm's factor
        image_dy = dy + image * (height * width * channels)
        for tap in tl.static_range(4):
            down, right = 2 * line + tap // 2, 2 * column + tap % 2
            placed = ((down < height) & (right < width))[:, None] & there[None, :]
            target = ((down * width + right) * channels)[:, None] + columns[None, :]
            tl.store(image_dy + target, tl.where(winner == tap, d, 0.0), mask=placed)


@triton.jit
def _peak(x, peaks, pixels, channels, COLUMNS: tl.constexpr):
    """Find the largest value per channel; a program takes some channels of one image."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, image = columns < channels, tl.program_id(0).to(tl.int64)
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for pixel in range(pixels):
        v = loaded(x, (image * pixels + pixel) * channels + columns, there)
        best = tl.where((v > best) | (v != v), v, best)  # NaN wins, and stays
    tl.store(peaks + image * channels + columns, best.to(peaks.dtype.element_ty), mask=there)


@triton.jit
def _spread_peak(x, peaks, g, dx, pixels, channels, COLUMNS: tl.constexpr):
    """Divide the gradient of a peak among the pixels that equal it; a peak of NaN gives all pixels NaN."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, image = columns < channels, tl.program_id(0).to(tl.int64)
    best = loaded(peaks, image * channels + columns, there)
    equal = tl.zeros((COLUMNS,), tl.float32)
    for pixel in range(pixels):
        v = loaded(x, (image * pixels + pixel) * channels + columns, there)
        equal += tl.where(v == best, 1.0, 0.0)
    d = loaded(g, image * channels + columns, there) / equal
    rest = tl.where(equal > 0, 0.0, float("nan"))  # as in torch: a zero would hide it
    for pixel in range(pixels):
        offsets = (image * pixels + pixel) * channels + columns
        v = tl.where(loaded(x, offsets, there) == best, d, rest)
        tl.store(dx + offsets, v.to(dx.dtype.element_ty), mask=there)


def peak(x: Tensor) -> Tensor:  # N x C x H x W -> N x C
    """The largest value of each channel of an image."""
    images, channels, height, width = x.shape
    peaks = torch.empty((images, channels), dtype=x.dtype, device=x.device)
    _peak[(images, -(-channels // WIDE))](x, peaks, height * width, channels, COLUMNS=WIDE, **FUSED)
    return peaks


def spread_peak(gradient: Tensor, x: Tensor, peaks: Tensor) -> Tensor:
    images, channels, height, width = x.shape
    dx = torch.empty_like(x)
    grid = (images, -(-channels // WIDE))
    _spread_peak[grid](x, peaks, gradient, dx, height * width, channels, COLUMNS=WIDE, **FUSED)
    return dx


def halve(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of each 2 x 2 pixels, which of the four it is, and the sums for `batchnorm_kernels.numbers`."""
    pooled, winners = _halved(y, y.dtype), _halved(y, torch.uint8)
    (tiles, columns), constants = _walked(y, pooled.numel() // y.shape[1])
    programs = max(1, min(MOMENTS // columns, tiles // LEAST))
    partial = torch.empty((2, programs, y.shape[1]), device=y.device)
    _halve[(programs, columns)](y, pooled, winners, partial, tiles=tiles, **constants)
    return pooled, winners, partial


def halve_normed(y: Tensor, found: Tensor, *, act: str) -> Tensor:
    """act(norm(pool(y))) with the norm's factor, bias and mean."""
    z = _halved(y, y.dtype)
    grid, constants = _walked(y, z.numel() // y.shape[1])
    _halve_normed[grid](y, found, z, ACT=ACTIVATIONS[act], **constants)
    return z


def spread_halved(
    reached: Reached, pooled: Tensor, found: Tensor, slopes: Tensor, winners: Tensor, *, shape: torch.Size
) -> Tensor:
    """The gradient of the tensor that was pooled, which has this shape."""
    dz, dz2, _, act = reached
    dy = torch.empty(shape, dtype=pooled.dtype, device=pooled.device, memory_format=torch.channels_last)
    images, channels, height, width = shape
    elements, widths, warps, stages, share = SPREADING
    columns = _fitting(channels, widths)
    tiles = -(-((height + 1) // 2) * ((width + 1) // 2) // (elements // columns))
    unit = 1 if channels % 8 else 8
    _spread_halved[tiles * -(-images // share), -(-channels // columns)](
        dz, dz if dz2 is None else dz2, pooled, winners, found, slopes, dy,
        images=images, height=height, width=width, tiles=tiles, share=share, units=channels // unit, UNIT=unit,
        ACT=ACTIVATIONS[act], TWO=dz2 is not None, ROWS=elements // columns, COLUMNS=columns, STAGES=stages,
        num_warps=warps, **FUSED,
    )  # fmt: skip
    return dy


def _halved(y: Tensor, dtype: torch.dtype) -> Tensor:
    images, channels, height, width = y.shape
    shape = (images, channels, height // 2, width // 2)
    return torch.empty(shape, dtype=dtype, device=y.device, memory_format=torch.channels_last)


def forward(y: Tensor, found: Tensor, padding: tuple[int, int] = (1, 1)) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled activation, which of the nine values won, and the winner's value before the norm.

    `padding`: pixels above an image and to its left, 0 or 1.
    """
    images, channels, height, width = y.shape
    pooled = (images, channels, (height + 1) // 2, (width + 1) // 2)
    z, winners, before = (
        torch.empty(pooled, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, torch.uint8, y.dtype)
    )
    grid, constants = _walked(y, z.numel() // channels)
    above, left = padding
    _pool[grid](y, found, z, winners, before, ABOVE=above, LEFT=left, **constants)
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
    padding: tuple[int, int] = (1, 1),
) -> Gradients:
    """The norm's gradients; dz + dz2 is the result's gradient."""
    g, dy, summed = torch.empty_like(dz), torch.empty_like(y), Table.of(dz).summed(GRADIENTS)
    partial = summed.partial(2, y.device)
    _sum_pooled[summed.grid](
        dz, dz if dz2 is None else dz2, winners, before, g, found, partial,
        TWO=dz2 is not None, **summed.constants,
    )  # fmt: skip
    own, slopes = merged(partial, 1, found, merging(Table.of(y), partial.shape[1]), span)
    above, left = padding
    images, _, height, width = y.shape
    blocks = images * ((height + 1) // 2 + 1 - above) * ((width + 1) // 2 + 1 - left)
    grid, constants = _walked(y, blocks)
    _spread_pooled[grid](g, y, winners, slopes, dy, ABOVE=above, LEFT=left, **constants)
    return Gradients(dy, *own)


def _fitting(channels: int, widths: Sequence[int]) -> int:
    """The width that leaves the fewest channels unused; of these, the largest."""
    return min(widths, key=lambda width: (-(-channels // width) * width, -width))


def _walked(y: Tensor, count: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of a pass over `count` pooled pixels, or blocks of four."""
    _, channels, height, width = y.shape
    unit, columns = 1 if channels % 8 else 8, _fitting(channels, WIDTHS)
    sizes = {"count": count, "height": height, "width": width, "units": channels // unit}
    constants = {**sizes, "UNIT": unit, "ROWS": TILED // columns, "COLUMNS": columns, **FUSED}
    return (-(-count // constants["ROWS"]), -(-channels // columns)), constants
