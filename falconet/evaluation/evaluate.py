"""Exact evaluation: every image counted once, whatever the batch size and the number of processes."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from falconet.checkpoint.manifest import rank
from falconet.config import options
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.preprocessing import Normalise
from falconet.data.storage import BoolArray
from falconet.errors import ConfigError, DataError, Interrupted, UserError, WorldError, printable
from falconet.evaluation import average_precision
from falconet.evaluation.average_precision import ClassPrecision, Scores
from falconet.evaluation.loss import MultiLabelLoss
from falconet.models import views
from falconet.models.folding import fold
from falconet.numerics.cuda_graphs import captured
from falconet.numerics.precision import Regime
from falconet.parallel.shared_failure import FailedTogetherError, failure_of_all
from falconet.parallel.world import World
from falconet.report.console import Say, counted
from falconet.report.epochs import ACCURACY, MEAN_AVERAGE_PRECISION, Metric

TOP = 5  # classes among which the right one counts too
MOST_NAMED = 20  # images that could not be read
FAILURES = (UserError, RuntimeError, MemoryError, OSError)  # of a validation, which leave the weights intact


def never() -> bool:
    """Never stop."""
    return False


Observe = Callable[[Tensor, Tensor], None]  # takes logits (N x classes) and labels (N, -1 for rows that do not count)


def overlook(logits: Tensor, labels: Tensor) -> None:
    """Observe nothing."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """How a model did on a set of images."""

    images: int
    top1: int
    top5: int
    loss: float  # mean over the images
    metric: Metric = ACCURACY  # what `score` is
    left_out: tuple[str, ...] = ()  # images that this process could not read
    by_class: tuple[ClassPrecision, ...] = ()  # of images with several labels

    @property
    def score(self) -> float:
        """The number by which models are compared, in percent: the accuracy, or the mean average precision."""
        return self.accuracy if self.metric is ACCURACY else average_precision.mean(self.by_class) or 0.0

    @property
    def accuracy(self) -> float:
        """The accuracy in percent; of images with several labels, those for which all labels are right."""
        return 100.0 * self.top1 / self.images

    @property
    def top5_accuracy(self) -> float:
        """The accuracy in percent if the right class is among the best five."""
        return 100.0 * self.top5 / self.images

    def __repr__(self) -> str:
        return f"<{self.metric.name} {self.score:.2f} % of {counted(self.images, 'image')}, loss {self.loss:.4f}>"

    @property
    def rank(self) -> tuple[float, float]:
        """Its place among other evaluations; the highest is the best."""
        return rank(self.score, self.loss)

    def warning(self, what: str) -> str | None:
        """A warning if the loss is not finite, even where the accuracy looks fine."""
        if math.isfinite(self.loss):
            return None
        causes = "the usual causes are batch norm's running statistics and a 16-bit --precision"
        return f"warning: {what} loss is {self.loss} because the model's outputs are not finite; {causes}"


def left_out_line(names: Sequence[str]) -> str:
    """The images that no accuracy counts, by name."""
    shown = printable(", ".join(names[:MOST_NAMED]))
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return f"left out of the validation, because they cannot be read: {counted(len(names), 'image')}: {shown}{more}"


# Measures a model; raises Interrupted if the second argument becomes true before the last batch.
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
    observe: Observe = overlook,
    tally: "Tally | None" = None,
    capture: bool = True,
    note: Say = lambda _: None,
) -> Evaluation:
    """The model's accuracy over all batches of all processes; labels of -1 are ignored.

    `tally`: a new one that counts them; None: that of images with one label. `observe` is called with this process's
    batches, in the order of their images. `capture`: replay batches as graphs on CUDA; `note` gets a line if it fails.

    Raises Interrupted in all processes if one of them is `stopping` before its last batch, and FailedTogetherError in
    all of several if one fails.
    """
    model.eval()
    tally = tally or Tally(world)
    left, failed = False, None
    score = captured(lambda images: regime.run(model, normalise(images)), world.device, note=note, capture=capture)
    try:
        for batch in batches:
            left = stopping()
            if left:
                break
            images, labels = batch.images.to(world.device, non_blocking=True), batch.labels.to(world.device)
            logits = score(images)
            tally.add(logits, labels)
            observe(logits, labels)
    except FAILURES as error:
        if world.size == 1:
            raise
        failed = error  # the others learn of it at the sum, where they wait
    return tally.result(left=left, failed=failed)


class Tally:
    """Counts the images of a validation, each with one label."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._totals = torch.zeros(4, dtype=torch.float64, device=world.device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        self._totals += count(logits, labels)

    def result(self, *, left: bool, failed: Exception | None = None) -> Evaluation:
        """What all processes counted; see `summed`."""
        return summed(self._totals, self.world, left=left, failed=failed)


