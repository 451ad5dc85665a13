"""Exact evaluation, every image counted once; the validations of a run; tables of accuracies."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet import writing
from falconet.checkpoint import format
from falconet.checkpoint.manifest import rank
from falconet.checkpoint.state import TrainState
from falconet.config import commands, options
from falconet.config.fields import value_or
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.preprocessing import Normalise
from falconet.data.storage import BoolArray
from falconet.errors import (
    ConfigError,
    DataError,
    Interrupted,
    LinkError,
    SaidElsewhereError,
    UserError,
    WorldError,
    memory_shortage,
    printable,
)
from falconet.exits import FAILED
from falconet.models import views
from falconet.models.batch_statistics import misfit
from falconet.models.folding import fold
from falconet.numerics.cuda_graphs import captured
from falconet.numerics.precision import Regime
from falconet.parallel.world import World
from falconet.report.console import Say, counted
from falconet.report.epochs import ACCURACY, MEAN_AVERAGE_PRECISION, Metric
from falconet.report.styles import Origin, Validated
from falconet.train import average_precision
from falconet.train.average_precision import ClassPrecision, Scores
from falconet.train.log import Output
from falconet.train.loss import MultiLabelLoss
from falconet.train.plan import Plan

AVERAGED = "validation_averaged"  # the group of what averages of checkpoints reached, in metrics.jsonl
TOP = 5  # classes among which the right one counts too
STATISTICS_IMAGES = 64  # enough to compare statistics with
MOST_NAMED = 20  # images that could not be read
FAILURES = (UserError, RuntimeError, MemoryError, OSError)  # of a validation, which leave the weights intact


def never() -> bool:
    """Never stop."""
    return False


Observe = Callable[[Tensor, Tensor], None]  # takes logits (N x classes) and labels (N, -1 for rows that do not count)


def overlook(logits: Tensor, labels: Tensor) -> None:
    """Observe nothing."""


class FailedTogetherError(Exception):
    """A validation that failed in one of several processes and ended in all of them, so that they can still save.

    `error` is what this process should raise after that.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


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
        """By which models are compared, in percent: the accuracy, or the mean average precision."""
        return self.accuracy if self.metric is ACCURACY else average_precision.mean(self.by_class) or 0.0

    @property
    def accuracy(self) -> float:
        """In percent; of images with several labels, those for which all labels are right."""
        return 100.0 * self.top1 / self.images

    @property
    def top5_accuracy(self) -> float:
        """In percent."""
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
        raise FailedTogetherError(_failure_of_all(failed, world))
    if marks:
        raise Interrupted
    if not images:
        unread = DataError("validation: none of the images could be read, so there is no accuracy")
        raise unread if world.size == 1 else FailedTogetherError(unread)
    return Evaluation(int(images), int(top1), int(top5), loss / images)


def _failure_of_all(own: Exception | None, world: World) -> Exception:
    """This process's own failure, or one with the same message as another's, which the first process then reports."""
    texts = world.texts("" if own is None else _to_json(own), "learning why the validation failed")
    return own or _from_json(next(filter(None, texts)))


def _to_json(error: Exception) -> str:
    is_short = memory_shortage(error) is not None
    code = error.code if isinstance(error, UserError) else None
    return json.dumps({"text": str(error), "code": code, "is_short": is_short})


def _from_json(text: str) -> Exception:
    told = json.loads(text)
    if told["is_short"]:
        return MemoryError(told["text"])
    if told["code"] is None:  # a traceback, which one process prints
        said = SaidElsewhereError(told["text"])
        said.code = FAILED
        return said
    error = UserError(told["text"])
    error.code = told["code"]
    return error


