"""Batch norm, an activation and a gate for each image and channel (squeeze and excite), for channels-last memory.

The gate is computed from the activation's means over each image, its gradient from such sums. Two passes read
the norm's input and sum what both directions need, so neither the activation nor its gradient is ever stored.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import (
    ACTIVATIONS,
    Gradients,
    activated,
    merged,
    normed,
    numbers_of,
    passed,
    sloped,
)
from falconet.models.fused.channel_tables import WIDTHS, Table, columns_of, loaded, merging, tile_of
from falconet.numerics.kernels import FUSED

if TYPE_CHECKING:
    from falconet.models.fused.span_kernels import Spanning

PROGRAMS = 2112  # of a pass that sums each image: 16 for each multiprocessor of an H100; a constant: it changes bits
SUMMED = 1024  # elements of such a pass, which keeps three sums in registers
SIZES = ["count", "units", "joined", "in_image", "parts", "images", "sums", "scale"]  # compiled once for all values


@triton.jit(do_not_specialize=SIZES)
def _sum_images(dz, y, statistics, partial, in_image, units, joined, parts, images, UNIT: tl.constexpr,
                ACT: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum a = act(norm(y)), a's slope and slope (y - mean) over a part of an image; BACK: each times dz."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    first, second, third = (
        tl.zeros((ROWS, COLUMNS), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32),
    )
    start = (tl.program_id(0) // parts).to(tl.int64) * in_image * wide
    for number in tl.range(tl.program_id(0) % parts, tl.cdiv(in_image, ROWS), parts, loop_unroll_factor=2):
        _, offsets, inside = tile_of(number, in_image, wide, columns, there, ROWS)
        x = loaded(y + start, offsets, inside)
        v = normed(x, factor, bias, mean)
        d = tl.where(inside, 1.0, 0.0)
        if BACK:
            d = loaded(dz + start, offsets, inside)
        s = passed(v, d, ACT)
        first += d * activated(v, ACT)
        second += s
        third += s * (x - mean)
    out = partial + tl.program_id(0) * wide + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + images * parts * wide, tl.sum(second, 0), mask=there)
    tl.store(out + 2 * images * parts * wide, tl.sum(third, 0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _merge_images(partial, total, sums, channels, images, scale, COLUMNS: tl.constexpr):
    """Add the parts of each image; the first of three sums is multiplied by `scale`."""
    image, line = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    value = tl.zeros((COLUMNS,), tl.float32)
    start = partial + (line * images + image).to(tl.int64) * sums * channels
    for number in range(sums):
        value += tl.load(start + number * channels + columns, mask=inside, other=0.0)
    value *= tl.where(line == 0, scale, 1.0)
    tl.store(total + (line * images + image).to(tl.int64) * channels + columns, value, mask=inside)


@triton.jit
def _of_image(values, image, channel, channels, inside):
    """A tile of numbers, of which every image has one per channel."""
    return tl.load(values + image[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _excite(y, statistics, gate, z, count, in_image, units, joined, UNIT: tl.constexpr,
            ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute act(norm(y)) times the gate of each image and channel."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    rows, offsets, inside = tile_of(tl.program_id(0), count, channels * joined, columns, there, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    v = activated(normed(loaded(y, offsets, inside), factor, bias, mean), ACT)
    v *= _of_image(gate, rows // in_image, channel, channels, inside)
    tl.store(z + offsets, v.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _weigh_images(forward, backward, gate, dmean, partial, elements, scale, SIZE: tl.constexpr):
    """Compute each image's share of the sums of g and of g (y - mean), where g = (gate dz + scale dmean) slope."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < elements
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(dmean + at, mask=inside, other=0.0).to(tl.float32) * scale
    for line in tl.static_range(1, 3):
        one = tl.load(backward + line * elements + at, mask=inside, other=0.0)
        other = tl.load(forward + line * elements + at, mask=inside, other=0.0)
        tl.store(partial + (line - 1) * elements + at, g * one + m * other, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _spread_excited(dz, y, statistics, gate, dmean, slopes, dy, count, in_image, units, joined, scale,
                    UNIT: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute the gradient of y."""
    channels = units * UNIT
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    rows, offsets, inside = tile_of(tl.program_id(0), count, channels * joined, columns, there, ROWS)
    factor, bias, mean = numbers_of(statistics, channel, channels, there)
    image = rows // in_image
    d = loaded(dz, offsets, inside) * _of_image(gate, image, channel, channels, inside)
    d += _of_image(dmean, image, channel, channels, inside) * scale
    x = loaded(y, offsets, inside)
    d = passed(normed(x, factor, bias, mean), d, ACT)
    tl.store(dy + offsets, sloped(d, x, slopes, channel, channels, there).to(dy.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Images(Table):
    """The table of a tensor whose images are summed one by one."""

    images: int

    @classmethod
    def of(cls, x: Tensor) -> "Images":
        pixels = x.shape[2] * x.shape[3]
        return cls(x.shape[0] * pixels, x.shape[1], pixels, x.shape[0])

    @property
    def width(self) -> int:
        """The width of a tile; the same for most channel counts, so that fewer kernels are compiled."""
        return WIDTHS[-1] if self.wide >= WIDTHS[-1] else super().width

    @property
    def in_image(self) -> int:
        """The number of joined rows in an image."""
        return self.period // self.joined

    @cached_property
    def parts(self) -> int:
        """The number of programs per column that share an image."""
        tiles = -(-self.in_image // (SUMMED // self.width))
        return max(1, min(tiles, PROGRAMS // (self.images * self.columns)))


@dataclass(frozen=True)
class Excitation:
    """A norm and its activation, whose result is multiplied by a gate per image and channel."""

    y: Tensor
    found: Tensor  # the norm's statistics
    act: str
    span: "Spanning | None" = None

    @cached_property
    def table(self) -> Images:
        return Images.of(self.y)

    def _image_sums(self, dz: Tensor | None, *, scale: float) -> Tensor:  # 3 x N x C, fp32
        table, device = self.table, self.y.device
        partial = torch.empty((3, table.images, table.parts * table.joined, table.channels), device=device)
        sizes = {name: value for name, value in table.shape.items() if name != "count"}
        _sum_images[(table.images * table.parts, table.columns)](
            self.y if dz is None else dz, self.y, self.found, partial, table.in_image, parts=table.parts,
            images=table.images, ACT=ACTIVATIONS[self.act], BACK=dz is not None,
            ROWS=SUMMED // table.width, **sizes,
        )  # fmt: skip
        total = torch.empty((3, table.images, table.channels), device=device)
        _merge_images[(table.images, -(-table.channels // 128), 3)](
            partial, total, table.parts * table.joined, table.channels, table.images, scale, COLUMNS=128, **FUSED
        )
        return total

    def sums(self) -> Tensor:  # 3 x N x C, fp32
        """The activation's means over each image, and the sums for its gradient."""
        return self._image_sums(None, scale=1.0 / self.table.period)

    def apply(self, gate: Tensor) -> Tensor:  # N x C x 1 x 1
        """The activation times the gate."""
        z, table = torch.empty_like(self.y), self.table
        grid, constants = table.walked
        _excite[grid](
            self.y, self.found, gate, z, in_image=table.in_image, ACT=ACTIVATIONS[self.act], **constants
        )  # fmt: skip
        return z

    def gate_sums(self, dz: Tensor) -> Tensor:  # 3 x N x C, fp32
        """The gate's gradient, and the sums for the norm's gradient."""
        return self._image_sums(dz, scale=1.0)

    def backward(self, dz: Tensor, gate: Tensor, dmean: Tensor, sums: tuple[Tensor, Tensor]) -> Gradients:
        """The norm's gradients; `dmean`: the means' gradient, N x C; `sums`: results of `sums` and `gate_sums`."""
        table, scale = self.table, 1.0 / self.table.period
        partial = torch.empty((2, table.images, table.channels), device=dz.device)
        elements = table.images * table.channels
        _weigh_images[(-(-elements // 1024),)](*sums, gate, dmean, partial, elements, scale, SIZE=1024, **FUSED)
        own, slopes = merged(partial, 1, self.found, merging(table, table.images), self.span)
        dy = torch.empty_like(self.y)
        grid, constants = table.walked
        _spread_excited[grid](
            dz, self.y, self.found, gate, dmean, slopes, dy, in_image=table.in_image, scale=scale,
            ACT=ACTIVATIONS[self.act], **constants,
        )  # fmt: skip
        return Gradients(dy, *own)
