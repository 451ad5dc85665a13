"""Mixup and cutmix: drawn on the host, applied on the device."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from falconet.config.facts import uses_cutmix
from falconet.config.options import Augmentation
from falconet.data.keyed import FloatArray, IntArray, Purpose, uniform

Targets = Callable[[Tensor], Tensor]  # labels (N) to targets of unmixed images, one row each; zeros for -1


class Mix(NamedTuple):
    """How a micro-batch is mixed."""

    mixup: Tensor  # N, float32: the image's own weight; ones mix nothing
    box: Tensor  # 4, int64: y0, y1, x0, x1 of the region cutmix pastes; an empty one pastes nothing. Or a row for
    # each of several parts of equal size, which are mixed separately

    def parts(self) -> "list[Mix]":
        return [Mix(*each) for each in zip(self.mixup.chunk(len(self.box)), self.box, strict=True)]


def mixes(augmentation: Augmentation) -> bool:
    return augmentation.mixup_alpha > 0


def mixes_or_cuts(augmentation: Augmentation) -> bool:
    return mixes(augmentation) or uses_cutmix(augmentation)


def draw(augmentation: Augmentation, *, indices: IntArray, micro_batch: int, side: int, seed: int, epoch: int) -> Mix:
    """The mix of global micro-batch number `micro_batch`, made of the images `indices`, each side x side pixels.

    Mixup and cutmix need two images, so that none is its own partner. With both and only two or three images, cutmix
    pastes what mixup has mixed with the image itself: fewer labels, equally exact.
    """
    assert len(indices) >= (2 if mixes_or_cuts(augmentation) else 1)
    weights = np.ones(len(indices))
    if mixes(augmentation):
        drawn = beta(augmentation.mixup_alpha, indices=indices, seed=seed, epoch=epoch)
        weights = np.maximum(drawn, 1 - drawn)
    box = _cutmix_box(augmentation, micro_batch=micro_batch, side=side, seed=seed, epoch=epoch)
    return Mix(torch.from_numpy(weights.astype(np.float32)), torch.tensor(box, dtype=torch.int64))


def beta(alpha: float, *, indices: IntArray, seed: int, epoch: int) -> FloatArray:
    """One Beta(alpha, alpha) number per index, by Joehnk's rejection, which suits alpha of at most 1.

    With x = u**(1/alpha) and y = v**(1/alpha), x / (x + y) given x + y <= 1 has that distribution. In logarithms,
    because the powers underflow for small alpha. Round r of an index uses its draws 2r and 2r + 1.
    """
    result = np.empty(len(indices))
    waiting = np.arange(len(indices))
    attempt = 0
    while len(waiting):  # each round accepts at least half
        drawn = uniform(
            seed=seed, epoch=epoch, indices=indices[waiting], purpose=Purpose.MIXUP, draws=2, first=2 * attempt
        )
        log_x, log_y = np.log1p(-drawn).T / alpha  # 1 - u is in (0, 1], so its logarithm is finite
        log_sum = np.logaddexp(log_x, log_y)
        accepted = log_sum <= 0
        result[waiting[accepted]] = np.exp(log_x - log_sum)[accepted]
        waiting = waiting[~accepted]
        attempt += 1
    return result


def _cutmix_box(
    augmentation: Augmentation, *, micro_batch: int, side: int, seed: int, epoch: int
) -> tuple[int, int, int, int]:
    if not uses_cutmix(augmentation):
        return (0, 0, 0, 0)
    number = np.array([micro_batch], dtype=np.int64)
    drawn = uniform(seed=seed, epoch=epoch, indices=number, purpose=Purpose.CUTMIX, draws=4)
    share, skip, down, right = (float(u) for u in drawn[0])
    if skip < augmentation.cutmix_disable_prob:
        return (0, 0, 0, 0)
    low, high = augmentation.cutmix_lambda_low, augmentation.cutmix_lambda_high
    kept = low + (high - low) * (share if augmentation.cutmix_draw == "even" else _exponential(share))
    box = round(side * math.sqrt(1 - kept))
    top, left = int(down * (side - box + 1)), int(right * (side - box + 1))
    return (top, top + box, left, left + box)


def _exponential(uniform: float) -> float:
    """The TensorFlow original's draw from 0 to 1, mostly near 1: 1 + ln(u) / 4 for a uniform u from e**-4 to 1."""
    least = math.exp(-4)
    return 1 + math.log(least + uniform * (1 - least)) / 4


def mixed_images(images: Tensor, mix: Mix | None) -> Tensor:
    """Mix images (N x 3 x H x W, floating): mixup first, then cutmix.

    Mixup's partner is the previous image, cutmix's the one before that, so an image can have up to four labels with
    both; two images are each other's partners. Shapes are static and nothing waits for the device, so this can be
    captured in a graph.
    """
    if mix is None:
        return images
    if mix.box.ndim == 2:
        pairs = zip(images.chunk(len(mix.box)), mix.parts(), strict=True)
        return torch.cat([mixed_images(part, own) for part, own in pairs])
    images = torch.lerp(_rolled(images, 1), images, mix.mixup[:, None, None, None].to(images.dtype))
    height, width = images.shape[-2:]
    top, bottom, left, right = mix.box.unbind()
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)[None, :]
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # H x W
    return torch.where(inside, _rolled(images, _away(images)), images)


def mixed_targets(labels: Tensor, mix: Mix | None, *, targets: Targets, side: int) -> Tensor:
    """Soft targets (N rows, float32) for mixed images of side x side pixels.

    An image labelled -1 gets a row of zeros, and its part in a partner counts for nothing.
    """
    if mix is not None and mix.box.ndim == 2:
        pairs = zip(labels.chunk(len(mix.box)), mix.parts(), strict=True)
        return torch.cat([mixed_targets(part, own, targets=targets, side=side) for part, own in pairs])
    rows = targets(labels)
    if mix is None:
        return rows
    rows = torch.lerp(_rolled(rows, 1), rows, mix.mixup[:, None])
    top, bottom, left, right = mix.box.unbind()
    kept = 1 - (bottom - top) * (right - left) / (side * side)
    rows = torch.lerp(_rolled(rows, _away(rows)), rows, kept)
    return rows * (labels >= 0)[:, None]


def _away(batch: Tensor) -> int:
    """How far back in the batch cutmix's partner is."""
    return 2 if len(batch) > 2 else 1


def _rolled(batch: Tensor, by: int) -> Tensor:
    # torch.roll would lose the channels-last memory format.
    return torch.cat((batch[-by:], batch[:-by]))
