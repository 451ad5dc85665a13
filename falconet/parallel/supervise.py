"""Hosts that run one job together: started, watched, and ended together. No torch in here."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from falconet.codes import DONE, FAILED, INTERRUPTED, MISTAKE
from falconet.errors import ConfigError
from falconet.parallel.hosts import Start

EVERY = 0.1  # seconds between two looks
GRACE = 60.0  # seconds from the end of one host to that of all; torch's agent gives its workers 30 of them
REACHING = 15.0  # seconds in which a host must answer


def require_reachable(starts: Sequence[Start], *, remote_shell: Sequence[str]) -> None:
    """Every other host answers, or one line names the first that does not."""
    remote = [start.host for start in starts if start.remote]
    if remote and not shutil.which(remote_shell[0]):
        raise ConfigError(f"--host: cannot reach {remote[0]}: {remote_shell[0]} is not installed here")
    over = [*remote_shell, *_patient(remote_shell)]
    asked = [
        (start.host, subprocess.Popen([*over, start.host, "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE))
        for start in starts
        if start.remote
    ]
    answers = [(host, *_answer(process)) for host, process in asked]
    for host, code, said in answers:
        if code:
            reason = said.strip().splitlines()[-1] if said.strip() else f"exit code {code}"
            raise ConfigError(f"--host: cannot reach {host} by {remote_shell[0]}: {reason}")


def _patient(remote_shell: Sequence[str]) -> Sequence[str]:
    """No question that nobody would answer, and an end to waiting; of ssh's own options."""
    return ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACHING:.0f}") if remote_shell[0] == "ssh" else ()


def _answer(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=2 * REACHING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 1, "does not answer"
    return process.returncode, said.decode(errors="replace")


def run_together(starts: Sequence[Start], *, variables: Mapping[str, str]) -> int:
    """Run all to their end and return the exit code; when one fails or we are told to stop, all end."""
    environment = os.environ | dict(variables)
    with _told_to_stop() as told:
        # In sessions of their own: a terminal's Ctrl-C reaches us alone, and their workers once.
        running = [
            subprocess.Popen(start.argv, env=environment, stdin=subprocess.PIPE, start_new_session=True)
            for start in starts
        ]
        deadline, by_themselves = float("inf"), set[int]()
        while any(process.poll() is None for process in running):
            failed = {process.returncode for process in running if process.returncode}
            if (failed or told) and deadline == float("inf"):
                deadline, by_themselves = time.monotonic() + GRACE, failed
                for process in running:
                    _let_go(process)
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(EVERY)
    for process in running:
        _let_go(process)
    codes = {process.returncode for process in running}
    if told or INTERRUPTED in (by_themselves or codes):  # whom we end calls that an interruption too
        return INTERRUPTED
    if MISTAKE in codes:
        return MISTAKE
    return FAILED if codes - {DONE} else DONE


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """The end of its standard input is the sign to end; ssh carries it to the other host."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


@contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """Not empty as soon as somebody asks us to end."""
    told: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        told.append(number)

    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []  # else `nohup`
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hang_up)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
