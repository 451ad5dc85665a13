"""One phase of a run, from its options to its end; `phasing` makes a run of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from falconet.checkpoint.state import Progress, TrainState
from falconet.config.data_rules import boxes_used
from falconet.config.phases import Phase, phases_of
from falconet.data.feed import Feed
from falconet.data.loader import Batch, BatchShape
from falconet.errors import Interrupted
from falconet.models.patterns import matching
from falconet.models.statistics import move_once
from falconet.numerics.precision import REGIMES
from falconet.numerics.scaling import Offender
from falconet.optim import ema
from falconet.optim.build import UpdateRule, build, build_scaled, undecayed_names
from falconet.optim.offload import HostedState
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.grid import Grid, divide
from falconet.parallel.replicas import Replicas, digest
from falconet.parallel.sharding import ShardedReplicas
from falconet.parallel.world import World, open_world
from falconet.report.throughput import Stopwatch
from falconet.train import memory
from falconet.train.drawing import Draw, drawing, no_drawing
from falconet.train.loop import train
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan
from falconet.train.profiled import Pause, ProfiledStep
from falconet.train.record import Identity, Record
from falconet.train.step import Step
from falconet.train.stop import StopRequest
from falconet.train.timed import TimedStep, moments_of
from falconet.wiring import (
    averaging,
    describing,
    ending,
    launching,
    measuring,
    numbers,
    parts,
    planning,
    restoring,
    run_folder,
    sharding,
    speaking,
    telling,
)
from falconet.wiring.launching import Launch
from falconet.wiring.placing import Placement, Setup, WholeModel


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a phase leaves to the next one."""

    averaged: Path  # the average of its checkpoints
    best: tuple[float, int] | None  # validation accuracy in percent, update


