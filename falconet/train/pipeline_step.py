"""A model in pipeline stages, one per process: its step, its evaluation, and how it is placed."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from falconet.checkpoint.state import TrainState
from falconet.config import facts
from falconet.data import mixing
from falconet.data.buffers import Batch
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, IdleLoader
from falconet.data.mixing import Mix
from falconet.data.preprocessing import Normalise
from falconet.errors import ConfigError, named_option
from falconet.evaluation.evaluate import Evaluation, Measure, Observe, Tally, never, overlook, tally_of
from falconet.evaluation.loss import Loss, Score, total
from falconet.models import splits, zoo
from falconet.models.folding import fold
from falconet.models.fused.fusion import Norm
from falconet.models.splits import Stage
from falconet.numerics.loss_scale import NonFinite, Offender
from falconet.numerics.precision import Regime
from falconet.numerics.recompute import Footprint, matching, measure_footprint, recompute_stage
from falconet.parallel.collectives import Processes
from falconet.parallel.data_parallel import Replicas
from falconet.parallel.grid import Grid, SeveralStages, Stages
from falconet.parallel.pipeline import Kind, Pipeline, StagePlace, in_flight, relay
from falconet.parallel.world import World
from falconet.report.console import counted
from falconet.train.memory import GIB, Outlook, training_bytes
from falconet.train.placement import Capture, build_moving
from falconet.train.setup import Network, Setup, TrainingLoader
from falconet.train.step import Moving, Step, Update


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How labels get from the first stage to the last.

    Only the first stage reads images, so only it knows which could not be read. What the others need of a micro-batch
    is a row of numbers: its labels, and how it is mixed.
    """

    micro_batch: int  # images
    accumulation: int
    image_size: int  # pixels
    mixes: bool
    parts: int = 1  # of a micro-batch that are mixed by themselves

    @property
    def width(self) -> int:
        """Numbers in a row: labels; for mixing, the share of each image and a box of each part."""
        return 2 * self.micro_batch + 4 * self.parts if self.mixes else self.micro_batch

    def rows(self, micro_batches: Sequence[Batch], *, stages: World) -> Tensor:  # accumulation x width, float64
        """The rows of an update, on every stage; float64 holds labels, shares and boxes exactly."""
        if stages.rank > 0:
            return stages.broadcast(
                torch.empty(self.accumulation, self.width, dtype=torch.float64, device=stages.device)
            )
        assert len(micro_batches) == self.accumulation
        own = [
            torch.cat([part.double().ravel() for part in (each.labels, *(each.mix or ()))]) for each in micro_batches
        ]
        return stages.broadcast(torch.stack(own))

    def read(self, row: Tensor) -> tuple[Tensor, Mix | None]:
        """Labels and mix of one micro-batch."""
        labels = row[: self.micro_batch].long()
        if not self.mixes:
            return labels, None
        mixup, box = row[self.micro_batch : -4 * self.parts].float(), row[-4 * self.parts :].long()
        return labels, Mix(mixup, box if self.parts == 1 else box.view(self.parts, 4))


class PipelinedStep:
    """One stage of the model on this device, the others in other processes."""

    def __init__(self, moving: Moving, place: StagePlace, *, forward: "Forward", loss: Loss, kind: Kind) -> None:
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
        self._nothing = Score(nothing, nothing, nothing.long(), nothing.long())  # on stages without a loss
        self._scores: list[Score] = []

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self._moving.at(update, lr)
        self._moving.move.begin()
        self._scores = []
        # Before the first backward pass, because it may clear old gradients.
        announced = self._moving.replicas.announced([None])
        rows = self._feeding.rows(micro_batches, stages=self._stages)
        images = (torch.cat([batch.images for batch in micro_batches]), rows) if self._stages.rank == 0 else ()
        self._pipeline(images, rows)
        self._passes.end()
        list(announced)  # all backward passes are done, the last one too
        skipped = self._moving.end()
        return Update(*total(self._scores or [self._nothing]), skipped)

    def _root(self, logits: Tensor, row: Tensor) -> Tensor:
        """The root of one micro-batch's backward pass, on the last stage; computed as LocalStep does."""
        labels, mix = self._feeding.read(row[0])
        score = self._loss.scored(logits, labels, mix, side=self._feeding.image_size, images=self._images)
        self._scores.append(score._replace(loss=score.loss.detach()))
        return self._moving.move.root(score.loss)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A stage's forward pass: the first stage prepares images, the last gives logits in fp32."""

    feeding: Feeding
    normalise: Normalise
    regime: Regime
    device: torch.device

    def training(self, model: nn.Module, *, is_first: bool, is_last: bool) -> Callable[..., Any]:
        """Takes images and a row of numbers on the first stage, on others the output of the stage before."""
        run = self.stage(model, is_last=is_last)
        return (lambda images, row: run(self.prepared(images, row[0]))) if is_first else run

    def stage(self, model: nn.Module, *, is_last: bool) -> Callable[..., Any]:
        """Takes values in the model's formats."""

        def run(*values: Tensor) -> Any:
            with self.regime.computing(self.device):
                results = model(*values)
            return results.float() if is_last else results

        return run

    def prepared(self, images: Tensor, row: Tensor) -> Tensor:
        return mixing.mixed_images(self.normalise(images), self.feeding.read(row)[1])


