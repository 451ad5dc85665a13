"""Stopping cleanly after Ctrl-C, SIGTERM or a lost terminal, and at once after a second Ctrl-C."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from falconet import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.2  # seconds after which a lost KeyboardInterrupt is raised again


class StopRequest:
    """Within it, the first signal only sets a flag, which the loop reads when the host has something to do."""

    def __init__(self, note: Callable[[str], None], *, after: str = "this update") -> None:
        """`after`: what is finished first."""
        self.requested = False
        self._note, self._after = note, after
        self._before: dict[signal.Signals, Any] = {}
        self._hook: Callable[[Any], Any] = sys.unraisablehook

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread gets signals, and may say who handles them
        self._before = {number: signal.signal(number, self._handle) for number in (*SIGNALS, signal.SIGALRM)}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else `nohup`
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._before:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Surround what a second signal interrupts at once; what follows, such as the end of a save, is not hurried.

        Python drops an exception raised while a destructor runs, and a generator that waits for its threads may be in
        one: the interruption is raised again until it arrives here.
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
        again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._request(f"stopping after {self._after}, then saving ({again} again: at once)")

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        """The system sends it, and then the shell: a second one does not mean to stop at once."""
        if not self.requested:
            self._request(f"the terminal is gone: stopping after {self._after}, then saving")

    def _request(self, note: str) -> None:
        self.requested = True
        exits.forget_lost_terminal()  # a launcher that lost it may have sent SIGTERM
        self._note(note)

    def _unraisable(self, lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:  # which is raised again
            self._hook(lost)
