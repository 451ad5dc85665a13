"""A channels-last tensor as a table of rows (images x pixels) by channels, and how kernels divide it into tiles.

If channels would leave parts of a tile unused, several rows are joined into one: 24 channels are read as rows of 384
values, three tiles wide.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

TILE = 4096  # elements of a pass over all of them: rows by channels
SUMMED = 2048  # elements of a pass that sums, which keeps its sums in registers
WIDTHS = (16, 32, 64, 128)  # values of a tile's row
LEAST = 4  # tiles of a program that sums, at least
MERGED = 8  # channels of a program that merges
CHUNK = 256  # sums that it reads at a time


@triton.jit
def columns_of(channels, joined, COLUMNS: tl.constexpr):
    """This program's columns in a joined row, their channels, and which of them exist."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return columns, columns % channels, columns < channels * joined


@triton.jit
def tile_of(number, count, wide, columns, there, ROWS: tl.constexpr):
    """The rows of a tile, the offsets of its elements, and which of them exist."""
    rows = number * ROWS + tl.arange(0, ROWS)
    return rows, rows[:, None].to(tl.int64) * wide + columns[None, :], (rows < count)[:, None] & there[None, :]


@triton.jit
def row_of(values, line, channel, channels, there):
    """A line of numbers, one per channel, that broadcasts over a tile's rows."""
    return tl.load(values + line * channels + channel, mask=there, other=0.0)[None, :]


@triton.jit
def loaded(pointer, offsets, inside):
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class Table:
    """A channels-last tensor as rows by channels, and how it is divided into tiles and programs."""

    values: int  # of each channel
    channels: int
    period: int  # rows of which a joined row may hold only whole parts: those of an image, or all

    @classmethod
    def of(cls, x: Tensor) -> "Table":
        values = x.numel() // x.shape[1]
        return cls(values, x.shape[1], values)

    @cached_property
    def joined(self) -> int:
        """The number of rows that are read as one: as few as fill the widest tile."""
        if self.channels % 8:
            return 1
        fewest = next(n for n in (1, 2, 4, 8, 16) if self.channels * n % WIDTHS[-1] == 0)
        return next(n for n in (16, 8, 4, 2, 1) if n <= fewest and self.period % n == 0)

    @property
    def wide(self) -> int:
        """The number of values in a joined row."""
        return self.channels * self.joined

    @property
    def count(self) -> int:
        """The number of joined rows."""
        return self.values // self.joined

    @cached_property
    def width(self) -> int:
        """The number of values in a tile's row: the widest that leaves the least unused."""
        return min(WIDTHS, key=lambda width: (-(-self.wide // width) * width, -width))

    @property
    def columns(self) -> int:
        return -(-self.wide // self.width)

    def summed(self, most: int) -> "Summed":
        """The division for a pass that sums, with at most `most` programs."""
        rows = SUMMED // self.width
        tiles = -(-self.count // rows)
        return Summed(self, rows, tiles, max(1, min(most // self.columns, tiles // LEAST)))

    @cached_property
    def walked(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and constants of a pass over all elements; rows first, as a grid's second number is at most 65,535."""
        rows = TILE // self.width
        return (-(-self.count // rows), self.columns), {"ROWS": rows, **self.shape}

    @cached_property
    def shape(self) -> dict[str, int]:
        """The arguments of all passes; Triton learns that 8 divides the channels, so that it reads 16 bytes at once."""
        unit = 1 if self.channels % 8 else 8
        sizes = {"count": self.count, "units": self.channels // unit, "joined": self.joined}
        return {**sizes, "UNIT": unit, "COLUMNS": self.width, **FUSED}


@dataclass(frozen=True)
class Summed:
    """The division of a table for a pass that sums."""

    table: Table
    rows: int  # of a tile
    tiles: int
    programs: int  # of each column

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, self.table.columns

    @property
    def constants(self) -> dict[str, int]:
        return {"tiles": self.tiles, "ROWS": self.rows, **self.table.shape}

    def partial(self, number: int, device: torch.device) -> Tensor:
        """A new tensor for the programs' sums, `number` from each."""
        return torch.empty((number, self.programs * self.table.joined, self.table.channels), device=device)

    @property
    def merged(self) -> "Merged":
        return merging(self.table, self.programs * self.table.joined)


Merged = tuple[tuple[int], dict[str, int]]  # grid and constants of a kernel that merges sums


def merging(table: Table, sums: int) -> Merged:
    """Grid and constants of a kernel that merges; `sums`: per channel."""
    sizes = {"count": table.values, "sums": sums, "channels": table.channels}
    return (-(-table.channels // MERGED),), {**sizes, "CHUNK": CHUNK, "COLUMNS": MERGED, **FUSED}
