"""A run: its plan, its phases one after the other, restoring and interruption, and what comes after the last update."""

import contextlib
import gc
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from falconet import writing
from falconet.checkpoint import disk
from falconet.checkpoint.manifest import IMAGES, SEVERAL_LABELS, Manifest
from falconet.checkpoint.state import Progress, TrainState
from falconet.checkpoint.writer import Writer
from falconet.config import commands, effects
from falconet.data.buffers import Batch
from falconet.data.dataset import BAD_PHOTOS
from falconet.errors import CheckpointError, ConfigError, Interrupted, ShortageError, named_option
from falconet.numerics.precision import REGIMES
from falconet.parallel import environment
from falconet.parallel.data_parallel import digest
from falconet.parallel.world import World
from falconet.report import gpu_driver
from falconet.report.console import Screen, are, counted
from falconet.report.epochs import in_short
from falconet.report.mlperf import MlperfLog
from falconet.report.throughput import Stopwatch
from falconet.train import (
    build,
    evaluate,
    log,
    loop,
    lr_finder,
    memory,
    metrics,
    plan_text,
    processes,
    record,
    run_folder,
    save,
    saved_model,
    summary,
)
from falconet.train.build import BuiltPhase
from falconet.train.evaluate import FailedTogetherError, Validation
from falconet.train.layer_table import Row, layer_table
from falconet.train.log import Log, Output, weight_drawing
from falconet.train.loop import Watch
from falconet.train.lr_finder import Finding
from falconet.train.metrics import Best, Measurements, NotFiniteError
from falconet.train.placement import TrainingLoader
from falconet.train.plan import Plan, phases_of
from falconet.train.processes import Launch
from falconet.train.profiled_step import ProfiledStep, Subject
from falconet.train.record import Recorder
from falconet.train.save import Identity, Saving
from falconet.train.step import ShownStep, Step, TimedStep, moments_of
from falconet.train.stop import StopRequest
from falconet.train.summary import Ending


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a phase leaves to the next one."""

    averaged: Path  # the average of its checkpoints
    best: Best | None


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all phases of a run write to."""

    folder: Path
    mark: str  # of its checkpoints
    sinks: run_folder.Sinks


def carry_out(launch: Launch) -> int:
    """Print the plan, and carry it out unless only the plan was asked for."""
    try:
        return _carried_out(launch)
    except ShortageError as error:
        short = ShortageError(error.short, helps=run_folder.NEEDS_LESS, after=error.after)
    # Here the error is gone, and with its traceback everything of the run that was on the device.
    raise memory.answer(short, launch)


def _carried_out(launch: Launch) -> int:
    began = time.time()
    if introduced := processes.introduction(launch):
        Screen(words=launch.conventions.words).line(introduced)
    site = build.open_site(launch)
    world, screen = site.world, site.screen
    with (
        world,
        run_folder.interruption_explained(screen.line, lambda: "stopped before the first update: nothing was saved"),
        run_folder.memory_explained(),
        contextlib.ExitStack() as held,
    ):
        processes.check_alike(world, launch.loaded, launch.restored)
        with named_option("precision"):
            REGIMES[launch.loaded.options.machine.precision].require(world.device)
        if not launch.loaded.options.run.plan:
            build.limit_libraries(launch.loaded.options, site.grid)
        launch = memory.settled(build.with_images(launch), site)
        launch, finding = _with_rate(launch, site)
        options = launch.loaded.options
        current = processes.current_phase(phases_of(options), launch.loaded, launch.restored)
        built = deque(build.phases_built(launch, site))
        plan = [line for each in built for line in plan_text.describe(each)]
        found_rate = [finding.line()] if finding else []
        notes = [*effects.notes(options, launch.loaded.sources), *launch.division.notes, *launch.notes]
        is_whole = options.run.plan or not launch.conventions.is_ours  # the originals' users always see all of it
        shown = plan if is_whole else [line for each in built for line in plan_text.brief(each)]
        for line in [*shown, *found_rate, *(f"note: {note}" for note in notes)]:
            screen.line(line)
        plan += found_rate
        if options.run.plan:
            for warning in filter(None, map(memory.warning, built)):
                screen.line(warning)
            screen.line("")
            screen.line(launch.loaded.to_yaml().rstrip())
            return 0
        for _ in range(current - 1):
            built.popleft()

        bad = built[0].images.check.lines()
        layers, graph = _layers(built[0]), _graph(built[0])

        def open_folder() -> Path:
            folder = _open_folder(launch, plan, held, bad)
            if options.logging.report:
                with record.warned(screen.line):
                    record.write_facts(folder, layers, record.environment_of(world, threads=site.threads))
            if finding:
                finding.write(folder)
                screen.line(f"the loss at each learning rate: {folder / lr_finder.PLOT}")
            return folder

        return _run_phases(built, open_folder, began=began, graph=graph)


