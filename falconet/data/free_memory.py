"""Free memory: of the machine, or of a container or batch job if it has less."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Version:
    """Where the system keeps the limits of a control group, and their names."""

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
    """The mount, which is a container's group, and all groups from there down to this process: each has a limit."""
    root = CGROUP / version.mount
    yield root
    for line in _lines(MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if version.controller in controllers.split(","):
            group = root / path.lstrip("/")
            yield from (part for part in (group, *group.parents) if root in part.parents)


def _left(group: Path, version: Version) -> int | None:
    """Bytes left; version 1 expresses "no limit" as more than any machine has."""
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
