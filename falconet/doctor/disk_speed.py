"""The speed of a folder's disk: a file is written there, dropped from the system's cache, and read again."""

import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 20  # bytes
MOST = 256 << 20  # bytes of the file
PIECE = 128 << 10  # bytes of a random read, about a photo
WRITING, READING = 2.0, 1.0  # seconds at most
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True)
class DiskSpeed:
    """The reading speed of one thread."""

    sequential: float  # bytes per second
    random: float  # reads of PIECE bytes per second
    bytes: int  # of the file
    kind: str  # of the file system

    def line(self, folder: Path) -> str:
        through = (
            "it is in memory"
            if self.kind in IN_MEMORY
            else "after the system was told to forget it (posix_fadvise); disks and hosts may have caches of their own"
        )
        return (
            f"disk of {folder} ({self.kind}): reads {self.sequential / 1e6:,.0f} MB/s in sequence and"
            f" {self.random:,.0f} photos of {PIECE >> 10} KiB/s at random, one thread, a file of"
            f" {self.bytes >> 20} MB, {through}"
        )


def measure(folder: Path) -> DiskSpeed:
    """Measure for at most four seconds, with a nameless file that disappears. OSError: the folder is not writable."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        handle, block = file.fileno(), random.Random(0).randbytes(BLOCK)
        begin, size = time.perf_counter(), 0
        while size < MOST and time.perf_counter() - begin < WRITING:
            os.write(handle, block)
            size += BLOCK
        _forget(handle)
        middle = size // BLOCK // 2 * BLOCK  # each half is read once, because a host may cache it
        sequential = _rate(handle, range(0, max(middle, BLOCK), BLOCK), BLOCK) * BLOCK
        places = list(range(middle, size - PIECE + 1, PIECE))
        random.Random(1).shuffle(places)
        return DiskSpeed(sequential, _rate(handle, places, PIECE), size, _file_system(folder))


def _forget(handle: int) -> None:
    os.fsync(handle)  # the system can forget only data that is on the disk
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(handle: int, places: range | list[int], size: int) -> float:
    """Reads per second."""
    begin, done = time.perf_counter(), 0
    for place in places:
        os.pread(handle, size, place)
        done += 1
        if time.perf_counter() - begin > READING:
            break
    return done / (time.perf_counter() - begin)


def _file_system(folder: Path) -> str:
    """The kind of file system, from the longest mount point above the folder."""
    path, found = folder.resolve(), {}
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown file system"
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        if path.is_relative_to(place):
            found[len(place)] = kind
    return found[max(found)] if found else "unknown file system"
