"""One update of the weights of a pipeline: the second kind of step, and evaluation over stages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from falconet.data import mixing
from falconet.data.loader import Batch
from falconet.data.mixing import Mix
from falconet.data.preprocessing import Normalise
from falconet.errors import ConfigError
from falconet.numerics.precision import Regime
from falconet.numerics.scaling import NonFinite
from falconet.parallel.grid import Grid
from falconet.parallel.pipeline import Kind, Pipeline, Place, relay
from falconet.parallel.world import World
from falconet.train.evaluate import Evaluation, count, never, summed
from falconet.train.loss import Loss
from falconet.train.moving import Moving
from falconet.train.step import Update


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How images and labels come to the first stage, and labels from there to the last one.

    Only the first stage reads images; it alone knows which of them could not be read. What the others need of a
    micro-batch is a row of numbers: its labels, and how it is mixed.
    """

    micro_batch: int  # images
    accumulation: int
    image_size: int  # pixels
    mixes: bool

    @property
    def width(self) -> int:
        """Numbers in a row: labels, and of mixing the share of each image and a box."""
        return 2 * self.micro_batch + 4 if self.mixes else self.micro_batch

    def rows(self, micro_batches: Sequence[Batch], *, stages: World) -> Tensor:  # accumulation x width, float64
        """The rows of an update, on every stage; float64 holds labels, shares and boxes exactly."""
        if stages.rank > 0:
            return stages.broadcast(
                torch.empty(self.accumulation, self.width, dtype=torch.float64, device=stages.device)
            )
        assert len(micro_batches) == self.accumulation
        own = [torch.cat([part.double() for part in (each.labels, *(each.mix or ()))]) for each in micro_batches]
        return stages.broadcast(torch.stack(own))

    def read(self, row: Tensor) -> tuple[Tensor, Mix | None]:
        """Labels and mix of one micro-batch."""
        labels = row[: self.micro_batch].long()
        if not self.mixes:
            return labels, None
        mixup, box = row[self.micro_batch : -4].float(), row[-4:].long()
        return labels, Mix(mixup, box)


class PipelinedStep:
    """One stage of the model on this device, the others on those of other processes."""

    def __init__(self, moving: Moving, place: Place, *, forward: "Forward", loss: Loss, kind: Kind) -> None:
        self._moving, model = moving, moving.model
        self._stages, self._feeding, self._loss = place.world, forward.feeding, loss
        self._images = forward.feeding.micro_batch * forward.feeding.accumulation
        self._pipeline = Pipeline(
            forward.training(model, is_first=place.is_first, is_last=place.is_last),
            place,
            kind=kind,
            micro_batches=forward.feeding.accumulation,
            loss=self._root,
        )
        self._passes = _Passes([p for p in model.parameters() if p.requires_grad], moving.move.passed)
        nothing = torch.zeros((), device=place.world.device)
        self._nothing = (nothing, nothing.long(), nothing.long())  # what stages without a loss say of an update
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self._moving.begin(update)
        self._parts = []
        announced = self._moving.replicas.announced(
            [None]
        )  # before the first backward pass: it may forget old gradients
        rows = self._feeding.rows(micro_batches, stages=self._stages)
        images = (torch.cat([batch.images for batch in micro_batches]), rows) if self._stages.rank == 0 else ()
        self._pipeline(images, rows)
        self._passes.end()
        list(announced)  # all backward passes are over, the last one too
        skipped = self._moving.end(update, lr)
        parts = self._parts or [self._nothing]
        loss, correct, counted = (torch.stack(values).sum(0) for values in zip(*parts, strict=True))
        return Update(loss, correct, counted, skipped)

    def _root(self, logits: Tensor, row: Tensor) -> Tensor:
        """Of one micro-batch, on the last stage: as LocalStep computes it."""
        labels, mix = self._feeding.read(row[0])
        side = self._feeding.image_size
        targets = mixing.mixed_targets(labels, mix, classes=self._loss.classes, side=side)
        loss = self._loss(logits, targets).sum() / self._images
        self._parts.append((loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()))
        return self._moving.move.root(loss)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A stage's forward pass: images are prepared by the first stage, logits are fp32 from the last."""

    feeding: Feeding
    normalise: Normalise
    regime: Regime
    device: torch.device

    def training(self, model: nn.Module, *, is_first: bool, is_last: bool) -> Callable[..., Any]:
        """Takes images and a row of numbers on the first stage, elsewhere what the stage before gives."""
        run = self.stage(model, is_last=is_last)
        return (lambda images, row: run(self.prepared(images, row[0]))) if is_first else run

    def stage(self, model: nn.Module, *, is_last: bool) -> Callable[..., Any]:
        """Takes values in the model's own formats."""

        def run(*values: Tensor) -> Any:
            with self.regime.computing(self.device):
                results = model(*values)
            return results.float() if is_last else results

        return run

    def prepared(self, images: Tensor, row: Tensor) -> Tensor:
        return mixing.mixed_images(self.normalise(images), self.feeding.read(row)[1])


