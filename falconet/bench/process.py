"""One run of a command in a process of its own: its lines, its end, its memory."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from falconet.bench.command import Command, child_environment
from falconet.parallel import memory
from falconet.parallel.leftovers import none_left

GRACE = 30.0  # seconds to save and leave after a polite signal
POLL = 0.05  # seconds


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended, and what it printed."""

    code: int
    seconds: float
    lines: Sequence[str]
    peak_memory: int  # bytes of the machine's memory, of the largest process as far as the system tells
    stopped: Literal["timeout", "interrupted"] | None = None
    unlogged: str = ""  # why the log is cut short, if it is

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "nothing was printed")


def run(command: Command, *, runs: Path, log: Path, timeout: float | None, echo: Callable[[str], None]) -> Ended:
    """Run a command to its end; standard output and error go to `log` as one. `timeout`: seconds."""
    with none_left(), terminated_as_interrupted():
        return _run(command, runs=runs, log=log, timeout=timeout, echo=echo)


def _run(command: Command, *, runs: Path, log: Path, timeout: float | None, echo: Callable[[str], None]) -> Ended:
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            command.argv,
            cwd=command.folder,
            env=child_environment(command, runs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",  # whatever the locale here is
            errors="replace",
            start_new_session=True,  # so that all of its processes can be reached, and Ctrl-C comes through us
        )
    except OSError as error:
        # Such as a program that is not there: the benchmark's failure, not ours.
        line = f"{error.filename or command.argv[0]}: {error.strerror}"
        log.write_text(line + "\n", encoding="utf-8")
        return Ended(code=127, seconds=0.0, lines=[line], peak_memory=0)
    lines: list[str] = []
    child = _Child(process)
    written = _Log(log)
    reader = threading.Thread(target=_read, args=(process, written, lines, echo), daemon=True)
    stopped: Literal["timeout", "interrupted"] | None = None
    try:
        reader.start()
        if not child.wait(timeout):
            stopped = "timeout"
            child.stop(signal.SIGTERM)
    except KeyboardInterrupt:
        stopped = "interrupted"
        child.stop(signal.SIGINT)
    reader.join(timeout=GRACE)
    return Ended(
        code=process.returncode,
        seconds=time.monotonic() - begun,
        lines=lines,
        peak_memory=child.peak,
        stopped=stopped,
        unlogged=written.why,
    )


class _Log:
    """A file of lines that a full disk cuts short: a program whose output nobody reads would wait for ever."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = path.open("wb", buffering=0)
        self.why = ""

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line.encode("utf-8", errors="replace"))
        except OSError as error:
            self.why = error.strerror or str(error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(process: "subprocess.Popen[str]", log: _Log, lines: list[str], echo: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as output, contextlib.closing(log):
        for line in output:
            log.write(line)
            lines.append(line.rstrip("\n"))
            echo(lines[-1])


class _Child:
    """A process, and the most memory that it was seen with."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._ours = memory.accounted()  # at least what it began with
        self.peak = 0  # bytes

    def wait(self, timeout: float | None) -> bool:
        """Whether it ended before the time was over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            self.peak = max(self.peak, memory.peak_of(self._process.pid))
            # Not Popen.wait, which throws away how much memory the process had.
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.peak = memory.peak_of_ended(usage, seen=self.peak, ours=self._ours)
                return True
            time.sleep(POLL)
        return False

    def stop(self, politely: signal.Signals) -> None:
        """Ask all processes to leave, then make them."""
        for number in (politely, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            if self.wait(GRACE):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # what the first one left behind
                return
        raise AssertionError("nothing outlives SIGKILL")


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is Ctrl-C, so that a scheduler's stop also keeps what was measured."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001
    raise KeyboardInterrupt
