"""Divide the replicas and stages that a recipe asks for over the available processes: pure arithmetic."""

from dataclasses import dataclass, replace

from falconet.errors import ConfigError, DeviceError
from falconet.parallel.environment import OURS

PROCESSES_PER_CORE = 2  # on a CPU; more would only compete for time and memory


@dataclass(frozen=True)
class Division:
    """The replicas, stages and micro-batches per replica and update that run, for the recipe's global batch."""

    replicas: int
    accumulation: int
    stages: int = 1
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return self.replicas * self.stages


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The recipe's demands; if `free`, only replicas x accumulation is fixed, because they come from a checkpoint."""

    replicas: int
    accumulation: int
    stages: int = 1
    strict: bool = False
    free: bool = False

    @property
    def processes(self) -> int:
        return self.replicas * self.stages

    def __str__(self) -> str:
        return _replicas(self.replicas) + (f" of {self.stages} stages" if self.stages > 1 else "")


def over_cores(cores: int) -> tuple[int, str]:
    """The number of processes for the cores of a host, and a phrase that says so."""
    processes = PROCESSES_PER_CORE * cores
    are = "1 core is" if cores == 1 else f"{cores} cores are"
    return processes, f"{are} available, enough for {_processes(processes)}"


def over_devices(asked: Asked, *, devices: int, what: str) -> Division:
    """Divide over devices, one process each; further replicas become accumulation, or all stages share one process."""
    if asked.processes <= devices:
        return Division(asked.replicas, asked.accumulation, asked.stages)
    if asked.strict:
        raise DeviceError(f"{asked} requested, which takes {asked.processes} devices; {what}")
    if devices < asked.stages:
        return _in_one(asked, over_devices(replace(asked, stages=1), devices=devices, what=what), what)
    most = devices // asked.stages
    return _folded(asked, next(count for count in range(most, 0, -1) if asked.replicas % count == 0), what)


def over_hosts(asked: Asked, *, hosts: int, devices: int, what: str) -> Division:
    """Divide in the same way on every host, with `devices` each; a replica stays on one host."""
    replicas, rest = divmod(asked.replicas, hosts)
    total = asked.replicas * asked.accumulation
    if rest and asked.free and total % hosts == 0:
        asked, replicas, rest = replace(asked, accumulation=total // hosts), 1, 0
    if rest:
        raise ConfigError(
            f"{asked} requested on {hosts} hosts; expected a multiple of {hosts}, because a replica stays on one host"
        )
    each = over_devices(replace(asked, replicas=replicas), devices=devices, what=what)
    notes = tuple(f"on each of {hosts} hosts: {note}" for note in each.notes)
    return replace(each, replicas=each.replicas * hosts, notes=notes)


def over_processes(asked: Asked, *, size: int, launcher: str, running: int | None = None) -> Division:
    """Divide over the processes that a launcher started, which must fit the recipe.

    `running`: stages of a replica for which the launcher has a process; None: as many as fit.
    """
    if running == 1 < asked.stages:
        whole = over_processes(replace(asked, stages=1), size=size, launcher=launcher)
        return _in_one(asked, whole, processes_of(launcher, size))
    total, what = asked.replicas * asked.accumulation, processes_of(launcher, size)
    replicas, rest = divmod(size, asked.stages)
    if size == asked.processes:
        return Division(asked.replicas, asked.accumulation, asked.stages)
    if not rest and asked.free and total % replicas == 0:
        note = (
            f"{total} micro-batch{'' if total == 1 else 'es'} per update over {_replicas(replicas)} instead of"
            f" {asked.replicas}; same global batch"
        )
        return Division(replicas, total // replicas, asked.stages, (note,))
    fits = not rest and replicas < asked.replicas and asked.replicas % replicas == 0
    if asked.strict and size < asked.processes and (fits or asked.stages > 1):
        raise DeviceError(f"{asked} requested, which takes {_processes(asked.processes)}; {launcher} started {size}")
    if fits:
        return _folded(asked, replicas, what)
    if asked.stages > 1 and size < asked.processes:
        return _in_one(asked, over_processes(replace(asked, stages=1), size=size, launcher=launcher), what)
    divisor = "" if asked.stages > 1 else ", or a number that divides it"
    raise ConfigError(
        f"{asked} with accumulation {asked.accumulation} requested, but {launcher} started {_processes(size)};"
        f" expected {_processes(asked.processes)}{divisor}"
    )


def processes_of(launcher: str, size: int) -> str:
    """A phrase for the processes that a launcher started, naming the launcher unless it is ours."""
    return _processes(size) if launcher == OURS else f"{_processes(size)} of {launcher}"


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _replicas(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"


def _folded(asked: Asked, replicas: int, what: str) -> Division:
    times = asked.replicas // replicas
    of = f" of {asked.stages} stages" if asked.stages > 1 else ""
    note = (
        f"{_replicas(asked.replicas)}{of} requested, {what}: {replicas} {'runs' if replicas == 1 else 'run'}, with"
        f" {times} times the accumulation; same global batch and learning rate"
    )
    return Division(replicas, asked.accumulation * times, asked.stages, (note,))


def _in_one(asked: Asked, division: Division, what: str) -> Division:
    """Run all stages of a replica in one process."""
    note = f"{asked.stages} stages requested, {what}: all stages of a replica run in one process, with the same updates"
    return replace(division, notes=(note, *division.notes))
