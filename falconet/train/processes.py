"""Which processes a run needs, and whether they are to be started or are there already."""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import falconet
from falconet.checkpoint import format
from falconet.checkpoint.manifest import Checkpoint, Manifest
from falconet.config import commands, options, rules
from falconet.config.fields import value_or
from falconet.config.load import Loaded, left_out, typed
from falconet.config.settings import CHECKPOINT, Setting, is_asked_for
from falconet.errors import CheckpointError, ConfigError, WorldError
from falconet.parallel import environment, resources
from falconet.parallel.division import PROCESSES_PER_CORE, Asked, Division, over_devices, over_processes
from falconet.parallel.environment import Place
from falconet.parallel.world import World, device_kind
from falconet.report.console import Screen, are, counted
from falconet.report.styles import FALCONET, Conventions
from falconet.train import run_folder
from falconet.train.plan import Phase

Restored = Checkpoint | None
Options = Loaded[commands.TrainOptions]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is about to begin in this process: its options, where it goes on from, and its place in the world."""

    loaded: Options
    restored: Restored
    division: Division
    place: Place | None
    again: bool  # another attempt: a worker died, or the whole run was started again with --resume
    conventions: Conventions = FALCONET
    notes: tuple[str, ...] = ()  # what of the restored run's options this one does not have


def prepare(loaded: Options, restored: Restored = None, *, conventions: Conventions = FALCONET) -> Launch:
    """Decide everything about processes; nothing is started."""
    place = environment.find_place(os.environ)
    _check_stages(rules.stages_of(loaded.options.parallel))
    loaded = _settled(loaded, restored, place)
    rules.check(loaded.options)  # again: the accumulation may be another one now
    division = _undivided_state(loaded.options.parallel, _whole(loaded.options, _divided(loaded, place)))
    _check_span(loaded.options.parallel, division)
    _check_interleaving(loaded.options.parallel, division)
    restarted = environment.attempt(os.environ) > 0
    if restarted:
        restored = newest(loaded.options, restored, conventions) or restored
    again = restarted or (loaded.options.run.resume and restored is not None)
    _check_restarts(loaded.options, restored)
    notes = _left_out(loaded, restored) if restored else ()
    return Launch(
        loaded=loaded,
        restored=restored,
        division=division,
        place=place,
        again=again,
        notes=notes,
        conventions=conventions,
    )


def _left_out(loaded: Options, restored: Checkpoint) -> tuple[str, ...]:
    found = left_out(loaded, restored.manifest.config)
    return tuple(
        f"--{name} is not taken from a checkpoint; add it to the line to {does}" for name, does in found.items()
    )


def must_start(launch: Launch) -> bool:
    """Whether workers are needed that nobody has started."""
    return launch.place is None and launch.division.processes > 1 and not launch.loaded.options.run.plan


def start(command: str, line: Sequence[Setting], launch: Launch) -> int:
    """Start the workers of a run and wait for their end; returns the exit code."""
    from falconet.parallel.launch import Workers  # torch.distributed takes a second to import
    from falconet.parallel.launch import launch as run_workers

    options = launch.loaded.options
    argv = [command, *typed(line)]
    home = run_folder.claim(options, restored=launch.restored, conventions=launch.conventions)
    if options.run.run_dir == "auto" and launch.restored is None:
        argv += ["--no-temporary", "--run-dir", str(home)]  # chosen here, so that another attempt finds it again
    say, saved = Screen().line, run_folder.checkpoints(home, options)
    if options.run.temporary:
        say(run_folder.temporary_line(home))
    workers = Workers(
        argv=argv,
        program=launch.conventions.program,
        processes=launch.division.processes,
        restarts=options.parallel.max_restarts,
    )
    try:
        code = run_workers(workers, progress=lambda: _names(saved), say=say)
    except WorldError as error:
        raise WorldError(f"{error}; {run_folder.how_to_go_on(home, saved)}") from None
    finally:
        if run_folder.is_named_anew(options, restored=launch.restored, conventions=launch.conventions):
            with contextlib.suppress(OSError):
                home.rmdir()  # only if it is empty: stopped before it began
    if options.run.temporary and (code == 0 or not any(home.iterdir())):  # stopped before it began
        run_folder.throw_away(home, say)
    return code


def check_alike(world: World, loaded: Options, restored: Restored) -> None:
    """Every process must run the same program with the same options from the same checkpoint."""
    world.agree("the version of falconet and torch", f"{falconet.__version__} and {torch.__version__}")
    world.agree("the options", hashlib.sha256(loaded.to_yaml().encode()).hexdigest()[:16])
    world.agree("the checkpoint", restored.folder.name if restored else "none")


def _settled(loaded: Options, restored: Restored, place: Place | None) -> Options:
    """The recipe's replicas and accumulation as numbers, so that a checkpoint says what it was trained with."""
    options = loaded.options
    asked, stages = environment.asked_of_launcher(os.environ), _stages(options)
    automatic = asked[0] if asked else max(1, place.size // stages) if place else 1
    replicas = value_or(options.parallel.replicas, automatic)
    accumulation = options.training.gradient_accumulation
    if restored and is_asked_for(loaded.sources.get("replicas")) and not _asks_for_another_batch(loaded):
        accumulation = _same_batch(restored.manifest, accumulation, replicas)
        tuned = options.fine_tuning.fine_tune_gradient_accumulation
        if tuned != "auto":
            tuned = _same_batch(restored.manifest, tuned, replicas)
            options = replace(options, fine_tuning=replace(options.fine_tuning, fine_tune_gradient_accumulation=tuned))
    options = replace(
        options,
        parallel=replace(options.parallel, replicas=replicas),
        training=replace(options.training, gradient_accumulation=accumulation),
    )
    return replace(loaded, options=options)


def _asks_for_another_batch(loaded: Options) -> bool:
    names = ("gradient-accumulation", "micro-batch-size", "fine-tune-gradient-accumulation")
    return any(is_asked_for(loaded.sources.get(name)) for name in names)


def _same_batch(manifest: Manifest, accumulation: int, replicas: int) -> int:
    """The accumulation that keeps the checkpoint's global batch on another number of replicas."""
    total = accumulation * int(manifest.config.get("replicas", {"value": 1})["value"])
    if total % replicas:
        raise ConfigError(
            f"--replicas: got {replicas}, which does not divide the {total} micro-batches of an update that the"
            " checkpoint was trained with; wanted a divisor, or --gradient-accumulation beside it"
        )
    return total // replicas


def _divided(loaded: Options, place: Place | None) -> Division:
    parallel, machine = loaded.options.parallel, loaded.options.machine
    assert parallel.replicas != "auto"
    asked = Asked(
        replicas=parallel.replicas,
        accumulation=loaded.options.training.gradient_accumulation,
        stages=_stages(loaded.options),
        strict=parallel.strict_devices,
        free=loaded.sources.get("replicas") == CHECKPOINT,
    )
    if place is not None:
        return over_processes(asked, size=place.size, launcher=place.launcher)
    if device_kind(machine.device) == "cuda":
        count = torch.cuda.device_count()
        return over_devices(asked, devices=max(1, count), what=f"{are(count, 'CUDA device')} here")
    cores = resources.cores()
    return over_devices(
        asked, devices=PROCESSES_PER_CORE * cores, what=f"{are(cores, 'core')} here, for 2 processes each"
    )


def _check_stages(stages: int) -> None:
    """A launcher's processes per replica are the stages of its pipeline."""
    asked = environment.asked_of_launcher(os.environ)
    if asked and asked[1] not in (1, stages):  # of 1, the division says what became of the stages
        raise ConfigError(
            f"the launcher was asked for {asked[1]} processes per replica, but the model is in"
            f" {counted(stages, 'stage')}; expected {stages}, or {asked[1] - 1} --pipeline-splits"
        )


def _check_span(parallel: options.Parallel, division: Division) -> None:
    if division.replicas % parallel.batchnorm_span:
        folded = f", of {parallel.replicas} asked for" if division.replicas != parallel.replicas else ""
        raise ConfigError(
            f"--batchnorm-span: got {parallel.batchnorm_span}, wanted a divisor of the number of replicas that run,"
            f" {division.replicas}{folded}"
        )


def _stages(options: commands.TrainOptions) -> int:
    """Stages of a replica that may run in processes of their own; those of a run that freezes layers share one."""
    return 1 if options.fine_tuning.half_res_training else rules.stages_of(options.parallel)


def _whole(options: commands.TrainOptions, division: Division) -> Division:
    """The same, with what became of stages that share a process."""
    stages = rules.stages_of(options.parallel)
    if stages == 1 or not options.fine_tuning.half_res_training:
        return division
    if options.parallel.strict_devices:
        raise ConfigError(
            f"--half-res-training: not with {stages} stages in processes of their own, which cannot freeze layers;"
            " wanted no --pipeline-splits, or no --strict-devices"
        )
    note = (
        f"{stages} stages asked for: all of a replica's run in one process, because --half-res-training freezes layers"
    )
    return replace(division, notes=(note, *division.notes))


def _undivided_state(parallel: options.Parallel, division: Division) -> Division:
    """The same, with what became of a state that only replicas can divide."""
    if not parallel.enable_optimizer_rts or parallel.replicas == 1 or division.replicas > 1:
        return division  # of one replica asked for, the rules of the options say it
    note = "--enable-optimizer-rts has no effect: one replica runs, which holds the whole state"
    return replace(division, notes=(*division.notes, note))


def accumulation_of(phase: Phase, division: Division) -> int:
    """Micro-batches of each replica that runs, for the global batch that the phase asks for."""
    asked, replicas = phase.options.training.gradient_accumulation, phase.options.parallel.replicas
    assert replicas != "auto"
    accumulation, rest = divmod(asked * replicas, division.replicas)
    if rest:
        raise ConfigError(
            f"{phase.accumulation}: got {asked}, which makes {counted(asked * replicas, 'micro-batch')} an update;"
            f" wanted a number that the {division.replicas} replicas that run can divide"
        )
    return accumulation


def standing(phases: Sequence[Phase], loaded: Options, restored: Restored) -> int:
    """The number of the phase that a run goes on with."""
    if restored is None:
        return 1
    folder, manifest = restored
    number, epochs = manifest.progress.phase, int(manifest.config["epoch"]["value"])
    if number > len(phases):
        raise ConfigError(
            f"--no-half-res-training: {folder} stands in the fine-tuning that follows it; wanted an earlier checkpoint"
        )
    if number > 1 and loaded.options.training.epoch != epochs:
        raise ConfigError(
            f"--epoch: got {loaded.options.training.epoch}, wanted {epochs}: {folder} stands in the fine-tuning that"
            " follows them, which a larger --fine-tune-epoch makes longer"
        )
    return number


def _check_interleaving(parallel: options.Parallel, division: Division) -> None:
    """More replicas than the checkpoint had leave fewer micro-batches to each."""
    if parallel.pipeline_schedule == "interleaved" and division.accumulation < division.stages:
        own = f"{counted(division.replicas, 'replica')} {'has' if division.replicas == 1 else 'have'}"
        raise ConfigError(
            f"--pipeline-schedule interleaved: {division.stages} stages need as many micro-batches an update, and"
            f" {own} {division.accumulation} each; wanted fewer processes, or grouped"
        )


def newest(options: commands.TrainOptions, restored: Restored, conventions: Conventions = FALCONET) -> Restored:
    """What an earlier attempt of this run saved last."""
    saved = run_folder.checkpoints(run_folder.choose(options, restored=restored, conventions=conventions), options)
    if not saved.is_dir() or not format.checkpoints_in(saved):
        return None  # nothing yet: from the start
    try:
        folder = format.newest_whole(saved, note=lambda _: None)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; wanted another --run-dir, to begin anew") from None
    return Checkpoint(folder, format.read_manifest(folder))


def _check_restarts(options: commands.TrainOptions, restored: Restored) -> None:
    """torchrun starts workers again with the same line, which must name the folder they find their checkpoints in."""
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if limit and options.run.run_dir == "auto" and not restored:
        raise ConfigError(
            f"--run-dir: is needed under torchrun --max-restarts {limit}: a worker that is started again looks there"
        )


def _names(folder: Path) -> set[str]:
    """The checkpoints in a folder; what was being written when a worker died begins with a dot, and is no progress."""
    return {path.name for path in folder.glob("[!.]*")}
