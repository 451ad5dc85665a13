"""A time limit for every test: a hanging test fails with its stack, and the processes it started are ended."""

import contextlib
import faulthandler
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep  # imported by name, because a test may replace those of the module

import pytest

# Seconds that only a hanging test takes: on a quiet machine the longest takes a thirtieth.
ALONE, WITH_PROCESSES = 300.0, 500.0
AGAIN = 60.0  # seconds until a test that hangs again while cleaning up is interrupted again


class Watch:
    """Interrupt the main thread with SIGUSR2 when its time is up; SIGALRM belongs to the program under test."""

    def __init__(self) -> None:
        self._end, self._changed = math.inf, threading.Condition()
        signal.signal(signal.SIGUSR2, self._interrupt)
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

    def _interrupt(self, number: int, frame: object) -> None:
        if self._end <= monotonic():  # else the test has just ended
            faulthandler.dump_traceback(file=2)  # every thread's, captured by pytest
            pytest.fail("the test hangs")


WATCH = Watch()


def in_time(item: pytest.Item) -> Iterator[None]:
    """Limit one phase of a test. A hang inside C is left to faulthandler_timeout, which ends the process."""
    WATCH.limit(WITH_PROCESSES if item.get_closest_marker("dist") else ALONE)
    try:
        return (yield)
    finally:
        WATCH.limit(math.inf)


@contextlib.contextmanager
def processes_ended(begun: Callable[[], object]) -> Iterator[None]:
    """End every process started inside by `subprocess`, with its descendants; `begun` is called for each."""
    started: list[subprocess.Popen] = []
    plain = subprocess.Popen.__init__

    def recorded(process: subprocess.Popen, *arguments: object, **named: object) -> None:
        begun()
        plain(process, *arguments, **named)
        started.append(process)

    subprocess.Popen.__init__ = recorded
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
            with contextlib.suppress(OSError):  # unwritten data
                pipe.close()


def descendants(pid: int) -> list[int]:
    """All descendants of a process, deepest first."""
    return [number for child in children(pid) for number in (*descendants(child), child)]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(stat.parent.name))
    return sorted(found)


def wait_until_gone(*pids: int) -> None:
    """Wait for the end of processes: that of a killed one comes later, and only its parent can be told of it."""
    while not all(map(_is_gone, pids)):
        sleep(0.01)


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; orphans may stay zombies where no init process reaps them."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