class MultiLabelTally(Tally):
    """The same for images with several labels, whose scores are kept until the end to rank them."""

    def __init__(self, world: World, sets: BoolArray) -> None:
        super().__init__(world)
        self._sets, self._scores = sets, Scores()
        self._loss = MultiLabelLoss(sets.shape[1], sets=torch.from_numpy(sets).to(world.device))

    def add(self, logits: Tensor, labels: Tensor) -> None:
        losses = self._loss(logits.double(), self._loss.targets(labels).double()).sum()
        right = self._loss.correct(logits, labels).double()
        self._totals += torch.stack(((labels >= 0).sum().double(), right, right, losses))
        self._scores.add(logits, labels)

    def result(self, *, left: bool, failed: Exception | None = None) -> Evaluation:
        found = super().result(left=left, failed=failed)
        by_class = self._scores.by_class(self._sets, self.world)
        if average_precision.mean(by_class) is None:
            unlabelled = DataError("validation: none of the images has a label, so there is no mean average precision")
            raise unlabelled if self.world.size == 1 else FailedTogetherError(unlabelled)
        return replace(found, metric=MEAN_AVERAGE_PRECISION, by_class=tuple(by_class))


def require_accuracy(images: Dataset, program: str) -> None:
    """Refuse photos with several labels to programs that print an accuracy; `program`: what takes them."""
    if images.label_sets is not None:
        raise ConfigError(
            f"{images.where or images.kind}: photos with several labels, for which this program has no accuracy;"
            f" expected `{program}`"
        )


def tally_of(images: Dataset, world: World) -> Tally:
    """A new tally of validation images."""
    return Tally(world) if images.label_sets is None else MultiLabelTally(world, images.label_sets)


def summed(totals: Tensor, world: World, *, left: bool, failed: Exception | None = None) -> Evaluation:
    """What all processes counted; raises Interrupted if any of them `left` before it had counted everything.

    Raises FailedTogetherError in all of them if any has `failed`.
    """
    many = world.size + 1  # more than can leave: one number tells both, and the message keeps its size
    mark = totals.new_full((1,), float(left + many * (failed is not None)))
    try:
        images, top1, top5, loss, marks = world.sum(torch.cat((totals, mark))).tolist()
    except (WorldError, RuntimeError):
        if failed is None:
            raise
        raise failed from failed.__cause__  # a broken device cannot tell the others: report what broke it
    if marks >= many:
        raise FailedTogetherError(failure_of_all(failed, world, "learning why the validation failed"))
    if marks:
        raise Interrupted
    if not images:
        unread = DataError("validation: none of the images could be read, so there is no accuracy")
        raise unread if world.size == 1 else FailedTogetherError(unread)
    return Evaluation(int(images), int(top1), int(top5), loss / images)


def count(logits: Tensor, labels: Tensor) -> Tensor:
    """Images, correct top-1, correct top-5, and the sum of losses; N x classes, N -> 4."""
    best = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    losses = F.cross_entropy(logits.double(), labels, ignore_index=-1, reduction="sum")
    return torch.stack(((labels >= 0).sum().double(), hits[:, 0].sum().double(), hits.sum().double(), losses))


def evaluator(
    images: Dataset,
    data: options.Data,
    *,
    regime: Regime,
    world: World,
    note: Say,
    observe: Observe = overlook,
    tta: views.Kind = "none",
    capture: bool = True,
) -> Measure:
    """Measures a model on the validation images of `images`; `capture`: replay batches as graphs on CUDA."""
    batch = data.validation_batch
    shape = BatchShape(micro_batch=batch, replicas=world.size, replica=world.rank)
    bad = BadImages(None, note=note)
    loader = Input(data=data, regime=regime, world=world, note=note).evaluation_loader(images, shape=shape, bad=bad)
    checked = images.left_out() if world.is_first else ()

    def measure(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
        # As predictions are made, so that both are equal to the bit; the weights are those of this moment.
        folding = fold(model.eval(), regime.formats(world.device)["activations"])
        found = evaluate(
            views.averaged(folding.model, tta),
            loader.batches(),
            normalise=images.normalise(world.device, dtype=folding.dtype, channels=folding.channels),
            regime=regime,
            world=world,
            stopping=stopping,
            observe=observe,
            tally=tally_of(images, world),
            capture=capture,
            note=note,
        )
        return replace(found, left_out=(*checked, *bad.names))

    return measure
