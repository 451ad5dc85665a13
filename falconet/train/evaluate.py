"""Exact evaluation: every image once."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from falconet.data.loader import Batch
from falconet.data.preprocessing import Normalise
from falconet.errors import DataError, Interrupted
from falconet.numerics.precision import Regime
from falconet.parallel.world import World


def never() -> bool:
    """A wish to stop that nobody has."""
    return False


@dataclass(frozen=True)
class Evaluation:
    """How a model did on a set of images."""

    images: int
    top1: int
    top5: int
    loss: float  # mean over the images

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100.0 * self.top1 / self.images

    @property
    def top5_accuracy(self) -> float:
        """In percent."""
        return 100.0 * self.top5 / self.images

    def warning(self, what: str) -> str | None:
        """A line where the loss is no number, though the accuracy of other images may look well."""
        if math.isfinite(self.loss):
            return None
        causes = "running statistics of batch norm, or a 16-bit --precision, are the usual causes"
        return f"warning: {what} loss is {self.loss}, the model gives values that are not finite; {causes}"


# Measures a model; Interrupted is raised where the second argument becomes true before the last batch.
Measure = Callable[[nn.Module, Callable[[], bool]], Evaluation]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    normalise: Normalise,
    regime: Regime,
    world: World,
    stopping: Callable[[], bool] = never,
) -> Evaluation:
    """The model's accuracy over all batches of all processes; labels of -1 count for nothing.

    Interrupted is raised in all processes where one of them is `stopping` before its last batch.
    """
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    left = False
    for batch in batches:
        left = stopping()
        if left:
            break
        images, labels = batch.images.to(world.device, non_blocking=True), batch.labels.to(world.device)
        totals += count(regime.run(model, normalise(images)), labels)
    return summed(totals, world, left=left)


def summed(totals: Tensor, world: World, *, left: bool) -> Evaluation:
    """What all processes counted; Interrupted where one has `left` before it had counted everything."""
    *counted, somebody_left = world.sum(torch.cat((totals, totals.new_full((1,), float(left))))).tolist()
    if somebody_left:
        raise Interrupted
    return _evaluation(*counted)


def _evaluation(images_seen: float, top1: float, top5: float, loss: float) -> Evaluation:
    if not images_seen:
        raise DataError("validation: not one image could be read, so there is no accuracy to tell")
    return Evaluation(int(images_seen), int(top1), int(top5), loss / images_seen)


def count(logits: Tensor, labels: Tensor) -> Tensor:
    """Images, right at the first place, right among five, and the sum of losses; N x classes, N -> 4."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    losses = F.cross_entropy(logits.double(), labels, ignore_index=-1, reduction="sum")
    return torch.stack(((labels >= 0).sum().double(), hits[:, 0].sum().double(), hits.sum().double(), losses))
