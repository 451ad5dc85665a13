"""How the replicas and stages that a recipe asks for are divided over the processes there are: pure arithmetic."""

from dataclasses import dataclass, replace

from falconet.errors import ConfigError, DeviceError

PROCESSES_PER_CORE = 2  # on a CPU; more of them would only take each other's time and memory


@dataclass(frozen=True)
class Division:
    """What runs, and micro-batches of each replica per update; the global batch is the recipe's whatever they are."""

    replicas: int
    accumulation: int
    stages: int = 1
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return self.replicas * self.stages


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the recipe says. `free`: of replicas and accumulation only the product counts: a checkpoint brought them."""

    replicas: int
    accumulation: int
    stages: int = 1
    strict: bool = False
    free: bool = False

    @property
    def processes(self) -> int:
        return self.replicas * self.stages

    def __str__(self) -> str:
        return f"--replicas {self.replicas}" + (f" with {self.stages} stages each" if self.stages > 1 else "")


def over_devices(asked: Asked, *, devices: int, what: str) -> Division:
    """As many processes as there are devices for; replicas without one become accumulation, then stages one process."""
    if asked.processes <= devices:
        return Division(asked.replicas, asked.accumulation, asked.stages)
    if asked.strict:
        wanted = "as many" if asked.stages == 1 else f"{asked.processes}"
        raise DeviceError(f"--strict-devices: {asked} needs {wanted} devices; {what}")
    if devices < asked.stages:
        return _in_one(asked, over_devices(replace(asked, stages=1), devices=devices, what=what), what)
    most = devices // asked.stages
    return _folded(asked, next(count for count in range(most, 0, -1) if asked.replicas % count == 0), what)


def over_processes(asked: Asked, *, size: int, launcher: str) -> Division:
    """The division over the processes that a launcher started, which must fit the recipe."""
    total, what = asked.replicas * asked.accumulation, f"{_processes(size)} of {launcher}"
    replicas, rest = divmod(size, asked.stages)
    if size == asked.processes:
        return Division(asked.replicas, asked.accumulation, asked.stages)
    if not rest and asked.free and total % replicas == 0:
        note = (
            f"{total} micro-batch{'' if total == 1 else 'es'} an update over {_replicas(replicas)} instead of"
            f" {asked.replicas}; same global batch"
        )
        return Division(replicas, total // replicas, asked.stages, (note,))
    fits = not rest and replicas < asked.replicas and asked.replicas % replicas == 0
    if asked.strict and size < asked.processes and (fits or asked.stages > 1):
        wanted = "as many" if asked.stages == 1 else f"{asked.processes}"
        raise DeviceError(f"--strict-devices: {asked} needs {wanted} processes, {launcher} started {size}")
    if fits:
        return _folded(asked, replicas, what)
    if asked.stages > 1 and size < asked.processes:
        return _in_one(asked, over_processes(replace(asked, stages=1), size=size, launcher=launcher), what)
    divisor = "" if asked.stages > 1 else ", or a number that divides it"
    raise ConfigError(
        f"--replicas: got {asked.replicas} with --gradient-accumulation {asked.accumulation}"
        + (f" and {asked.stages} stages" if asked.stages > 1 else "")
        + f", but {launcher} started {_processes(size)}; wanted {_processes(asked.processes)}{divisor}"
    )


def processes_that_fit(replicas: int, *, stages: int, devices: int) -> int:
    """The most processes for whole replicas that divide those asked for; one for all where not one replica fits."""
    if stages > devices:
        return 1
    return stages * next(count for count in range(min(replicas, devices // stages), 0, -1) if replicas % count == 0)


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _replicas(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"


def _folded(asked: Asked, replicas: int, what: str) -> Division:
    times = asked.replicas // replicas
    of = f" of {asked.stages} stages" if asked.stages > 1 else ""
    note = (
        f"{_replicas(asked.replicas)}{of} asked for, {what}: {replicas} {'runs' if replicas == 1 else 'run'}, with"
        f" {times} times the accumulation; global batch and learning rate stay"
    )
    return Division(replicas, asked.accumulation * times, asked.stages, (note,))


def _in_one(asked: Asked, division: Division, what: str) -> Division:
    """The same with all stages of a replica in one process."""
    note = f"{asked.stages} stages asked for, {what}: all of a replica's run in one process, with the same updates"
    return replace(division, notes=(note, *division.notes))
