"""A phase of a run: the state that it begins with, its updates, and what comes after the last one."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from falconet.checkpoint.format import whole_after
from falconet.checkpoint.manifest import IMAGES
from falconet.checkpoint.state import Progress, TrainState
from falconet.config import facts
from falconet.config.fields import options_of, value_of
from falconet.data.buffers import Batch
from falconet.errors import Interrupted
from falconet.evaluation.evaluate import left_out_line
from falconet.evaluation.running_statistics import misfit_warning
from falconet.parallel.data_parallel import digest
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import World
from falconet.report import gpu_driver
from falconet.report.console import Screen
from falconet.report.epochs import in_short
from falconet.report.run_files import logged_at
from falconet.report.sinks import Sink
from falconet.report.styles import Facts, RunLog, Style
from falconet.report.throughput import Rate, Stopwatch
from falconet.train import (
    build,
    conclusion,
    fitting,
    interruption,
    loop,
    memory_report,
    record,
    resume,
    run_folder,
    summary,
)
from falconet.train.build import BuiltPhase
from falconet.train.capture import WARM
from falconet.train.log import Log, Output, weight_drawing
from falconet.train.loop import Watch
from falconet.train.metrics import Best, Measurements, NotFiniteError
from falconet.train.plan import Plan
from falconet.train.profiled_step import LOOKED, ProfiledStep, Subject
from falconet.train.record import Recorder
from falconet.train.save import Saving, identity_of
from falconet.train.step import ShownStep, Step, TimedStep, moments_of
from falconet.train.stop import StopRequest
from falconet.train.summary import Ending
from falconet.train.validation import Validation, validation_batch


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a phase leaves to the next one."""

    averaged: Path  # the average of its checkpoints
    best: Best | None
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all phases of a run write to."""

    folder: Path
    mark: str  # of its checkpoints
    sinks: run_folder.Sinks
    environment: Mapping[str, str]  # versions and hardware


def begin(built: BuiltPhase, handed: Handover | None = None) -> TrainState:
    """The state of a phase: new, with the weights that the phase before left, or the restored checkpoint's."""
    state, screen, model = built.new_state(), built.site.screen, built.options.model.model
    if handed:
        state.begin_with(handed.averaged, name=model)
        state.progress = Progress(built.plan.updates_before)
        screen.line(f"phase {built.phase.number} of {built.phase.count} starts with {handed.averaged}")
    elif built.restored:
        folder, manifest = built.restored
        built.images.check_classes(manifest.class_names, where=str(folder), several=manifest.several_labels)
        if changes := built.images.changes_since(manifest.content.get(IMAGES)):
            screen.line(changes)
        resume.require_same_state(built.launch.loaded.options, built.restored)
        resume.require_parts(built.launch.loaded.options, built.restored, state)
        state.load(folder, name=model)
        state.progress = replace(Progress.from_json(manifest.meter), update=manifest.progress.update)
        screen.line(f"restored {folder}, update {state.progress.update:,} of {built.plan.updates:,}")
    elif built.options.training.init_path or isinstance(built.options.training.pretrained, Path):
        _warn_of_misfit(built, state)
    replicas = built.site.grid.replicas
    if replicas.size > 1:  # the digest takes a second per gigabyte of weights
        replicas.agree("the weights", digest(state.model))
    return state


def _warn_of_misfit(built: BuiltPhase, state: TrainState) -> None:
    """Print if the statistics of a weights file do not fit the images; a stage alone cannot compare them."""
    site = built.site
    if site.world.is_first and site.grid.stages.size == 1:
        warning = misfit_warning(state.model, built.images, built.options.data, regime=built.regime, world=site.world)
        if warning:
            site.screen.line(warning)


def train_phase(
    built: BuiltPhase, state: TrainState, session: Session, *, handed: Handover | None = None
) -> Handover | None:
    """Make the updates of a phase and what follows them; return what it leaves to a next one."""
    if warning := fitting.warning(built, state.model):
        built.site.screen.line(warning)
    return RunningPhase(built, state, session, handed=handed).run()


