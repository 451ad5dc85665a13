"""How a run is divided among processes: those that a launcher has started, or those that it needs."""

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from falconet.checkpoint.manifest import Checkpoint, Manifest
from falconet.config import commands, facts, options
from falconet.config.fields import value_or
from falconet.config.load import LoadedTraining
from falconet.config.settings import CHECKPOINT, is_asked_for
from falconet.errors import ConfigError, DeviceError, named_option
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
from falconet.parallel.world import device_kind
from falconet.report.console import are, counted
from falconet.train.plan import Phase

if TYPE_CHECKING:
    from falconet.parallel.launch import Hosts  # torch.distributed takes a second to import


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A division of a run, and which part of it this process is."""

    division: Division
    place: Place | None  # among the processes that are there; None: this one starts them, or needs no others
    hosts: "Hosts | None" = None  # that have met, each with one process, this one here


def divide(loaded: LoadedTraining, place: Place | None) -> Divided:
    """Divide a run, whose number of replicas is settled, over devices, processes or hosts.

    A process on each of several hosts meets the others here, unless only the plan was asked for.
    """
    asked = _asked(loaded)
    is_one_per_host = place is not None and environment.is_one_per_host(os.environ, place)
    if place is not None and is_one_per_host and not _is_started(asked, place):
        division, hosts = _divided_over_hosts(loaded, asked, place)
        return Divided(division=_fitted(loaded.options, division), place=None, hosts=hosts)
    return Divided(division=_fitted(loaded.options, _divided(loaded, asked, place)), place=place)


def _fitted(options: commands.TrainOptions, division: Division) -> Division:
    """The division with notes on what it changes of the options; refused if they do not allow it."""
    fitted = _spanned(options, _undivided_state(options.parallel, _whole(options, division)))
    _check_interleaving(options, fitted)
    return fitted


def with_replicas(loaded: LoadedTraining, restored: Checkpoint | None, place: Place | None) -> LoadedTraining:
    """The recipe's replicas and accumulation as numbers, so that a checkpoint states what it was trained with."""
    options = loaded.options
    replicas = value_or(options.parallel.replicas, _automatic_replicas(place, stages=_stages(options)))
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


def _automatic_replicas(place: Place | None, *, stages: int) -> int:
    """The replicas that the launcher was asked for, else as many as it has started, else one."""
    if asked := environment.asked_of_launcher(os.environ):
        return asked[0]
    if place is None:
        return 1
    whole = environment.is_one_per_host(os.environ, place) or environment.stages_running(os.environ) == 1
    return place.size if whole else max(1, place.size // stages)


def _asks_for_another_batch(loaded: LoadedTraining) -> bool:
    names = ("gradient-accumulation", "micro-batch-size", "fine-tune-gradient-accumulation")
    return any(is_asked_for(loaded.sources.get(name)) for name in names)


def _same_batch(manifest: Manifest, accumulation: int, replicas: int) -> int:
    """The accumulation that keeps the checkpoint's global batch on another number of replicas."""
    total = accumulation * (manifest.number("replicas") if "replicas" in manifest.config else 1)
    if total % replicas:
        raise ConfigError(
            f"--replicas: got {replicas}, which does not divide the {total} micro-batches per update that the"
            " checkpoint was trained with; expected a divisor, or --gradient-accumulation as well"
        )
    return total // replicas


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


def check_stages(stages: int) -> None:
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
    return 1 if options.fine_tuning.half_res_training else facts.stages_of(options.parallel)


def _whole(options: commands.TrainOptions, division: Division) -> Division:
    """The division, with a note on stages that share a process."""
    stages = facts.stages_of(options.parallel)
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


def _check_interleaving(options: commands.TrainOptions, division: Division) -> None:
    """Check the accumulation, which more replicas than the checkpoint had may have lowered since the rules saw it."""
    if options.parallel.pipeline_schedule != "interleaved":
        return
    asked = options.training.gradient_accumulation, facts.stages_of(options.parallel)
    for accumulation, stages in (asked, (division.accumulation, division.stages)):
        if accumulation < stages:
            raise ConfigError(
                f"--pipeline-schedule interleaved: {stages} stages need at least {stages} micro-batches per update, but"
                f" each replica has {accumulation}; expected fewer replicas, or --pipeline-schedule grouped"
            )
