"""Group norm for channels-last memory in Triton: sums of tiles, then of groups, then the elements.

A group is SIZE neighbouring channels, or STRIDED, every n-th channel.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

TILE = 8192  # elements, of whole channels: pixels by channels
CHANNELS = 128  # of a tile, at most: 256 bytes of fp16 in a row


@triton.jit
def _tile(pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """Offsets within an image, the tile's channels, and the mask of elements inside the image."""
    rows = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    columns = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (rows < pixels)[:, None] & (columns < channels)[None, :]
    offsets = tl.program_id(0).to(tl.int64) * pixels * channels + rows[:, None] * channels + columns[None, :]
    return offsets, columns, inside


@triton.jit
def _row(values, columns, channels, SIZE: tl.constexpr, STRIDED: tl.constexpr):
    """The values of the groups that a tile's channels belong to, as a row."""
    groups = channels // SIZE
    group = columns % groups if STRIDED else columns // SIZE
    return tl.load(values + tl.program_id(0) * groups + group, mask=columns < channels, other=0.0)[None, :]


@triton.jit
def _of_tiles(start, pixels, channels, tiles,
              SIZE: tl.constexpr, STRIDED: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr,
              TILES: tl.constexpr):  # fmt: skip
    """Offsets of a group's channels in the results of some tiles, their mask, and the pixels of each tile."""
    image, group, columns = tl.program_id(0), tl.program_id(1), tl.arange(0, COLUMNS)
    rows = start + tl.arange(0, TILES)
    channel = group + columns * tl.num_programs(1) if STRIDED else group * SIZE + columns
    place = (image * tiles + rows)[:, None] * channels + channel[None, :]
    inside = (rows < tiles)[:, None] & (columns < SIZE)[None, :]
    counts = tl.minimum(pixels - rows * PIXELS, PIXELS)[:, None].to(tl.float32)
    return place, inside, counts