def _with_rate(launch: Launch, site: build.Site) -> tuple[Launch, Finding | None]:
    """The run with a number for --lr auto, and how it was found."""
    options = launch.loaded.options
    if options.learning_rate.lr != "auto":
        return launch, None
    if options.run.plan:
        note = "--lr auto is found by a range test before the first update: rates in this plan are shares of it"
        return replace(launch, notes=(*launch.notes, note)), None
    site.screen.line("finding a learning rate (--lr auto)")
    finding = lr_finder.find(launch, site)
    return lr_finder.settled(launch, finding.rate), finding


def _layers(built: BuiltPhase) -> list[Row]:
    """The layers of the model for the report, in the first process; before the model is changed for its device."""
    if not built.options.logging.report or not built.site.world.is_first:
        return []
    # With CUDA the compiler is imported anyway; without, an image takes less than a hundredth of an update.
    on: Literal["cpu", "meta"] = "meta" if built.site.world.device.type == "cuda" else "cpu"
    return layer_table(built.placement.whole, image_size=built.images.preprocessing.image_size, on=on)


def _graph(built: BuiltPhase) -> Any:
    """The model for TensorBoard, if that was asked for and works; before the model is changed for its device."""
    if not built.options.logging.tensorboard or not built.site.world.is_first:
        return None
    from falconet.report.tensorboard import graph_of

    size = built.images.preprocessing.image_size
    return graph_of(built.placement.whole, image_size=size, say=built.site.screen.line)


def _run_phases(phases: deque[BuiltPhase], open_folder: Callable[[], Path], *, began: float, graph: Any = None) -> int:
    """Train every phase; one that is done leaves `phases`, which frees its memory on the device.

    `graph`: of the model, for trackers.
    """
    first = phases[0]
    launch, site, options = first.launch, first.site, first.launch.loaded.options
    state = begin(first)
    if first.phase.is_last and not state.progress.unvalidated:
        done = _nothing_left(first, state.progress)
        if done:
            site.screen.line(f"nothing left to train: {done}")
            return 0
    folder = Path(site.world.once(lambda: str(open_folder())))
    if options.run.temporary:
        site.screen.line(run_folder.temporary_line(folder))
    if launch.restored and (elsewhere := run_folder.elsewhere_line(launch.restored, folder)):
        site.screen.line(elsewhere)
    saved = run_folder.checkpoints(folder, options)
    mark = site.world.once(lambda: _mark(launch))
    with (
        run_folder.interruption_explained(
            site.screen.line, lambda: f"stopped; {run_folder.how_to_continue(folder, saved)}"
        ),
        run_folder.EndRecorded(folder if site.world.is_first else None),
        run_folder.full_disk_explained(folder, saved),
        run_folder.memory_explained(saved),
        contextlib.closing(_open_sinks(phases, folder, state.progress.update, began=began, mark=mark)) as sinks,
    ):
        for each in sinks.trackers if graph is not None else ():
            each.write_graph(graph)
        session = Session(folder=folder, mark=mark, sinks=sinks)
        handed = train_phase(phases.popleft(), state, session)
        del first
        while phases:
            assert handed is not None, "a phase that another one follows is averaged"
            del state
            gc.collect()  # hooks on gradients keep the model in a reference cycle
            state = begin(phases[0], handed)
            handed = train_phase(phases.popleft(), state, session, best=handed.best)
    if options.run.temporary:
        site.world.barrier("ending")  # no process writes there any more
        if site.world.is_first:
            run_folder.remove_temporary(folder, site.screen.line)
    return 0


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
        _require_same_state(built.launch.loaded.options, manifest, folder=folder)
        state.load(folder, name=model)
        state.progress = _progress_in(built.plan, manifest)
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
        warning = evaluate.statistics_warning(
            state.model, built.images, built.options.data, regime=built.regime, world=site.world
        )
        if warning:
            site.screen.line(warning)


