"""Mixup and cutmix: drawn on the host, applied on the device."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from falconet.data.keyed import FloatArray, IntArray, Purpose, uniform
from falconet.errors import ConfigError


class Mix(NamedTuple):
    """How one micro-batch is mixed."""

    mixup: Tensor  # N, float32: each image's own weight; ones mix nothing
    box: Tensor  # 4, int64: y0, y1, x0, x1 of the region cutmix pastes; an empty one pastes nothing


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """What may be mixed and how strongly; the originals' options and rules."""

    mixup_alpha: float = 0.0  # Beta(alpha, alpha); 0 means no mixup
    cutmix_lambda_low: float = 0.0  # share of the image kept, drawn from [low, high)
    cutmix_lambda_high: float = 0.0  # equal bounds fix the share; (0, 0) and (1, 1) mean no cutmix
    cutmix_disable_prob: float = 0.0  # chance that a micro-batch skips cutmix
    cutmix_draw: Literal["even", "exponential"] = "even"  # how the share is drawn between its bounds

    def __post_init__(self) -> None:
        if not 0 <= self.mixup_alpha <= 1:
            raise ConfigError(f"--mixup-alpha: got {self.mixup_alpha}, wanted 0 to 1")
        if not 0 <= self.cutmix_lambda_low <= self.cutmix_lambda_high <= 1:
            raise ConfigError(
                f"--cutmix-lambda-low and --cutmix-lambda-high: got {self.cutmix_lambda_low} and "
                f"{self.cutmix_lambda_high}, wanted 0 <= low <= high <= 1"
            )
        if not 0 <= self.cutmix_disable_prob <= 1:
            raise ConfigError(f"--cutmix-disable-prob: got {self.cutmix_disable_prob}, wanted 0 to 1")

    @property
    def mixes(self) -> bool:
        return self.mixup_alpha > 0

    @property
    def cuts(self) -> bool:
        return (self.cutmix_lambda_low, self.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))

    @property
    def minimum_micro_batch(self) -> int:
        """Images needed so that no image is its own partner: mixup takes the neighbour, cutmix the one after it.

        Of three images with both, what cutmix pastes was mixed with the image itself: fewer labels, as exact.
        """
        return 3 if self.cuts else 2 if self.mixes else 1

    def check(self, micro_batch: int) -> None:
        if micro_batch < self.minimum_micro_batch:
            kinds = " and ".join(["mixup"] * self.mixes + ["cutmix"] * self.cuts)
            raise ConfigError(
                f"--micro-batch-size: got {micro_batch}, wanted at least {self.minimum_micro_batch} for {kinds}"
            )


def draw(mixing: Mixing, *, indices: IntArray, micro_batch: int, side: int, seed: int, epoch: int) -> Mix:
    """The mix of global micro-batch number `micro_batch`, made of the images `indices`, each side x side pixels."""
    own = np.ones(len(indices))
    if mixing.mixes:
        drawn = beta(mixing.mixup_alpha, indices=indices, seed=seed, epoch=epoch)
        own = np.maximum(drawn, 1 - drawn)
    box = _cutmix_box(mixing, micro_batch=micro_batch, side=side, seed=seed, epoch=epoch)
    return Mix(torch.from_numpy(own.astype(np.float32)), torch.tensor(box, dtype=torch.int64))


def beta(alpha: float, *, indices: IntArray, seed: int, epoch: int) -> FloatArray:
    """One Beta(alpha, alpha) number for each index, by Joehnk's rejection; made for alpha of 1 or less.

    With x = u**(1/alpha) and y = v**(1/alpha), x / (x + y) given x + y <= 1 has the wanted distribution. In logarithms,
    because the powers underflow for a small alpha. An index's round r uses its own draws 2r and 2r + 1.
    """
    result = np.empty(len(indices))
    waiting = np.arange(len(indices))
    attempt = 0
    while len(waiting):  # at least half is accepted in each round
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


def _cutmix_box(mixing: Mixing, *, micro_batch: int, side: int, seed: int, epoch: int) -> tuple[int, int, int, int]:
    if not mixing.cuts:
        return (0, 0, 0, 0)
    number = np.array([micro_batch], dtype=np.int64)
    drawn = uniform(seed=seed, epoch=epoch, indices=number, purpose=Purpose.CUTMIX, draws=4)
    share, skip, down, right = (float(u) for u in drawn[0])
    if skip < mixing.cutmix_disable_prob:
        return (0, 0, 0, 0)
    low, high = mixing.cutmix_lambda_low, mixing.cutmix_lambda_high
    kept = low + (high - low) * (share if mixing.cutmix_draw == "even" else _exponential(share))
    box = round(side * math.sqrt(1 - kept))
    top, left = int(down * (side - box + 1)), int(right * (side - box + 1))
    return (top, top + box, left, left + box)


def _exponential(uniform: float) -> float:
    """The TensorFlow original's draw from 0 to 1: 1 + ln(u) / 4 for an even u from e**-4 to 1, so mostly near 1."""
    least = math.exp(-4)
    return 1 + math.log(least + uniform * (1 - least)) / 4


def one_hot(labels: Tensor, *, classes: int) -> Tensor:  # N x classes, float32
    """Targets of unmixed images; a label of -1 gets a row of zeros. Unlike torch's, never asks the device."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).float()


def apply(images: Tensor, labels: Tensor, mix: Mix | None, *, classes: int) -> tuple[Tensor, Tensor]:
    """Mixed images (N x 3 x H x W, floating) and soft targets (N x classes, float32): mixup first, then cutmix.

    Mixup's partner is the image before, cutmix's the one before that, so with both an image carries up to four labels.
    An image labelled -1 gets a row of zeros, and what it lends to a partner counts for nothing. Shapes are static and
    the device is not asked for numbers: this can be captured in a graph.
    """
    return mixed_images(images, mix), mixed_targets(labels, mix, classes=classes, side=images.shape[-1])


def mixed_images(images: Tensor, mix: Mix | None) -> Tensor:
    """The images' half of `apply`."""
    if mix is None:
        return images
    images = torch.lerp(_rolled(images, 1), images, mix.mixup[:, None, None, None].to(images.dtype))
    height, width = images.shape[-2:]
    top, bottom, left, right = mix.box.unbind()
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)[None, :]
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # H x W
    return torch.where(inside, _rolled(images, 2), images)


def mixed_targets(labels: Tensor, mix: Mix | None, *, classes: int, side: int) -> Tensor:
    """The targets' half of `apply`, for images of side x side pixels."""
    targets = one_hot(labels, classes=classes)
    if mix is None:
        return targets
    targets = torch.lerp(_rolled(targets, 1), targets, mix.mixup[:, None])
    top, bottom, left, right = mix.box.unbind()
    kept = 1 - (bottom - top) * (right - left) / (side * side)
    targets = torch.lerp(_rolled(targets, 2), targets, kept)
    return targets * (labels >= 0)[:, None]


def _rolled(batch: Tensor, by: int) -> Tensor:
    # torch.roll would lose the channels-last memory format.
    return torch.cat((batch[-by:], batch[:-by]))
