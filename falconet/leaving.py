"""Ctrl-C while libraries are imported: the process ends, without a word. Imports next to nothing itself."""

import contextlib
import os
import signal
from collections.abc import Iterator

from falconet.codes import INTERRUPTED


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