def count(logits: Tensor, labels: Tensor) -> Tensor:
    """Images, correct top-1, correct top-5, and the sum of losses; N x classes, N -> 4."""
    best = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    losses = F.cross_entropy(logits.double(), labels, ignore_index=-1, reduction="sum")
    return torch.stack(((labels >= 0).sum().double(), hits[:, 0].sum().double(), hits.sum().double(), losses))


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Batch], *, normalise: Normalise, regime: Regime) -> None:
    """Replace every running mean and variance with the plain average over the batches."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's way to ask for a cumulative average
        layer.train()
    for batch in batches:
        regime.run(model, normalise(batch.images))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


def validation_batch(options: commands.TrainOptions) -> int:
    """Images per validation batch on one replica; pipeline stages pass on batches of one size only."""
    asked, micro_batch = options.data.validation_batch_size, options.data.micro_batch
    return micro_batch if options.parallel.pipeline_splits else value_or(asked, micro_batch)


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
    batch = value_or(data.validation_batch_size, data.micro_batch)
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


def statistics_warning(
    model: nn.Module, images: Dataset, data: options.Data, *, regime: Regime, world: World
) -> str | None:
    """A warning if batch norm's running statistics do not fit one batch of the validation images."""
    if data.data in ("generated", "synthetic"):
        return None
    batch = min(value_or(data.validation_batch_size, data.micro_batch), STATISTICS_IMAGES)
    quiet = BadImages(None, note=lambda _: None)
    reading = Input(data=data, regime=regime, world=world, note=lambda _: None)
    loader = reading.evaluation_loader(images, shape=BatchShape(micro_batch=batch), bad=quiet)
    first = next(iter(loader.batches()))
    pixels = first.images.to(world.device)[first.labels.to(world.device) >= 0]  # without padding
    normalised = images.normalise(world.device)(pixels)
    found = misfit(model, lambda: regime.run(model, normalised)) if len(pixels) else None
    if found is None:
        return None
    pixels_advice = "check --normalization, --pixel-mean and --pixel-deviation"
    return f"warning: {found.text}; {f'try --shortcut-padding {found.side}' if found.side else pixels_advice}"


Which = Literal["model", "ema", "other"]  # the trained weights, their moving average, or those of a checkpoint


class Record(Protocol):
    """Keeps what validations answer, one model after the other."""

    def begin(self, which: Which) -> None: ...  # the next batches are this model's
    def add(self, logits: Tensor, labels: Tensor) -> None: ...  # an Observe
    def best(self, which: Which, found: Evaluation, validated: Validated) -> None: ...  # better than all before it


class NoRecord:
    """Keeps nothing."""

    def begin(self, which: Which) -> None: ...
    def add(self, logits: Tensor, labels: Tensor) -> None: ...
    def best(self, which: Which, found: Evaluation, validated: Validated) -> None: ...


@dataclass(kw_only=True)
class Validation:
    """Measures the model of a run when the loop asks for it, and reports what it finds."""

    plan: Plan
    state: TrainState
    output: Output
    measure: Measure
    batch: int  # images per batch on one replica
    checkpoint_name: Callable[[], str]  # the name of a checkpoint saved now
    stopping: Callable[[], bool] = never  # whether this process was asked to stop
    left_out: tuple[str, ...] = ()  # images that this process could not read so far
    metric: Metric = ACCURACY  # what was measured
    record: Record = field(default_factory=NoRecord)
    seconds: float = 0.0  # of all validations in this process, moving averages included

    def run(self) -> bool:
        """Whether it was completed; a run that is asked to stop meanwhile leaves it, with nothing written."""
        stopwatch, update = self.output.stopwatch, self.state.progress.update
        try:
            with stopwatch.standing():
                begun = stopwatch.clock()
                self.record.begin("model")
                found = self.measure(self.state.model, self._glancing)
                seconds = stopwatch.clock() - begun
                self.record.begin("ema")
                averaged = self.measure(self.state.ema.model, self._glancing) if self.state.ema else None
                self.seconds += stopwatch.clock() - begun
        except Interrupted:
            return False
        self.output.screen.hide()
        self.left_out, self.metric = found.left_out, found.metric
        self.output.measurements.write(
            update,
            _named("validation", found)
            | {"validation/seconds": seconds}
            | (_named("validation_ema", averaged) if averaged else {}),
        )
        average = averaged.score if averaged else None
        better = max((found, averaged), key=lambda each: each.rank) if averaged else found
        is_best = self.output.measurements.score(update, better.score, better.loss, epoch=self.plan.epoch_at(update))
        validated = self._validated(found, seconds, self.checkpoint_name())
        self.output.style.validated(replace(validated, average=average, is_best=is_best))
        if is_best:
            with stopwatch.standing():
                self.record.best("model" if better is found else "ema", better, validated)
        self._warn(found, "validation")
        if averaged:
            self._warn(averaged, "the moving average's validation")
        return True

    def _glancing(self) -> bool:
        """Called at every batch."""
        self.output.screen.glance("validating")
        return self.stopping()

    def average(self, name: str, *, suffix: str, origin: Origin) -> None:
        """Measure the model, which has averaged weights; `suffix` distinguishes further averages."""
        begun = self.output.stopwatch.clock()
        self.record.begin("other")
        found = self.measure(self.state.model, never)
        self._warn(found, "the averaged checkpoints' validation")
        group = f"{AVERAGED}_{suffix}" if suffix else AVERAGED
        self.output.measurements.write(self.state.progress.update, _named(group, found))
        seconds = self.output.stopwatch.clock() - begun
        validated = replace(self._validated(found, seconds, name), origin=origin)
        self.output.style.averaged(validated, which=suffix)

    def other(
        self, name: str, progress: format.Progress, report: Callable[[Validated], None], *, origin: Origin
    ) -> Evaluation:
        """Measure the model, which has the weights of another checkpoint, and `report` it."""
        begun = self.output.stopwatch.clock()
        self.record.begin("other")
        found = self.measure(self.state.model, self.stopping)
        self._warn(found, f"the validation of {name}")
        validated = self._validated(found, self.output.stopwatch.clock() - begun, name)
        report(replace(validated, update=progress.update, epoch=progress.epochs, origin=origin))
        return found

    def _warn(self, found: Evaluation, what: str) -> None:
        warning = found.warning(what)
        if warning:
            self.output.screen.line(warning)

    def _validated(self, found: Evaluation, seconds: float, name: str) -> Validated:
        update = self.state.progress.update
        return Validated(
            name=name,
            update=update,
            epoch=self.plan.epoch_at(update),
            accuracy=found.score,
            loss=found.loss,
            images=found.images,
            seconds=seconds,
            batch=self.batch * self.plan.replicas,
        )