class _Passes:
    """Calls `passed` when a backward pass has added its last gradient, which the schedule does not report."""

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
        """End an update after its last pass: a parameter without a part in the loss has left the count unfinished."""
        if self._missing != self._count:
            self._missing = self._count
            self._passed()


def non_finite_of_stages(grid: Grid, numbers: Sequence[int]) -> Callable[[NonFinite], NonFinite]:
    """What any stage found; `numbers`: the places of this stage's gradients among the whole model's."""
    places = torch.tensor(numbers or [0], device=grid.world.device)  # a stage may have none

    def everywhere(own: NonFinite) -> NonFinite:
        # One message: the first place is the largest negated one; a huge number stands for none.
        nowhere = torch.iinfo(torch.int64).max
        mine = places.index_select(0, own.first.clamp_min(0).view(1))[0]  # indexing would wait for the device
        place = torch.where(own.found, mine, nowhere)
        first = -grid.stages.max(-place)
        return NonFinite(first < nowhere, torch.where(first < nowhere, first, -1))

    return everywhere


@torch.inference_mode()
def evaluate_stages(
    model: nn.Module,
    batches: Iterable[Batch],
    place: StagePlace,
    *,
    forward: Forward,
    grid: Grid,
    stopping: Callable[[], bool] = never,
    observe: Observe = overlook,
    tally: Tally | None = None,
) -> Evaluation:
    """`evaluate` for a pipeline: the first stage's batches count, other stages get as many with any content.

    When one stage is `stopping`, all stages of its replica leave at the same batch, because each passes batches on.
    """
    world = grid.world
    folded = fold(model.eval(), forward.regime.formats(world.device)["activations"]).model
    run = forward.stage(folded, is_last=place.is_last)
    tally = tally or Tally(world)
    left, vote = False, grid.stages.vote()
    for batch in batches:
        left = vote(stopping())
        if left:
            break
        labels = grid.stages.broadcast(batch.labels.to(world.device))
        given = [forward.normalise(batch.images)] if place.is_first else []
        logits = relay(run, place, given)
        if logits is not None:
            tally.add(logits, labels)
            observe(logits, labels)
    return tally.result(left=left)


