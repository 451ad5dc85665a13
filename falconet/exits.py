"""Exit codes, the same of every program here: scripts and launchers rely on them."""

import contextlib
import errno
import os
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from typing import NoReturn

DONE = 0
FAILED = 1  # our own fault, or that of a process that went away
MISTAKE = 2  # the user's, said in one line
SLOWER = 3  # `falconet bench --compare`: it ran, and lost more than the margin
INTERRUPTED = 130  # Ctrl-C, or a scheduler's signal


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Ctrl-C ends the process: libraries may swallow it while they are imported, and break seconds later."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another program's own way of stopping
        return
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_lost_terminal(streams: Sequence[int] = (1, 2)) -> None:
    """Let what is written to a terminal that is gone (an ssh connection broke) go nowhere: it would be an error."""
    for stream in streams:
        try:
            termios.tcgetattr(stream)
        except termios.error as error:  # a file or a pipe is another error
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def soon(code: int) -> NoReturn:
    """End the process; a Ctrl-C while Python clears up, which takes a second behind torch, ends it at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    sys.exit(_last_words(code))


def now(code: int) -> NoReturn:
    """End the process, of which everything is written and closed, without Python's own clearing up.

    That takes a second behind torch, and ends Python's threads while torch's C++ ones go on: a worker whose run was
    done was once seen to abort after its last word (docs/log.md).
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may have been closed from the beginning
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone, or it is closed
            stream.flush()
    os._exit(code)


def _last_words(code: int) -> int:
    """The exit code when standard output is written; what nobody reads any more (`| head`) is forgotten, not missed."""
    try:
        if sys.stdout:  # it may have been closed from the beginning
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        if code == DONE and not isinstance(error, BrokenPipeError):
            print(f"standard output: {error.strerror}", file=sys.stderr)  # noqa: T201
            return MISTAKE
    return code
