"""Average precision: how well the scores of a class rank the images that have it above those that do not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.data.storage import BoolArray
from falconet.parallel.world import World

FloatArray = npt.NDArray[np.float32]
MOST_BYTES = 1 << 26  # of the scores that processes exchange in one message


def average_precision(scores: FloatArray, present: BoolArray) -> float | None:  # N, N -> 0 to 1
    """The mean of the precision at every score, weighted by the recall gained there; None: no image has the class.

    Images with equal scores are taken together, so their order does not matter. Scores that are not numbers are lowest.
    """
    positives = int(present.sum())
    if not positives:
        return None
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-ranked, kind="stable")
    ranked, hits = ranked[order], np.cumsum(present[order])
    last = np.append(ranked[1:] != ranked[:-1], True)  # of the images with the same score
    found = hits[last]
    precision = found / (np.flatnonzero(last) + 1)
    return float((np.diff(found, prepend=0) * precision).sum() / positives)


@dataclass(frozen=True)
class ClassPrecision:
    """One class of a validation."""

    images: int  # that have it
    average_precision: float | None  # percent; None: no image has it


def mean(classes: Sequence[ClassPrecision]) -> float | None:
    """The mean in percent, over the classes that an image has; None: there is none."""
    known = [each.average_precision for each in classes if each.average_precision is not None]
    return sum(known) / len(known) if known else None


@dataclass
class Scores:
    """The scores of this process's images, on the host: 4 bytes for each image and class."""

    _scores: list[Tensor] = field(default_factory=list)
    _labels: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        is_counted = labels >= 0
        self._scores.append(logits[is_counted].float().cpu())
        self._labels.append(labels[is_counted].cpu())

    def by_class(self, sets: BoolArray, world: World) -> list[ClassPrecision]:
        """The precision of each class over the images of all processes, in each of them; a few classes at a time."""
        classes = sets.shape[1]
        scores = torch.cat([torch.zeros(0, classes), *self._scores])
        labels = torch.cat([torch.zeros(0, dtype=torch.int64), *self._labels])
        ours, total = _place(len(labels), world)
        numbers = _gathered(labels, ours, total, world).numpy()
        at_once = max(1, MOST_BYTES // (4 * max(1, total)))
        found = []
        for first in range(0, classes, at_once):
            own = scores[:, first : first + at_once]
            everyone = own.numpy() if world.size == 1 else _gathered(own, ours, total, world).numpy()
            found += [_precision(everyone[:, at], sets[numbers, first + at]) for at in range(everyone.shape[1])]
        return found


def _precision(scores: FloatArray, present: BoolArray) -> ClassPrecision:
    share = average_precision(scores, present)
    return ClassPrecision(int(present.sum()), None if share is None else 100.0 * share)


def _place(count: int, world: World) -> tuple[slice, int]:
    """Where this process's images are among those of all, and how many those are."""
    counts = torch.zeros(world.size, dtype=torch.int64)
    counts[world.rank] = count
    counts = world.sum(counts)
    first = int(counts[: world.rank].sum())
    return slice(first, first + count), int(counts.sum())


def gathered(own: Tensor, world: World) -> Tensor:
    """The rows of all processes, by rank."""
    return _gathered(own, *_place(len(own), world), world)


def _gathered(own: Tensor, ours: slice, total: int, world: World) -> Tensor:
    """Everyone's rows, by a sum to which each process adds zeros elsewhere, which changes no bit."""
    rows = torch.zeros(total, *own.shape[1:], dtype=own.dtype)
    rows[ours] = own
    return world.sum(rows)
