"""Launch the workers that a plan needs with torch's elastic agent, and restart them when one dies."""

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from falconet import exits, writing
from falconet.errors import ConfigError, Interrupted, WorldError
from falconet.exits import DONE, INTERRUPTED, MISTAKE
from falconet.parallel import environment, meeting, rendezvous
from falconet.parallel.environment import Place
from falconet.parallel.host import none_left
from falconet.parallel.meeting import Wait

FINAL = (MISTAKE, INTERRUPTED)  # exit codes after which restarting would not help
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the agent handles these
ALL = "falconet-hosts"  # the run id of hosts that have met
TOGETHER = 120  # seconds in which the agents of hosts that have met must start
NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The program to run and the number of processes; at most `restarts` restarts in a row without progress."""

    argv: Sequence[str]  # of the program
    processes: int
    restarts: int
    program: Sequence[str] = ("-m", "falconet")  # Python's arguments before them
    hosts: "Hosts | None" = None  # with as many on each; None: this host alone
    stages: int | None = None  # of a replica that have a process each; None: as the program has it


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, whose first processes have met at a store on the first host and start the workers."""

    rank: int
    size: int
    address: str
    port: int
    store: Store
    fewest: int  # devices that any of them has


def meet(place: Place, *, devices: int, timeout: float) -> Hosts:
    """Meet the processes of the other hosts; `devices`: those of this host."""
    where, wait = f"{place.address}:{place.port}", Wait(place, timeout=timeout)
    try:
        store = meeting.open_store(wait)
        fewest = min(map(int, meeting.exchange(store, meeting.HOST, str(devices), wait=wait)))
    except (OSError, DistError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{place.launcher}: {where} is in use; choose a free port") from error
        reason = str(error).partition("\n")[0]
        raise WorldError(f"worker {place.rank}: cannot meet the others at {where}: {reason}") from error
    return Hosts(rank=place.rank, size=place.size, address=place.address, port=place.port, store=store, fewest=fewest)


def launch(workers: Workers, *, progress: Callable[[], object], say: Callable[[str], None]) -> int:
    """Run the workers until they exit; return the exit code. `progress()` changes with every new checkpoint."""
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
            limit = f" after {attempt} attempts (restarts allowed: {workers.restarts})" if workers.restarts else ""
            raise WorldError(f"{what}{_why(failures)}; gave up{limit}")
        left -= 1
        say(f"{what}; restarting all workers from the newest complete checkpoint")


def _run(workers: Workers, attempt: int) -> Mapping[int, int]:
    """Run the workers once; return the exit codes of those that failed, by rank."""
    own = {
        environment.OWN: str(os.getpid()),
        environment.ATTEMPT: str(attempt),
        # Our errors report in one line what torch's C++ would warn about.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL") or "ERROR",
    }
    if workers.stages is not None:
        own[environment.RUNNING] = str(workers.stages)
    # Mode 0700 and an unpredictable name; new for each attempt, without the files of dead workers.
    with writing.scratch() as folder:
        own |= {} if workers.hosts else {environment.MEETING: folder}
        config = LaunchConfig(
            nproc_per_node=workers.processes,
            max_restarts=0,  # we restart: the agent would also do so after a user error
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=heeded(),
            **(_together(workers.hosts) if workers.hosts else _alone()),
        )
        with _variables(own):
            agent = elastic_launch(config, sys.executable)
            return failures_of(lambda: agent(*workers.program, *workers.argv))


def _alone() -> dict[str, Any]:
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": rendezvous.ONE_HOST,
        "rdzv_endpoint": f"{environment.LOOPBACK}:{environment.PORT}",  # for torch's variables; nothing listens
    }


def _together(hosts: Hosts) -> dict[str, Any]:
    rendezvous.OPENED[ALL] = hosts.store
    return {
        "min_nodes": hosts.size,
        "max_nodes": hosts.size,
        "run_id": ALL,
        "rdzv_backend": rendezvous.IN_ORDER,
        "rdzv_endpoint": f"{hosts.address}:{hosts.port}",
        "rdzv_configs": {"rank": hosts.rank, "timeout": TOGETHER},
    }


def failures_of(agent: Callable[[], object]) -> Mapping[int, int]:
    """Run torch's agent silently to the end of its workers; return the exit codes of failures, by rank."""
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
    """The signals for the agent to handle, without those that `nohup` has turned off."""
    return ",".join(number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


def described(failures: Mapping[int, int]) -> str:
    """A line that says how the workers that failed first ended."""
    return ", ".join(f"rank {rank} {_ended(code)}" for rank, code in sorted(_first_to_fail(failures).items()))


def _why(failures: Mapping[int, int]) -> str:
    """A hint about where to look for the reason."""
    if -signal.SIGKILL in _first_to_fail(failures).values():
        return f" on {socket.gethostname()} (by the system, if it ran out of memory: see `dmesg`)"
    return f" on {socket.gethostname()}"


def _first_to_fail(failures: Mapping[int, int]) -> Mapping[int, int]:
    """The failures without workers that the agent ended after another one had failed."""
    return {rank: code for rank, code in failures.items() if code != -signal.SIGTERM} or failures


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


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
    """Restore the signal handlers that the agent replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's loggers: we report in one line."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(NOISY)]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
