"""One phase of a run, from its options to what it trains; `training` makes its updates, `phasing` a run of them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from falconet.checkpoint.state import Progress, TrainState
from falconet.config.data_rules import boxes_used
from falconet.config.phases import Phase, phases_of
from falconet.config.ranges import value_or
from falconet.data.loader import BatchShape
from falconet.models.patterns import matching
from falconet.models.statistics import move_once
from falconet.numerics.precision import REGIMES
from falconet.numerics.scaling import Offender
from falconet.optim import ema
from falconet.optim.build import UpdateRule, build, build_scaled, undecayed_names
from falconet.optim.offload import HostedState
from falconet.parallel import resources
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.grid import Grid, divide
from falconet.parallel.replicas import Replicas, digest
from falconet.parallel.sharding import ShardedReplicas
from falconet.parallel.world import World, open_world
from falconet.train.plan import Plan
from falconet.train.record import Best
from falconet.train.step import Step
from falconet.wiring import describing, launching, numbers, planning, restoring, sharding, speaking
from falconet.wiring.images import Images, check_classes, open_images, published_images, refuse_download
from falconet.wiring.launching import Launch
from falconet.wiring.placing import Placement, Setup, WholeModel


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
        self.screen = speaking.screen_of(self.world)
        self.note = speaking.spoken(self.world)
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
            accumulation=launching.accumulation_of(self.phase, self.division),
            replicas=self.division.replicas,
            replica=self.grid.replicas.rank,
        )

    @cached_property
    def images(self) -> Images:
        return self.full_size.at_reduced_size() if self.phase.is_reduced else self.full_size

    @cached_property
    def full_size(self) -> Images:
        """The data, opened once for all phases; for a plan alone it need not be there."""
        percentage = self.options.training.dataset_percentage
        if self.options.run.plan:
            published = published_images(self.options.data, model=self.options.model.model, percentage=percentage)
            if published is not None:
                return published
        if self.launch.restored:
            refuse_download(self.loaded)
        return open_images(
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
        from falconet.wiring.pipelining import StagedModel  # torch's pipelines take a second to import

        stored = self.restored.manifest.runtime.get("splits") if self.restored else None
        return StagedModel(self.setup, stages=self.division.stages, stored=stored)

    @property
    def model(self) -> nn.Module:
        """What this process trains."""
        return self.placement.model

    @cached_property
    def replicas(self) -> Replicas:
        parallel = self.options.parallel
        return sharding.replicas(
            self.model, self.grid.replicas, bucket=parallel.bucket_size, sharded=parallel.enable_optimizer_rts
        )

    @cached_property
    def plan(self) -> Plan:
        return planning.plan_of(
            self.phase, images=len(self.images.splits.train), shape=self.shape, updates_before=self.updates_before
        )

    def plan_lines(self) -> list[str]:
        """Everything that was decided, in words."""
        return describing.plan_lines(self)

    def new_state(self) -> TrainState:
        """Before the first update."""
        options = self.options.optimizer
        rule = UpdateRule(
            name=options.optimizer,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            eps=options.optimizer_eps,
            rmsprop_decay=options.rmsprop_decay,
            lars_trust=options.lars_eeta,
            undecayed=self._undecayed(),
        )
        span_batchnorm(self.model, self.grid, span=self.options.parallel.batchnorm_span)
        if self.options.training.batchnorm_per_update:
            move_once(self.model, micro_batches=self.shape.accumulation)
        shards = self.replicas if isinstance(self.replicas, ShardedReplicas) else None
        if shards and rule.name == "lars":
            sharding.require_one_type(self.model, rule.undecayed)
        updates = self.plan.updates_per_epoch
        scale = numbers.loss_scale(self.options, updates_per_epoch=updates, regime=self.regime, world=self.world)
        trained = shards.trained if shards else self.model
        optimizer = (
            build_scaled(trained, rule, rounding=numbers.rounding(self.options, regime=self.regime))
            if scale
            else build(trained, rule)
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
        sharding.attach(optimizer, self.model, shards=shards, numbers=self.placement.numbers())
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
            named = matching(self.placement.weights, options.lars_skip, option="--lars-skip")
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
            check_classes(self.images, manifest.class_names, where=str(folder))
            restoring.require_same_state(self.loaded.options, manifest, folder=folder)
            state.load(folder, name=self.options.model.model)
            state.progress = restoring.progress_in(self.plan, manifest)
            self.screen.line(f"restored {folder}, update {state.progress.update:,} of {self.plan.updates:,}")
        if self.grid.replicas.size > 1:  # the digest takes a second for each gigabyte of weights
            self.grid.replicas.agree("the weights", digest(state.model))
        return state
