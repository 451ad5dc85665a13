"""The updates of a phase, and what comes after them: averages, further validations, the summary."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Writer
from falconet.data.feed import Feed
from falconet.data.loader import Batch, IdleLoader, Loader, SyntheticLoader
from falconet.errors import Interrupted
from falconet.report.throughput import Stopwatch
from falconet.train import loop, memory
from falconet.train.drawing import Draw, drawing, no_drawing
from falconet.train.metrics import NotFiniteError
from falconet.train.profiled import ProfiledStep
from falconet.train.record import Best, Record
from falconet.train.saving import Identity, Saving
from falconet.train.step import Step
from falconet.train.stop import StopRequest
from falconet.train.timed import TimedStep, moments_of
from falconet.wiring import averaging, ending, evaluating, measuring, run_folder, sharding, telling
from falconet.wiring.running import Handover, Run


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all phases of a run share in a process, and what the phase before this one left."""

    folder: Path
    mark: str  # of its checkpoints
    sinks: run_folder.Sinks
    handed: Handover | None = None


def train(run: Run, state: TrainState, session: Session) -> Handover | None:
    """Make the updates of the phase and what comes after them; what it leaves to a next phase."""
    world, screen, folder = run.world, run.screen, session.folder
    loader, stopwatch = run.placement.loader(), Stopwatch(moments=moments_of(world.device))
    step = _watched(run, TimedStep(run.step(state), stopwatch), session, left=run.plan.updates - state.progress.update)
    begun: list[Saving] = []

    def lost() -> str:
        words = begun[0].lost() if begun else "stopped at once"
        return f"{words}; {ending.how_to_go_on(folder, run_folder.checkpoints(folder, run.options))}"

    with (
        StopRequest(screen.line) as stop,
        ending.interruption_explained(screen.line, lost),
        sharding.writer(world, timeout=run.options.parallel.collective_timeout) as writer,
        screen,
        stop.heard(),
    ):
        world.heeds(lambda: stop.requested)
        begun.append(_saving(run, state, session, writer))
        record = _record(run, begun[0], session, stop=stop, stopwatch=stopwatch)
        screen.begin(total=run.plan.updates, done=state.progress.update)
        if run.options.checkpoints.initial_checkpoint and state.progress.update == 0 and not run.restored:
            record.save()
        with contextlib.closing(loader):
            _update(run, record, step, loader, folder=folder)
        record.end()
        with stopwatch.standing():
            averaged = _conclude(run, record, folder)
    held = memory.measure(state, run.replicas, run.grid)
    if world.is_first:
        run_folder.write_summary(folder, record, screen.line, peak_memory=world.peak_memory(), memory=held)
    return Handover(averaged=averaged, best=record.best) if averaged else None


def identity_of(run: Run, folder: Path, *, mark: str | None = None) -> Identity:
    """What the checkpoints of a run say about themselves."""
    return Identity(
        model=run.options.model.model,
        data=run.options.data.data,
        classes=run.images.classes,
        run=mark,
        content={
            "class_names": list(run.images.splits.class_names),
            "preprocessing": run.images.preprocessing.to_json(),
            "config": run.loaded.table(),
            "plan": run.plan.lines(),
            "runtime": {
                "threads": run.threads,
                "processes": run.world.size,
                "splits": list(run.placement.splits),
                "device": str(run.world.device),
                "run_dir": str(folder),
                "cuda": torch.version.cuda,
            },
        },
    )


def _saving(run: Run, state: TrainState, session: Session, writer: Writer) -> Saving:
    return Saving(
        plan=run.plan,
        state=state,
        identity=identity_of(run, session.folder, mark=session.mark),
        folder=run_folder.checkpoints(session.folder, run.options),
        kept=run_folder.kept(run.loaded.options),
        writer=writer,
        say=run.screen.line,
        last=run.restored.folder if run.restored else None,
    )


def _record(run: Run, saving: Saving, session: Session, *, stop: StopRequest, stopwatch: Stopwatch) -> Record:
    sinks, state = session.sinks, saving.state
    return Record(
        plan=run.plan,
        state=state,
        saving=saving,
        evaluate=run.placement.evaluator(),
        validation_batch=evaluating.validation_batch(run.options),
        trained=run.placement.trained,
        screen=run.screen,
        sink=sinks.metrics,
        draw=_drawing(run, sinks, stopwatch),
        write_times=sinks.write_times,
        stop=stop,
        offender=run.offender,
        vote=run.world.vote(),
        stopwatch=stopwatch,
        best=session.handed.best if session.handed else _best(run),
        noted=run.restored.manifest.metrics if run.restored and state.progress.unvalidated else {},
        style=telling.open_style(run, session.folder, sinks=sinks.tables),
    )


def _update(
    run: Run, record: Record, step: Step, loader: Loader | SyntheticLoader | IdleLoader, *, folder: Path
) -> None:
    """Every update that is left, with what is due in between."""
    plan, world, screen = run.plan, run.world, run.screen

    def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
        record.begin_epoch(epoch)
        batches = Feed(loader.streamed(epoch, skip=skip), device=world.device, ring=loader.ring)
        return screen.counts(record.stopwatch.waits(batches), epoch=f"epoch {epoch + 1}/{plan.last_epoch}")

    try:
        loop.train(plan, record.state.progress, step, updates_of=updates_of, watch=record, world=world)
    except NotFiniteError as error:
        raise record.saving.diverged(error) from None
    except Interrupted:
        screen.line(f"saved {record.saving.finish()}")
        screen.line(f"to continue: {ending.restore_line(folder, record.saving.folder)}")
        world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
        raise


def _conclude(run: Run, record: Record, folder: Path) -> Path | None:
    """What was asked for after the last update; the average of the checkpoints, if there is one."""
    averaged: Path | None = None
    record.saving.finish()
    if run.options.averaging.weight_avg_strategy != "none":
        averaged = averaging.after_training(record, run.options, world=run.world, say=run.screen.line)
    path = run.options.validation.validate_checkpoints
    if path is not None and run.options.data.data != "synthetic" and run.phase.is_last:
        measured = measuring.after_training(record, path, images=run.images, world=run.world, say=run.screen.line)
        if run.options.style.log_style == "falconet" and run.world.is_first:
            measuring.report(measured, folder, run.screen.line)
    return averaged


def _drawing(run: Run, sinks: run_folder.Sinks, stopwatch: Stopwatch) -> Draw:
    """Histograms of the weights of the first replica, if they were asked for; its stages all take part."""
    if not run.options.logging.weight_histogram or run.grid.replicas.rank > 0:
        return no_drawing
    names = run.placement.trained
    return drawing(run.model, names, stages=run.grid.stages, sinks=sinks.weights, pause=stopwatch.standing)


def _watched(run: Run, step: TimedStep, session: Session, *, left: int) -> Step:
    """The step, traced for a while if that was asked for; one process is enough to see."""
    if not run.options.logging.profile or not run.world.is_first:
        return step
    return ProfiledStep(step, session.folder, device=run.world.device, updates=left, pause=step.stopwatch.standing)


def _best(run: Run) -> Best | None:
    stored = run.restored.manifest.content.get("best") if run.restored else None
    return Best(*stored) if stored else None
