"""The plan of a run in words, phase by phase."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from falconet.checkpoint.state import Progress, TrainState
from falconet.config.fields import value_or
from falconet.config.rules import PHOTOS, boxes_used
from falconet.data import input
from falconet.data.dataset import Dataset, open_dataset, published_dataset
from falconet.data.loader import BatchShape
from falconet.errors import named_option
from falconet.models.freezing import matching
from falconet.models.norms import move_once
from falconet.numerics.loss_scale import Offender
from falconet.numerics.precision import REGIMES
from falconet.optim import ema
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import build_optimizer, build_scaled_optimizer, undecayed_names
from falconet.parallel import resources
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.data_parallel import Replicas, digest
from falconet.parallel.grid import Grid, divide
from falconet.parallel.world import World, open_world
from falconet.parallel.zero import ShardedReplicas
from falconet.report import console
from falconet.report.console import counted
from falconet.train import build, processes, restore, saved_model
from falconet.train.build import (
    Placement,
    Setup,
    WholeModel,
    attach_pieces,
    build_replicas,
    freezing_lines,
    loss_scale,
    require_one_type,
    rounding,
)
from falconet.train.log import Best
from falconet.train.plan import Phase, Plan, phases_of, plan_of
from falconet.train.processes import Launch
from falconet.train.step import Step


def describe_plan(run: "Run") -> list[str]:
    """Everything that was decided for a phase; of a later one, what it does differently."""
    if run.phase.count == 1:
        return _lines(run)
    return [_heading(run), *(_lines(run) if run.phase.number == 1 else _changed_lines(run))]


def _heading(run: "Run") -> str:
    phase, side = run.phase, run.images.training.image_size
    first, last = run.plan.epochs_before + 1, run.plan.last_epoch
    begins = "" if phase.number == 1 else ", from the average of the checkpoints before"
    return f"phase {phase.number} of {phase.count}: epochs {first} to {last} at {side} x {side}{begins}"


def _changed_lines(run: "Run") -> list[str]:
    options = run.options
    return [
        *freezing_lines(run.setup),
        *run.plan.lines(),
        f"optimizer {options.optimizer.optimizer} with momentum {options.optimizer.momentum:g}, augment"
        f" {run.images.augment(options.augmentation.augment)}, nothing mixed",
    ]


def _lines(run: "Run") -> list[str]:
    options, world = run.options, run.world
    augment = run.images.augment(options.augmentation.augment)
    placed = build.describe_optimizer_state(options.parallel, world, replicas=run.division.replicas)
    others = options.validation.validate_checkpoints
    loaders = input.workers(options.data, run.division.processes)
    each = " in each process" if run.division.processes > 1 else ""
    lines = [
        f"model {options.model.model}, {run.placement.parameters:,} parameters",
        f"data {options.data.data}: {run.images.describe()}, augment {augment}",
        *_decoding_lines(run),
        f"device {world.device}, {counted(run.threads, 'CPU thread')}, {counted(loaders, 'loader thread')}{each}",
        *input.input_lines(run.images, options.data, options.augmentation, device=world.device),
        *build.numerics_lines(options, regime=run.regime, device=world.device),
        *build.workspace_lines(
            options.workspace, device=world.device, stage=run.grid.stages.rank, stages=run.grid.stages.size
        ),
        *run.placement.lines(),
        *run.plan.lines(),
        *([f"then measures each checkpoint of {others}"] if others and options.data.data != "synthetic" else []),
        f"optimizer {options.optimizer.optimizer}{placed}, seed {options.run.seed}",
    ]
    if options.data.data == "synthetic" and options.validation.validation_mode != "none":
        lines.append("note: synthetic data lives on the device only, so there is nothing to validate on")
    return lines


def _decoding_lines(run: "Run") -> list[str]:
    data = run.options.data
    if data.data not in PHOTOS:
        return []
    on_device = input.decode_device(data, run.images.train, run.world.device) == "cuda"
    return [f"photos are decoded by {'nvJPEG on the device' if on_device else input.decoder()}"]


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a phase leaves to the next one."""

    averaged: Path  # the average of its checkpoints
    best: Best | None


