"""What this machine has for a run: its cores, and the device that the options ask for."""

import os

from falconet.config import options
from falconet.config.fields import value_or
from falconet.parallel.environment import Place, cores_of
from falconet.parallel.world import World, open_world


def cores(processes: int = 1) -> int:
    """Cores for this process; where none has been started yet, for each of as many as will be."""
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return cores_of(os.environ, host=host, own=own, expected=processes)


def open_machine(machine: options.Machine, *, place: Place | None = None) -> World:
    """The device that the options ask for and its threads, for this process or for all that a launcher started."""
    threads = value_or(machine.threads, cores())
    return open_world(machine.device, threads=threads, deterministic=machine.deterministic, place=place)
