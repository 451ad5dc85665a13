"""Run a benchmark's command: fill in its parameters, start the process, log it and end it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from falconet import exits
from falconet.bench.spec import Benchmark
from falconet.errors import ConfigError, did_you_mean
from falconet.parallel import host
from falconet.parallel.host import none_left
from falconet.report.folders import RUNS

_PARAMETER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_TRAINS = ("train.py", "resnet_main.py")  # scripts of the originals
GRACE = 30.0  # seconds to save and exit after a signal
POLL = 0.05  # seconds between looking at the process


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, its variables on top of the environment, and its folder."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path

    def shown(self) -> str:
        """The command as a user would type it."""
        own = ["falconet", *self.argv[3:]] if self.argv[1:3] == ("-m", "falconet") else self.argv
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(own)])


def build_command(
    benchmark: Benchmark, parameters: Mapping[str, str], *, wandb: bool, profile: bool, note: Callable[[str], None]
) -> Command:
    """Build the command of one variant."""
    filled = _with_parameters(benchmark, parameters)
    outside = os.environ | {name: os.path.expandvars(value) for name, value in benchmark.environment.items()}
    try:
        words = [_with_variables(word, outside, note) for word in shlex.split(filled)]
    except ValueError as error:
        raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: {str(error).lower()}") from error
    environment = {name: outside[name] for name in benchmark.environment}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        environment[found[1]] = found[2]
        del words[0]
    if not words:
        raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: names no program")
    if not (wandb or benchmark.allow_wandb):
        words = _without_wandb(words)
    if profile and _trains(words):
        words.append("--profile")
    return Command(argv=tuple(_program(words)), environment=environment, folder=benchmark.folder)


def _with_parameters(benchmark: Benchmark, parameters: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in parameters:
            meant = did_you_mean(name, parameters) or "; expected one of the parameters"
            raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: unknown parameter {{{name}}}{meant}")
        return parameters[name]

    return _PARAMETER.sub(value, benchmark.command)


def _with_variables(word: str, environment: Mapping[str, str], note: Callable[[str], None]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environment.get(name):
            note(f"note: ${name} is {'empty' if name in environment else 'not set; using an empty string'}")
        return environment.get(name, "")

    return _VARIABLE.sub(value, word)


def _without_wandb(words: list[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--wandb"):
            dropping = word != "--wandb" and "=" not in word
        elif dropping and not word.startswith("-"):
            dropping = False
        else:
            dropping = False
            kept.append(word)
    return kept


def _trains(words: list[str]) -> bool:
    return words[:2] == ["falconet", "train"] or any(Path(word).name in _TRAINS for word in words)


def _program(words: list[str]) -> list[str]:
    """Use this Falconet and this Python, whatever PATH has."""
    if words[0] == "falconet":
        return [sys.executable, "-m", "falconet", *words[1:]]
    return [sys.executable, *words[1:]] if words[0] in ("python", "python3") else words


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The exit code and the output of a process."""

    code: int
    seconds: float
    lines: Sequence[str]
    peak_memory: int  # bytes of host memory, of the largest process as far as the system reports it
    stopped: Literal["timeout", "interrupted"] | None = None
    unlogged: str = ""  # why the log is incomplete, if it is

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "(no output)")


def run(command: Command, *, runs: Path, log: Path, timeout: float | None, echo: Callable[[str], None]) -> Ended:
    """Run a command to its end, with stdout and stderr merged into `log`. `timeout` is in seconds."""
    with none_left(), terminated_as_interrupted():
        return _run(command, runs=runs, log=log, timeout=timeout, echo=echo)


def _run(command: Command, *, runs: Path, log: Path, timeout: float | None, echo: Callable[[str], None]) -> Ended:
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command.argv,
            cwd=command.folder,
            env=child_environment(command, runs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",  # whatever the locale
            errors="replace",
            start_new_session=True,  # so that all its processes can be signalled, and Ctrl-C goes through us
        )
    except OSError as error:
        # Such as a missing program: a failure of the benchmark, not of this program.
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
        seconds=time.monotonic() - start,
        lines=lines,
        peak_memory=child.peak,
        stopped=stopped,
        unlogged=written.why,
    )


def child_environment(command: Command, runs: Path) -> dict[str, str]:
    """This environment plus the command's; this Python's programs come first in PATH, and runs go to `runs`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", RUNS: str(runs)} | dict(command.environment)


class _Log:
    """A log that stops when the disk is full; reading continues, because a full pipe would block the program."""

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
    """A process and its peak memory."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._ours = host.accounted()  # at least what it started with
        self.peak = 0  # bytes

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; return whether it came in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            self.peak = max(self.peak, host.peak_of(self._process.pid))
            # Not Popen.wait, which discards the memory usage.
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.peak = host.peak_of_ended(usage, seen=self.peak, ours=self._ours)
                return True
            time.sleep(POLL)
        return False

    def stop(self, first: signal.Signals) -> None:
        """Ask all processes to exit, then kill them."""
        for number in (first, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            if self.wait(GRACE):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # child processes that are left
                return
        raise AssertionError("nothing survives SIGKILL")


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM and a lost terminal like Ctrl-C: results are kept, and started processes are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else `nohup`
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # the system sends it, and then the shell
    exits.forget_lost_terminal()
    raise KeyboardInterrupt