@torch.no_grad()
def boundaries(
    stages: Sequence[nn.Module], *, forward: Forward, prepare: Callable[[nn.Module], nn.Module]
) -> list[list[Tensor]]:
    """What each stage but the last passes to the next for one micro-batch, on `meta`.

    Found by running copies of the stages on two images on the device, which decides the formats of a regime;
    `prepare` makes such a copy.
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
                f"--pipeline-splits: more than activations of images would have to pass from stage {number} to stage"
                f" {number + 1}; expected a split elsewhere"
            )
        found.append([torch.empty((feeding.micro_batch, *v.shape[1:]), dtype=v.dtype, device="meta") for v in values])
    return found


MEASURED = 8  # images, at most, on which the cost of layers is measured


class StagedModel:
    """One stage of a replica in each process; only planned where there is one process."""

    uncaptured: str | None = "stages of a pipeline wait for one another"

    def __init__(self, setup: Setup, *, stages: int, stored: Sequence[str] | None = None) -> None:
        """`stored`: the splits of the restored run, which an automatic choice keeps."""
        self.setup, self._count, self._stored = setup, stages, stored

    @cached_property
    def network(self) -> Network:
        assert self.setup.unfrozen_at is None, "the rules of the options refuse it"
        return self.setup.new_network()

    @cached_property
    def splits(self) -> Sequence[str]:
        asked = self.setup.options.parallel.pipeline_splits
        if not asked[0].startswith("auto:"):
            return asked
        if self._stored and len(self._stored) == self._count - 1:
            return tuple(self._stored)
        return self.setup.grid.world.once(lambda: " ".join(self._balanced())).split()

    def _balanced(self) -> list[str]:
        """Measured in the first process, for all."""
        device, shape = self.setup.device, self._shape
        side = self.setup.images.preprocessing.image_size
        example = torch.rand(min(shape.micro_batch, MEASURED), 3, side, side, device=device)
        with self.setup.regime.computing(device), named_option("pipeline_splits"):
            return splits.balance(
                self._on_device(self.network.model),
                self._count,
                example=example.contiguous(memory_format=torch.channels_last),
            )

    @property
    def _shape(self) -> BatchShape:
        return self.setup.shape.as_run

    @cached_property
    def _stages(self) -> list[Stage]:
        with named_option("pipeline_splits"):
            return splits.split(self.network.model, self.splits)

    @cached_property
    def _boundaries(self) -> list[list[Tensor]]:
        modules = [stage.module for stage in self._stages]
        return boundaries(modules, forward=self._forward, prepare=self._on_device)

    @cached_property
    def _footprints(self) -> list[Footprint]:
        shape, side = self._shape, self.setup.images.preprocessing.image_size
        kind = self.setup.regime.formats(self.setup.device)["activations"]
        images = [torch.empty(shape.micro_batch, 3, side, side, dtype=kind, device="meta")]
        given = [images, *self._boundaries]
        stored = self._kept if self._mode == "manual" else None
        return [
            measure_footprint(stage.module, *own, stored=stored) for stage, own in zip(self._stages, given, strict=True)
        ]

    @property
    def _mode(self) -> str:
        return facts.recompute_mode(self.setup.options.numerics, self.setup.options.parallel)

    @cached_property
    def _kept(self) -> list[str]:
        """The layers whose outputs --recompute-checkpoints stores."""
        with named_option("recompute_checkpoints"):
            return matching(self.network.model, self.setup.options.numerics.recompute_checkpoints)

    def build(self) -> nn.Module:
        """This process's stage."""
        rank = self.setup.grid.stages.rank
        self.setup.whiten(self.network.model)
        footprint = self._footprints[rank]
        stored = self._kept if self._mode == "manual" else footprint.stored_layers(footprint.every)
        model = self.setup.regime.prepare(self._stages[rank].module, self.setup.device)
        if self._mode != "none":
            recompute_stage(model, stored)
        return model

    def lines(self) -> list[str]:
        options, shape = self.setup.options, self._shape
        kind = options.parallel.pipeline_schedule
        lines = [
            f"pipeline of {self._count} stages, {kind}: {counted(shape.accumulation, 'micro-batch')} per update;"
            f" each stage recomputes {_RECOMPUTED[self._mode]}",
        ]
        for number, (stage, need) in enumerate(
            zip(self._stages, self.needs(self.setup.shape.micro_batch, kind), strict=True)
        ):
            flights = in_flight(kind, stage=number, stages=self._count, micro_batches=shape.accumulation)
            lines.append(
                f"stage {number}: {stage.first} to {stage.last}, {zoo.count_parameters(stage.module):,} parameters,"
                f" {counted(flights, 'micro-batch')} in flight,"
                f" {need / GIB:.3f} GiB predicted"
            )
        if self.setup.device.type == "cuda" and any(isinstance(layer, Norm) for layer in self.network.model.modules()):
            lines.append("norms: none fused with what follows them, because the model is cut into stages")
        return lines

    def needs(self, micro_batch: int, kind: Kind) -> list[int]:
        """Predicted bytes of each stage with a micro-batch of another size, for updates of as many images."""
        options, shape = self.setup.options, self._shape
        images, micro_batch = shape.micro_batch * shape.accumulation, micro_batch * self.setup.shape.joined
        needs = []
        for number, (stage, footprint) in enumerate(zip(self._stages, self._footprints, strict=True)):
            flights = in_flight(kind, stage=number, stages=self._count, micro_batches=images // micro_batch)
            weights = training_bytes(stage.module, options, regime=self.setup.regime, replicas=shape.replicas)
            recomputed = frozenset() if self._mode == "none" else footprint.every
            activations = (flights - 1) * footprint.stored(recomputed) + footprint.peak(recomputed)
            needs.append(weights + activations * micro_batch // shape.micro_batch)
        side = self.setup.images.training.image_size
        ahead = self.setup.input.images_on_device(self.setup.images.train, shape=self.setup.shape, side=side)
        needs[0] += (self._copies * images + ahead) * 3 * side**2
        return needs

    def outlook(self, model: nn.Module | None) -> Outlook:  # noqa: ARG002, stages are measured by their footprints
        """The outlook of stages, each with its own device; on a host, all share the memory."""
        is_apart, parallel = self.setup.device.type == "cuda", self.setup.options.parallel
        accumulation, kind = self.setup.options.training.gradient_accumulation, parallel.pipeline_schedule

        def needs(micro_batch: int, kind: Kind) -> float:
            """Bytes of the largest stage; on a host, of the average one, because all have the same share."""
            stages = self.needs(micro_batch, kind)
            return max(stages) if is_apart else sum(stages) / len(stages)

        return Outlook(
            of=needs,
            schedules=(kind, "interleaved") if kind == "grouped" and accumulation >= self._count else (kind,),
            subject="a stage is " if is_apart else "a stage on average is ",
            share="" if is_apart else " for each",
            helps="expected more --pipeline-splits, fewer images per update or smaller ones",
        )

    @property
    def _copies(self) -> int:
        """The copies of images on the first stage: as loaded, joined for the schedule, and those of the next update."""
        return 3 if self.setup.device.type == "cuda" else 2

    def stages(self) -> Stages:
        own = self._stages[self.setup.grid.stages.rank].module.state_dict()
        return SeveralStages(self.setup.grid, own=own, every=self.network.model.state_dict())

    def loader(self) -> TrainingLoader:
        setup = self.setup
        if not setup.grid.is_first_stage:
            return IdleLoader(len(setup.images.train), shape=setup.shape)
        return setup.training_loader()

    def evaluator(self, observe: Observe = overlook) -> Measure:
        setup, place = self.setup, self._place
        shape = replace(self._shape, accumulation=1)
        bad = BadImages(None, note=setup.note)
        loader = setup.input.evaluation_loader(setup.images, shape=shape, bad=bad)

        def batches() -> Iterator[Batch]:
            if place.is_first:
                return loader.batches()
            nothing = Batch(torch.empty(0), torch.full((shape.micro_batch,), -1), None)
            return iter([nothing] * loader.batches_per_replica)

        def measure_stages(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
            found = evaluate_stages(
                model,
                batches(),
                place,
                forward=self._forward,
                grid=setup.grid,
                stopping=stopping,
                observe=observe,
                tally=tally_of(setup.images, setup.grid.world),
            )
            checked = setup.images.left_out() if setup.grid.world.is_first else ()
            return replace(found, left_out=(*checked, *bad.names))

        return measure_stages

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender, capture: Capture) -> Step:  # noqa: ARG002
        setup, trained = self.setup, self.network.trained
        own = [name for name, weight in state.model.named_parameters() if weight.requires_grad]
        everywhere = non_finite_of_stages(setup.grid, [trained.index(name) for name in own])
        return PipelinedStep(
            build_moving(state, setup, self.network.frozen, replicas=replicas, offender=offender, stages=everywhere),
            self._place,
            forward=self._forward,
            loss=setup.loss,
            kind=setup.options.parallel.pipeline_schedule,
        )

    @cached_property
    def _place(self) -> StagePlace:
        stages = self.setup.grid.stages
        assert isinstance(stages, Processes)
        edges = [[], *self._boundaries, self._logits]
        return StagePlace(world=stages, entering=edges[stages.rank], leaving=edges[stages.rank + 1])

    @property
    def _logits(self) -> list[Tensor]:
        return [torch.empty(self._shape.micro_batch, self.setup.images.classes, device="meta")]

    @cached_property
    def _forward(self) -> Forward:
        setup = self.setup
        feeding = Feeding(
            micro_batch=self._shape.micro_batch,
            accumulation=self._shape.accumulation,
            image_size=setup.images.preprocessing.image_size,
            mixes=mixing.mixes_or_cuts(setup.options.augmentation) and setup.images.kind != "synthetic",
            parts=setup.shape.joined,
        )
        return Forward(feeding=feeding, normalise=setup.normalise, regime=setup.regime, device=setup.device)

    def _on_device(self, module: nn.Module) -> nn.Module:
        """A copy as it will be on its device."""
        return self.setup.regime.prepare(copy.deepcopy(module), self.setup.device)


_RECOMPUTED = {
    "none": "nothing",
    "auto": "its blocks",
    "manual": "all but the outputs that --recompute-checkpoints names",
}