def _require_same_state(options: commands.TrainOptions, manifest: Manifest, *, folder: Path) -> None:
    """The state of one update rule means nothing to another even if the tensors fit; nor do other formats."""
    trained, asked = manifest.option("optimizer"), options.optimizer.optimizer
    if trained != asked:
        raise ConfigError(f"--optimizer: got '{asked}', expected '{trained}', whose state {folder} holds")
    training = options.training
    for name, patterns in (("trainable", training.trainable), ("freeze", (training.freeze or "",))):
        value: str | list[str] = manifest.config.get(name, {"value": ""})["value"]  # older checkpoints trained all
        got, expected = " ".join(patterns), value if isinstance(value, str) else " ".join(value)
        if got != expected:
            raise ConfigError(
                f"--{name}: got '{got}', expected '{expected}', whose state {folder} holds; `falconet train"
                " --init-path` starts a new run with its weights"
            )
    for name, epochs in (("unfreeze-after", training.unfreeze_after), ("freeze-after", training.freeze_after)):
        if (epochs is None) == (name in manifest.config):
            expected = "a number of epochs" if epochs is None else "none"
            raise ConfigError(f"--{name}: expected {expected}, because {folder} holds the state of such a run")
    before, now = REGIMES.get(manifest.option("precision")), REGIMES[options.machine.precision]
    if before is None:
        raise CheckpointError(f"{folder}: its precision is '{manifest.option('precision')}', which is none of ours")
    if before.update != now.update:
        raise ConfigError(
            f"--precision: got '{now.name}', expected one that updates in the same format as '{before.name}', whose"
            f" state {folder} holds"
        )


def _progress_in(plan: Plan, manifest: Manifest) -> Progress:
    """The checkpoint's place in a plan, which may have another global batch."""
    updates, rest = divmod(manifest.progress.images, plan.global_batch)
    if rest:
        raise ConfigError(
            f"--micro-batch-size: the checkpoint is {manifest.progress.images:,} images into an epoch, which a"
            f" global batch of {plan.global_batch} does not divide; expected the one it was trained with"
        )
    return replace(Progress.from_json(manifest.meter), update=plan.update_at(manifest.progress.epoch, updates))


def _ended_early(plan: Plan, progress: Progress, best: Best | None) -> bool:
    return best is not None and plan.ends_early(progress.update, best=best.update)


def _nothing_left(built: BuiltPhase, progress: Progress) -> str | None:
    """Why there is nothing left to train and what would continue the run; None: there is something."""
    manifest = built.restored.manifest if built.restored else None
    best = Best(*manifest.best) if manifest and manifest.best else None
    if best and progress.update < built.plan.updates and _ended_early(built.plan, progress, best):
        return (
            f"it ended early after {counted(built.plan.place(progress.update)[0], 'epoch')}, the best validation,"
            f" {best.accuracy:.2f} %, was after {built.plan.epoch_at(best.update):g}; a larger --early-stopping, or"
            " None, continues the run"
        )
    if progress.update < built.plan.updates:
        return None
    if built.options.training.updates is not None:
        length = _all(built.plan.updates, "update")
    elif built.options.training.has_whole_epochs:
        length = _all(built.plan.last_epoch, "epoch")
    else:
        length = f"all {in_short(built.plan.epoch_at(built.plan.updates))} epochs are done"
    return f"{length}; a larger {built.phase.length} continues the run"


def _all(count: int, what: str) -> str:
    return f"{'all ' if count > 1 else ''}{are(count, what)} done"


def _mark(launch: Launch) -> str:
    """What distinguishes the checkpoints of this run from others in the same folder; kept by a restored run."""
    stored = launch.restored.manifest.content.get("run") if launch.restored else None
    return stored if isinstance(stored, str) and stored else secrets.token_hex(16)


