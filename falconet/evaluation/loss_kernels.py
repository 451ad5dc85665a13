"""Cross-entropy and what a micro-batch reports of it in Triton: two launches forward and one backward.

A row of logits is read twice: for its largest, and for the sums. Programs add the rows of a tile, and one more merges
their sums in a fixed order: no atomics, so the same input always gives the same bits.
"""
# Triton's functions have no types that mypy could check, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.numerics.kernels import FUSED

TILE = 1024  # logits of a tile, if a row is not longer
LONGEST = 4096  # logits of a row that are read at a time
CHUNK = 1024  # programs whose sums are merged at a time
SIZES = ["rows", "classes", "programs", "images"]  # compiled once for all values


@triton.jit
def _weighed(labels, targets, weights, row, exists, columns, classes, SOFT: tl.constexpr, WEIGHTED: tl.constexpr):
    """Targets of a tile, the weights of its classes, and which of its logits exist."""
    inside = exists[:, None] & (columns < classes)[None, :]
    if SOFT:
        t = tl.load(targets + row[:, None].to(tl.int64) * classes + columns[None, :], mask=inside, other=0.0)
    else:
        label = tl.load(labels + row, mask=exists, other=-1)
        t = tl.where(inside & (columns[None, :] == label[:, None]), 1.0, 0.0)
    w = tl.where(inside, 1.0, 0.0)
    if WEIGHTED:
        w *= tl.load(weights + columns, mask=columns < classes, other=0.0)[None, :]
    return t, w, inside