@triton.jit
def _moments(x, means, squares, pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """Per channel of a tile: the mean, and the sum of squares around it (around 0 it would cancel)."""
    offsets, columns, inside = _tile(pixels, channels, PIXELS, CHANNELS)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(pixels - tl.program_id(1) * PIXELS, PIXELS)
    mean = tl.sum(values, 0) / count
    around = tl.where(inside, values - mean[None, :], 0.0)
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * channels + columns
    tl.store(means + place, mean, mask=columns < channels)
    tl.store(squares + place, tl.sum(around * around, 0), mask=columns < channels)


@triton.jit
def _statistics(means, squares, mean, rstd, pixels, channels, tiles, eps,
                SIZE: tl.constexpr, STRIDED: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr,
                TILES: tl.constexpr):  # fmt: skip
    """Per group of an image, from its tiles, by Chan's formula."""
    total = tl.zeros([TILES, COLUMNS], tl.float32)
    for start in range(0, tiles, TILES):
        place, inside, counts = _of_tiles(start, pixels, channels, tiles, SIZE, STRIDED, COLUMNS, PIXELS, TILES)
        total += tl.where(inside, tl.load(means + place, mask=inside, other=0.0) * counts, 0.0)
    elements = pixels * SIZE * 1.0  # not .to(): a size of 1 arrives as a plain number
    middle = tl.sum(tl.sum(total, 1), 0) / elements
    total = tl.zeros([TILES, COLUMNS], tl.float32)
    for start in range(0, tiles, TILES):
        place, inside, counts = _of_tiles(start, pixels, channels, tiles, SIZE, STRIDED, COLUMNS, PIXELS, TILES)
        away = tl.load(means + place, mask=inside, other=0.0) - middle
        total += tl.where(inside, tl.load(squares + place, mask=inside, other=0.0) + counts * away * away, 0.0)
    variance = tl.sum(tl.sum(total, 1), 0) / elements
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(mean + number, middle)
    tl.store(rstd + number, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _normalise(x, y, weight, bias, mean, rstd, pixels, channels,
               SIZE: tl.constexpr, STRIDED: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    offsets, columns, inside = _tile(pixels, channels, PIXELS, CHANNELS)
    exists = columns < channels
    middle, factor = _row(mean, columns, channels, SIZE, STRIDED), _row(rstd, columns, channels, SIZE, STRIDED)
    w = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    result = (values - middle) * factor * w + b
    tl.store(y + offsets, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sums(x, dy, mean, rstd, plain, weighted, pixels, channels,
          SIZE: tl.constexpr, STRIDED: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Per channel of a tile: the sums of dy, and of dy times the normalised input."""
    offsets, columns, inside = _tile(pixels, channels, PIXELS, CHANNELS)
    exists = columns < channels
    middle, factor = _row(mean, columns, channels, SIZE, STRIDED), _row(rstd, columns, channels, SIZE, STRIDED)
    normal = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - middle) * factor
    slope = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * channels + columns
    tl.store(plain + place, tl.sum(slope, 0), mask=exists)
    tl.store(weighted + place, tl.sum(slope * normal, 0), mask=exists)


@triton.jit
def _slopes(dy, x, dx, weight, mean, rstd, plain, weighted, pixels, channels,
            SIZE: tl.constexpr, STRIDED: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    offsets, columns, inside = _tile(pixels, channels, PIXELS, CHANNELS)
    exists = columns < channels
    middle, factor = _row(mean, columns, channels, SIZE, STRIDED), _row(rstd, columns, channels, SIZE, STRIDED)
    constant, linear = _row(plain, columns, channels, SIZE, STRIDED), _row(weighted, columns, channels, SIZE, STRIDED)
    w = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    normal = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - middle) * factor
    slope = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
    result = (slope * w - constant - normal * linear) * factor
    tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, *, strided: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and each group's mean and 1 / standard deviation, N x groups, fp32."""
    images, channels, pixels, size = _shape(x, groups)
    grid, tile = _grid(images, pixels, channels)
    means, squares = (x.new_empty(images, grid[1], channels, dtype=torch.float32) for _ in range(2))
    mean, rstd = (x.new_empty(images, groups, dtype=torch.float32) for _ in range(2))
    y = torch.empty_like(x)
    _moments[grid](x, means, squares, pixels, channels, **tile)
    columns = triton.next_power_of_2(size)
    tiles = min(triton.next_power_of_2(grid[1]), max(1, 2048 // columns))
    _statistics[(images, groups)](
        means, squares, mean, rstd, pixels, channels, grid[1], eps,
        SIZE=size, STRIDED=strided, COLUMNS=columns, PIXELS=tile["PIXELS"], TILES=tiles, **FUSED,
    )  # fmt: skip
    _normalise[grid](x, y, weight, bias, mean, rstd, pixels, channels, SIZE=size, STRIDED=strided, **tile)
    return y, mean, rstd


def backward(
    x: Tensor, dy: Tensor, groups: int, weight: Tensor, mean: Tensor, rstd: Tensor, *, strided: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias, the latter two in fp32."""
    images, channels, pixels, size = _shape(x, groups)
    grid, tile = _grid(images, pixels, channels)
    plain, weighted = (x.new_empty(images, grid[1], channels, dtype=torch.float32) for _ in range(2))
    _sums[grid](x, dy, mean, rstd, plain, weighted, pixels, channels, SIZE=size, STRIDED=strided, **tile)
    by_image = torch.stack((plain, weighted)).sum(2)  # 2 x N x C
    shape, channel = ((size, groups), 2) if strided else ((groups, size), 3)
    of_groups = (by_image * weight.float()).view(2, images, *shape).sum(channel) / (pixels * size)
    dx = torch.empty_like(x)
    _slopes[grid](
        dy, x, dx, weight, mean, rstd, of_groups[0], of_groups[1], pixels, channels, SIZE=size, STRIDED=strided, **tile
    )
    dbias, dweight = by_image.sum(1).unbind()
    return dx, dweight, dbias


def _shape(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    images, channels, height, width = x.shape
    return images, channels, height * width, channels // groups


def _grid(images: int, pixels: int, channels: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    columns = min(CHANNELS, triton.next_power_of_2(channels))
    rows = min(TILE // columns, triton.next_power_of_2(pixels))
    return (images, -(-pixels // rows), -(-channels // columns)), {"PIXELS": rows, "CHANNELS": columns, **FUSED}
