"""A run: what is decided before its first update, its folder and sinks, and its phases one after the other."""

import contextlib
import gc
import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from falconet import writing
from falconet.checkpoint import disk
from falconet.checkpoint.state import Progress
from falconet.config import effects
from falconet.data.dataset import BAD_PHOTOS
from falconet.errors import ShortageError, named_option
from falconet.numerics.precision import REGIMES
from falconet.parallel import environment
from falconet.report.console import Screen, are, counted
from falconet.report.epochs import in_short
from falconet.report.mlperf import MlperfLog
from falconet.train import (
    build,
    fitting,
    interruption,
    lr_finder,
    plan_text,
    record,
    resume,
    run_folder,
    workers,
)
from falconet.train.build import BuiltPhase, Site
from falconet.train.layer_table import Row, layer_table
from falconet.train.lr_finder import Finding
from falconet.train.mlperf_submission import submission_of
from falconet.train.phase import Session, begin, best_of, ended_early, train_phase
from falconet.train.plan import phases_of
from falconet.train.preparation import Launch


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What is decided for a run before its first update."""

    launch: Launch  # with numbers for what trials have found
    site: Site
    phases: deque[BuiltPhase]  # all of them; each is taken from here when its turn comes, which frees its memory
    current: int  # the number of the phase that it begins with
    plan: Sequence[str]  # every line
    shown: Sequence[str]  # what is printed of it, with notes
    finding: Finding | None  # of --lr auto


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is known of a run before its model is changed for its device."""

    environment: Mapping[str, str]  # versions and hardware
    bad: Sequence[str]  # photos that cannot be used
    layers: Sequence[Row]  # for the report
    graph: Any  # of the model, for trackers; None: they do not take one


def carry_out(launch: Launch) -> int:
    """Print the plan, and carry it out unless only the plan was asked for."""
    try:
        return _carried_out(launch)
    except ShortageError as error:
        short = ShortageError(error.short, helps=error.helps, after=error.after, phase=error.phase)
    # Here the error is gone, and with its traceback everything of the run that was on the device.
    raise fitting.answer(short, launch)


def _carried_out(launch: Launch) -> int:
    began = time.time()
    if introduced := workers.introduction(launch):
        Screen(words=launch.conventions.words).line(introduced)
    site = build.open_site(launch)
    with (
        site.world,
        interruption.interruption_explained(
            site.screen.line, lambda: "stopped before the first update: nothing was saved"
        ),
        interruption.memory_explained(),
        contextlib.ExitStack() as held,
    ):
        _check(launch, site)
        decided = decide(launch, site)
        for line in decided.shown:
            site.screen.line(line)
        if launch.loaded.options.run.plan:
            _end_plan(decided)
            return 0
        return _run_phases(decided, held, began=began)


def _check(launch: Launch, site: Site) -> None:
    """Refuse processes that differ, and what the device cannot do; limit its libraries to what they may."""
    options = launch.loaded.options
    workers.check_alike(site.world, launch.loaded, launch.restored)
    with named_option("precision"):
        REGIMES[options.machine.precision].require(site.world.device)
    if not options.run.plan:
        build.limit_libraries(options, site.grid)


def decide(launch: Launch, site: Site) -> Decided:
    """Find what only trials can, and describe every phase; no model is built that stays."""
    fitted = fitting.with_micro_batch(build.with_images(launch), site)
    settled, finding = lr_finder.with_rate(fitted, site)
    options = settled.loaded.options
    current = resume.current_phase(phases_of(options), settled.loaded, settled.restored)
    phases = build.phases_built(settled, site)
    plan = [line for each in phases for line in plan_text.describe(each)]
    is_whole = options.run.plan or settled.conventions.prints_whole_plan
    shown = plan if is_whole else [line for each in phases for line in plan_text.brief(each)]
    found = [finding.line()] if finding else []
    notes = [*effects.notes(options, settled.loaded.sources), *settled.division.notes, *settled.notes]
    return Decided(
        launch=settled,
        site=site,
        phases=deque(phases),
        current=current,
        plan=[*plan, *found],
        shown=[*shown, *found, *(f"note: {note}" for note in notes)],
        finding=finding,
    )


def _end_plan(decided: Decided) -> None:
    """Print what --plan shows below the plan: warnings, and every option with its source."""
    say = decided.site.screen.line
    for warning in filter(None, map(fitting.warning, decided.phases)):
        say(warning)
    say("")
    say(decided.launch.loaded.to_yaml().rstrip())