def _open_folder(launch: Launch, plan: list[str], held: contextlib.ExitStack, bad: list[str]) -> Path:
    """The run folder, locked until `held` is closed. `bad`: photos that cannot be used."""
    options = launch.loaded.options
    folder = run_folder.open_folder(
        launch.loaded, restored=launch.restored, again=launch.again, conventions=launch.conventions
    )
    saved = run_folder.checkpoints(folder, options)
    restarted = environment.attempt(os.environ) > 0
    held.enter_context(run_folder.alone(folder, again=restarted))
    if not saved.samefile(folder):  # another run may have been told to save in this one's checkpoints/
        option = "--checkpoint-output-path" if options.checkpoints.checkpoint_output_path else "--run-dir"
        held.enter_context(run_folder.alone(saved, option=option, again=restarted))
    run_folder.check_saved(
        saved, launch.loaded, restored=launch.restored
    )  # the run that held the lock may have just ended
    if launch.again:  # its workers are gone, and nothing else saves there
        disk.sweep(saved, abandoned=0.0, kinds=("tmp",))
    if options.run.resume and not launch.restored:
        run_folder.check_resumed(folder, saved)
    if launch.restored or launch.again or options.run.resume:
        again = launch.again or options.run.resume
        run_folder.continue_log(folder, launch.restored, conventions=launch.conventions, again=again)
    run_folder.write_config(folder, launch.loaded.rooted().to_yaml(launch.started()), "\n".join(plan) + "\n")
    if bad:
        writing.replace(folder, BAD_PHOTOS, "\n".join(bad) + "\n")
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
    submission = log.submission(
        options,
        first.plan,
        weights=first.placement.trained,
        validated=len(first.images.validation),
        epochs=phases[-1].plan.last_epoch,
        began=began,
    )
    path = folder / f"result_{options.run.seed}.txt"
    return opens(MlperfLog(path, submission, done=first.plan.place(update)[0]))


