"""A phase of a run: the state that it begins with, its updates, and what comes after the last one."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from falconet.checkpoint.format import whole_after
from falconet.checkpoint.manifest import IMAGES, SEVERAL_LABELS
from falconet.checkpoint.state import Progress, TrainState
from falconet.checkpoint.writer import Writer
from falconet.config import rules
from falconet.config.fields import options_of, value_of
from falconet.data.buffers import Batch
from falconet.errors import Interrupted
from falconet.evaluation.evaluate import left_out_line
from falconet.evaluation.running_statistics import misfit_warning
from falconet.parallel.data_parallel import digest
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import World
from falconet.report import gpu_driver
from falconet.report.epochs import in_short
from falconet.report.run_files import logged_at
from falconet.report.sinks import Sink
from falconet.report.styles import Facts, RunLog, Style
from falconet.report.throughput import Stopwatch
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
from falconet.train.preparation import Launch
from falconet.train.profiled_step import LOOKED, ProfiledStep, Subject
from falconet.train.record import Recorder
from falconet.train.save import Identity, Saving
from falconet.train.setup import TrainingLoader
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
    """Make the updates of a phase and what follows them; returns what it leaves to a next one."""
    world, screen, folder = built.site.world, built.site.screen, session.folder
    if warning := fitting.warning(built, state.model):
        screen.line(warning)
    loader = built.placement.loader()
    stopwatch = Stopwatch(moments=moments_of(world.device), seconds=state.progress.seconds)
    recorder = _recorder(built, session, update=state.progress.update, stopwatch=stopwatch)
    warm = LOOKED if built.options.logging.profile else WARM  # in every process: replicas capture together
    made = built.step(state, preparing=stopwatch.preparing, warm=warm)
    timed = TimedStep(recorder.watched(made), stopwatch)
    profiled = _profiled(built, timed, folder, state)
    step = _shown(built, profiled or timed)
    before = _joules(world.device)
    best = handed.best if handed else best_of(built)
    output = _output(built, state, session, stopwatch=stopwatch, best=best)
    writer = build.checkpoint_writer(world, timeout=built.options.parallel.collective_timeout)
    in_a_row = built.plan.in_a_row
    stop = StopRequest(screen.line, after="this update" if in_a_row == 1 else f"at most {in_a_row} updates")
    saving = _saving(built, state, session, output=output, writer=writer, stop=stop)
    with (
        stop,
        interruption.interruption_explained(
            screen.line, lambda: f"{saving.lost()}; {interruption.how_to_continue(folder, saving.folder)}"
        ),
        writer,
        screen,
        contextlib.closing(profiled) if profiled else contextlib.nullcontext(),
        stop.heard(),
        _saved_together(saving),
        _stopped_in_order(built, saving, recorder, session.folder),
    ):
        world.heeds(lambda: stop.requested)
        vote = world.vote()
        watch = Watch(
            validation=_validation(built, state, saving, recorder, stopping=lambda: stop.requested),
            log=_log(built, state, session, output=output),  # last: it starts to count the time
            saving=saving,
            stopping=lambda: vote(stop.requested),
            ended=lambda: ended_early(built.plan, state.progress, output.measurements.best),
        )
        saving.check_room()
        screen.begin(
            total=built.plan.updates,
            done=state.progress.update,
            images=built.plan.global_batch,
            heartbeat=built.launch.conventions.heartbeat,
        )
        if built.options.checkpoints.initial_checkpoint and state.progress.update == 0 and not built.restored:
            saving.save()
        with contextlib.closing(loader):
            _update(built, state, step, watch, recorder, loader=loader)
        watch.log.end()
        rate = watch.log.whole_run()
        with stopwatch.standing():
            averaged = conclusion.conclude(built, saving, watch.validation, folder)
    memory_of_stages = memory_report.measure_stages(state, built.replicas, built.site.grid)
    joules = _energy(before, world)
    if watch.validation.left_out:
        built.site.note(left_out_line(watch.validation.left_out))
    ending = Ending(
        checkpoints=saving.folder,
        metric=watch.validation.metric,
        memory=memory_of_stages,
        is_last=built.phase.is_last,
        rate=rate,
        whole=watch.log.seconds,
        seconds=watch.log.seconds_of(rate, validation=watch.validation.seconds),
        joules=joules,
        draws=built.phase.is_last and built.options.logging.save_plots,
    )
    if handed:
        ending = ending.after(handed.ending)
    if world.is_first:
        summary.write(folder, watch.log, ending, session.environment)
        if built.phase.is_last:
            summary.hand_over(watch.log, ending, session.sinks.trackers)
        end = recorder.ended if built.phase.is_last else recorder.phase_ended
        report = end(state.progress.update)
        is_told = built.launch.conventions.is_ours and not built.options.run.temporary
        summary.show(folder, watch.log, replace(ending, report=report if is_told else None))
    return Handover(averaged=averaged, best=output.measurements.best, ending=ending) if averaged else None


def ended_early(plan: Plan, progress: Progress, best: Best | None) -> bool:
    """Whether the validations have not become better for as long as --early-stopping allows."""
    return best is not None and plan.ends_early(progress.update, best=best.epoch)


def best_of(built: BuiltPhase) -> Best | None:
    """The best validation before the checkpoint that the run continues from, if there was one."""
    stored = built.restored.manifest.best if built.restored else None
    return Best(*stored) if stored else None


def _recorder(built: BuiltPhase, session: Session, *, update: int, stopwatch: Stopwatch) -> Recorder:
    """What keeps the answers and pictures of a phase for its report, if there is one."""
    logging = built.options.logging
    if not logging.report:
        return record.Unreported()
    page = record.NoPage if built.options.run.temporary else record.Page
    recorder = record.Unpictured if built.options.data.data == "synthetic" else record.Reported
    return recorder(
        session.folder,
        images=built.images,
        grid=built.site.grid,
        update=update,
        stopwatch=stopwatch,
        say=built.site.screen.line,
        page=page(draws=logging.save_plots, trackers=session.sinks.trackers),
    )


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


@contextlib.contextmanager
def _stopped_in_order(built: BuiltPhase, saving: Saving, recorder: Recorder, folder: Path) -> Iterator[None]:
    """After a request to stop, print how to continue once everything is saved."""
    screen = built.site.screen
    try:
        yield
    except Interrupted:
        saving.output.style.stopped()
        screen.line(f"saved {saving.finish()}")
        screen.line(f"to continue: {interruption.restore_line(folder, saving.folder)}")
        recorder.stopped()
        built.site.world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
        raise


def _profiled(built: BuiltPhase, step: TimedStep, folder: Path, state: TrainState) -> ProfiledStep | None:
    """The step, profiled for a while in the first process if that was asked for."""
    world, left = built.site.world, built.plan.updates - state.progress.update
    if not built.options.logging.profile or not world.is_first or left < 1:
        return None
    subject = Subject(
        model=state.model,
        device=world.device,
        folder=folder,
        say=built.site.screen.line,
        pause=step.stopwatch.standing,
        facts={"captured": built.uncaptured is None, "processes": world.size, "batch": built.plan.global_batch},
    )
    return ProfiledStep(step, subject, updates=left)


def _shown(built: BuiltPhase, step: Step) -> Step:
    """The step, with its loss on the screen in the first process; of several stages, only the last knows it."""
    world = built.site.world
    has_loss = world.is_first and built.site.grid.stages.size == 1
    return ShownStep(step, built.site.screen.show, device=world.device) if has_loss else step


def _output(
    built: BuiltPhase, state: TrainState, session: Session, *, stopwatch: Stopwatch, best: Best | None
) -> Output:
    manifest, update = built.restored.manifest if built.restored else None, state.progress.update
    # Of a run that only has to be ended, the summary states what was logged last.
    is_over = update >= built.plan.updates or ended_early(built.plan, state.progress, best)
    measurements = Measurements(
        session.sinks.metrics,
        update=update,
        restored=manifest.metrics if manifest and state.progress.unvalidated else None,
        latest=logged_at(session.folder, update) if is_over and built.site.world.is_first else None,
        best=best,
    )
    style = _open_style(built, session.folder, sinks=session.sinks.trackers)
    return Output(screen=built.site.screen, style=style, measurements=measurements, stopwatch=stopwatch)


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
            stages=rules.stages_of(options.parallel),
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


def _saving(
    built: BuiltPhase, state: TrainState, session: Session, *, output: Output, writer: Writer, stop: StopRequest
) -> Saving:
    return Saving(
        plan=built.plan,
        state=state,
        output=output,
        identity=identity_of(built, session.folder, mark=session.mark),
        folder=run_folder.checkpoints(session.folder, built.options),
        kept=run_folder.kept(built.launch.loaded.options),
        writer=writer,
        last=built.restored.folder if built.restored else None,
        world=built.site.world,
        stopping=lambda: stop.requested,
    )


def _initial_weights(launch: Launch) -> str | None:
    """What the run's weights were before its first update, if they were pretrained; kept by a restored run."""
    if launch.initial:
        return launch.initial.source
    stored = launch.restored.manifest.content.get("initial_weights") if launch.restored else None
    return stored if isinstance(stored, str) else None