def _known(first: BuiltPhase) -> Start:
    """What is known of a run by its first phase."""
    site = first.site
    return Start(
        bad=first.images.check.lines(),
        layers=_layers(first),
        graph=_graph(first),
        environment=record.environment_of(site.world, threads=site.threads),
    )


def _layers(built: BuiltPhase) -> list[Row]:
    """The layers of the model for the report, in the first process; before the model is changed for its device."""
    if not built.options.logging.report or not built.site.world.is_first:
        return []
    # With CUDA the compiler is imported anyway; without, an image takes less than a hundredth of an update.
    on: Literal["cpu", "meta"] = "meta" if built.site.world.device.type == "cuda" else "cpu"
    return layer_table(built.placement.network.model, image_size=built.images.preprocessing.image_size, on=on)


def _graph(built: BuiltPhase) -> Any:
    """The model for TensorBoard, if that was asked for and works; before the model is changed for its device."""
    if not built.options.logging.tensorboard or not built.site.world.is_first:
        return None
    from falconet.report.trackers.tensorboard import graph_of

    size = built.images.preprocessing.image_size
    return graph_of(built.placement.network.model, image_size=size, say=built.site.screen.line)


def _run_phases(decided: Decided, held: contextlib.ExitStack, *, began: float) -> int:
    """Train every phase that is left; one that is done leaves `decided`, which frees its memory on the device."""
    launch, site, phases = decided.launch, decided.site, decided.phases
    for _ in range(decided.current - 1):
        phases.popleft()
    first, options = phases[0], launch.loaded.options
    start = _known(first)
    state = begin(first)
    if _is_finished(first, state.progress):
        return 0
    folder = Path(site.world.once(lambda: str(_open_folder(decided, start, held))))
    if options.run.temporary:
        site.screen.line(run_folder.temporary_line(folder))
    if launch.restored and (elsewhere := run_folder.elsewhere_line(launch.restored, folder)):
        site.screen.line(elsewhere)
    saved = run_folder.checkpoints(folder, options)
    mark = site.world.once(lambda: _mark(launch))
    with (
        interruption.interruption_explained(
            site.screen.line, lambda: f"stopped; {interruption.how_to_continue(folder, saved)}"
        ),
        interruption.EndRecorded(folder if site.world.is_first else None),
        interruption.full_disk_explained(folder, saved),
        interruption.memory_explained(saved, first.phase),
        contextlib.closing(_open_sinks(phases, folder, state.progress.update, began=began, mark=mark)) as sinks,
    ):
        for each in sinks.trackers if start.graph is not None else ():
            each.write_graph(start.graph)
        session = Session(folder=folder, mark=mark, sinks=sinks, environment=start.environment)
        handed = train_phase(phases.popleft(), state, session)
        del first
        while phases:
            assert handed is not None, "a phase that another one follows is averaged"
            del state
            gc.collect()  # hooks on gradients keep the model in a reference cycle
            with interruption.memory_explained(saved, phases[0].phase):
                state = begin(phases[0], handed)
                handed = train_phase(phases.popleft(), state, session, handed=handed)
    if options.run.temporary:
        site.world.barrier("ending")  # no process writes there any more
        if site.world.is_first:
            run_folder.remove_temporary(folder, site.screen.line)
    return 0


def _is_finished(built: BuiltPhase, progress: Progress) -> bool:
    """Whether a continued run has nothing left to do; prints why, or that only its end is left."""
    done = _nothing_left(built, progress) if built.phase.is_last and not progress.unvalidated else None
    if done is None:
        return False
    only_ends = _lacks_its_end(built)
    left = "every update was made; what follows the last one is left"
    built.site.screen.line(left if only_ends else f"nothing left to train: {done}")
    return not only_ends


def _nothing_left(built: BuiltPhase, progress: Progress) -> str | None:
    """Why there is nothing left to train and what would continue the run; None: there is something."""
    best = best_of(built)
    if best and progress.update < built.plan.updates and ended_early(built.plan, progress, best):
        return (
            f"it ended early after {counted(built.plan.place(progress.update)[0], 'epoch')}, the best validation,"
            f" {best.accuracy:.2f} %, was after {best.epoch:g}; a larger --early-stopping, or"
            " None, continues the run"
        )
    if progress.update < built.plan.updates:
        return None
    if built.options.training.updates is not None:
        length = _all(built.options.training.updates, "update")
    elif built.options.training.has_whole_epochs:
        length = _all(built.plan.last_epoch, "epoch")
    else:
        length = f"all {in_short(built.plan.epoch_at(built.plan.updates))} epochs are done"
    return f"{length}; a larger {built.phase.length} continues the run"


