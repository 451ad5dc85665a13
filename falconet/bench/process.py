"""From a benchmark's command as it is written to the words and the environment of a process."""

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

from falconet.bench.spec import Benchmark
from falconet.errors import ConfigError, did_you_mean
from falconet.parallel import host
from falconet.parallel.host import none_left
from falconet.report.folders import RUNS

_PARAMETER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_TRAINS = ("train.py", "resnet_main.py")  # scripts of the originals


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is started: words, variables on top of the environment, and the folder."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path

    def shown(self) -> str:
        """As one would type it."""
        own = ["falconet", *self.argv[3:]] if self.argv[1:3] == ("-m", "falconet") else self.argv
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(own)])


def build_command(
    benchmark: Benchmark, parameters: Mapping[str, str], *, wandb: bool, profile: bool, note: Callable[[str], None]
) -> Command:
    """The command of one variant."""
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
        raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: has no program in it")
    if not (wandb or benchmark.allow_wandb):
        words = _without_wandb(words)
    if profile and _trains(words):
        words.append("--profile")
    return Command(argv=tuple(_program(words)), environment=environment, folder=benchmark.folder)


def child_environment(command: Command, runs: Path) -> dict[str, str]:
    """This process's environment with the command's; programs of this Python come first, runs go to `runs`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", RUNS: str(runs)} | dict(command.environment)


def _with_parameters(benchmark: Benchmark, parameters: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in parameters:
            meant = did_you_mean(name, parameters) or "; wanted it among the parameters"
            raise ConfigError(f"{benchmark.where}: {benchmark.name}: cmd: nothing is known of {{{name}}}{meant}")
        return parameters[name]

    return _PARAMETER.sub(value, benchmark.command)


def _with_variables(word: str, environment: Mapping[str, str], note: Callable[[str], None]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environment.get(name):
            note(f"note: ${name} is {'empty' if name in environment else 'not set; taken as empty'}")
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
    """Falconet and Python are those that run this, wherever the shell would look."""
    if words[0] == "falconet":
        return [sys.executable, "-m", "falconet", *words[1:]]
    return [sys.executable, *words[1:]] if words[0] in ("python", "python3") else words


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
        self._ours = host.accounted()  # at least what it began with
        self.peak = 0  # bytes

    def wait(self, timeout: float | None) -> bool:
        """Whether it ended before the time was over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            self.peak = max(self.peak, host.peak_of(self._process.pid))
            # Not Popen.wait, which throws away how much memory the process had.
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.peak = host.peak_of_ended(usage, seen=self.peak, ours=self._ours)
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
