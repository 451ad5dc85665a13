"""Exit codes, the same for every program here, because scripts and launchers rely on them; and how a process ends."""

import contextlib
import errno
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

DONE = 0
FAILED = 1  # a bug, or a process that died
BROKEN = 1  # photos that training could not read: `falconet data check` and `data pack` say so to scripts
MISTAKE = 2  # the user's, reported in one line
SLOWER = 3  # `falconet bench --compare`: it ran, and lost more than the margin
INTERRUPTED = 130  # Ctrl-C, or a scheduler's signal


@contextlib.contextmanager
def at_once(last: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C end the process: a library may swallow it while it is imported, and break seconds later.

    `last`: what is done before.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the calling program handles it
        return

    def end(*_: object) -> None:
        last()
        os._exit(INTERRUPTED)

    try:
        signal.signal(signal.SIGINT, end)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_lost_terminal(streams: Sequence[int] = (1, 2)) -> None:
    """Discard output to a terminal that is gone (an ssh connection broke): writing to it would be an error."""
    for stream in streams:
        try:
            termios.tcgetattr(stream)
        except termios.error as error:  # a file or a pipe gives another error
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def soon(code: int) -> NoReturn:
    """End the process; Ctrl-C during Python's clean-up, which takes a second after torch, ends it at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    sys.exit(_after_flush(code))


def now(code: int) -> NoReturn:
    """End the process, whose files are written and closed, without Python's clean-up.

    The clean-up takes a second after torch, and ends Python's threads while torch's C++ threads still run: a worker
    that had finished its run was once seen to abort there (docs/maintaining/log.md).
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may have been closed from the start
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def _after_flush(code: int) -> int:
    """Exit 2 when stdout cannot be written; a reader that stopped reading (`| head`) is no error."""
    try:
        if sys.stdout:  # it may have been closed from the start
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        if code == DONE and not isinstance(error, BrokenPipeError):
            print(f"stdout: {error.strerror}", file=sys.stderr)  # noqa: T201
            return MISTAKE
    return code
