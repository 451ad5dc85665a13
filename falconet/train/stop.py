"""Stopping cleanly: Ctrl-C and SIGTERM ask for it, a second Ctrl-C insists."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within it, the first signal only raises a flag, which the loop sees after its update."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._note = note
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._note(f"{signal.Signals(number).name}: finishing this update, then saving; again to stop at once")
