"""Fused batch norm over the batches of several replicas: the exchanged numbers, and merging them.

Each replica sends three numbers per channel forward and two backward. All merge them in the order of the replicas, so
that all get the same bits.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.models.fused.batchnorm_kernels import SIZES, Running, merged_moments, store_numbers
from falconet.models.fused.channel_tables import MERGED, Table, merging
from falconet.numerics.kernels import FUSED

if TYPE_CHECKING:
    from falconet.parallel.batchnorm import Span


@triton.jit(do_not_specialize=SIZES)
def _merge_own(partial, x, own, count, sums, channels, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute mean, variance and count of each channel's values on this replica."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    mean, variance = merged_moments(partial, x, count, sums, columns, inside, channels, CHUNK, COLUMNS)
    tl.store(own + columns, mean, mask=inside)
    tl.store(own + channels + columns, variance, mask=inside)
    tl.store(own + 2 * channels + columns, tl.zeros((COLUMNS,), tl.float32) + count, mask=inside)


@triton.jit(do_not_specialize=["replicas"])
def _merge_replicas(gathered, weight, bias, running_mean, running_variance, batches, statistics,
                    replicas, channels, eps, momentum, COLUMNS: tl.constexpr, TRACKS: tl.constexpr):  # fmt: skip
    """Merge the norm's numbers as in Chan et al., and move the running statistics; a fifth line has the total count."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    mean, squares, count = (
        tl.zeros((COLUMNS,), tl.float32),
        tl.zeros((COLUMNS,), tl.float32),
        tl.zeros((COLUMNS,), tl.float32),
    )
    for replica in range(replicas):
        start = gathered + 3 * replica * channels + columns
        more = tl.load(start + 2 * channels, mask=inside, other=1.0)
        away = tl.load(start, mask=inside, other=0.0) - mean
        share = more / (count + more)
        squares += tl.load(start + channels, mask=inside, other=0.0) * more + (away * share) * (away * count)
        mean += away * share
        count += more
    store_numbers(mean, squares / count, count, weight, bias, running_mean, running_variance, batches, statistics,
                  columns, inside, channels, eps, momentum, TRACKS)  # fmt: skip
    tl.store(statistics + 4 * channels + columns, count, mask=inside)


@triton.jit(do_not_specialize=["replicas"])
def _merge_slopes(gathered, statistics, slopes, replicas, channels, COLUMNS: tl.constexpr):
    """Compute b and c of dy = a g + b (y - mean) + c from the gradients of weight and bias on each replica."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < channels
    dweight, dbias = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for replica in range(replicas):
        start = gathered + 2 * replica * channels + columns
        dweight += tl.load(start, mask=inside, other=0.0)
        dbias += tl.load(start + channels, mask=inside, other=0.0)
    factor = tl.load(statistics + columns, mask=inside, other=0.0)
    inverse = tl.load(statistics + 3 * channels + columns, mask=inside, other=0.0)
    count = tl.load(statistics + 4 * channels + columns, mask=inside, other=1.0)
    tl.store(slopes + channels + columns, -factor * inverse * (dweight / count), mask=inside)
    tl.store(slopes + 3 * channels + columns, -factor * (dbias / count), mask=inside)


@dataclass(frozen=True)
class Spanning:
    """A norm's sums over the replicas of its span."""

    span: "Span"

    def numbers(
        self, x: Tensor, partial: Tensor, weight: Tensor, bias: Tensor, running: Running | None, *, eps: float
    ) -> Tensor:
        """The four lines of `batchnorm_kernels.statistics` and the number of values on all replicas, 5 x C."""
        channels = x.shape[1]
        own, found = torch.empty((3, channels), device=x.device), torch.empty((5, channels), device=x.device)
        grid, constants = merging(Table.of(x), partial.shape[1])
        _merge_own[grid](partial, x, own, **constants)
        everyone = self.span.gathered(own.view(-1))
        mean, variance, batches, momentum = running or (found, found, found, 0.0)
        _merge_replicas[grid](
            everyone, weight, bias, mean, variance, batches, found, replicas=len(everyone), channels=channels,
            eps=eps, momentum=momentum, COLUMNS=MERGED, TRACKS=running is not None, **FUSED,
        )  # fmt: skip
        return found

    def mend_slopes(self, slopes: Tensor, gradients: Tensor, found: Tensor) -> None:
        """Change the slopes of this replica to those of all; `gradients`: this replica's for weight and bias."""
        channels = found.shape[1]
        everyone = self.span.gathered(gradients.view(-1))
        _merge_slopes[(-(-channels // MERGED),)](
            everyone, found, slopes, replicas=len(everyone), channels=channels, COLUMNS=MERGED, **FUSED
        )
