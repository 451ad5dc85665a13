"""Histograms of weights, counted on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 64
_FACTS = 5  # numbers before the counts: minimum, maximum, number of values, sum, sum of squares


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite values between neighbouring edges."""

    smallest: float
    largest: float
    count: int
    sum: float
    squares: float  # sum of the squares
    counts: Sequence[int]

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are counts."""
        low, high = _around(self.smallest, self.largest)
        return [*(low + (high - low) * place / len(self.counts) for place in range(len(self.counts))), high]


@torch.no_grad()
def count_histograms(values: Tensor) -> Tensor:  # any shape -> BINS + 5, float64, on the device
    """Compute the numbers of a histogram without synchronising with the device.

    torch.histc is not used: it synchronises to learn the range, and is not deterministic on CUDA.
    """
    flat = values.detach().reshape(-1).float()
    finite = flat.isfinite()
    low, high = torch.where(finite, flat, torch.inf).amin(), torch.where(finite, flat, -torch.inf).amax()
    flat = torch.where(finite, flat, low)
    wide = torch.where(high > low, high - low, 1.0)  # a single value goes into the middle bin, as in numpy
    share = torch.where(high > low, (flat - low) / wide, 0.5)
    bins = (share * BINS).nan_to_num(0.0).clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device).scatter_add_(0, bins, finite.long())
    exact = torch.where(finite, flat, 0.0).double()
    facts = torch.stack([low.double(), high.double(), finite.sum().double(), exact.sum(), exact.square().sum()])
    return torch.cat([facts, counts.double()])


def read_histograms(rows: Tensor) -> list[Histogram]:  # N x (BINS + 5)
    """Synchronise with the device and read all rows; rows without a finite value are empty histograms around 0."""
    found = []
    for row in rows.tolist():
        smallest, largest, count, total, squares = row[:_FACTS]
        empty = count == 0
        found.append(
            Histogram(
                0.0 if empty else smallest,
                0.0 if empty else largest,
                int(count),
                total,
                squares,
                [int(number) for number in row[_FACTS:]],
            )
        )
    return found


def no_histograms(device: torch.device) -> Tensor:  # BINS + 5
    """A row of zeros, to which another process adds its counts."""
    return torch.zeros(BINS + _FACTS, dtype=torch.float64, device=device)


def _around(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
