"""A model in stages: one a process, each reading, computing and evaluating its part."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from falconet.checkpoint.state import TrainState
from falconet.config import rules
from falconet.data.feed import singly
from falconet.data.loader import Batch, BatchShape, IdleLoader, Loader, SyntheticLoader
from falconet.models import splits, zoo
from falconet.models.splits import Stage
from falconet.numerics.footprint import Footprint, measure
from falconet.numerics.recompute import matching, recompute_stage
from falconet.numerics.scaling import Offender
from falconet.parallel.pipeline import Place, in_flight
from falconet.parallel.processes import Processes
from falconet.parallel.replicas import Replicas
from falconet.parallel.stages import SeveralStages, Stages
from falconet.report.words import counted
from falconet.train.evaluate import Evaluation, Measure
from falconet.train.pipelined import (
    Feeding,
    Forward,
    PipelinedStep,
    boundaries,
    evaluate_stages,
    non_finite_of_stages,
)
from falconet.wiring import loading, numbers, sharding
from falconet.wiring.placing import Setup, moving

MEASURED = 8  # images on which the cost of layers is measured, at the most


class StagedModel:
    """One stage of a replica a process; without processes, what a plan says of them."""

    def __init__(self, setup: Setup, *, stages: int, stored: Sequence[str] | None = None) -> None:
        """`stored`: the splits of the restored run, which an automatic choice keeps."""
        self._setup, self._count, self._stored = setup, stages, stored

    @cached_property
    def _whole(self) -> nn.Module:
        return self._setup.built()

    @cached_property
    def splits(self) -> Sequence[str]:
        asked = self._setup.options.parallel.pipeline_splits
        if not asked[0].startswith("auto:"):
            return asked
        if self._stored and len(self._stored) == self._count - 1:
            return tuple(self._stored)
        return self._setup.grid.world.once(lambda: " ".join(self._balanced())).split()

    def _balanced(self) -> list[str]:
        """Measured on the first process, and the same for all of them."""
        device, shape = self._setup.grid.world.device, self._setup.shape
        side = self._setup.images.preprocessing.image_size
        example = torch.rand(min(shape.micro_batch, MEASURED), 3, side, side, device=device)
        with self._setup.regime.computing(device):
            return splits.balance(
                self._on_device(self._whole),
                self._count,
                example=example.contiguous(memory_format=torch.channels_last),
            )

    @cached_property
    def _stages(self) -> list[Stage]:
        return splits.split(self._whole, self.splits)

    @cached_property
    def _boundaries(self) -> list[list[Tensor]]:
        modules = [stage.module for stage in self._stages]
        return boundaries(modules, forward=self._forward, prepare=self._on_device)

    @cached_property
    def _footprints(self) -> list[Footprint]:
        shape, side = self._setup.shape, self._setup.images.preprocessing.image_size
        kind = self._setup.regime.formats(self._setup.grid.world.device)["activations"]
        images = [torch.empty(shape.micro_batch, 3, side, side, dtype=kind, device="meta")]
        given = [images, *self._boundaries]
        stored = self._kept if self._mode == "manual" else None
        return [measure(stage.module, *own, stored=stored) for stage, own in zip(self._stages, given, strict=True)]

    @property
    def _mode(self) -> str:
        return rules.recompute_mode(self._setup.options.numerics, self._setup.options.parallel)

    @cached_property
    def _kept(self) -> list[str]:
        """The layers that --recompute-checkpoints names."""
        return matching(self._whole, self._setup.options.numerics.recompute_checkpoints)

    @cached_property
    def model(self) -> nn.Module:
        """Our stage, on its device."""
        rank = self._setup.grid.stages.rank
        footprint = self._footprints[rank]
        stored = self._kept if self._mode == "manual" else footprint.stored_layers(footprint.every)
        model = self._setup.regime.prepare(self._stages[rank].module, self._setup.grid.world.device)
        if self._mode != "none":
            recompute_stage(model, stored)
        return model

    @property
    def parameters(self) -> int:
        return zoo.count_parameters(self._whole)

    @cached_property
    def weights(self) -> Sequence[str]:
        return [name for name, _ in self._whole.named_parameters()]

    @cached_property
    def trained(self) -> Sequence[str]:
        return [name for name, weight in self._whole.named_parameters() if weight.requires_grad]

    def lines(self) -> list[str]:
        options, shape = self._setup.options, self._setup.shape
        kind = options.parallel.pipeline_schedule
        lines = [
            *self._setup.beginning(self._whole),
            f"pipeline of {self._count} stages, {kind}: {counted(shape.accumulation, 'micro-batch')} an update;"
            f" each stage recomputes {_RECOMPUTED[self._mode]}",
        ]
        for number, (stage, footprint) in enumerate(zip(self._stages, self._footprints, strict=True)):
            flights = in_flight(kind, stage=number, stages=self._count, micro_batches=shape.accumulation)
            weights = numbers.training_bytes(stage.module, options, regime=self._setup.regime, replicas=shape.replicas)
            recomputed = frozenset() if self._mode == "none" else footprint.every
            activations = (flights - 1) * footprint.stored(recomputed) + footprint.peak(recomputed)
            lines.append(
                f"stage {number}: {stage.first} to {stage.last}, {zoo.count_parameters(stage.module):,} parameters,"
                f" {counted(flights, 'micro-batch')} in flight,"
                f" {(weights + activations) / numbers.GIB:.3f} GiB predicted"
            )
        return lines

    def stages(self) -> Stages:
        return SeveralStages(self._setup.grid, own=self.model.state_dict(), every=self._whole.state_dict())

    def numbers(self) -> Mapping[str, int]:
        return sharding.numbered(self._whole)

    def loader(self) -> Loader | SyntheticLoader | IdleLoader:
        setup = self._setup
        if not setup.grid.is_first_stage:
            return IdleLoader(len(setup.images.splits.train), shape=setup.shape)
        return loading.training_loader(
            setup.images, setup.options, shape=setup.shape, world=setup.grid.world, note=setup.note
        )

    def evaluator(self) -> Measure:
        setup, place = self._setup, self._place
        shape = BatchShape(
            micro_batch=setup.shape.micro_batch, replicas=setup.shape.replicas, replica=setup.shape.replica
        )
        device = setup.grid.world.device
        loader = loading.evaluation_loader(
            setup.images, setup.options.data, shape=shape, regime=setup.regime, world=setup.grid.world, note=setup.note
        )

        def batches() -> Iterator[Batch]:
            if place.is_first:
                return singly(loader.batches(), device=device, ring=loader.ring)
            nothing = Batch(torch.empty(0), torch.full((shape.micro_batch,), -1), None)
            return iter([nothing] * loader.batches_per_replica)

        def measure_stages(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
            return evaluate_stages(model, batches(), place, forward=self._forward, grid=setup.grid, stopping=stopping)

        return measure_stages

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> PipelinedStep:
        setup = self._setup
        own = [name for name, weight in state.model.named_parameters() if weight.requires_grad]
        everywhere = non_finite_of_stages(setup.grid, [self.trained.index(name) for name in own])
        return PipelinedStep(
            moving(state, setup, replicas=replicas, offender=offender, stages=everywhere),
            self._place,
            forward=self._forward,
            loss=setup.loss,
            kind=setup.options.parallel.pipeline_schedule,
        )

    @cached_property
    def _place(self) -> Place:
        stages = self._setup.grid.stages
        assert isinstance(stages, Processes)
        edges = [[], *self._boundaries, self._logits]
        return Place(world=stages, entering=edges[stages.rank], leaving=edges[stages.rank + 1])

    @property
    def _logits(self) -> list[Tensor]:
        return [torch.empty(self._setup.shape.micro_batch, self._setup.images.classes, device="meta")]

    @cached_property
    def _forward(self) -> Forward:
        setup = self._setup
        feeding = Feeding(
            micro_batch=setup.shape.micro_batch,
            accumulation=setup.shape.accumulation,
            image_size=setup.images.preprocessing.image_size,
            mixes=loading.mixing_of(setup.options.augmentation) is not None and setup.images.kind != "synthetic",
        )
        device = setup.grid.world.device
        return Forward(feeding=feeding, normalise=setup.normalise, regime=setup.regime, device=device)

    def _on_device(self, module: nn.Module) -> nn.Module:
        """A copy as it will be on its device; the original stays as it is."""
        return self._setup.regime.prepare(copy.deepcopy(module), self._setup.grid.world.device)


_RECOMPUTED = {"none": "nothing", "auto": "its blocks", "manual": "all but what --recompute-checkpoints keeps"}
