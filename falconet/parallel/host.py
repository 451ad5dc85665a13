"""This host: ending leftover processes, peak and free memory, the processor. This module does not import torch."""

import ctypes
import os
import platform
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

GRACE = 30.0  # seconds from SIGTERM to SIGKILL, as in torch's agent
EVERY = 0.05  # seconds between looking for their end
DOUBT = 64 << 20  # bytes by which rusage may exceed the parent's peak and still be inherited from it
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.M)


@contextmanager
def none_left() -> Iterator[None]:
    """On exit, end every process group that was started inside the context.

    A signal that arrives while a process is being started loses track of it, and torch's agent then also loses track of
    the workers that it started before.
    """
    before = _leaders()
    try:
        yield
    finally:
        _end(_leaders() - before)


def _leaders() -> set[int]:
    """The children of this process that lead a process group."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited meanwhile
            number, parent, group = _read(path.read_text(encoding="utf-8", errors="replace"))  # names are bytes
            if parent == os.getpid() and group == number:
                found.add(number)
    return found


def _read(stat: str) -> tuple[int, int, int]:
    """The ids of a process, its parent and its group; the name in parentheses between them may hold anything."""
    _, parent, group = stat.rpartition(")")[2].split()[:3]
    return int(stat.partition(" ")[0]), int(parent), int(group)


def _end(leaders: set[int]) -> None:
    _signal(leaders, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while leaders and time.monotonic() < deadline:
        time.sleep(EVERY)
        leaders = {number for number in leaders if not _has_ended(number)}
    _signal(leaders, signal.SIGKILL)


def _signal(leaders: set[int], number: signal.Signals) -> None:
    for leader in leaders:
        with suppress(ProcessLookupError):
            os.killpg(leader, number)


def _has_ended(number: int) -> bool:
    """Whether a leader has exited; if so, kill what is left of its group."""
    with suppress(ChildProcessError):  # already reaped
        # Without reaping it, so that its id is not reused yet.
        if os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        _signal({number}, signal.SIGKILL)
        os.waitpid(number, 0)
    return True


def peak_of(process: int) -> int:
    """Peak bytes of a process since its program started; 0 if it has exited or there is no /proc."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = _PEAK.search(status)
    return int(found[1]) * 1024 if found else 0


def own_peak() -> int:
    """Peak bytes of this process."""
    return peak_of(os.getpid()) or accounted()


def accounted() -> int:
    """Peak bytes of this process by rusage, which includes those of the parent when it was started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of_ended(usage: resource.struct_rusage, *, seen: int, ours: int) -> int:
    """Peak bytes of a program that exited, or of its largest child; the value `seen` if rusage may be `ours`."""
    account = usage.ru_maxrss * 1024
    return max(seen, account) if account > ours + DOUBT else seen


MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Version:
    """The files and names of a control group's limits in one version of the interface."""

    controller: str  # in MEMBERSHIP
    mount: str
    limit: str
    used: str
    files: tuple[str, str]  # in memory.stat: counted as used, but reclaimed when needed


# Not `file` or `cache`, which include files in memory: those cannot be reclaimed.
VERSIONS = (
    Version("", ".", "memory.max", "memory.current", ("active_file", "inactive_file")),
    Version(  # version 1; its counters without `total_` leave out child groups
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def available() -> int:
    """Bytes that this process could still allocate."""
    left = [_left(group, version) for version in VERSIONS for group in _groups(version)]
    return min([_meminfo(), *(own for own in left if own is not None)])


def _groups(version: Version) -> Iterator[Path]:
    """The groups that limit this process, from the mount (a container's group) down to its own."""
    root = CGROUP / version.mount
    yield root
    for line in _lines(MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if version.controller in controllers.split(","):
            group = root / path.lstrip("/")
            yield from (part for part in (group, *group.parents) if root in part.parents)


def _left(group: Path, version: Version) -> int | None:
    """Bytes left in a group; version 1 expresses "no limit" as more than any machine has."""
    limit, used = _number(group / version.limit), _number(group / version.used)
    if limit is None or used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    return max(0, limit - used + sum(int(stat.get(name, 0)) for name in version.files))


def _meminfo() -> int:
    found = next((line.split()[1] for line in _lines(MEMINFO) if line.startswith("MemAvailable:")), None)
    return 4 << 30 if found is None else int(found) << 10  # not Linux: any machine that trains has this much


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or the word `max`
        return None


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let glibc reuse freed blocks, instead of returning those of a layer to the system and faulting in others.

    This lasts until the process ends. Other allocators, and a glibc that the user tuned by variables, are left alone.
    """
    is_tuned = "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    if is_tuned or any(name.startswith("MALLOC_") for name in environ):
        return
    if mallopt := _of_libc("mallopt"):
        mallopt(M_MMAP_MAX, 0)  # no block has a mapping of its own
        mallopt(M_TRIM_THRESHOLD, -1)  # nor is the end of the heap returned
        mallopt(M_ARENA_MAX, 1)  # in threads too: the heaps of their own hold at most 64 MiB


def return_freed_memory() -> None:
    """Return freed memory to the system; blocks that are needed later are faulted in again."""
    if malloc_trim := _of_libc("malloc_trim"):
        malloc_trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None: musl and macOS do not have it."""
    return getattr(ctypes.CDLL(None), name, None)


CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or platform.processor() or "unknown processor"


def processor_flags() -> frozenset[str]:
    """The processor's features by Linux's names; empty if they are not known."""
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features") or "").split())


def _cpuinfo(name: str) -> str:
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.partition(":")[0].strip() == name:
                return line.partition(":")[2].strip()
    return ""


def total_memory() -> int:
    """The memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
