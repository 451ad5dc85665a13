"""The processes of a run: how many it needs, whether to start them, and where each run continues from."""

import contextlib
import hashlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import falconet
from falconet.checkpoint import format
from falconet.checkpoint.initial_weights import InitialWeights
from falconet.checkpoint.manifest import Checkpoint, Manifest
from falconet.config import commands, options, rules
from falconet.config.fields import options_of, value_or
from falconet.config.load import INVOCATION, Loaded, left_out, typed, unsettled
from falconet.config.settings import CHECKPOINT, WEIGHTS, Setting, is_asked_for
from falconet.data.dataset import Dataset
from falconet.errors import CheckpointError, ConfigError, DeviceError, WorldError, named_option
from falconet.parallel import environment, world
from falconet.parallel.division import (
    Asked,
    Division,
    over_cores,
    over_devices,
    over_hosts,
    over_processes,
)
from falconet.parallel.environment import Place
from falconet.parallel.world import World, device_kind
from falconet.report.console import Screen, are, counted
from falconet.report.styles import FALCONET, Conventions
from falconet.train import defaults, run_folder
from falconet.train.plan import Phase

if TYPE_CHECKING:
    from falconet.parallel.launch import Hosts  # torch.distributed takes a second to import

STARTED = ("pretrained", "init-path")  # used once, by the first start of a run
MOST_DIGITS = 15  # of a number in a checkpoint's config
Restored = Checkpoint | None
LoadedTraining = Loaded[commands.TrainOptions]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is about to start in this process: its options, what it continues from, its place in the world."""

    loaded: LoadedTraining
    restored: Restored
    division: Division
    place: Place | None
    again: bool  # another attempt: a worker died, or the run was started again with --resume
    initial: InitialWeights | None = None  # pretrained weights of a new run
    images: Dataset | None = None  # the data, if it was opened to settle the options
    conventions: Conventions = FALCONET
    hosts: "Hosts | None" = None  # of which each has one process, this one here; it starts the workers
    notes: tuple[str, ...] = ()  # on weights, and on the restored run's options that this one does not take over

    def stored(self) -> dict[str, dict[str, Any]]:
        """The options that its checkpoints state; a continued run still started with the weights it once named."""
        table = self.loaded.rooted().table()
        for name, entry in self.loaded.table().items():
            if entry["value"] != table[name]["value"]:
                table[name]["typed"] = entry["value"]  # a relative path
        return table | self.started()

    def started(self) -> dict[str, dict[str, Any]]:
        """The weights that a continued run once started with."""
        first = self.restored.manifest.config if self.restored else {}
        return {name: first[name] for name in STARTED if name in first}


def prepare(loaded: LoadedTraining, restored: Restored = None, *, conventions: Conventions = FALCONET) -> Launch:
    """Decide everything about processes; nothing is started. One process on each of several hosts meets the others."""
    place = environment.find_place(os.environ)
    _check_stages(rules.stages_of(loaded.options.parallel))
    loaded, initial, images = defaults.with_photos(loaded) if restored is None else (loaded, None, None)
    loaded, images = defaults.settled(loaded, images)
    loaded = _settled(loaded, restored, place)
    asked, hosts = _asked(loaded), None
    if place is not None and environment.is_one_per_host(os.environ, place) and not _is_started(asked, place):
        division, hosts = _divided_over_hosts(loaded, asked, place)
        place = None
    else:
        division = _divided(loaded, asked, place)
    division = _undivided_state(loaded.options.parallel, _whole(loaded.options, division))
    division = _spanned(loaded.options, division)
    _check_interleaving(loaded.options, division)
    restarted = environment.attempt(os.environ) > 0
    if restarted:
        restored = newest(loaded.options, conventions) or restored
    again = restarted or (loaded.options.run.resume and restored is not None)
    _check_restarts(loaded.options)
    ignored = left_out(loaded, restored.manifest.config) if restored else {}
    notes = defaults.weight_notes(loaded, initial) if restored is None else ()
    notes += tuple(
        f"--{name} is not taken from a checkpoint; add it to the command line to {does}"
        for name, does in ignored.items()
    )
    return Launch(
        loaded=loaded,
        restored=restored,
        division=division,
        place=place,
        again=again,
        initial=initial,
        hosts=hosts,
        images=images,
        notes=notes,
        conventions=conventions,
    )


def must_start(launch: Launch) -> bool:
    """Whether workers are needed that no launcher has started."""
    return launch.place is None and launch.division.processes > 1 and not launch.loaded.options.run.plan


def start(command: str, line: Sequence[Setting], launch: Launch) -> int:
    """Start the workers of a run and wait for them; returns the exit code."""
    from falconet.parallel.launch import Workers  # torch.distributed takes a second to import
    from falconet.parallel.launch import launch as run_workers

    options = launch.loaded.options
    argv = [command, *typed(line)]
    if launch.hosts is not None:
        return _start_on_host(argv, launch, launch.hosts)
    home = run_folder.claim(options, launch.conventions)
    if options.run.run_dir == "auto":
        argv += ["--no-temporary", "--run-dir", str(home)]  # chosen here, so that another attempt finds it
    say, saved = Screen(words=launch.conventions.words).line, run_folder.checkpoints(home, options)
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
        raise WorldError(f"{error}; {run_folder.how_to_continue(home, saved)}") from None
    finally:
        if run_folder.is_named_anew(options, launch.conventions):
            with contextlib.suppress(OSError):
                home.rmdir()  # works only if it is empty: stopped before it started
    if options.run.temporary and (code == 0 or not any(home.iterdir())):  # empty: stopped before it started
        run_folder.remove_temporary(home, say)
    return code


def _start_on_host(argv: Sequence[str], launch: Launch, hosts: "Hosts") -> int:
    """Start this host's share of the workers, of which the first of all chooses the run folder."""
    from falconet.parallel.launch import Workers
    from falconet.parallel.launch import launch as run_workers

    own, say = launch.division.processes // hosts.size, Screen(words=launch.conventions.words).line
    if hosts.rank > 0:
        say(_as_worker(hosts.rank, hosts.size, own))
    for note in launch.division.notes if hosts.rank == 0 else ():
        say(f"note: {note}")
    workers = Workers(
        argv=argv,
        program=launch.conventions.program,
        processes=own,
        restarts=0,
        hosts=hosts,
        stages=launch.division.stages,
    )
    try:
        return run_workers(workers, progress=lambda: None, say=say)
    except WorldError as error:
        raise WorldError(f"{error}; to continue, start the same line with --resume on every worker") from None