class Run:
    """One phase of a training run, or one process of it."""

    def __init__(self, launch: Launch, *, before: "Run | None" = None) -> None:
        """`before`: the phase before this one, whose processes and data it shares."""
        self.phase: Phase = phases_of(launch.loaded.options)[before.phase.number if before else 0]
        self.loaded, self.options = launch.loaded, self.phase.options
        self.launch, self.division = launch, launch.division
        restored = launch.restored
        self.restored = restored if restored and restored.manifest.progress.phase == self.phase.number else None
        self.updates_before = before.plan.updates if before else 0
        if before:
            self.full_size = before.full_size
        self.threads: int = before.threads if before else self._threads()
        self.world: World = before.world if before else self._open_world()
        self.screen = console.screen_of(self.world)
        self.note = console.spoken(self.world)
        self.regime = REGIMES[self.options.machine.precision]
        self.offender = Offender(self.world.device)
        # A plan is printed by one process, whatever the processes it speaks of.
        stages = self.division.stages if self.world.size > 1 else 1
        self.grid: Grid = before.grid if before else divide(self.world, stages=stages)

    def _threads(self) -> int:
        """The restored run's, because the number changes bits; of another number of processes they say nothing."""
        runtime = self.launch.restored.manifest.runtime if self.launch.restored else {}
        stored = runtime.get("threads") if runtime.get("processes", 1) == self.division.processes else None
        return value_or(self.options.machine.threads, stored or resources.cores(self.division.processes))

    def _open_world(self) -> World:
        machine = self.options.machine
        return open_world(
            machine.device,
            threads=self.threads,
            deterministic=machine.deterministic,
            place=self.launch.place,
            timeout=self.options.parallel.collective_timeout,
        )

    @cached_property
    def shape(self) -> BatchShape:
        return BatchShape(
            micro_batch=self.options.data.micro_batch_size,
            accumulation=processes.accumulation_of(self.phase, self.division),
            replicas=self.division.replicas,
            replica=self.grid.replicas.rank,
        )

    @cached_property
    def images(self) -> Dataset:
        return self.full_size.at_reduced_size() if self.phase.is_reduced else self.full_size

    @cached_property
    def full_size(self) -> Dataset:
        """The data, opened once for all phases; for a plan alone it need not be there."""
        percentage = self.options.training.dataset_percentage
        if self.options.run.plan:
            published = published_dataset(self.options.data, model=self.options.model.model, percentage=percentage)
            if published is not None:
                return published
        if self.launch.restored:
            saved_model.refuse_download(self.loaded)
        return open_dataset(
            self.options.data,
            model=self.options.model.model,
            global_batch=self.shape.global_batch,
            seed=self.options.run.seed,
            use_objects=boxes_used(self.options),
            percentage=percentage,
        )

    @property
    def _initial(self) -> Path | None:
        """Of a run's beginning alone: a later phase has what the one before left, a restored run its checkpoint."""
        return None if self.launch.restored or self.phase.number > 1 else self.options.training.init_path

    @property
    def setup(self) -> Setup:
        return Setup(
            options=self.options,
            initial=self._initial,
            images=self.images,
            shape=self.shape,
            grid=self.grid,
            regime=self.regime,
            note=self.note,
            first_trained=self.phase.first_trained,
        )

    @cached_property
    def placement(self) -> Placement:
        """How the model lies on the devices, decided here once."""
        if self.division.stages == 1:
            return WholeModel(self.setup)
        from falconet.train.pipeline_step import StagedModel  # torch's pipelines take a second to import

        stored = self.restored.manifest.runtime.get("splits") if self.restored else None
        return StagedModel(self.setup, stages=self.division.stages, stored=stored)

    @property
    def model(self) -> nn.Module:
        """What this process trains."""
        return self.placement.model

    @cached_property
    def replicas(self) -> Replicas:
        parallel = self.options.parallel
        return build_replicas(
            self.model, self.grid.replicas, bucket=parallel.bucket_size, sharded=parallel.enable_optimizer_rts
        )

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.phase, images=len(self.images.train), shape=self.shape, updates_before=self.updates_before)

    def plan_lines(self) -> list[str]:
        """Everything that was decided, in words."""
        return describe_plan(self)

    def new_state(self) -> TrainState:
        """Before the first update."""
        options = self.options.optimizer
        undecayed = self._undecayed()
        span_batchnorm(self.model, self.grid, span=self.options.parallel.batchnorm_span)
        if self.options.training.batchnorm_per_update:
            move_once(self.model, micro_batches=self.shape.accumulation)
        shards = self.replicas if isinstance(self.replicas, ShardedReplicas) else None
        if shards and options.optimizer == "lars":
            require_one_type(self.model, undecayed)
        updates = self.plan.updates_per_epoch
        scale = loss_scale(self.options, updates_per_epoch=updates, regime=self.regime, world=self.world)
        trained = shards.trained if shards else self.model
        optimizer = (
            build_scaled_optimizer(
                trained, options, rounding=rounding(self.options, regime=self.regime), undecayed=undecayed
            )
            if scale
            else build_optimizer(trained, options, undecayed=undecayed)
        )
        world, replicas = self.world, self.grid.replicas
        state = TrainState(
            self.model,
            optimizer,
            scale=scale,
            shards=shards,
            stages=self.placement.stages(),
            rank=replicas.rank,
            copies=replicas.size,
        )
        attach_pieces(optimizer, self.model, shards=shards, numbers=self.placement.numbers())
        if self.options.parallel.offload_optimizer and world.device.type != "cpu":
            bucket = self.options.parallel.bucket_size
            state.hosted = HostedState(optimizer, bucket_megabytes=bucket, device=world.device)
        if options.ema_half_life is not None:
            state.ema = ema.Ema(self.model, ema.decay_for(options.ema_half_life, updates))
        return state

    def _undecayed(self) -> frozenset[str] | None:
        """The weights that are not decayed, nor scaled by lars; None: vectors."""
        options = self.options.optimizer
        if options.optimizer == "lars" and options.lars_skip:
            # Among all weights: what --trainable leaves as it is may be named here too.
            with named_option("lars_skip"):
                named = matching(self.placement.weights, options.lars_skip)
            return named & frozenset(self.placement.trained)
        return undecayed_names(self.model, options.weight_decay_exclude)

    def step(self, state: TrainState) -> Step:
        """What makes one update of a state."""
        return self.placement.step(state, replicas=self.replicas, offender=self.offender)

    def begin(self, handed: Handover | None = None) -> TrainState:
        """New, with the weights that the phase before has left, or as the restored checkpoint has it."""
        state = self.new_state()
        if handed:
            state.begin_with(handed.averaged, name=self.options.model.model)
            state.progress = Progress(self.plan.updates_before)
            self.screen.line(f"phase {self.phase.number} of {self.phase.count} begins with {handed.averaged}")
        elif self.restored:
            folder, manifest = self.restored
            self.images.check_classes(manifest.class_names, where=str(folder))
            restore.require_same_state(self.loaded.options, manifest, folder=folder)
            state.load(folder, name=self.options.model.model)
            state.progress = restore.progress_in(self.plan, manifest)
            self.screen.line(f"restored {folder}, update {state.progress.update:,} of {self.plan.updates:,}")
        if self.grid.replicas.size > 1:  # the digest takes a second for each gigabyte of weights
            self.grid.replicas.agree("the weights", digest(state.model))
        return state