def identity_of(built: BuiltPhase, folder: Path, *, mark: str | None = None) -> Identity:
    """What the checkpoints of a run state about themselves."""
    site, images = built.site, built.images
    return Identity(
        model=built.options.model.model,
        data=built.options.data.data,
        classes=images.classes,
        run=mark,
        content={
            "class_names": list(images.class_names),
            **({SEVERAL_LABELS: True} if images.label_sets is not None else {}),
            "preprocessing": images.preprocessing.to_json(),
            IMAGES: images.fingerprint(),
            "config": built.launch.stored(),
            "plan": built.plan.lines(),
            "initial_weights": _initial_weights(built.launch),
            "runtime": {
                "threads": site.threads,
                "processes": site.world.size,
                "splits": list(built.placement.splits),
                "device": str(site.world.device),
                "run_dir": str(folder),
                "cuda": torch.version.cuda,
            },
        },
    )


def _log(built: BuiltPhase, state: TrainState, session: Session, *, output: Output) -> Log:
    trained, stages, stopwatch = built.placement.network.trained, built.site.grid.stages, output.stopwatch
    also = [lambda update: session.sinks.write_times(update, stopwatch.update_seconds())]
    if built.options.logging.weight_histogram and built.site.grid.replicas.rank == 0:
        trackers = session.sinks.trackers
        draw = weight_drawing(built.model, trained, stages=stages, sinks=trackers, pause=stopwatch.standing)
        also.insert(0, draw)
    return Log(
        plan=built.plan,
        state=state,
        output=output,
        first_skipped=lambda: built.offender.read(trained),
        metric=built.images.metric,
        also=also,
    )


