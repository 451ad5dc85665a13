"""The cores of this machine, and the device that the options ask for."""

import os

from falconet.config import options
from falconet.config.fields import value_or
from falconet.parallel.environment import Place, cores_of
from falconet.parallel.world import World, open_world


def cores(processes: int = 1) -> int:
    """Cores for this process, or for each of `processes` that are still to be started."""
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return cores_of(os.environ, host=host, own=own, expected=processes)


def open_machine(machine: options.Machine, *, place: Place | None = None) -> World:
    """Open the world that the options ask for: this process, or all that a launcher started."""
    threads = value_or(machine.threads, cores())
    return open_world(machine.device, threads=threads, deterministic=machine.deterministic, place=place)
