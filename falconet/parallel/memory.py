"""How much of the machine's memory a process has had at the most.

Not the system's account of a process that ended alone (`ru_maxrss`): a program begins it with the peak of the process
that started it, so that of a small program started by a large one it tells the large one's.
"""

import os
import re
import resource
from pathlib import Path

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