def _validation(
    built: BuiltPhase, state: TrainState, saving: Saving, recorder: Recorder, *, stopping: Callable[[], bool]
) -> Validation:
    return Validation(
        plan=built.plan,
        state=state,
        output=saving.output,
        measure=built.placement.evaluator(recorder.add),
        batch=validation_batch(built.options),
        checkpoint_name=saving.name,
        stopping=stopping,
        metric=built.images.metric,
        record=recorder,
    )


def _update(
    built: BuiltPhase, state: TrainState, step: Step, watch: Watch, recorder: Recorder, *, loader: TrainingLoader
) -> None:
    """Make every update that is left, with what is due in between."""
    plan, world, screen, saving = built.plan, built.site.world, built.site.screen, watch.saving

    def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
        recorder.epoch_ended(state.progress.update)
        watch.log.begin_epoch(epoch)
        return screen.counts(
            saving.output.stopwatch.waits(loader.updates(epoch, skip=skip, until=plan.last_epoch)),
            epoch=f"epoch {epoch + 1}/{in_short(plan.epoch_at(plan.updates))}",
            total=min(plan.updates_per_epoch, plan.updates - plan.update_at(epoch, 0)),
            done=skip,
        )

    try:
        loop.train(plan, state.progress, step, updates_of=updates_of, watch=watch, world=world)
    except NotFiniteError as error:
        recorder.stopped()
        raise saving.diverged(error) from None
