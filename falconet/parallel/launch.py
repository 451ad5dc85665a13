"""Start the workers a plan needs, when no launcher has: torch's elastic agent, and again when a worker dies."""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from falconet import exits
from falconet.errors import Interrupted, WorldError
from falconet.exits import DONE, INTERRUPTED, MISTAKE
from falconet.parallel import environment, meeting
from falconet.parallel.host import none_left

FINAL = (MISTAKE, INTERRUPTED)  # of a worker that starting again would not mend
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the agent takes these over
NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What to run, in how many processes; `restarts` in a row that may pass without progress."""

    argv: Sequence[str]  # of `python -m falconet`
    processes: int
    restarts: int


def launch(workers: Workers, *, progress: Callable[[], object], say: Callable[[str], None]) -> int:
    """Run the workers to their end and return the exit code; `progress` changes when there is a new checkpoint."""
    attempt, left, stood = 0, workers.restarts, progress()
    while True:
        failures = _run(workers, attempt)
        codes = set(failures.values())
        if not codes:
            return DONE
        for code in FINAL:
            if code in codes:
                return code
        stands = progress()
        attempt, left, stood = attempt + 1, workers.restarts if stands != stood else left, stands
        what = described(failures)
        if left == 0:
            limit = f" after {attempt} attempts (--max-restarts {workers.restarts})" if workers.restarts else ""
            raise WorldError(f"{what}{_why(failures)}; gave up{limit}")
        left -= 1
        say(f"{what}; starting all workers again from the newest whole checkpoint")


def _run(workers: Workers, attempt: int) -> Mapping[int, int]:
    """One attempt; the exit codes of the workers that failed, by rank."""
    own = {
        environment.OWN: str(os.getpid()),
        environment.ATTEMPT: str(attempt),
        # What torch's C++ warns about is in our own errors, in one line.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL") or "ERROR",
    }
    # Mode 0700, under a name that cannot be guessed; a new one for each attempt, without what dead workers wrote.
    with tempfile.TemporaryDirectory(prefix="falconet-") as folder, _variables({**own, environment.MEETING: folder}):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers.processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=meeting.ONE_HOST,
            rdzv_endpoint=f"{environment.LOOPBACK}:{environment.PORT}",  # for torch's variables: nothing listens there
            max_restarts=0,  # restarts are ours: the agent would also start again after a user's mistake
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=heeded(),
        )
        agent = elastic_launch(config, sys.executable)
        return failures_of(lambda: agent("-m", "falconet", *workers.argv))


def failures_of(agent: Callable[[], object]) -> Mapping[int, int]:
    """Run torch's agent to the end of its workers, in silence; the exit codes of those that failed, by rank."""
    with none_left(), _quiet(), _signals_kept():
        try:
            agent()
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException:
            exits.forget_lost_terminal()
            raise Interrupted from None
        return {}


def heeded() -> str:
    """The signals that the agent ends its workers by; else it would also take what `nohup` has turned off."""
    return ",".join(number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


def described(failures: Mapping[int, int]) -> str:
    """How the workers ended that failed first."""
    return ", ".join(f"rank {rank} {_ended(code)}" for rank, code in sorted(_first_to_fail(failures).items()))


def _why(failures: Mapping[int, int]) -> str:
    """Where a person looks for the reason."""
    if -signal.SIGKILL in _first_to_fail(failures).values():
        return f" on {socket.gethostname()} (by the system, if memory ran out there: `dmesg` tells)"
    return f" on {socket.gethostname()}"


def _first_to_fail(failures: Mapping[int, int]) -> Mapping[int, int]:
    """Without those that the agent itself ended after another one had failed."""
    return {rank: code for rank, code in failures.items() if code != -signal.SIGTERM} or failures


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


@contextlib.contextmanager
def _variables(own: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent's handlers go when it goes."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The agent reports to logs what we say in one line."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(NOISY)]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