def introduction(launch: Launch) -> str | None:
    """What a worker of TF_CONFIG that was started by hand prints, because the first one prints the rest."""
    place = launch.place
    if place is None or place.launcher != environment.TF_CONFIG or place.rank == 0:
        return None
    return _as_worker(place.rank, place.size, 1)


def _as_worker(rank: int, size: int, own: int) -> str:
    where = f"worker {rank} of {size} on {socket.gethostname()}"
    return f"{where}: {counted(own, 'process')} here; worker 0 prints what is trained, and saves"


def check_alike(world: World, loaded: LoadedTraining, restored: Restored) -> None:
    """Every process must run the same program with the same options from the same checkpoint."""
    world.agree("the version of falconet and torch", f"{falconet.__version__} and {torch.__version__}")
    world.agree("the options", hashlib.sha256(loaded.to_yaml().encode()).hexdigest()[:16])
    world.agree("the checkpoint", restored.folder.name if restored else "none")


def _settled(loaded: LoadedTraining, restored: Restored, place: Place | None) -> LoadedTraining:
    """The recipe's replicas and accumulation as numbers, so that a checkpoint states what it was trained with."""
    options = loaded.options
    asked, stages = environment.asked_of_launcher(os.environ), _stages(options)
    automatic = asked[0] if asked else _as_many_as_started(place, stages) if place else 1
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


