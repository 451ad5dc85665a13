"""Trackers: sinks for other programs, which can show more than metrics and whose failures never end a run."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from falconet.errors import UserError, printable
from falconet.report.console import Say
from falconet.report.sinks import Metrics
from falconet.report.trackers.histograms import Histogram

OPENING = 30.0  # seconds that a run waits for a tracker before its first update
CLOSING = 60.0  # seconds that it waits after the last one for what is still to be sent
WAITING = 1000  # calls that may wait for a slow tracker, a few hundred bytes each except for pictures
LONGEST = 200  # letters of an error; some libraries add a whole page


@dataclass(frozen=True)
class Picture:
    """An image file, PNG or JPEG, with its caption."""

    caption: str
    content: bytes


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix; only cells with images are listed."""

    class_names: Sequence[str]
    cells: Sequence[tuple[int, int, int]]  # label, predicted, images


class Tracker:
    """The interface of a tracker; each kind shows what it has a place for and ignores the rest."""

    def write(self, update: int, metrics: Metrics) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms of the weights by name."""

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:
        """Write pictures that belong together; earlier ones of the same name belong to an earlier update."""

    def write_confusion(self, update: int, confusion: Confusion) -> None: ...

    def write_graph(self, graph: Any) -> None:
        """Write the model as TensorBoard's GraphDef."""

    def write_result(self, update: int, metrics: Metrics) -> None:
        """Write, after the last update, the numbers by which runs are compared."""


Call = Callable[[Tracker], None]


class Guarded(Tracker):
    """A tracker in its own thread, so that training neither waits for it nor fails with it.

    If it fails or does not answer for long, the training thread prints one line, and from then on the
    tracker gets nothing more.
    """

    def __init__(self, name: str, opens: Callable[[], Tracker], *, say: Say, patience: float = OPENING) -> None:
        """`patience`: seconds to wait until the tracker is open. A user's mistake that it finds then is raised."""
        self._name, self._say, self._is_given_up = name, say, False
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)  # None: the end
        self._is_open, self._caught = threading.Event(), _Caught()
        self._thread = threading.Thread(target=self._serve, args=(opens,), name=f"falconet-{name}", daemon=True)
        with _unasked():
            self._thread.start()
            is_open = self._is_open.wait(patience)
        if not is_open:
            self._give_up(f"no answer within {patience:g} s")
        elif isinstance(self._caught.error, UserError):
            self._is_given_up = True
            raise self._caught.error
        else:
            self._look()

    def _serve(self, opens: Callable[[], Tracker]) -> None:
        with self._caught:
            tracker = opens()
            self._is_open.set()
            with _Caught() as failed:
                while (call := self._calls.get()) is not None and not self._is_given_up:
                    call(tracker)
            if failed.error is None:
                tracker.close()
            else:
                self._caught.error = failed.error  # reported already, so do not report it again
                with _Caught():
                    tracker.close()
        self._is_open.set()

    def _look(self) -> None:
        """Report a failure, once."""
        error = self._caught.error
        if error is not None:
            self._give_up(in_words(error))

    def _give_up(self, why: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            self._say(f"note: {self._name}: {why}; nothing more is sent to it")

    def _hand(self, call: Call) -> None:
        self._look()
        if self._is_given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up("it has not answered for a long time")

    def write(self, update: int, metrics: Metrics) -> None:
        self._hand(lambda tracker: tracker.write(update, metrics))

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        self._hand(lambda tracker: tracker.write_weights(update, histograms))

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:
        self._hand(lambda tracker: tracker.write_pictures(update, name, pictures))

    def write_confusion(self, update: int, confusion: Confusion) -> None:
        self._hand(lambda tracker: tracker.write_confusion(update, confusion))

    def write_graph(self, graph: Any) -> None:
        self._hand(lambda tracker: tracker.write_graph(graph))

    def write_result(self, update: int, metrics: Metrics) -> None:
        self._hand(lambda tracker: tracker.write_result(update, metrics))

    def close(self) -> None:
        """Wait until everything is written; never raises."""
        self._look()
        if self._is_given_up:
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)
            return
        until = time.monotonic() + CLOSING
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=CLOSING)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"no answer within {CLOSING:g} s")
        self._look()


@contextlib.contextmanager
def _unasked() -> Iterator[None]:
    """Detach standard input from the terminal: a question asked in a thread would wait for an answer forever."""
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


class _Caught:
    """Keeps any exception raised within: other libraries may raise anything, and none of it may end a run."""

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.error = self.error or error
        return True


def in_words(error: BaseException) -> str:
    """Another program's error in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    short = " ".join(printable(text.replace("\n", " ")).split())[:LONGEST].rstrip(" .;")
    return short or type(error).__name__
