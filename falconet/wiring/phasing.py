"""A run from its options to its end, phase by phase: shared by train and restore."""

import contextlib
import gc
import secrets
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from falconet.checkpoint import disk
from falconet.config import effects
from falconet.config.phases import phases_of
from falconet.report.mlperf import MlperfLog
from falconet.report.words import are
from falconet.wiring import ending, launching, mlperf, run_folder, training
from falconet.wiring.launching import Launch
from falconet.wiring.running import Run


def go(launch: Launch) -> int:
    """Print the plan, and carry it out unless only the plan was asked for."""
    began = time.time()
    runs = deque([Run(launch)])
    with (
        runs[0].world as world,
        ending.interruption_explained(runs[0].screen.line, lambda: "stopped before the first update: nothing was made"),
        contextlib.ExitStack() as held,
    ):
        launching.check_alike(world, launch.loaded, launch.restored)
        runs[0].regime.require(world.device)
        phases = phases_of(launch.loaded.options)
        begins = launching.standing(phases, launch.loaded, launch.restored)
        for _ in phases[1:]:
            runs.append(Run(launch, before=runs[-1]))
        return _carry_out(runs, launch, skip=begins - 1, began=began, held=held)


def _carry_out(runs: deque[Run], launch: Launch, *, skip: int, began: float, held: contextlib.ExitStack) -> int:
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
        ending.interruption_explained(screen.line, lambda: f"stopped; {ending.how_to_go_on(folder, saved)}"),
        ending.full_disk_explained(folder, saved),
        contextlib.closing(_open_sinks(runs, folder, state.progress.update, began=began)) as sinks,
    ):
        session = training.Session(folder=folder, mark=mark, sinks=sinks)
        handed = training.train(runs.popleft(), state, session)
        while runs:
            assert handed is not None, "a phase that another one follows is averaged"
            del state
            gc.collect()  # hooks on gradients hold the model in a circle
            state = runs[0].begin(handed)
            handed = training.train(runs.popleft(), state, replace(session, handed=handed))
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
    told = mlperf.submission(
        options,
        first.plan,
        weights=first.placement.trained,
        validated=len(first.images.splits.validation),
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
