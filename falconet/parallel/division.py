"""How the replicas that a recipe asks for are divided over the processes there are: pure arithmetic."""

from dataclasses import dataclass

from falconet.errors import ConfigError, DeviceError

PROCESSES_PER_CORE = 2  # on a CPU; more of them would only take each other's time and memory


@dataclass(frozen=True)
class Division:
    """Processes, and micro-batches of each per update; the global batch is the recipe's whatever they are."""

    processes: int
    accumulation: int
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the recipe says. `free`: only the product counts, because a checkpoint brought the two numbers along."""

    replicas: int
    accumulation: int
    strict: bool = False
    free: bool = False


def over_devices(asked: Asked, *, devices: int, what: str) -> Division:
    """As many processes as there are devices for; replicas without one become accumulation."""
    if asked.replicas <= devices:
        return Division(asked.replicas, asked.accumulation)
    if asked.strict:
        raise DeviceError(f"--strict-devices: --replicas {asked.replicas} needs as many devices; {what}")
    processes = next(count for count in range(devices, 0, -1) if asked.replicas % count == 0)
    return _folded(asked, processes, what)


def over_processes(asked: Asked, *, size: int, launcher: str) -> Division:
    """The division over the processes that a launcher started, which must fit the recipe."""
    total = asked.replicas * asked.accumulation
    if size == asked.replicas:
        return Division(size, asked.accumulation)
    if asked.free and total % size == 0:
        note = f"{total} micro-batches an update over {size} replicas instead of {asked.replicas}; same global batch"
        return Division(size, total // size, note)
    if size < asked.replicas and asked.replicas % size == 0:
        if asked.strict:
            raise DeviceError(
                f"--strict-devices: --replicas {asked.replicas} needs as many processes, {launcher} started {size}"
            )
        return _folded(asked, size, f"{size} processes of {launcher}")
    raise ConfigError(
        f"--replicas: got {asked.replicas} with --gradient-accumulation {asked.accumulation}, but {launcher} started"
        f" {size} processes; wanted {asked.replicas} processes, or a number that divides it"
    )


def processes_that_fit(replicas: int, *, stages: int, devices: int) -> int:
    """The most processes for whole replicas that divide those asked for; one for all where not one replica fits."""
    if stages > devices:
        return 1
    return stages * next(count for count in range(min(replicas, devices // stages), 0, -1) if replicas % count == 0)


def _folded(asked: Asked, processes: int, what: str) -> Division:
    times = asked.replicas // processes
    note = (
        f"{asked.replicas} replicas asked for, {what}: {processes} run, with {times} times the accumulation; global"
        " batch and learning rate stay"
    )
    return Division(processes, asked.accumulation * times, note)