def _named(group: str, found: Evaluation) -> dict[str, float]:
    is_one = found.metric is ACCURACY
    return {
        f"{group}/{found.metric.name}": found.score,
        **({f"{group}/top5_accuracy": found.top5_accuracy} if is_one else {f"{group}/exact": found.accuracy}),
        f"{group}/loss": found.loss,
        f"{group}/images": found.images,
    }


ACCURACIES_FILE = "validation.csv"
AccuracyRow = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One row of a table: a measured model."""

    name: str  # of its checkpoint
    epoch: str  # epochs trained, and images of the next one; empty: unknown
    found: Evaluation
    classes: int

    def cells(self) -> AccuracyRow:
        """What is measured, in percent."""
        found = self.found
        if found.metric is not ACCURACY:
            return {found.metric.name: f"{found.score:.2f}", found.metric.training: f"{found.accuracy:.2f}"}
        # Of five classes or fewer, the top 5 are always right.
        return {"top1": f"{found.accuracy:.2f}", "top5": f"{found.top5_accuracy:.2f}" if self.classes > TOP else ""}


def tabulate_accuracies(accuracies: Sequence[Accuracy]) -> list[AccuracyRow]:
    """One row per model; the best is marked by its exact score, not by the two decimals shown, then by its loss."""
    best = max(accuracies, key=lambda each: each.found.rank)
    return [
        {
            "checkpoint": each.name,
            "epoch": each.epoch,
            **each.cells(),
            "loss": f"{each.found.loss:.4f}",
            "images": str(each.found.images),
            "best": "best" if each is best else "",
        }
        for each in accuracies
    ]


def show_accuracies(rows: Sequence[AccuracyRow], say: Say) -> None:
    """Print a table in plain text, without empty columns; one row alone is not called the best."""
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    shown = [name for name in shown if name != "best" or len(rows) > 1]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    for cells in ({name: name for name in shown}, *rows):
        say("  ".join(cells[name].ljust(widths[name]) for name in shown).rstrip())


def write_accuracies(rows: Sequence[AccuracyRow], path: Path, *, option: str, named: bool = False) -> None:
    """Write the table as CSV; see `write_result`."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_result(file.getvalue(), path, option=option, named=named)


def write_result(text: str, path: Path, *, option: str, named: bool) -> None:
    """`option`: the one to change if writing fails; `named`: the user named the file, which may be a link."""
    try:
        if named:
            path.write_bytes(writing.coded(text))
        else:
            writing.replace(path.parent, path.name, text)
    except LinkError as error:
        raise LinkError(error.path, option) from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from error
