"""The updates of a phase, and what comes after them: averages, further validations, the summary."""

import contextlib
import gc
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from falconet.checkpoint import disk
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Writer
from falconet.config import effects
from falconet.data.buffers import Batch
from falconet.data.loader import IdleLoader, Loader, SyntheticLoader
from falconet.errors import Interrupted, named_option
from falconet.report.console import are
from falconet.report.mlperf import MlperfLog
from falconet.report.throughput import Stopwatch
from falconet.train import build, checkpoints, evaluate, log, loop, metrics, processes, run_folder
from falconet.train.log import Best, Draw, Record, no_drawing, weight_drawing
from falconet.train.metrics import NotFiniteError
from falconet.train.phase import Handover, Run
from falconet.train.plan import phases_of
from falconet.train.processes import Launch
from falconet.train.save import Identity, Saving
from falconet.train.step import ProfiledStep, Step, TimedStep, moments_of
from falconet.train.stop import StopRequest


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all phases of a run share in a process, and what the phase before this one left."""

    folder: Path
    mark: str  # of its checkpoints
    sinks: run_folder.Sinks
    handed: Handover | None = None


def train_phase(run: Run, state: TrainState, session: Session) -> Handover | None:
    """Make the updates of the phase and what comes after them; what it leaves to a next phase."""
    world, screen, folder = run.world, run.screen, session.folder
    loader, stopwatch = run.placement.loader(), Stopwatch(moments=moments_of(world.device))
    step = _watched(run, TimedStep(run.step(state), stopwatch), session, left=run.plan.updates - state.progress.update)
    begun: list[Saving] = []

    def lost() -> str:
        words = begun[0].lost() if begun else "stopped at once"
        return f"{words}; {run_folder.how_to_go_on(folder, run_folder.checkpoints(folder, run.options))}"

    with (
        StopRequest(screen.line) as stop,
        run_folder.interruption_explained(screen.line, lost),
        build.checkpoint_writer(world, timeout=run.options.parallel.collective_timeout) as writer,
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
    held = metrics.measure_memory(state, run.replicas, run.grid)
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
            "class_names": list(run.images.class_names),
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
        validation_batch=evaluate.validation_batch(run.options),
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
        style=log.open_style(run, session.folder, sinks=sinks.tables),
    )


def _update(
    run: Run, record: Record, step: Step, loader: Loader | SyntheticLoader | IdleLoader, *, folder: Path
) -> None:
    """Every update that is left, with what is due in between."""
    plan, world, screen = run.plan, run.world, run.screen

    def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
        record.begin_epoch(epoch)
        return screen.counts(
            record.stopwatch.waits(loader.updates(epoch, skip=skip)), epoch=f"epoch {epoch + 1}/{plan.last_epoch}"
        )

    try:
        loop.train(plan, record.state.progress, step, updates_of=updates_of, watch=record, world=world)
    except NotFiniteError as error:
        raise record.saving.diverged(error) from None
    except Interrupted:
        screen.line(f"saved {record.saving.finish()}")
        screen.line(f"to continue: {run_folder.restore_line(folder, record.saving.folder)}")
        world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
        raise


def _conclude(run: Run, record: Record, folder: Path) -> Path | None:
    """What was asked for after the last update; the average of the checkpoints, if there is one."""
    averaged: Path | None = None
    record.saving.finish()
    if run.options.averaging.weight_avg_strategy != "none":
        averaged = checkpoints.average_after_training(record, run.options, world=run.world, say=run.screen.line)
    path = run.options.validation.validate_checkpoints
    if path is not None and run.options.data.data != "synthetic" and run.phase.is_last:
        measured = checkpoints.validate_after_training(
            record, path, images=run.images, world=run.world, say=run.screen.line
        )
        if run.options.style.log_style == "falconet" and run.world.is_first:
            checkpoints.report_accuracies(measured, folder, run.screen.line)
    return averaged


def _drawing(run: Run, sinks: run_folder.Sinks, stopwatch: Stopwatch) -> Draw:
    """Histograms of the weights of the first replica, if they were asked for; its stages all take part."""
    if not run.options.logging.weight_histogram or run.grid.replicas.rank > 0:
        return no_drawing
    names = run.placement.trained
    return weight_drawing(run.model, names, stages=run.grid.stages, sinks=sinks.weights, pause=stopwatch.standing)


def _watched(run: Run, step: TimedStep, session: Session, *, left: int) -> Step:
    """The step, traced for a while if that was asked for; one process is enough to see."""
    if not run.options.logging.profile or not run.world.is_first:
        return step
    return ProfiledStep(step, session.folder, device=run.world.device, updates=left, pause=step.stopwatch.standing)


def _best(run: Run) -> Best | None:
    stored = run.restored.manifest.content.get("best") if run.restored else None
    return Best(*stored) if stored else None


def carry_out(launch: Launch) -> int:
    """Print the plan, and carry it out unless only the plan was asked for."""
    began = time.time()
    runs = deque([Run(launch)])
    with (
        runs[0].world as world,
        run_folder.interruption_explained(
            runs[0].screen.line, lambda: "stopped before the first update: nothing was made"
        ),
        contextlib.ExitStack() as held,
    ):
        processes.check_alike(world, launch.loaded, launch.restored)
        with named_option("precision"):
            runs[0].regime.require(world.device)
        phases = phases_of(launch.loaded.options)
        begins = processes.standing(phases, launch.loaded, launch.restored)
        for _ in phases[1:]:
            runs.append(Run(launch, before=runs[-1]))
        return _run_phases(runs, launch, skip=begins - 1, began=began, held=held)


def _run_phases(runs: deque[Run], launch: Launch, *, skip: int, began: float, held: contextlib.ExitStack) -> int:
    """Every phase but the first `skip`; a phase that is over leaves `runs`, and with it the device's memory.

    `held` keeps the run folder to this run as long as it is open.
    """
    world, screen, options = runs[0].world, runs[0].screen, launch.loaded.options
    lines = [line for run in runs for line in run.plan_lines()]
    notes = [*effects.notes(options, launch.loaded.sources), *launch.division.notes, *launch.notes]
    for line in [*lines, *(f"note: {note}" for note in notes)]:
        screen.line(line)
    if options.run.plan:
        screen.line("")
        screen.line(launch.loaded.to_yaml().rstrip())
        return 0
    for _ in range(skip):
        runs.popleft()
    state = runs[0].begin()
    over = state.progress.update >= runs[0].plan.updates and not state.progress.unvalidated
    if runs[0].phase.is_last and over:
        plan, by_updates = runs[0].plan, options.training.updates is not None
        done, each = (plan.updates, "update") if by_updates else (plan.last_epoch, "epoch")
        length = f"{'all ' if done > 1 else ''}{are(done, each)} done"
        screen.line(f"nothing left to train: {length}; a larger {runs[0].phase.length} goes on")
        return 0
    folder = Path(world.once(lambda: str(_open_folder(launch, lines, held))))
    if options.run.temporary:
        screen.line(run_folder.temporary_line(folder))
    saved = run_folder.checkpoints(folder, options)
    mark = world.once(lambda: _mark(launch))
    with (
        run_folder.interruption_explained(screen.line, lambda: f"stopped; {run_folder.how_to_go_on(folder, saved)}"),
        run_folder.full_disk_explained(folder, saved),
        contextlib.closing(_open_sinks(runs, folder, state.progress.update, began=began)) as sinks,
    ):
        session = Session(folder=folder, mark=mark, sinks=sinks)
        handed = train_phase(runs.popleft(), state, session)
        while runs:
            assert handed is not None, "a phase that another one follows is averaged"
            del state
            gc.collect()  # hooks on gradients hold the model in a circle
            state = runs[0].begin(handed)
            handed = train_phase(runs.popleft(), state, replace(session, handed=handed))
    if options.run.temporary:
        world.barrier("ending")  # nobody writes there any more
        if world.is_first:
            run_folder.throw_away(folder, screen.line)
    return 0


def _open_sinks(runs: deque[Run], folder: Path, update: int, *, began: float) -> run_folder.Sinks:
    """The sinks of the run, in the first process; `update`: where it goes on; `began`: seconds since 1970."""
    first, options = runs[0], runs[0].options
    if not first.world.is_first:
        return run_folder.Sinks()
    if not options.logging.mlperf_logging:
        return run_folder.open_sinks(folder, first.loaded)
    told = log.submission(
        options,
        first.plan,
        weights=first.placement.trained,
        validated=len(first.images.validation),
        epochs=runs[-1].plan.last_epoch,
        began=began,
    )
    path = folder / f"result_{options.run.seed}.txt"
    return run_folder.open_sinks(folder, first.loaded, MlperfLog(path, told, done=first.plan.place(update)[0]))


def _mark(launch: Launch) -> str:
    """What tells the checkpoints of this run from others in the same folder: the restored run's, or a new one."""
    stored = launch.restored.manifest.content.get("run") if launch.restored else None
    return stored if isinstance(stored, str) and stored else secrets.token_hex(16)


def _open_folder(launch: Launch, plan: list[str], held: contextlib.ExitStack) -> Path:
    options = launch.loaded.options
    folder = run_folder.open_folder(options, restored=launch.restored, again=launch.again)
    held.enter_context(run_folder.alone(folder, again=launch.again))
    if launch.again:  # all of its workers are gone, and nobody else saves there
        disk.sweep(run_folder.checkpoints(folder, options), abandoned=0.0, kinds=("tmp",))
    run_folder.write_config(folder, launch.loaded, "\n".join(plan) + "\n")
    return folder