@triton.jit
def _read(logits, row, columns, inside, classes):
    offsets = row[:, None].to(tl.int64) * classes + columns[None, :]
    return tl.load(logits + offsets, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _score_rows(logits, labels, targets, weights, known, partial, rows, classes, programs, kept, spread,
                SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHS: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sums over a tile's rows: losses, their parts by smoothing, right ones, and those that count.

    `kept`: of a target; `spread`: to each class, of a row's targets. `known`: for the backward pass.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    label = tl.load(labels + row, mask=exists, other=-1)
    own = tl.load(logits + row.to(tl.int64) * classes + label, mask=(label >= 0) & (label < classes), other=0.0)
    own = own.to(tl.float32)[:, None]
    most, present = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    ahead = tl.zeros((ROWS,), tl.int32)  # classes that come before the label's: of equal ones the first, NaN before all
    for start in range(0, classes, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        t, _, inside = _weighed(labels, targets, weights, row, exists, columns, classes, SOFT, WEIGHTED)
        x = _read(logits, row, columns, inside, classes)
        larger = (own == own) & ((x > own) | (x != x))
        equal = (x == own) | ((x != x) & (own != own))
        first = larger | (equal & (columns[None, :] < label[:, None]))
        ahead += tl.sum((inside & first).to(tl.int32), 1)
        most = tl.maximum(most, tl.max(x, 1))
        present += tl.sum(t, 1)
    # Triton 3.6 fails on a loop's maximum or sum that is used twice; `where` is its one use, here and below.
    most, even = tl.where(exists, most, 0.0), present * spread
    total, soft = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    weight, soft_weight = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    exponentials = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        t, w, inside = _weighed(labels, targets, weights, row, exists, columns, classes, SOFT, WEIGHTED)
        x = tl.where(inside, _read(logits, row, columns, inside, classes) - most[:, None], 0.0)
        u = even[:, None] * w
        t = t * kept * w + u
        exponentials += tl.sum(tl.where(inside, tl.exp(x), 0.0), 1)
        total += tl.sum(t * x, 1)
        weight += tl.sum(t, 1)
        if SMOOTHS:
            soft += tl.sum(u * x, 1)
            soft_weight += tl.sum(u, 1)
    log, weight = tl.log(exponentials), tl.where(exists, weight, 0.0)
    tl.store(known + row, most, mask=exists)
    tl.store(known + rows + row, log, mask=exists)
    tl.store(known + 2 * rows + row, weight, mask=exists)
    tl.store(known + 3 * rows + row, even, mask=exists)
    counts = exists & (label >= 0)
    out = partial + tl.program_id(0)
    tl.store(out, tl.sum(tl.where(exists, weight * log - total, 0.0), 0))
    by_smoothing = soft_weight * log - soft if SMOOTHS else soft
    tl.store(out + programs, tl.sum(tl.where(exists, by_smoothing, 0.0), 0))
    right = counts & (label < classes) & (ahead == 0)
    tl.store(out + 2 * programs, tl.sum(right.to(tl.float32), 0))
    tl.store(out + 3 * programs, tl.sum(counts.to(tl.float32), 0))


@triton.jit
def _summed(values, programs, CHUNK: tl.constexpr):
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, programs, CHUNK):
        place = start + tl.arange(0, CHUNK)
        total += tl.load(values + place, mask=place < programs, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=SIZES)
def _merge_scores(partial, loss, smoothing, correct, counted, programs, images, CHUNK: tl.constexpr):
    """Of all programs; losses are divided by the number of images. Counts of fewer than 2^24 images are exact."""
    tl.store(loss, _summed(partial, programs, CHUNK) / images)
    tl.store(smoothing, _summed(partial + programs, programs, CHUNK) / images)
    tl.store(correct, _summed(partial + 2 * programs, programs, CHUNK).to(tl.int64))
    tl.store(counted, _summed(partial + 3 * programs, programs, CHUNK).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def _spread_loss(logits, labels, targets, weights, known, d, dlogits, rows, classes, images, kept,
                 SOFT: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of the logits, from that of the loss."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    t, w, inside = _weighed(labels, targets, weights, row, exists, columns, classes, SOFT, WEIGHTED)
    most = tl.load(known + row, mask=exists, other=0.0)[:, None]
    log = tl.load(known + rows + row, mask=exists, other=0.0)[:, None]
    weight = tl.load(known + 2 * rows + row, mask=exists, other=0.0)[:, None]
    even = tl.load(known + 3 * rows + row, mask=exists, other=0.0)[:, None]
    likely = tl.exp(_read(logits, row, columns, inside, classes) - most - log)
    v = (likely * weight - (t * kept * w + even * w)) * (tl.load(d) / images)
    offsets = row[:, None].to(tl.int64) * classes + columns[None, :]
    tl.store(dlogits + offsets, v.to(dlogits.dtype.element_ty), mask=inside)


class Expected(NamedTuple):
    """What logits are compared with."""

    labels: Tensor  # N, int64; -1 counts as nothing
    targets: Tensor | None  # N x classes, float32; None: those of the labels
    weights: Tensor | None  # of the classes, float32; None: 1
    smoothing: float


def scored(logits: Tensor, expected: Expected, *, images: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses and the part of smoothing, both over `images`; right images, and those that count."""
    return _Scored.apply(logits, expected, images)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, expected: Expected, images: int) -> tuple[Tensor, ...]:
        logits, labels = logits.contiguous(), expected.labels
        rows, classes = logits.shape
        columns = min(max(16, triton.next_power_of_2(classes)), LONGEST)
        constants = {"SOFT": expected.targets is not None, "WEIGHTED": expected.weights is not None}
        constants |= {"ROWS": max(1, TILE // columns), "COLUMNS": columns, **FUSED}
        tensors = [labels, *(labels if each is None else each for each in (expected.targets, expected.weights))]
        programs = -(-rows // constants["ROWS"])
        known, partial = (torch.empty((4, n), device=logits.device) for n in (rows, programs))
        losses = [torch.empty((), device=logits.device) for _ in range(2)]
        counts = [torch.empty((), dtype=torch.int64, device=logits.device) for _ in range(2)]
        sizes, kept = {"rows": rows, "classes": classes}, 1 - expected.smoothing
        _score_rows[(programs,)](
            logits, *tensors, known, partial, programs=programs, kept=kept, spread=expected.smoothing / classes,
            SMOOTHS=expected.smoothing > 0, **sizes, **constants,
        )  # fmt: skip
        _merge_scores[(1,)](partial, *losses, *counts, programs=programs, images=images, CHUNK=CHUNK, **FUSED)
        ctx.save_for_backward(logits, *tensors, known)
        ctx.constants = {**sizes, "images": images, "kept": kept, **constants}
        ctx.grid = programs, -(-classes // columns)
        ctx.mark_non_differentiable(losses[1], *counts)
        return *losses, *counts

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        logits, *others = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        _spread_loss[ctx.grid](logits, *others, d, dlogits, **ctx.constants)
        return dlogits, None, None