class Run:
    """One phase of a training run, or one process of it."""

    def __init__(self, launch: Launch, *, before: "Run | None" = None) -> None:
        """`before`: the phase before this one, whose processes and data it shares."""
        self.phase: Phase = phases_of(launch.loaded.options)[before.phase.number if before else 0]
        self.loaded, self.options = launch.loaded, self.phase.options
        self.launch, self.division = launch, launch.division
        restored = launch.restored
        self.restored = restored if restored and restored[1].progress.phase == self.phase.number else None
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
        runtime = self.launch.restored[1].runtime if self.launch.restored else {}
        stored = runtime.get("threads") if runtime.get("processes", 1) == self.division.processes else None
        return parts.value_or(self.options.machine.threads, stored or parts.cores(self.division.processes))

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
    def images(self) -> parts.Images:
        return self.full_size.at_reduced_size() if self.phase.is_reduced else self.full_size

    @cached_property
    def full_size(self) -> parts.Images:
        """The data, opened once for all phases; for a plan alone it need not be there."""
        percentage = self.options.training.dataset_percentage
        if self.options.run.plan:
            published = parts.published_images(self.options.data, model=self.options.model.model, percentage=percentage)
            if published is not None:
                return published
        return parts.open_images(
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

        stored = self.restored[1].runtime.get("splits") if self.restored else None
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
            parts.check_classes(self.images, manifest.class_names, where=str(folder))
            restoring.require_same_state(self.loaded.options, manifest, folder=folder)
            state.load(folder, name=self.options.model.model)
            state.progress = restoring.progress_in(self.plan, manifest)
            self.screen.line(f"restored {folder}, update {state.progress.update:,} of {self.plan.updates:,}")
        self.grid.replicas.agree("the weights", digest(state.model))
        return state

    def train(
        self, state: TrainState, folder: Path, *, sinks: run_folder.Sinks, handed: Handover | None = None
    ) -> Handover | None:
        """Make the updates of the phase and what comes after them; what it leaves to a next phase."""
        options, world = self.options, self.world
        averaged: Path | None = None
        loader = self.placement.loader()
        stopwatch = Stopwatch(moments=moments_of(world.device))
        step: Step = TimedStep(self.step(state), stopwatch)
        step = self._watched(step, folder, left=self.plan.updates - state.progress.update, pause=stopwatch.standing)

        def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
            record.begin_epoch(epoch)
            batches = Feed(loader.streamed(epoch, skip=skip), device=world.device, ring=loader.ring)
            return self.screen.counts(stopwatch.waits(batches), epoch=f"epoch {epoch + 1}/{self.plan.last_epoch}")

        begun: list[Record] = []

        def lost() -> str:
            words = begun[0].lost() if begun else "stopped at once"
            return f"{words}; {ending.how_to_go_on(folder, run_folder.checkpoints(folder, options))}"

        with (
            StopRequest(self.screen.line) as stop,
            ending.interruption_explained(self.screen.line, lost),
            sharding.writer(world, timeout=options.parallel.collective_timeout) as writer,
            self.screen,
        ):
            world.heeds(lambda: stop.requested)
            record = Record(
                plan=self.plan,
                state=state,
                identity=self._identity(folder),
                checkpoints=run_folder.checkpoints(folder, options),
                kept=run_folder.kept(self.loaded.options),
                evaluate=self.placement.evaluator(),
                validation_batch=parts.validation_batch(options),
                trained=self.placement.trained,
                screen=self.screen,
                sink=sinks.metrics,
                draw=self._drawing(sinks, stopwatch),
                write_times=sinks.write_times,
                writer=writer,
                stop=stop,
                offender=self.offender,
                vote=world.vote(),
                stopwatch=stopwatch,
                best=handed.best if handed else self._best(),
                last_saved=self.restored[0] if self.restored else None,
                noted=self.restored[1].metrics if self.restored and state.progress.unvalidated else {},
                style=telling.open_style(self, folder, sinks=sinks.tables),
            )
            begun.append(record)
            self.screen.begin(total=self.plan.updates, done=state.progress.update)
            if options.checkpoints.initial_checkpoint and state.progress.update == 0 and not self.restored:
                record.save()
            try:
                train(self.plan, state.progress, step, updates_of=updates_of, watch=record, world=world)
            except NotFiniteError as error:
                raise record.diverged(error) from None
            except Interrupted:
                saved = record.finish()
                world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
                self.screen.line(f"saved {saved}")
                self.screen.line(f"to continue: {ending.restore_line(folder, record.checkpoints)}")
                raise
            finally:
                loader.close()
            record.end()
            with stopwatch.standing():
                record.finish()
                if options.averaging.weight_avg_strategy != "none":
                    averaged = averaging.after_training(record, options, world=world, say=self.screen.line)
                self._validate_others(record, folder)
        held = memory.measure(state, self.replicas, self.grid)
        if world.is_first:
            run_folder.write_summary(folder, record, self.screen.line, peak_memory=world.peak_memory(), memory=held)
        return Handover(averaged=averaged, best=record.best) if averaged else None

    def _validate_others(self, record: Record, folder: Path) -> None:
        """At the end of the run, each checkpoint of the folder that --validate-checkpoints names."""
        path = self.options.validation.validate_checkpoints
        if path is None or self.options.data.data == "synthetic" or not self.phase.is_last:
            return
        say = self.screen.line
        measured = measuring.after_training(record, path, images=self.images, world=self.world, say=say)
        if self.options.style.log_style == "falconet" and self.world.is_first:
            measuring.report(measured, folder, say)

    def _drawing(self, sinks: run_folder.Sinks, stopwatch: Stopwatch) -> Draw:
        """Histograms of the weights of the first replica, if they were asked for; its stages all take part."""
        if not self.options.logging.weight_histogram or self.grid.replicas.rank > 0:
            return no_drawing
        names = self.placement.trained
        return drawing(self.model, names, stages=self.grid.stages, sinks=sinks.weights, pause=stopwatch.standing)

    def _watched(self, step: Step, folder: Path, *, left: int, pause: Pause) -> Step:
        """The step, traced for a while if that was asked for; one process is enough to see."""
        if not self.options.logging.profile or not self.world.is_first:
            return step
        return ProfiledStep(step, folder, device=self.world.device, updates=left, pause=pause)

    def _best(self) -> tuple[float, int] | None:
        stored = self.restored[1].content.get("best") if self.restored else None
        return (stored[0], stored[1]) if stored else None

    def _identity(self, folder: Path) -> Identity:
        return Identity(
            model=self.options.model.model,
            data=self.options.data.data,
            classes=self.images.classes,
            content={
                "class_names": list(self.images.splits.class_names),
                "preprocessing": self.images.preprocessing.to_json(),
                "config": self.loaded.table(),
                "plan": self.plan.lines(),
                "runtime": {
                    "threads": self.threads,
                    "processes": self.world.size,
                    "splits": list(self.placement.splits),
                    "device": str(self.world.device),
                    "run_dir": str(folder),
                    "cuda": torch.version.cuda,
                },
            },
        )
