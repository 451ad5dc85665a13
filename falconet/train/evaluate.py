"""Exact evaluation: every image once."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet import writing
from falconet.config import commands, options
from falconet.config.fields import value_or
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.preprocessing import Normalise
from falconet.errors import ConfigError, DataError, Interrupted, LinkError
from falconet.numerics.precision import Regime
from falconet.parallel.world import World
from falconet.report.console import Say


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


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Batch], *, normalise: Normalise, regime: Regime) -> None:
    """Replace every running mean and variance by the plain average over the batches."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's word for a cumulative average
        layer.train()
    for batch in batches:
        regime.run(model, normalise(batch.images))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


def validation_batch(options: commands.TrainOptions) -> int:
    """Images of one batch of a validation on one replica; stages hand on batches of one size alone."""
    asked, micro_batch = options.data.validation_batch_size, options.data.micro_batch_size
    return micro_batch if options.parallel.pipeline_splits else value_or(asked, micro_batch)


def evaluator(images: Dataset, data: options.Data, *, regime: Regime, world: World, note: Say) -> Measure:
    """Measures a model on the validation images."""
    batch = value_or(data.validation_batch_size, data.micro_batch_size)
    shape = BatchShape(micro_batch=batch, replicas=world.size, replica=world.rank)
    loader = Input(data=data, regime=regime, world=world, note=note).evaluation_loader(images, shape=shape)
    normalise = images.normalise(world.device)

    def measure(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
        return evaluate(model, loader.batches(), normalise=normalise, regime=regime, world=world, stopping=stopping)

    return measure


ACCURACIES_FILE = "validation.csv"
ACCURACY_COLUMNS = ("checkpoint", "epoch", "top1", "top5", "loss", "images", "best")
AccuracyRow = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What was measured of one model."""

    name: str  # of its checkpoint
    epoch: str  # whole epochs behind it, and images of the next one; empty: not known
    found: Evaluation


def tabulate_accuracies(accuracies: Sequence[Accuracy]) -> list[AccuracyRow]:
    """One row a model, the best one marked; by its exact accuracy, not by the two places shown."""
    best = max(accuracies, key=lambda each: (each.found.accuracy, each.found.top5_accuracy))
    return [
        {
            "checkpoint": each.name,
            "epoch": each.epoch,
            "top1": f"{each.found.accuracy:.2f}",
            "top5": f"{each.found.top5_accuracy:.2f}",
            "loss": f"{each.found.loss:.4f}",
            "images": str(each.found.images),
            "best": "best" if each is best else "",
        }
        for each in accuracies
    ]


def show_accuracies(rows: Sequence[AccuracyRow], say: Say) -> None:
    """A table in plain text, and the line that tools of the originals read."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in ACCURACY_COLUMNS}
    for cells in ({name: name for name in ACCURACY_COLUMNS}, *rows):
        say("  ".join(cells[name].ljust(widths[name]) for name in ACCURACY_COLUMNS).rstrip())
    for row in rows:
        say(f"Accuracy on test set: {row['top1']}%")


def write_accuracies(rows: Sequence[AccuracyRow], path: Path, *, option: str, named: bool = False) -> None:
    """`option`: the one to change where it cannot be written; `named`: the user named the file itself, link or not."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ACCURACY_COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    try:
        if named:
            path.write_text(file.getvalue(), encoding="utf-8", newline="")
        else:
            writing.replace(path.parent, path.name, file.getvalue())
    except LinkError as error:
        raise LinkError(error.path, option) from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from error