class _Passes:
    """Says when a backward pass has added its last gradient: the schedule does not."""

    def __init__(self, trained: Sequence[nn.Parameter], passed: Callable[[], None]) -> None:
        self._missing, self._count, self._passed = len(trained), len(trained), passed
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, _parameter: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._missing = self._count
            self._passed()

    def end(self) -> None:
        """The update's passes are over; a parameter that had no part in the loss has let the count run behind."""
        if self._missing != self._count:
            self._missing = self._count
            self._passed()


def non_finite_of_stages(grid: Grid, numbers: Sequence[int]) -> Callable[[NonFinite], NonFinite]:
    """What any stage found; `numbers`: the places of this stage's gradients among all of the model's."""
    places = torch.tensor(numbers or [0], device=grid.world.device)  # a stage without any finds nothing

    def everywhere(own: NonFinite) -> NonFinite:
        # One message: the first place of all is the largest negated one, and a large number where there is none.
        nowhere = torch.iinfo(torch.int64).max
        mine = places.index_select(0, own.first.clamp_min(0).view(1))[0]  # places[...] would wait for the device
        place = torch.where(own.found, mine, nowhere)
        first = -grid.stages.max(-place)
        return NonFinite(first < nowhere, torch.where(first < nowhere, first, -1))

    return everywhere


@torch.inference_mode()
def evaluate_stages(
    model: nn.Module,
    batches: Iterable[Batch],
    place: Place,
    *,
    forward: Forward,
    grid: Grid,
    stopping: Callable[[], bool] = never,
) -> Evaluation:
    """As `evaluate`: the batches are the first stage's, the other stages are given as many of any content.

    Where one stage is `stopping`, all of its replica leave at the same batch, because each hands its batches on.
    """
    model.eval()
    world = grid.world
    run = forward.stage(model, is_last=place.is_last)
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    left, vote = False, grid.stages.vote()
    for batch in batches:
        left = vote(stopping())
        if left:
            break
        labels = grid.stages.broadcast(batch.labels.to(world.device))
        given = [forward.normalise(batch.images)] if place.is_first else []
        logits = relay(run, place, given)
        if logits is not None:
            totals += count(logits, labels)
    return summed(totals, world, left=left)


@torch.no_grad()
def boundaries(
    stages: Sequence[nn.Module], *, forward: Forward, prepare: Callable[[nn.Module], nn.Module]
) -> list[list[Tensor]]:
    """What each stage but the last gives to the next, of one micro-batch, on `meta`.

    Found by running copies of the stages on two images on the device itself, because only there a regime's formats
    are decided; `prepare` makes such a copy.
    """
    side, feeding, few = forward.feeding.image_size, forward.feeding, 2
    values: tuple[Tensor, ...] = (torch.zeros(few, 3, side, side, device=forward.device),)
    values = tuple(value.contiguous(memory_format=torch.channels_last) for value in values)
    found = []
    for number, stage in enumerate(stages[:-1]):
        with forward.regime.computing(forward.device):
            values = prepare(stage).eval()(*values)
        if not all(isinstance(value, Tensor) and value.ndim and len(value) == few for value in values):
            raise ConfigError(
                f"--pipeline-splits: from stage {number} to stage {number + 1} more than activations of images would"
                " have to pass; wanted a split elsewhere"
            )
        found.append([torch.empty((feeding.micro_batch, *v.shape[1:]), dtype=v.dtype, device="meta") for v in values])
    return found
