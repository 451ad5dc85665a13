"""Processes that outlive the agent that started them: found and ended. No torch in here."""

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GRACE = 30.0  # seconds from being asked to end to being made to, as torch's agent gives
EVERY = 0.05  # seconds between two looks


@contextmanager
def none_left() -> Iterator[None]:
    """Whoever was started within, as the leader of a group of its own, ends with it, and its group too.

    A signal that reaches us while a process is started makes us forget it: nobody would end it. Torch's agent forgets
    all workers that it has started until then.
    """
    before = _leaders()
    try:
        yield
    finally:
        _end(_leaders() - before)


def _leaders() -> set[int]:
    """Children of this process that lead a group of processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            number, parent, group = _read(path.read_text(encoding="utf-8", errors="replace"))  # a name may be any bytes
            if parent == os.getpid() and group == number:
                found.add(number)
    return found


def _read(stat: str) -> tuple[int, int, int]:
    """The numbers of a process, its parent and its group; the name between them may hold anything, in parentheses."""
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
    """Whether a leader has ended; whoever it left behind in its group ends here."""
    with suppress(ChildProcessError):  # somebody else asked first
        # Without reaping it: until then, its number is nobody else's.
        if os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        _signal({number}, signal.SIGKILL)
        os.waitpid(number, 0)
    return True


DOUBT = 64 << 20  # bytes: what the account may be above the peak of who started the program, and still be that
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.M)


def peak_of(process: int) -> int:
    """Bytes since its program began; 0 for a process that has ended, and where the system does not tell."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = _PEAK.search(status)
    return int(found[1]) * 1024 if found else 0


def own_peak() -> int:
    """The same of this process, as far as the system tells."""
    return peak_of(os.getpid()) or accounted()


def accounted() -> int:
    """Bytes of the account of this process, with what it began with."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of_ended(usage: resource.struct_rusage, *, seen: int, ours: int) -> int:
    """Bytes of a program that ended, or of its largest child, where these cannot be `ours`; else what was `seen`."""
    account = usage.ru_maxrss * 1024
    return max(seen, account) if account > ours + DOUBT else seen
