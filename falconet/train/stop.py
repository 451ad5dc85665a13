"""Stopping cleanly: Ctrl-C and SIGTERM ask for it, a second Ctrl-C insists."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.2  # seconds after which a KeyboardInterrupt that nobody heard is raised again


class StopRequest:
    """Within it, the first signal only raises a flag, which the loop sees after its update."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._note = note
        self._before: dict[signal.Signals, Any] = {}
        self._hook: Callable[[Any], Any] = sys.unraisablehook

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (*SIGNALS, signal.SIGALRM)}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Around what a second signal breaks off at once; what follows, such as the end of a save, has its time.

        Python throws away an exception that comes while a destructor runs, and a generator that waits for its threads
        may be in one: until the interruption comes out here, it is raised again and again.
        """
        try:
            yield
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            raise KeyboardInterrupt
        self.requested = True
        self._note(f"{signal.Signals(number).name}: finishing this update, then saving; again to stop at once")

    def _unraisable(self, lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:  # which comes again
            self._hook(lost)
