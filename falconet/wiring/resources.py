"""What this machine has for a run: cores, threads, devices and what decodes photos."""

import os

from falconet.config import sections
from falconet.config.ranges import value_or
from falconet.data import native
from falconet.parallel.environment import Place, cores_of
from falconet.parallel.world import World, open_world

MOST_WORKERS = 32  # the originals' limit
DEVICE_WORKERS = 3  # where the device decodes: two keep it busy, and more than four get into each other's way


def cores(processes: int = 1) -> int:
    """Cores for this process; where none has been started yet, for each of as many as will be."""
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return cores_of(os.environ, host=host, own=own, expected=processes)


def open_machine(machine: sections.Machine, *, place: Place | None = None) -> World:
    """The device that the options ask for and its threads, for this process or for all that a launcher started."""
    threads = value_or(machine.threads, cores())
    return open_world(machine.device, threads=threads, deterministic=machine.deterministic, place=place)


def decoder() -> str:
    """What reads JPEG files here."""
    library = native.library()
    return f"the native decoder ({library.processor})" if library else f"Pillow: {native.why_not()}"


def workers(data: sections.Data, processes: int = 1) -> int:
    most = DEVICE_WORKERS if data.decode_device == "cuda" else MOST_WORKERS
    return value_or(data.dataloader_workers, min(most, cores(processes)))
