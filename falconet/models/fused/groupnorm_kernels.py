"""Group norm, a residual sum and an activation for channels-last memory in Triton, in two passes each way.

Tables, tiles and activations are those of batch norm, but no tile has rows of two images, so the numbers of its groups
are rows, too. A group is `size` adjacent channels or, if STRIDED, every n-th channel. Programs sum parts of images;
small kernels merge those in a fixed order, so the same input always gives the same bits.

Proxy norm, which replaces an activation, is computed in the same passes: its moments are two numbers per channel.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import ACTIVATIONS, activated, gradient, normed, passed, store_signs
from falconet.models.fused.channel_tables import CHUNK, MERGED, TILE, columns_of, loaded, row_of, tile_of
from falconet.models.fused.excitation_kernels import SUMMED, Images
from falconet.numerics.kernels import FUSED

GROUPS = 32  # that one program merges, at most
MEMBERS = 2048  # sums of them that it reads at a time
SIZES = ["in_image", "joined", "parts", "size", "groups", "sums", "lines", "pixels"]  # compiled once for all values


@triton.jit
def _group_of(channel, size, groups, STRIDED: tl.constexpr):
    return channel % groups if STRIDED else channel // size


@triton.jit
def _first_of(group, size, STRIDED: tl.constexpr):
    """The first channel of a group."""
    return group if STRIDED else group * size


@triton.jit
def _numbers(statistics, weight, bias, image, channel, channels, there, size, STRIDED: tl.constexpr):
    """Factor, bias and mean of an image's channels, broadcast over a tile's rows."""
    groups = channels // size
    place = statistics + image * 2 * groups + _group_of(channel, size, groups, STRIDED)
    mean = tl.load(place, mask=there, other=0.0)[None, :]
    inverse = tl.load(place + groups, mask=there, other=0.0)[None, :]
    factor = inverse * row_of(weight, 0, channel, channels, there).to(tl.float32)
    return factor, row_of(bias, 0, channel, channels, there).to(tl.float32), mean


@triton.jit
def _members(group, start, sums, size, groups, STRIDED: tl.constexpr, MEMBERS: tl.constexpr):
    """Part of each group's sums in the lines of an image: channels, offsets, and which of them exist."""
    at = start + tl.arange(0, MEMBERS)
    line, member = (at // size)[None, :], (at % size)[None, :]
    channel = group[:, None] + member * groups if STRIDED else group[:, None] * size + member
    return channel, line * (groups * size) + channel, (group < groups)[:, None] & (at < sums * size)[None, :]


@triton.jit(do_not_specialize=SIZES)
def _sum_moments(x, partial, in_image, units, joined, parts, size, UNIT: tl.constexpr, STRIDED: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum x - pivot and its square over a part of an image. The pivot is the first value of the group."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    number = tl.num_programs(0) - 1 - tl.program_id(0)  # the end first: the cache still holds it
    start = (number // parts).to(tl.int64) * in_image * wide
    pivots = _first_of(_group_of(channel, size, channels // size, STRIDED), size, STRIDED)
    pivot = tl.load(x + start + pivots, mask=there, other=0.0).to(tl.float32)[None, :]
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(number % parts, tl.cdiv(in_image, ROWS), parts, loop_unroll_factor=4):
        _, offsets, inside = tile_of(tile, in_image, wide, columns, there, ROWS)
        v = tl.where(inside, loaded(x + start, offsets, inside) - pivot, 0.0)
        first += v
        second += v * v
    out = partial + number.to(tl.int64) * wide + columns
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + tl.num_programs(0).to(tl.int64) * wide, tl.sum(second, 0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _merge_moments(partial, x, statistics, pixels, sums, size, groups, eps, STRIDED: tl.constexpr,
                   GROUPS: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Compute mean and 1 / deviation of some groups of an image, which has `sums` lines of sums."""
    image, group = tl.program_id(0), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channels = groups * size
    start = partial + image.to(tl.int64) * sums * channels
    later = tl.num_programs(0).to(tl.int64) * sums * channels
    first, second = tl.zeros((GROUPS, MEMBERS), tl.float32), tl.zeros((GROUPS, MEMBERS), tl.float32)
    for at in range(0, sums * size, MEMBERS):
        _, offsets, inside = _members(group, at, sums, size, groups, STRIDED, MEMBERS)
        first += tl.load(start + offsets, mask=inside, other=0.0)
        second += tl.load(start + later + offsets, mask=inside, other=0.0)
    exists = group < groups
    count = pixels * 1.0 * size
    offset = tl.sum(first, 1) / count
    variance = tl.maximum(tl.sum(second, 1) / count - offset * offset, 0.0)
    pivots = image.to(tl.int64) * pixels * channels + _first_of(group, size, STRIDED)
    mean = offset + tl.load(x + pivots, mask=exists, other=0.0).to(tl.float32)
    variance = tl.where(mean == mean, variance, mean)  # a maximum drops NaN
    place = statistics + image * 2 * groups + group
    tl.store(place, mean, mask=exists)
    tl.store(place + groups, 1.0 / tl.sqrt(variance + eps), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _normalise(y, statistics, weight, bias, shortcut, moments, z, bits, in_image, units, joined, parts, size,
               UNIT: tl.constexpr, STRIDED: tl.constexpr, ACT: tl.constexpr, ADDS: tl.constexpr, KEEPS: tl.constexpr,
               PROXY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """act(norm(y) + shortcut); KEEPS: store the signs as bits; PROXY: standardise by the proxy's moments."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    image = tl.program_id(0) // parts
    before = image.to(tl.int64) * in_image  # rows
    rows, offsets, inside = tile_of(tl.program_id(0) % parts, in_image, wide, columns, there, ROWS)
    offsets += before * wide
    factor, shift, mean = _numbers(statistics, weight, bias, image, channel, channels, there, size, STRIDED)
    v = normed(loaded(y, offsets, inside), factor, shift, mean)
    if ADDS:
        v += loaded(shortcut, offsets, inside)
    a = activated(v, ACT)
    if PROXY:
        a = (a - row_of(moments, 0, channel, channels, there)) * row_of(moments, 1, channel, channels, there)
    tl.store(z + offsets, a.to(z.dtype.element_ty), mask=inside)
    if KEEPS:
        store_signs(bits + before * ((wide + 7) // 8), v, rows, in_image, wide, ROWS, COLUMNS)


@triton.jit(do_not_specialize=SIZES)
def _sum_gradients(dz, dz2, y, bits, g, statistics, weight, bias, moments, partial, in_image, units, joined, parts,
                   size, UNIT: tl.constexpr, STRIDED: tl.constexpr, ACT: tl.constexpr, TWO: tl.constexpr,
                   KEPT: tl.constexpr, STORES: tl.constexpr, PROXY: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum the norm's gradient g and g (y - mean) over a part of an image. STORES: store g for later use.

    PROXY: also the result's gradient, and its product with (activation - the proxy's mean).
    """
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    image = number // parts
    before = image.to(tl.int64) * in_image
    start, signs = before * wide, bits + before * ((wide + 7) // 8)
    factor, shift, mean = _numbers(statistics, weight, bias, image, channel, channels, there, size, STRIDED)
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    if PROXY:
        middle = row_of(moments, 0, channel, channels, there)
        inverse = row_of(moments, 1, channel, channels, there)
        third, fourth = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(number % parts, tl.cdiv(in_image, ROWS), parts, loop_unroll_factor=2 if STORES else 4):
        rows, offsets, inside = tile_of(tile, in_image, wide, columns, there, ROWS)
        offsets += start
        if PROXY:
            given, v = gradient(dz, dz2, y, signs, rows, offsets, inside, factor, shift, mean, in_image, wide,
                                0, TWO, KEPT, ROWS, COLUMNS)  # fmt: skip
            inner = normed(v, factor, shift, mean)
            third += given
            fourth += given * (activated(inner, ACT) - middle)
            d = passed(inner, given * inverse, ACT)
        else:
            d, v = gradient(dz, dz2, y, signs, rows, offsets, inside, factor, shift, mean, in_image, wide,
                            ACT, TWO, KEPT, ROWS, COLUMNS)  # fmt: skip
        if STORES:
            stored = d.to(g.dtype.element_ty)
            tl.store(g + offsets, stored, mask=inside)
            d = stored.to(tl.float32)  # the shortcut gets it rounded: one gradient, not two
        first += d
        second += d * (v - mean)
    out = partial + number.to(tl.int64) * wide + columns
    later = tl.num_programs(0).to(tl.int64) * wide
    tl.store(out, tl.sum(first, 0), mask=there)
    tl.store(out + later, tl.sum(second, 0), mask=there)
    if PROXY:
        tl.store(out + 2 * later, tl.sum(third, 0), mask=there)
        tl.store(out + 3 * later, tl.sum(fourth, 0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _merge_slopes(partial, statistics, weight, slopes, pixels, sums, size, groups, STRIDED: tl.constexpr,
                  GROUPS: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Compute b and c of dy = factor g + b (y - mean) + c for some groups of an image."""
    image, group = tl.program_id(0), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channels = groups * size
    start = partial + image.to(tl.int64) * sums * channels
    later = tl.num_programs(0).to(tl.int64) * sums * channels
    first, second = tl.zeros((GROUPS, MEMBERS), tl.float32), tl.zeros((GROUPS, MEMBERS), tl.float32)
    for at in range(0, sums * size, MEMBERS):
        channel, offsets, inside = _members(group, at, sums, size, groups, STRIDED, MEMBERS)
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        first += w * tl.load(start + offsets, mask=inside, other=0.0)
        second += w * tl.load(start + later + offsets, mask=inside, other=0.0)
    exists = group < groups
    count = pixels * 1.0 * size
    inverse = tl.load(statistics + (image * 2 + 1) * groups + group, mask=exists, other=0.0)
    place = slopes + image * 2 * groups + group
    tl.store(place, -inverse * inverse * inverse * (tl.sum(second, 1) / count), mask=exists)
    tl.store(place + groups, -inverse * (tl.sum(first, 1) / count), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _merge_parameters(partial, statistics, moments, gradients, lines, sums, channels, size, STRIDED: tl.constexpr,
                      PROXY: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Gradients of weight and bias and, if PROXY, of the moments; `lines`: of all images, `sums` of each."""
    groups = channels // size
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < channels
    group = _group_of(columns, size, groups, STRIDED)
    first, second = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
    third, fourth = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
    for start in tl.range(0, lines, CHUNK, loop_unroll_factor=2):
        line = start + tl.arange(0, CHUNK)
        inside = (line < lines)[:, None] & exists[None, :]
        offsets = line[:, None].to(tl.int64) * channels + columns[None, :]
        place = ((line // sums) * 2 + 1)[:, None] * groups + group[None, :]
        later = lines.to(tl.int64) * channels
        first += tl.load(partial + offsets, mask=inside, other=0.0)
        inverse = tl.load(statistics + place, mask=inside, other=0.0)
        second += inverse * tl.load(partial + later + offsets, mask=inside, other=0.0)
        if PROXY:
            third += tl.load(partial + 2 * later + offsets, mask=inside, other=0.0)
            fourth += tl.load(partial + 3 * later + offsets, mask=inside, other=0.0)
    tl.store(gradients + columns, tl.sum(second, 0), mask=exists)
    tl.store(gradients + channels + columns, tl.sum(first, 0), mask=exists)
    if PROXY:
        inverse = tl.load(moments + channels + columns, mask=exists, other=0.0)
        tl.store(gradients + 2 * channels + columns, -inverse * tl.sum(third, 0), mask=exists)
        tl.store(gradients + 3 * channels + columns, tl.sum(fourth, 0), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def _spread_gradients(dz, dz2, y, bits, statistics, weight, bias, moments, slopes, dy, in_image, units, joined, parts,
                      size, UNIT: tl.constexpr, STRIDED: tl.constexpr, ACT: tl.constexpr, TWO: tl.constexpr,
                      KEPT: tl.constexpr, PROXY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute the gradient of y."""
    channels = units * UNIT
    wide = channels * joined
    columns, channel, there = columns_of(channels, joined, COLUMNS)
    image = tl.program_id(0) // parts
    before = image.to(tl.int64) * in_image
    rows, offsets, inside = tile_of(tl.program_id(0) % parts, in_image, wide, columns, there, ROWS)
    offsets += before * wide
    factor, shift, mean = _numbers(statistics, weight, bias, image, channel, channels, there, size, STRIDED)
    signs = bits + before * ((wide + 7) // 8)
    d, v = gradient(dz, dz2, y, signs, rows, offsets, inside, factor, shift, mean, in_image, wide,
                    ACT, TWO, KEPT, ROWS, COLUMNS)  # fmt: skip
    if PROXY:
        d *= row_of(moments, 1, channel, channels, there)
    groups = channels // size
    place = slopes + image * 2 * groups + _group_of(channel, size, groups, STRIDED)
    linear = tl.load(place, mask=there, other=0.0)[None, :]
    constant = tl.load(place + groups, mask=there, other=0.0)[None, :]
    tl.store(dy + offsets, (d * factor + (v - mean) * linear + constant).to(dy.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Grouped(Images):
    """The table of a tensor whose groups of channels are normalised image by image."""

    groups: int
    strided: bool

    @classmethod
    def by(cls, x: Tensor, groups: int, *, strided: bool) -> "Grouped":
        pixels = x.shape[2] * x.shape[3]
        return cls(x.shape[0] * pixels, x.shape[1], pixels, x.shape[0], groups, strided)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The arguments of all passes."""
        shape = {name: value for name, value in self.shape.items() if name != "count"}
        return {**shape, "in_image": self.in_image, "size": self.channels // self.groups, "STRIDED": self.strided}

    @property
    def summed(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a pass that sums."""
        grid = (self.images * self.parts, self.columns)
        return grid, {"parts": self.parts, "ROWS": SUMMED // self.width, **self.sizes}

    @property
    def tiled(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a pass over all elements."""
        rows = min(TILE // self.width, triton.next_power_of_2(self.in_image))
        tiles = -(-self.in_image // rows)
        return (self.images * tiles, self.columns), {"parts": tiles, "ROWS": rows, **self.sizes}

    @property
    def merged(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a kernel that merges the sums of groups."""
        groups = min(GROUPS, triton.next_power_of_2(self.groups))
        grid = (self.images, -(-self.groups // groups))
        sizes = {"pixels": self.period, "sums": self.parts * self.joined, "size": self.channels // self.groups}
        tile = {"GROUPS": groups, "MEMBERS": MEMBERS // groups}
        return grid, {**sizes, "groups": self.groups, "STRIDED": self.strided, **tile, **FUSED}

    def partial(self, number: int, device: torch.device) -> Tensor:
        """A new tensor for the programs' sums, `number` from each."""
        return torch.empty((number, self.images * self.parts * self.joined, self.channels), device=device)


def statistics(x: Tensor, groups: int, *, strided: bool, eps: float) -> Tensor:
    """The mean and 1 / deviation of each image's groups, N x 2 x groups, fp32."""
    table = Grouped.by(x, groups, strided=strided)
    found, partial = torch.empty((table.images, 2, groups), device=x.device), table.partial(2, x.device)
    grid, constants = table.summed
    _sum_moments[grid](x, partial, **constants)
    grid, constants = table.merged
    _merge_moments[grid](partial, x, found, eps=eps, **constants)
    return found


class Gradients(NamedTuple):
    input: Tensor
    parameters: Tensor  # of weight and bias and, with a proxy norm, of its two moments, as rows
    shortcut: Tensor | None


@dataclass(frozen=True)
class GroupNorm:
    """A norm whose statistics are known: act(norm(y) + shortcut)."""

    y: Tensor
    found: Tensor  # the statistics
    weight: Tensor
    bias: Tensor
    act: str
    strided: bool
    moments: Tensor | None = None  # mean and 1 / deviation of a proxy norm that takes the activation, 2 x C

    @cached_property
    def table(self) -> Grouped:
        return Grouped.by(self.y, self.found.shape[2], strided=self.strided)

    @property
    def _proxy(self) -> tuple[Tensor, bool]:
        return (self.found, False) if self.moments is None else (self.moments, True)

    def apply(self, shortcut: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The result, and the signs of a rectified sum as bits for the backward pass."""
        y, table, (moments, proxy) = self.y, self.table, self._proxy
        z, adds = torch.empty_like(y), shortcut is not None
        keeps = adds and self.act == "relu"
        bits = torch.empty((table.count, -(-table.wide // 8)), dtype=torch.uint8, device=y.device) if keeps else None
        grid, constants = table.tiled
        _normalise[grid](
            y, self.found, self.weight, self.bias, shortcut if adds else y, moments, z, bits if keeps else z,
            ACT=ACTIVATIONS[self.act], ADDS=adds, KEEPS=keeps, PROXY=proxy, **constants,
        )  # fmt: skip
        return z, bits

    def backward(
        self, dz: Tensor, *, dz2: Tensor | None = None, adds: bool = False, bits: Tensor | None = None
    ) -> Gradients:
        """The gradients; `dz` + `dz2` is the result's, `adds`: there was a shortcut, with the sum's signs in `bits`."""
        y, found, weight, bias, table = self.y, self.found, self.weight, self.bias, self.table
        two, kept, kind, (moments, proxy) = dz2 is not None, bits is not None, ACTIVATIONS[self.act], self._proxy
        stores = adds and (kept or two)  # else the shortcut's gradient is dz itself
        partial, g = table.partial(4 if proxy else 2, y.device), torch.empty_like(y) if stores else dz
        grid, constants = table.summed
        _sum_gradients[grid](
            dz, dz2 if two else dz, y, bits if kept else dz, g, found, weight, bias, moments, partial,
            ACT=kind, TWO=two, KEPT=kept, STORES=stores, PROXY=proxy, **constants,
        )  # fmt: skip
        slopes = torch.empty_like(found)
        grid, constants = table.merged
        _merge_slopes[grid](partial, found, weight, slopes, **constants)
        sizes = {name: constants[name] for name in ("sums", "size", "STRIDED")}
        parameters = torch.empty((4 if proxy else 2, table.channels), device=y.device)
        _merge_parameters[(-(-table.channels // MERGED),)](
            partial, found, moments, parameters, partial.shape[1], channels=table.channels, PROXY=proxy, CHUNK=CHUNK,
            COLUMNS=MERGED, **sizes, **FUSED,
        )  # fmt: skip
        dy = torch.empty_like(y)
        two, kept, kind = (False, False, 0) if stores else (two, kept, kind)  # g has them already
        grid, constants = table.tiled
        _spread_gradients[grid](
            g, dz2 if two else g, y, bits if kept else g, found, weight, bias, moments, slopes, dy,
            ACT=kind, TWO=two, KEPT=kept, PROXY=proxy, **constants,
        )  # fmt: skip
        return Gradients(dy, parameters, g if adds else None)
