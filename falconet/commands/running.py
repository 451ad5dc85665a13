"""A run from its options to its end: shared by train and restore."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from falconet.checkpoint import disk
from falconet.checkpoint.manifest import Manifest
from falconet.checkpoint.state import Progress, TrainState
from falconet.commands import averaging, feeding, launching, numbers, parts, run_folder, sharding, telling
from falconet.commands.launching import Launch
from falconet.commands.pipelining import StagedModel
from falconet.commands.placing import Placement, Setup, WholeModel
from falconet.config import rules
from falconet.data.feed import Feed
from falconet.data.loader import Batch, BatchShape
from falconet.errors import ConfigError, Interrupted
from falconet.numerics.precision import REGIMES
from falconet.numerics.scaling import Offender
from falconet.optim import ema
from falconet.optim.build import UpdateRule, build, build_scaled, undecayed_names
from falconet.optim.offload import HostedState
from falconet.optim.schedules import Schedule
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.grid import divide
from falconet.parallel.replicas import Replicas, digest
from falconet.parallel.sharding import ShardedReplicas
from falconet.parallel.world import open_world
from falconet.report.sinks import Several
from falconet.report.throughput import Stopwatch
from falconet.train import memory
from falconet.train.loop import train
from falconet.train.metrics import NotFiniteError
from falconet.train.plan import Plan, updates_in_epoch
from falconet.train.profiled import ProfiledStep
from falconet.train.record import Identity, Record
from falconet.train.step import Step
from falconet.train.stop import StopRequest


class Run:
    """One training run, or one process of it."""

    def __init__(self, launch: Launch) -> None:
        self.loaded, self.options, self.restored = launch.loaded, launch.loaded.options, launch.restored
        self.launch, self.division = launch, launch.division
        self.threads = parts.value_or(
            self.options.machine.threads, self._stored_threads() or parts.cores(launch.division.processes)
        )
        machine = self.options.machine
        self.world = open_world(
            machine.device,
            threads=self.threads,
            deterministic=machine.deterministic,
            place=launch.place,
            timeout=self.options.parallel.collective_timeout,
        )
        self.screen = launching.screen_of(self.world)
        self.note = launching.spoken(self.world)
        self.regime = REGIMES[machine.precision]
        self.offender = Offender(self.world.device)
        # A plan is printed by one process, whatever the processes it speaks of.
        self.grid = divide(self.world, stages=self.division.stages if self.world.size > 1 else 1)

    @cached_property
    def shape(self) -> BatchShape:
        return BatchShape(
            micro_batch=self.options.data.micro_batch_size,
            accumulation=self.division.accumulation,
            replicas=self.division.replicas,
            replica=self.grid.replicas.rank,
        )

    @cached_property
    def images(self) -> parts.Images:
        return parts.open_images(
            self.options.data,
            model=self.options.model.model,
            global_batch=self.shape.global_batch,
            seed=self.options.run.seed,
            use_objects=rules.crops_photos(self.options) and self.options.augmentation.use_bbox_info,
        )

    @cached_property
    def placement(self) -> Placement:
        """How the model lies on the devices, decided here once."""
        setup = Setup(
            options=self.options,
            images=self.images,
            shape=self.shape,
            grid=self.grid,
            regime=self.regime,
            note=self.note,
        )
        if self.division.stages == 1:
            return WholeModel(setup)
        stored = self.restored[1].runtime.get("splits") if self.restored else None
        return StagedModel(setup, stages=self.division.stages, stored=stored)

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
        options, rate = self.options, self.options.learning_rate
        images = len(self.images.splits.train)
        schedule = Schedule(
            kind=rate.lr_schedule,
            peak=rate.lr,
            epochs=options.training.epoch,
            updates_per_epoch=updates_in_epoch(images, self.shape.global_batch),
            warmup_epochs=rate.warmup_epoch,
            changes_per_epoch=rate.lr_scheduler_freq,
            decay=rate.lr_decay,
            drops=rate.lr_epoch_decay,
            power=rate.lr_power,
            end_ratio=rate.lr_end_ratio,
        )
        synthetic = options.data.data == "synthetic"
        return Plan(
            epochs=options.training.epoch,
            images=images,
            micro_batch=self.shape.micro_batch,
            accumulation=self.shape.accumulation,
            replicas=self.shape.replicas,
            schedule=schedule,
            logs_per_epoch=options.logging.logs_per_epoch,
            validation_mode="none" if synthetic else options.validation.validation_mode,
            validation_frequency=options.validation.validation_frequency,
            epochs_per_save=options.checkpoints.checkpoint_save_freq,
        )

    def go(self) -> int:
        """Print the plan, and carry it out unless only the plan was asked for."""
        with self.world:
            return self._go()

    def _go(self) -> int:
        launching.check_alike(self.world, self.loaded, self.restored)
        self.regime.require(self.world.device)
        notes = [*rules.notes(self.options, self.loaded.sources), *self.division.notes]
        for line in [*self.plan_lines(), *(f"note: {note}" for note in notes)]:
            self.screen.line(line)
        if self.options.run.plan:
            self.screen.line("")
            self.screen.line(self.loaded.to_yaml().rstrip())
            return 0
        state = self._state()
        if state.progress.update >= self.plan.updates:
            self.screen.line(f"nothing left to train: all {self.plan.epochs} epochs are done; a larger --epoch goes on")
            return 0
        self._train(state)
        return 0

    def plan_lines(self) -> list[str]:
        """Everything that was decided, in words."""
        options, world = self.options, self.world
        augment = self.images.augment(options.augmentation.augment)
        placed = sharding.describe(options.parallel, world)
        loaders = parts.workers(options.data, self.division.processes)
        each = " in each process" if self.division.processes > 1 else ""
        lines = [
            f"model {options.model.model}, {self.placement.parameters:,} parameters",
            f"data {options.data.data}: {self.images.describe()}, augment {augment}{self._decoding()}",
            f"device {world.device}, {self.threads} CPU threads, {loaders} loader threads{each}",
            *feeding.lines(
                options.data,
                train=parts.training_reading(self.images, options),
                validation=parts.validation_reading(self.images),
                device=world.device,
            ),
            *numbers.lines(options, regime=self.regime, device=world.device),
            *self.placement.lines(),
            *self.plan.lines(),
            f"optimizer {options.optimizer.optimizer}{placed}, seed {options.run.seed}",
        ]
        if options.data.data == "synthetic" and options.validation.validation_mode != "none":
            lines.append("note: synthetic data lives on the device only, so there is nothing to validate on")
        return lines

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
            undecayed=undecayed_names(self.model, options.weight_decay_exclude),
        )
        span_batchnorm(self.model, self.grid.replicas, span=self.options.parallel.batchnorm_span)
        shards = self.replicas if isinstance(self.replicas, ShardedReplicas) else None
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

    def step(self, state: TrainState) -> Step:
        """What makes one update of a state."""
        return self.placement.step(state, replicas=self.replicas, offender=self.offender)

    def _state(self) -> TrainState:
        """New, or as the restored checkpoint has it."""
        state = self.new_state()
        if self.restored:
            folder, manifest = self.restored
            parts.check_classes(self.images, manifest.class_names, where=str(folder))
            self._require_same_state(manifest, folder)
            state.load(folder, name=self.options.model.model)
            state.progress = self._progress(manifest)
            self.screen.line(f"restored {folder}, update {state.progress.update:,} of {self.plan.updates:,}")
        self.grid.replicas.agree("the weights", digest(state.model))
        return state

    def _stored_threads(self) -> int | None:
        """The restored run's, because the number changes bits; of another number of processes they say nothing."""
        runtime = self.restored[1].runtime if self.restored else {}
        return runtime.get("threads") if runtime.get("processes", 1) == self.division.processes else None

    def _require_same_state(self, manifest: Manifest, folder: Path) -> None:
        """State of one update rule means nothing to another, even where the tensors would fit; so do its formats."""
        trained, asked = manifest.config["optimizer"]["value"], self.options.optimizer.optimizer
        if trained != asked:
            raise ConfigError(f"--optimizer: got '{asked}', wanted '{trained}', whose state {folder} holds")
        stored = REGIMES[manifest.config["precision"]["value"]]
        if stored.update != self.regime.update:
            raise ConfigError(
                f"--precision: got '{self.regime.name}', wanted one that updates as '{stored.name}' does, whose state"
                f" {folder} holds"
            )

    def _progress(self, manifest: Manifest) -> Progress:
        """The checkpoint's place in this plan, whose global batch may be another one."""
        progress = Progress.from_json(manifest.meter)
        updates, rest = divmod(manifest.progress.images, self.plan.global_batch)
        if rest:
            raise ConfigError(
                f"--micro-batch-size: the checkpoint stands {manifest.progress.images:,} images into an epoch, which a"
                f" global batch of {self.plan.global_batch} does not divide; wanted the one it was trained with"
            )
        return replace(progress, update=manifest.progress.epoch * self.plan.updates_per_epoch + updates)

    def _train(self, state: TrainState) -> None:
        options, world = self.options, self.world
        folder = Path(world.once(self._open_folder))
        loader = self.placement.loader()
        step = self._watched(self.step(state), folder, left=self.plan.updates - state.progress.update)
        stopwatch = Stopwatch()

        def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
            batches = Feed(loader.streamed(epoch, skip=skip), device=world.device, ring=loader.ring)
            return self.screen.counts(stopwatch.waits(batches), epoch=f"epoch {epoch + 1}/{self.plan.epochs}")

        sinks = contextlib.closing(run_folder.open_sinks(folder, self.loaded) if world.is_first else Several([]))
        with (
            sinks as sink,
            sharding.writer(world, timeout=options.parallel.collective_timeout) as writer,
            StopRequest(self.screen.line) as stop,
            self.screen,
        ):
            record = Record(
                plan=self.plan,
                state=state,
                identity=self._identity(folder),
                checkpoints=run_folder.checkpoints(folder, options),
                kept=run_folder.kept(options),
                evaluate=self.placement.evaluator(),
                trained=self.placement.trained,
                screen=self.screen,
                sink=sink,
                writer=writer,
                stop=stop,
                offender=self.offender,
                vote=world.vote(),
                stopwatch=stopwatch,
                best=self._best(),
                last_saved=self.restored[0] if self.restored else None,
                style=telling.open_style(
                    self.loaded,
                    self.plan,
                    parameters=self.placement.parameters,
                    image_size=self.images.preprocessing.image_size,
                    folder=folder,
                    say=self.screen.line if world.is_first else None,
                ),
            )
            self.screen.begin(total=self.plan.updates, done=state.progress.update)
            try:
                train(self.plan, state.progress, step, updates_of=updates_of, watch=record, world=world)
            except NotFiniteError as error:
                raise record.diverged(error) from None
            except Interrupted:
                saved = record.finish()
                world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
                self.screen.line(f"saved {saved}")
                self.screen.line(f"to continue: falconet restore --checkpoint-input-path {folder}")
                raise
            finally:
                loader.close()
            with stopwatch.standing():
                record.finish()
                if options.averaging.weight_avg_strategy != "none":
                    averaging.after_training(record, options, world=world, say=self.screen.line)
        held = memory.measure(state, self.replicas, self.grid)
        if world.is_first:
            run_folder.write_summary(folder, record, self.screen.line, peak_memory=world.peak_memory(), memory=held)

    def _watched(self, step: Step, folder: Path, *, left: int) -> Step:
        """The step, traced for a while if that was asked for; one process is enough to see."""
        if not self.options.logging.profile or not self.world.is_first:
            return step
        return ProfiledStep(step, folder, device=self.world.device, updates=left)

    def _decoding(self) -> str:
        data = self.options.data
        if data.data not in rules.PHOTOS:
            return ""
        on_device = feeding.decode_device(data, self.images.splits.train, self.world.device) == "cuda"
        return f", decoded by {'nvJPEG on the device' if on_device else parts.decoder()}"

    def _open_folder(self) -> str:
        folder = run_folder.open_folder(self.options, restored=self.restored, again=self.launch.again)
        if self.launch.again:  # all of its workers are gone, and nobody else saves there
            disk.sweep(run_folder.checkpoints(folder, self.options), abandoned=0.0, kinds=("tmp",))
        run_folder.write_config(folder, self.loaded, "\n".join(self.plan_lines()) + "\n")
        return str(folder)

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
