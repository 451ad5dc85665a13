"""No test holds the others up: one that hangs fails with its stack, and what a failed one started is ended."""

import contextlib
import faulthandler
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic  # the clock itself: a test may put another one into `time`

import pytest

# Seconds: only what hangs takes so long. On a quiet machine no test takes a thirtieth, but for a minute of fuzzing.
ALONE, WITH_PROCESSES = 300.0, 500.0
AGAIN = 60.0  # seconds after which a test that waits once more, to clean up, is told again


class Watch:
    """Interrupts the main thread with SIGUSR2 when its time is over; SIGALRM and its timer belong to the program."""

    def __init__(self) -> None:
        self._end, self._changed = math.inf, threading.Condition()
        signal.signal(signal.SIGUSR2, self._tell)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def limit(self, seconds: float) -> None:
        with self._changed:
            self._end = monotonic() + seconds
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                left = self._end - monotonic()
                if left <= 0:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                    left = AGAIN
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _tell(self, number: int, frame: object) -> None:
        if self._end <= monotonic():  # and not a moment too late
            faulthandler.dump_traceback(file=2)  # of every thread, into what pytest captures
            pytest.fail("the test hangs")


WATCH = Watch()


def in_time(item: pytest.Item) -> Iterator[None]:
    """One phase of a test. What hangs within C is left to pytest's own faulthandler_timeout, which ends the process."""
    WATCH.limit(WITH_PROCESSES if item.get_closest_marker("dist") else ALONE)
    try:
        return (yield)
    finally:
        WATCH.limit(math.inf)


@contextlib.contextmanager
def processes_ended(begun: Callable[[], object]) -> Iterator[None]:
    """Whoever was started within by `subprocess` ends with it, and whoever they started; `begun` is called for each."""
    started: list[subprocess.Popen] = []
    plain = subprocess.Popen.__init__

    def noted(process: subprocess.Popen, *arguments: object, **named: object) -> None:
        begun()
        plain(process, *arguments, **named)
        started.append(process)

    subprocess.Popen.__init__ = noted
    try:
        yield
    finally:
        subprocess.Popen.__init__ = plain
        for process in started:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        for number in (*descendants(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet written to it
                pipe.close()


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs before themselves."""
    return [number for child in children(pid) for number in (*descendants(child), child)]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(stat.parent.name))
    return sorted(found)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; not everywhere is there somebody who reaps those that outlived their parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