class RunningPhase:
    """A phase under way: its step, what watches over it, and where it reports to.

    Nothing refers to it when it has run: the graphs of its step must be gone before its processes part.
    """

    def __init__(
        self, built: BuiltPhase, state: TrainState, session: Session, *, handed: Handover | None = None
    ) -> None:
        """`handed`: what the phase before has left."""
        world, screen, in_a_row = built.site.world, built.site.screen, built.plan.in_a_row
        self._built, self._state, self._session, self._handed = built, state, session, handed
        self._loader = built.placement.loader()
        self._stopwatch = Stopwatch(moments=moments_of(world.device), seconds=state.progress.seconds)
        self._recorder = self._open_recorder()
        self._step, self._profiled = self._build_step()
        self._joules = _joules(world.device)
        self._output = self._open_output()
        self._writer = build.checkpoint_writer(world, timeout=built.options.parallel.collective_timeout)
        stop = StopRequest(screen.line, after="this update" if in_a_row == 1 else f"at most {in_a_row} updates")
        self._stop = stop
        self._stopping: Callable[[], bool] = lambda: stop.requested
        self._saving = self._open_saving()

    def run(self) -> Handover | None:
        """Make the updates that are left, and what follows them; return what the phase leaves to a next one."""
        saving = self._saving
        with self._held():
            watch = self._watch()
            saving.check_room()
            self._begin()
            with contextlib.closing(self._loader):
                self._update(watch)
            watch.log.end()
            rate = watch.log.whole_run()
            with self._stopwatch.standing():
                averaged = conclusion.conclude(self._built, saving, watch.validation, self._session.folder)
        ending = self._ending(watch, rate)
        if self._built.site.world.is_first:
            self._summarise(watch.log, ending)
        return Handover(averaged=averaged, best=self._best, ending=ending) if averaged else None

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold what must be held while the phase is under way; what comes later ends earlier."""
        folder, saving, stop = self._session.folder, self._saving, self._stop
        with (
            stop,  # signals are its own until everything else has ended
            interruption.interruption_explained(  # after the last save, and below the bar
                self._screen.line, lambda: f"{saving.lost()}; {interruption.how_to_continue(folder, saving.folder)}"
            ),
            self._writer,
            self._screen,
            contextlib.closing(self._profiled) if self._profiled else contextlib.nullcontext(),
            stop.heard(),  # a second signal ends at once what is within, but not the writer
            _saved_together(saving),
            self._stopped_in_order(),
        ):
            yield

    @contextlib.contextmanager
    def _stopped_in_order(self) -> Iterator[None]:
        """After a request to stop, print how to continue once everything is saved."""
        saving, folder = self._saving, self._session.folder
        try:
            yield
        except Interrupted:
            saving.output.style.stopped()
            self._screen.line(f"saved {saving.finish()}")
            self._screen.line(f"to continue: {interruption.restore_line(folder, saving.folder)}")
            self._recorder.stopped()
            # A launcher may end the first process as soon as another one is gone.
            self._built.site.world.barrier("saving")
            raise

    def _watch(self) -> Watch:
        """What happens around the updates."""
        built, progress, measurements = self._built, self._state.progress, self._output.measurements
        built.site.world.heeds(self._stopping)
        vote, stopping = built.site.world.vote(), self._stopping
        return Watch(
            validation=self._validation(),
            log=self._log(),  # last: it starts to count the time
            saving=self._saving,
            stopping=lambda: vote(stopping()),
            ended=lambda: ended_early(built.plan, progress, measurements.best),
        )

    def _begin(self) -> None:
        """Show the phase on the screen, and save the initial checkpoint if that was asked for."""
        built, progress = self._built, self._state.progress
        self._screen.begin(
            total=built.plan.updates,
            done=progress.update,
            images=built.plan.global_batch,
            heartbeat=built.launch.conventions.heartbeat,
        )
        if built.options.checkpoints.initial_checkpoint and progress.update == 0 and not built.restored:
            self._saving.save()

    def _update(self, watch: Watch) -> None:
        """Make every update that is left, with what is due in between."""
        plan, progress, loader, recorder = self._built.plan, self._state.progress, self._loader, self._recorder
        screen, stopwatch = self._screen, self._stopwatch

        def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
            recorder.epoch_ended(progress.update)
            watch.log.begin_epoch(epoch)
            return screen.counts(
                stopwatch.waits(loader.updates(epoch, skip=skip, until=plan.last_epoch)),
                epoch=f"epoch {epoch + 1}/{in_short(plan.epoch_at(plan.updates))}",
                total=min(plan.updates_per_epoch, plan.updates - plan.update_at(epoch, 0)),
                done=skip,
            )

        try:
            loop.train(plan, progress, self._step, updates_of=updates_of, watch=watch, world=self._built.site.world)
        except NotFiniteError as error:
            recorder.stopped()
            raise self._saving.diverged(error) from None

    def _ending(self, watch: Watch, rate: Rate) -> Ending:
        """What is known after the last update; a collective."""
        built, log = self._built, watch.log
        memory = memory_report.measure_stages(self._state, built.replicas, built.site.grid)
        joules = _energy(self._joules, built.site.world)
        if watch.validation.left_out:
            built.site.note(left_out_line(watch.validation.left_out))
        ending = Ending(
            checkpoints=self._saving.folder,
            metric=watch.validation.metric,
            memory=memory,
            is_last=built.phase.is_last,
            rate=rate,
            whole=log.seconds,
            seconds=log.seconds_of(rate, validation=watch.validation.seconds),
            joules=joules,
            draws=built.phase.is_last and built.options.logging.save_plots,
        )
        return ending.after(self._handed.ending) if self._handed else ending

    def _summarise(self, log: Log, ending: Ending) -> None:
        """Write and show what the phase reached, and end its report."""
        built, session, update = self._built, self._session, self._state.progress.update
        summary.write(session.folder, log, ending, session.environment)
        if built.phase.is_last:
            summary.hand_over(log, ending, session.sinks.trackers)
        end = self._recorder.ended if built.phase.is_last else self._recorder.phase_ended
        report = end(update)
        is_told = built.launch.conventions.shows_report and not built.options.run.temporary
        summary.show(session.folder, log, replace(ending, report=report if is_told else None))

    @property
    def _screen(self) -> Screen:
        return self._built.site.screen

    @property
    def _best(self) -> Best | None:
        """The best validation so far."""
        return self._output.measurements.best

    def _open_recorder(self) -> Recorder:
        """What keeps the answers and pictures of the phase for its report, if there is one."""
        built, logging = self._built, self._built.options.logging
        if not logging.report:
            return record.Unreported()
        page = record.NoPage if built.options.run.temporary else record.Page
        recorder = record.Unpictured if built.options.data.data == "synthetic" else record.Reported
        return recorder(
            self._session.folder,
            images=built.images,
            grid=built.site.grid,
            update=self._state.progress.update,
            stopwatch=self._stopwatch,
            say=built.site.screen.line,
            page=page(draws=logging.save_plots, trackers=self._session.sinks.trackers),
        )

    def _build_step(self) -> tuple[Step, ProfiledStep | None]:
        """The step of the loop; and as it is profiled, if that was asked for."""
        world, grid, screen = self._built.site.world, self._built.site.grid, self._screen
        warm = LOOKED if self._built.options.logging.profile else WARM  # in every process: replicas capture together
        made = self._built.step(self._state, preparing=self._stopwatch.preparing, warm=warm)
        timed = TimedStep(self._recorder.watched(made), self._stopwatch)
        profiled = self._profile(timed)
        has_loss = world.is_first and grid.stages.size == 1  # of several stages, only the last knows it
        shown = ShownStep(profiled or timed, screen.show, device=world.device) if has_loss else profiled or timed
        return shown, profiled

    def _profile(self, step: TimedStep) -> ProfiledStep | None:
        """The step, profiled for a while in the first process if that was asked for."""
        built, world = self._built, self._built.site.world
        left = built.plan.updates - self._state.progress.update
        if not built.options.logging.profile or not world.is_first or left < 1:
            return None
        subject = Subject(
            model=self._state.model,
            device=world.device,
            folder=self._session.folder,
            say=self._screen.line,
            pause=self._stopwatch.standing,
            facts={"captured": built.uncaptured is None, "processes": world.size, "batch": built.plan.global_batch},
        )
        return ProfiledStep(step, subject, updates=left)

    def _open_output(self) -> Output:
        built, session, progress = self._built, self._session, self._state.progress
        best = self._handed.best if self._handed else best_of(built)
        stored = built.restored.manifest.metrics if built.restored and progress.unvalidated else None
        # Of a run that only has to be ended, the summary states what was logged last.
        is_over = progress.update >= built.plan.updates or ended_early(built.plan, progress, best)
        latest = logged_at(session.folder, progress.update) if is_over and built.site.world.is_first else None
        measurements = Measurements(
            session.sinks.metrics, update=progress.update, restored=stored, latest=latest, best=best
        )
        style = _open_style(built, session.folder, sinks=session.sinks.trackers)
        return Output(screen=self._screen, style=style, measurements=measurements, stopwatch=self._stopwatch)

    def _open_saving(self) -> Saving:
        built, session = self._built, self._session
        return Saving(
            plan=built.plan,
            state=self._state,
            output=self._output,
            identity=identity_of(built, session.folder, mark=session.mark),
            folder=run_folder.checkpoints(session.folder, built.options),
            kept=run_folder.kept(built.launch.loaded.options),
            writer=self._writer,
            last=built.restored.folder if built.restored else None,
            world=built.site.world,
            stopping=self._stopping,
        )

    def _log(self) -> Log:
        built, trackers, stopwatch = self._built, self._session.sinks.trackers, self._stopwatch
        sinks, offender, trained = self._session.sinks, built.offender, built.placement.network.trained
        also = [lambda update: sinks.write_times(update, stopwatch.update_seconds())]
        if built.options.logging.weight_histogram and built.site.grid.replicas.rank == 0:
            stages = built.site.grid.stages
            draw = weight_drawing(built.model, trained, stages=stages, sinks=trackers, pause=stopwatch.standing)
            also.insert(0, draw)
        return Log(
            plan=built.plan,
            state=self._state,
            output=self._output,
            first_skipped=lambda: offender.read(trained),
            metric=built.images.metric,
            also=also,
        )

    def _validation(self) -> Validation:
        built = self._built
        return Validation(
            plan=built.plan,
            state=self._state,
            output=self._output,
            measure=built.placement.evaluator(self._recorder.add),
            batch=validation_batch(built.options),
            checkpoint_name=self._saving.name,
            stopping=self._stopping,
            metric=built.images.metric,
            record=self._recorder,
        )


def ended_early(plan: Plan, progress: Progress, best: Best | None) -> bool:
    """Whether the validations have not become better for as long as --early-stopping allows."""
    return best is not None and plan.ends_early(progress.update, best=best.epoch)


def best_of(built: BuiltPhase) -> Best | None:
    """The best validation before the checkpoint that the run continues from, if there was one."""
    stored = built.restored.manifest.best if built.restored else None
    return Best(*stored) if stored else None


def _joules(device: torch.device) -> float | None:
    """What the device has used since its driver was loaded; None: it does not tell."""
    return gpu_driver.joules(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None


def _energy(before: float | None, world: World) -> float | None:
    """The joules of all devices since `before`; None: one of them does not tell. A collective."""
    now = _joules(world.device) if before is not None else None
    known = before is not None and now is not None
    used = now - before if before is not None and now is not None else 0.0
    total, told = world.sum(torch.tensor([used, float(known)], dtype=torch.float64)).tolist()
    return total if round(told) == world.size else None


@contextlib.contextmanager
def _saved_together(saving: Saving) -> Iterator[None]:
    """After a failure that all processes know of, leave once the checkpoint is whole: a launcher ends slower ones."""
    try:
        yield
    except FailedTogetherError as failed:
        saving.finish()
        raise failed.error from failed.error.__cause__


def _open_style(built: BuiltPhase, folder: Path, *, sinks: Sequence[Sink]) -> Style:
    """The style of a phase, with its first lines printed; only the first process writes files."""
    options, is_first, conventions = built.options, built.site.world.is_first, built.launch.conventions
    style = conventions.style(RunLog(built.site.screen.line, folder if is_first else None, sinks=sinks))
    asked, restored = built.launch.loaded.options, built.restored
    style.begin(
        Facts(
            options={name: value_of(asked, option) for name, option in options_of(type(asked)).items()},
            typed=conventions.typed,
            folder=folder,
            model=built.placement.network.layers,
            parameters=built.placement.network.parameters,
            global_batch=built.plan.global_batch,
            replicas=built.plan.replicas,
            stages=facts.stages_of(options.parallel),
            image_size=built.images.training.image_size,
            epochs=built.plan.epoch_at(built.plan.updates),
            metric=built.images.metric,
            validates=built.plan.validation_mode != "none",
            averages=options.optimizer.ema_half_life is not None,
            restored=restored.folder if restored else None,
            is_newest=not restored or whole_after(restored.folder.parent, restored.manifest.progress) is None,
        )
    )
    return style
