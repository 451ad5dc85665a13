"""Losses: what the number that an image is labelled with means as a target, and what missing it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from falconet.data import mixing
from falconet.data.keyed import IntArray
from falconet.data.mixing import Mix
from falconet.data.storage import BoolArray


class Score(NamedTuple):
    """What a micro-batch adds to its update; only the loss has a gradient."""

    loss: Tensor  # the sum over its images, divided by the images of the update
    smoothing: Tensor  # the part of it that label smoothing adds
    correct: Tensor  # images with the right top class, or with exactly the right labels
    images: Tensor  # images that counted


def total(scores: Sequence[Score]) -> Score:
    """The sum of the scores of all micro-batches of an update."""
    if len(scores) == 1:  # without a launch for each of its numbers
        return scores[0]
    return Score(*(torch.stack(values).sum(0) for values in zip(*scores, strict=True)))


@dataclass(frozen=True)
class Loss:
    """Cross-entropy against soft targets: 1 - s of the targets, s of the mean over all classes, per image."""

    classes: int
    smoothing: float = 0.0
    has_kernel: ClassVar[bool] = True  # which computes a score on CUDA

    def scored(self, logits: Tensor, labels: Tensor, mix: Mix | None, *, side: int, images: int) -> Score:
        """The score of mixed images of side x side pixels.

        `images`: of the update, in which each has the weight `1 / images`.
        """
        mixed = None if mix is None else mixing.mixed_targets(labels, mix, targets=self.targets, side=side)
        if logits.is_cuda and self.has_kernel:
            from falconet.evaluation import loss_kernels  # Triton comes with CUDA only

            expected = loss_kernels.Expected(labels, mixed, self._factors(), self.smoothing)
            return Score(*loss_kernels.scored(logits, expected, images=images))
        losses, smoothing = self.parts(logits, self.targets(labels) if mixed is None else mixed)
        # A sum over images, divided once by their number: the gradient is the same however they are split.
        loss = losses.sum() / images
        return Score(loss, smoothing / images, self.correct(logits, labels), (labels >= 0).sum())

    def targets(self, labels: Tensor) -> Tensor:  # N x classes, float32
        """Targets of unmixed images; a label of -1 gives a row of zeros."""
        # Unlike torch's one_hot, this never waits for the device.
        return (labels[:, None] == torch.arange(self.classes, device=labels.device)).float()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits, targets: N x classes; a row of zeros gives a loss of 0. Result: N."""
        return self.parts(logits, targets)[0]

    def parts(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and how much of their sum is there because of smoothing, without a gradient: a scalar."""
        logs = F.log_softmax(logits, dim=1)
        losses = -(self.smoothed(targets) * logs).sum(1)
        if not self.smoothing:
            return losses, losses.new_zeros(())
        return losses, -(self.weighted(self._uniform(targets)) * logs.detach()).sum()

    def smoothed(self, targets: Tensor) -> Tensor:
        """What the logarithms are weighted by; N x classes."""
        return self.weighted(targets * (1.0 - self.smoothing) + self._uniform(targets))

    def weighted(self, targets: Tensor) -> Tensor:
        factors = self._factors()
        return targets if factors is None else targets * factors

    def _factors(self) -> Tensor | None:
        """A weight for each class; None: 1."""
        return None

    def _uniform(self, targets: Tensor) -> Tensor:  # N x 1
        return targets.sum(1, keepdim=True) * (self.smoothing / self.classes)

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Images with the right top class."""
        return (logits.argmax(1) == labels).sum()


@dataclass(frozen=True, kw_only=True)
class WeightedLoss(Loss):
    """The same with a weight for each class, as in torch's cross-entropy before it is divided."""

    weights: Tensor  # classes, on the device

    def _factors(self) -> Tensor:
        return self.weights


@dataclass(frozen=True, kw_only=True)
class MultiLabelLoss(Loss):
    """Binary cross-entropy, the mean over the classes, per image; a label is the number of a set of classes.

    Targets have two halves: how much of each class is present, and how much is absent. So a row of zeros still gives a
    loss of 0, while an image without any label has one, and mixing is linear in both.
    """

    has_kernel: ClassVar[bool] = False
    sets: Tensor  # sets x classes, bool, on the device
    weights: Tensor | None = None  # classes: of present ones; None: 1

    def targets(self, labels: Tensor) -> Tensor:  # N x 2 classes, float32
        present = present_classes(self.sets, labels).float()
        return torch.cat((present, 1 - present), 1) * (labels >= 0)[:, None]

    def parts(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits: N x classes; targets: N x 2 classes. Smoothing moves targets here, and is no part of its own."""
        present, absent = self.smoothed(targets).chunk(2, dim=1)
        if self.weights is not None:
            present = present * self.weights
        losses = -(present * F.logsigmoid(logits) + absent * F.logsigmoid(-logits)).mean(1)
        return losses, losses.new_zeros(())

    def smoothed(self, targets: Tensor) -> Tensor:
        """1 becomes 1 - s / 2, and 0 becomes s / 2."""
        return torch.lerp(targets, targets.roll(self.classes, dims=1), self.smoothing / 2)

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return exact(logits, labels, self.sets)


def present_classes(sets: Tensor, labels: Tensor) -> Tensor:  # N x classes, bool
    """The sets of classes with these numbers; any set for a label of -1."""
    return sets.index_select(0, labels.clamp_min(0))


def exact(logits: Tensor, labels: Tensor, sets: Tensor) -> Tensor:
    """Images whose classes at or above a probability of 0.5 are exactly those of their set."""
    return (((logits >= 0) == present_classes(sets, labels)).all(1) & (labels >= 0)).sum()


def presence_weights(labels: IntArray, sets: BoolArray) -> tuple[float, ...]:
    """The images without a class over those with it, so that both weigh the same; 1 for a class of no image."""
    shown = sets[labels[labels >= 0]]
    return tuple(float((len(shown) - n) / n) if 0 < n < len(shown) else 1.0 for n in shown.sum(axis=0).tolist())