def train_phase(built: BuiltPhase, state: TrainState, session: Session, *, best: Best | None = None) -> Handover | None:
    """Make the updates of a phase and what follows them; returns what it leaves to a next one."""
    world, screen, folder = built.site.world, built.site.screen, session.folder
    if warning := memory.warning(built, state.model):
        screen.line(warning)
    loader = built.placement.loader()
    stopwatch = Stopwatch(moments=moments_of(world.device), seconds=state.progress.seconds)
    recorder = _recorder(built, session, update=state.progress.update, stopwatch=stopwatch)
    timed = TimedStep(recorder.watched(built.step(state, preparing=stopwatch.preparing)), stopwatch)
    profiled = _profiled(built, timed, folder, state)
    step = _shown(built, profiled or timed)
    before = _joules(world.device)
    output = _output(built, state, session, stopwatch=stopwatch, best=best)
    writer = build.checkpoint_writer(world, timeout=built.options.parallel.collective_timeout)
    in_a_row = built.plan.in_a_row
    stop = StopRequest(screen.line, after="this update" if in_a_row == 1 else f"at most {in_a_row} updates")
    saving = _saving(built, state, session, output=output, writer=writer, stop=stop)
    with (
        stop,
        run_folder.interruption_explained(
            screen.line, lambda: f"{saving.lost()}; {run_folder.how_to_continue(folder, saving.folder)}"
        ),
        writer,
        screen,
        contextlib.closing(profiled) if profiled else contextlib.nullcontext(),
        stop.heard(),
        _saved_together(saving),
    ):
        world.heeds(lambda: stop.requested)
        vote = world.vote()
        watch = Watch(
            validation=_validation(built, state, saving, recorder, stopping=lambda: stop.requested),
            log=_log(built, state, session, output=output),  # last: it starts to count the time
            saving=saving,
            stopping=lambda: vote(stop.requested),
            ended=lambda: _ended_early(built.plan, state.progress, output.measurements.best),
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
            _update(built, state, step, watch, recorder, loader=loader, folder=folder)
        watch.log.end()
        rate = watch.log.whole_run()
        with stopwatch.standing():
            averaged = _conclude(built, watch, folder)
    memory_of_stages = metrics.measure_stages(state, built.replicas, built.site.grid)
    joules = _energy(before, world)
    if watch.validation.left_out:
        built.site.note(evaluate.left_out_line(watch.validation.left_out))
    if world.is_first:
        ending = Ending(
            checkpoints=saving.folder,
            metric=watch.validation.metric,
            memory=memory_of_stages,
            is_last=built.phase.is_last,
            rate=rate,
            seconds=watch.log.seconds_of(rate, validation=watch.validation.seconds),
            joules=joules,
        )
        summary.write(folder, watch.log, ending)
        if built.phase.is_last:
            summary.hand_over(watch.log, ending, session.sinks.trackers)
        end = recorder.ended if built.phase.is_last else recorder.phase_ended
        report = end(state.progress.update)
        is_told = built.launch.conventions.is_ours and not built.options.run.temporary
        summary.show(folder, watch.log, replace(ending, report=report if is_told else None))
    return Handover(averaged=averaged, best=output.measurements.best) if averaged else None


def _recorder(built: BuiltPhase, session: Session, *, update: int, stopwatch: Stopwatch) -> Recorder:
    """What keeps the answers and pictures of a phase for its report, if there is one."""
    logging = built.options.logging
    if not logging.report or built.options.data.data == "synthetic":
        return record.Unreported()
    page = record.NoPage if built.options.run.temporary else record.Page
    return record.Reported(
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
    manifest = built.restored.manifest if built.restored else None
    stored = manifest.best if manifest else None
    measurements = Measurements(
        session.sinks.metrics,
        update=state.progress.update,
        restored=manifest.metrics if manifest and state.progress.unvalidated else None,
        best=best or (Best(*stored) if stored else None),
    )
    style = log.open_style(built, session.folder, sinks=session.sinks.trackers)
    return Output(screen=built.site.screen, style=style, measurements=measurements, stopwatch=stopwatch)


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
    stored = launch.restored.manifest.content.get("initial_weights") if launch.restored else None
    return launch.initial.source if launch.initial else stored if isinstance(stored, str) else None


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
    trained, stages, stopwatch = built.placement.trained, built.site.grid.stages, output.stopwatch
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
        batch=evaluate.validation_batch(built.options),
        checkpoint_name=saving.name,
        stopping=stopping,
        metric=built.images.metric,
        record=recorder,
    )


def _update(
    built: BuiltPhase,
    state: TrainState,
    step: Step,
    watch: Watch,
    recorder: Recorder,
    *,
    loader: TrainingLoader,
    folder: Path,
) -> None:
    """Make every update that is left, with what is due in between."""
    plan, world, screen, saving = built.plan, built.site.world, built.site.screen, watch.saving

    def updates_of(epoch: int, skip: int) -> Iterable[Sequence[Batch]]:
        recorder.epoch_ended(state.progress.update)
        watch.log.begin_epoch(epoch)
        return screen.counts(
            saving.output.stopwatch.waits(loader.updates(epoch, skip=skip)),
            epoch=f"epoch {epoch + 1}/{in_short(plan.epoch_at(plan.updates))}",
            total=min(plan.updates_per_epoch, plan.updates - plan.update_at(epoch, 0)),
            done=skip,
        )

    try:
        loop.train(plan, state.progress, step, updates_of=updates_of, watch=watch, world=world)
    except NotFiniteError as error:
        recorder.stopped()
        raise saving.diverged(error) from None
    except Interrupted:
        saving.output.style.stopped()
        screen.line(f"saved {saving.finish()}")
        screen.line(f"to continue: {run_folder.restore_line(folder, saving.folder)}")
        recorder.stopped()
        world.barrier("saving")  # a launcher may end the first process as soon as another one is gone
        raise


def _conclude(built: BuiltPhase, watch: Watch, folder: Path) -> Path | None:
    """What was asked for after the last update; returns the average of the checkpoints, if any."""
    options, world, saving = built.options, built.site.world, watch.saving
    averaged: Path | None = None
    saving.finish()
    if options.averaging.weight_avg_strategy != "none":
        averaged = save.average_after_training(saving, watch.validation, options, world=world)
    path = options.validation.validate_checkpoints
    if path is not None and options.data.data != "synthetic" and built.phase.is_last:
        is_ours = saving.output.style.tabulates
        measured = saved_model.validate_folder(
            path,
            saving,
            watch.validation,
            images=built.images,
            world=world,
            report=(lambda _: None) if is_ours else saving.output.style.validated,
        )
        if is_ours and world.is_first:
            rows, file = evaluate.tabulate_accuracies(measured), folder / evaluate.ACCURACIES_FILE
            evaluate.show_accuracies(rows, built.site.screen.line)
            evaluate.write_accuracies(rows, file, option="--run-dir")
            built.site.screen.line(f"written to {file}")
    return averaged