def _as_many_as_started(place: Place, stages: int) -> int:
    """Replicas where none were asked for."""
    whole = environment.is_one_per_host(os.environ, place) or environment.stages_running(os.environ) == 1
    return place.size if whole else max(1, place.size // stages)


def _asks_for_another_batch(loaded: LoadedTraining) -> bool:
    names = ("gradient-accumulation", "micro-batch-size", "fine-tune-gradient-accumulation")
    return any(is_asked_for(loaded.sources.get(name)) for name in names)


def _same_batch(manifest: Manifest, accumulation: int, replicas: int) -> int:
    """The accumulation that keeps the checkpoint's global batch on another number of replicas."""
    total = accumulation * (stored_number(manifest, "replicas") if "replicas" in manifest.config else 1)
    if total % replicas:
        raise ConfigError(
            f"--replicas: got {replicas}, which does not divide the {total} micro-batches per update that the"
            " checkpoint was trained with; expected a divisor, or --gradient-accumulation as well"
        )
    return total // replicas


def stored_number(manifest: Manifest, option: str) -> int:
    text = manifest.option(option)
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise CheckpointError(f"the checkpoint's config has {text!r:.40} for '{option}', expected a number")
    return int(text)


def _asked(loaded: LoadedTraining) -> Asked:
    parallel = loaded.options.parallel
    assert parallel.replicas != "auto"
    return Asked(
        replicas=parallel.replicas,
        accumulation=loaded.options.training.gradient_accumulation,
        stages=_stages(loaded.options),
        strict=parallel.strict_devices,
        free=loaded.sources.get("replicas") == CHECKPOINT,
    )


def _is_started(asked: Asked, place: Place) -> bool:
    """Whether the hosts' own processes are all that the plan needs; the stages of a replica stay on one host."""
    return asked.processes == place.size and asked.stages == 1


def _divided_over_hosts(loaded: LoadedTraining, asked: Asked, place: Place) -> tuple[Division, "Hosts | None"]:
    """The division over hosts with one process each, and those hosts, which a plan does not wait for."""
    from falconet.parallel import launch  # torch.distributed takes a second to import

    options = loaded.options
    devices, what = devices_of(options.machine)
    timeout = options.parallel.collective_timeout
    hosts = None if options.run.plan else launch.meet(place, devices=devices, timeout=timeout)
    fewest = hosts.fewest if hosts else devices
    if fewest < devices:
        what = f"devices for {counted(fewest, 'process')} on the host with the fewest"
    try:
        return over_hosts(asked, hosts=place.size, devices=fewest, what=what), hosts
    except DeviceError as error:
        raise DeviceError(f"--strict-devices: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--replicas: {error}") from None


def _divided(loaded: LoadedTraining, asked: Asked, place: Place | None) -> Division:
    machine = loaded.options.machine
    if place is not None:
        running = environment.stages_running(os.environ)
        try:
            division = over_processes(asked, size=place.size, launcher=place.launcher, running=running)
            division = _over_workers(division, place)
            # The process that started this one on its host has printed why.
            return replace(division, notes=()) if running and environment.OWN in os.environ else division
        except DeviceError as error:
            raise DeviceError(f"--strict-devices: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"--replicas: {error}") from None
    devices, what = devices_of(machine)
    with named_option("strict_devices"):
        return over_devices(asked, devices=devices, what=what)


def _over_workers(division: Division, place: Place) -> Division:
    """The division, with a note if it lays each replica's pipeline across the workers of TF_CONFIG."""
    if place.launcher != environment.TF_CONFIG or division.stages == 1:
        return division
    where = "" if place.local_size > 1 else " of different hosts"
    note = (
        f"the {division.stages} stages of a replica run in {division.stages} workers of TF_CONFIG{where}, one in each"
    )
    return replace(division, notes=(*division.notes, note))


def devices_of(machine: options.Machine) -> tuple[int, str]:
    """How many processes the devices of this host are enough for, and that in words."""
    if device_kind(machine.device) == "cuda":
        count = torch.cuda.device_count()
        return max(1, count), f"{are(count, 'CUDA device')} available"
    return over_cores(world.cores())


def _check_stages(stages: int) -> None:
    """A launcher's processes per replica are the stages of its pipeline."""
    asked = environment.asked_of_launcher(os.environ)
    if asked and asked[1] not in (1, stages):  # of 1, the division has a note on the stages
        raise ConfigError(
            f"the launcher was asked for {asked[1]} processes per replica, but the model is in"
            f" {counted(stages, 'stage')}; expected {stages}, or {asked[1] - 1} --pipeline-splits"
        )


def folded(parallel: options.Parallel, division: Division) -> int:
    """Replicas that each running one stands for; 1 if the checkpoint's micro-batches were divided anew."""
    assert parallel.replicas != "auto"
    times, rest = divmod(parallel.replicas, division.replicas)
    return 1 if rest else max(1, times)


def joined(parallel: options.Parallel, division: Division) -> int:
    """Micro-batches of folded replicas that batch norm's span holds, and that therefore run as one."""
    return math.gcd(folded(parallel, division), parallel.batchnorm_span)


def _spanned(options: commands.TrainOptions, division: Division) -> Division:
    """The division, with a note if batch norm spans folded replicas; a span must be of whole processes, or in one."""
    parallel = options.parallel
    span, together, times = parallel.batchnorm_span, joined(parallel, division), folded(parallel, division)
    if division.replicas % (span // together) or together not in (span, times):
        of = f" (of {parallel.replicas} requested)" if division.replicas != parallel.replicas else ""
        raise ConfigError(
            f"--batchnorm-span: got {span}, expected a divisor of the number of replicas that run,"
            f" {division.replicas}{of}"
        )
    if together == 1:
        return division
    size = options.data.micro_batch_size
    images = f"{together} x {size}" if size == "auto" else f"{together * size}"
    note = (
        f"--batchnorm-span {span}: the micro-batches of {together} folded replicas run as one of {images} images, with"
        f" {together} times the activations"
    )
    return replace(division, notes=(*division.notes, note))


def _stages(options: commands.TrainOptions) -> int:
    """Stages of a replica that may run in separate processes; a run that freezes layers keeps them in one."""
    return 1 if options.fine_tuning.half_res_training else rules.stages_of(options.parallel)


def _whole(options: commands.TrainOptions, division: Division) -> Division:
    """The division, with a note on stages that share a process."""
    stages = rules.stages_of(options.parallel)
    if stages == 1 or not options.fine_tuning.half_res_training:
        return division
    if options.parallel.strict_devices:
        raise ConfigError(
            f"--half-res-training: not with {stages} stages in separate processes, which cannot freeze layers;"
            " expected no --pipeline-splits, or no --strict-devices"
        )
    note = f"the {stages} stages of a replica run in one process, because --half-res-training freezes layers"
    return replace(division, notes=(note, *division.notes))


def _undivided_state(parallel: options.Parallel, division: Division) -> Division:
    """The division, with a note if there is only one replica, so that the optimizer's state is not sharded."""
    if not parallel.enable_optimizer_rts or parallel.replicas == 1 or division.replicas > 1:
        return division  # for one replica asked for, the rules of the options have a note
    note = "--enable-optimizer-rts has no effect: only one replica runs, and holds the whole state"
    return replace(division, notes=(*division.notes, note))


def accumulation_of(phase: Phase, division: Division) -> int:
    """Micro-batches per update on each replica that runs, for the global batch that the phase asks for."""
    asked, replicas = phase.options.training.gradient_accumulation, phase.options.parallel.replicas
    assert replicas != "auto"
    accumulation, rest = divmod(asked * replicas, division.replicas)
    if rest:
        raise ConfigError(
            f"{phase.accumulation}: got {asked}, which makes {counted(asked * replicas, 'micro-batch')} per update;"
            f" expected a number that the {division.replicas} replicas that run can share"
        )
    return accumulation


def current_phase(phases: Sequence[Phase], loaded: LoadedTraining, restored: Restored) -> int:
    """The number of the phase that a run starts in."""
    if restored is None:
        return 1
    folder, manifest = restored
    number = manifest.progress.phase
    if number > len(phases):
        raise ConfigError(
            f"--no-half-res-training: {folder} is from the fine-tuning after it; expected an earlier checkpoint"
        )
    if number > 1 and loaded.options.training.epochs != (epochs := stored_number(manifest, "epoch")):
        raise ConfigError(
            f"--epoch: got {loaded.options.training.epochs}, expected {epochs}: {folder} is from the fine-tuning after"
            " them, which a larger --fine-tune-epoch makes longer"
        )
    return number


def _check_interleaving(options: commands.TrainOptions, division: Division) -> None:
    """Check the accumulation, which more replicas than the checkpoint had may have lowered since the rules saw it."""
    if options.parallel.pipeline_schedule != "interleaved":
        return
    asked = options.training.gradient_accumulation, rules.stages_of(options.parallel)
    for accumulation, stages in (asked, (division.accumulation, division.stages)):
        if accumulation < stages:
            raise ConfigError(
                f"--pipeline-schedule interleaved: {stages} stages need at least {stages} micro-batches per update, but"
                f" each replica has {accumulation}; expected fewer replicas, or --pipeline-schedule grouped"
            )


def newest(options: commands.TrainOptions, conventions: Conventions = FALCONET) -> Restored:
    """What an earlier attempt at this run saved last."""
    saved = run_folder.checkpoints(run_folder.choose(options, conventions), options)
    if not saved.is_dir() or not format.checkpoints_in(saved):
        return None  # nothing saved yet
    try:
        folder = format.newest_whole(saved, note=lambda _: None)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; expected another --run-dir, to start a new run") from None
    return Checkpoint(folder, format.read_manifest(folder))


def _is_of_weights(name: str, loaded: LoadedTraining, manifest: Manifest) -> bool:
    """Whether the weights that a run started with decided an option."""
    is_theirs = manifest.config.get(name, {}).get("source") == WEIGHTS
    return is_theirs and not loaded.chooses(name)


# Settled by every start, from the launcher: the checkpoint's are kept unless the line names others.
SETTLED = ("replicas", "gradient-accumulation")
FITTED = ("micro-batch-size", "gradient-accumulation")  # by --micro-batch-size auto; the checkpoint's are kept


def earlier(loaded: LoadedTraining, conventions: Conventions = FALCONET) -> Restored:
    """What --resume continues from: the run folder's newest checkpoint, refused if its options were different."""
    found = newest(loaded.options, conventions)
    if found is None:
        return None
    folder, manifest = found
    asked, stored = _values(loaded.rooted().table()), _values(manifest.config)
    if isinstance(place := stored.get("data-dir"), str):  # relative in older checkpoints
        stored["data-dir"] = str(Path(place).absolute())
    for name in options_of(type(loaded.options)):
        is_open = not is_asked_for(loaded.sources.get(name)) and (name in SETTLED or name not in stored)
        is_open = is_open or name in unsettled(loaded.line) or _is_of_weights(name, loaded, manifest)
        is_open = is_open or (asked["micro-batch-size"] == "auto" and name in FITTED)
        if name not in INVOCATION and not is_open and asked.get(name) != stored.get(name):
            raise ConfigError(
                f"--resume: {folder} was trained with --{name} {_shown(stored.get(name))}, but this command line has"
                f" {_shown(asked.get(name))}; expected the same options, another --run-dir, or `falconet restore`"
            )
    return found


def _values(table: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    return {name: entry["value"] for name, entry in table.items()}


def _shown(value: object) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_restarts(options: commands.TrainOptions) -> None:
    """torchrun restarts workers with the same command line, which must name the folder with their checkpoints."""
    limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if limit and options.run.run_dir == "auto":
        raise ConfigError(
            f"--run-dir: required under torchrun --max-restarts {limit}: restarted workers look there for checkpoints"
        )


def _names(folder: Path) -> set[str]:
    """The checkpoints in a folder; unfinished ones start with a dot, and are not progress."""
    return {path.name for path in folder.glob("[!.]*")}