def _lacks_its_end(built: BuiltPhase) -> bool:
    """Whether the run that is continued stopped between its last update and its summary."""
    restored, launch = built.restored, built.launch
    if not restored or restored.manifest.progress.update > built.plan.updates:
        return False
    conventions = launch.conventions
    answer = built.site.world.once(
        lambda: "yes" if run_folder.lacks_its_end(built.options, restored, conventions) else ""
    )
    return bool(answer)


def _all(count: int, what: str) -> str:
    return f"{'all ' if count > 1 else ''}{are(count, what)} done"


def _mark(launch: Launch) -> str:
    """What distinguishes the checkpoints of this run from others in the same folder; kept by a restored run."""
    stored = launch.restored.manifest.content.get("run") if launch.restored else None
    return stored if isinstance(stored, str) and stored else secrets.token_hex(16)


def _open_folder(decided: Decided, start: Start, held: contextlib.ExitStack) -> Path:
    """The run folder with what is known before the first update, locked until `held` is closed."""
    launch, say = decided.launch, decided.site.screen.line
    folder = _locked_folder(launch, held)
    config, plan = launch.loaded.rooted().to_yaml(launch.started()), "\n".join(decided.plan) + "\n"
    run_folder.write_config(folder, config, plan)
    if start.bad:
        writing.replace(folder, BAD_PHOTOS, "\n".join(start.bad) + "\n")
    if launch.loaded.options.logging.report:
        with record.warned(say):
            record.write_facts(folder, start.layers, start.environment)
    if decided.finding:
        decided.finding.write(folder)
        say(f"the loss at each learning rate: {folder / lr_finder.PLOT}")
    return folder


def _locked_folder(launch: Launch, held: contextlib.ExitStack) -> Path:
    """The run folder, which no other run uses until `held` is closed; its log ends where the run continues."""
    options, restored, conventions = launch.loaded.options, launch.restored, launch.conventions
    folder = run_folder.open_folder(launch.loaded, restored=restored, again=launch.again, conventions=conventions)
    saved = run_folder.checkpoints(folder, options)
    restarted = environment.attempt(os.environ) > 0
    held.enter_context(run_folder.alone(folder, again=restarted))
    if not saved.samefile(folder):  # another run may have been told to save in this one's checkpoints/
        option = "--checkpoint-output-path" if options.checkpoints.checkpoint_output_path else "--run-dir"
        held.enter_context(run_folder.alone(saved, option=option, again=restarted))
    run_folder.check_saved(saved, launch.loaded, restored=restored)  # the run that held the lock may have just ended
    if launch.again:  # its workers are gone, and nothing else saves there
        disk.sweep(saved, abandoned=0.0, kinds=("tmp",))
    if options.run.resume and not restored:
        run_folder.check_resumed(folder, saved)
    if restored or launch.again or options.run.resume:
        again = launch.again or options.run.resume
        run_folder.continue_log(folder, restored, conventions=conventions, again=again)
    return folder


def _open_sinks(phases: deque[BuiltPhase], folder: Path, update: int, *, began: float, mark: str) -> run_folder.Sinks:
    """The sinks of the run, in the first process; it starts after `update`. `began`: seconds since 1970."""
    first, options = phases[0], phases[0].options
    if not first.site.world.is_first:
        return run_folder.Sinks()
    opens = partial(
        run_folder.open_sinks,
        folder,
        first.launch.loaded,
        say=first.site.screen.line,
        mark=mark,
        restored=first.launch.restored,
    )
    if not options.logging.mlperf_logging:
        return opens()
    stated = submission_of(
        options,
        first.plan,
        weights=first.placement.network.trained,
        validated=len(first.images.validation),
        epochs=phases[-1].plan.last_epoch,
        began=began,
    )
    path = folder / f"result_{options.run.seed}.txt"
    return opens(MlperfLog(path, stated, done=first.plan.place(update)[0]))
