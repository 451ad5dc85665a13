"""Requests that arrive together are computed together: a queue with an end, and batches that wait only a moment."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from falconet.infer.predictor import Pixels, Scores
from falconet.report.console import are

Execute = Callable[[Sequence[Pixels]], list[Scores]]  # the scores of each portion; blocks its thread


class OverloadedError(Exception):
    """More is waiting than may wait; the client should come back later."""


class ComputingError(Exception):
    """The model failed on a batch; after a fault of the device it will fail on every other one too."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a batch is sent off, and what may wait."""

    max_batch: int  # images
    max_delay: float  # seconds that the first request of a batch waits for others while a lane is free
    max_queue: int  # images that may wait


@dataclass(kw_only=True)
class Counts:
    """What was done so far."""

    requests: int = 0  # answered
    images: int = 0
    executions: int = 0
    refused: int = 0
    dropped: int = 0  # given up by their client before they were computed
    failed_in_a_row: int = 0  # executions since the last one that went well


@dataclass(eq=False)
class _Waiting:
    images: Pixels
    since: float  # of the event loop's clock
    scores: "asyncio.Future[Scores]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Gives requests to lanes, several in one batch where several are there; belongs to one event loop."""

    def __init__(self, lanes: Sequence[Execute], policy: Policy) -> None:
        self.counts = Counts()
        self._policy = policy
        self._idle = list(lanes)
        self._threads = ThreadPoolExecutor(len(lanes), thread_name_prefix="lane")
        self._queue: deque[_Waiting] = deque()
        self._queued = 0  # images
        self._alarm: asyncio.TimerHandle | None = None

    async def submit(self, images: Pixels) -> Scores:
        """The scores of 1 to `max_batch` images; OverloadedError at once if too many are waiting."""
        assert 0 < len(images) <= self._policy.max_batch
        if self._queued + len(images) > self._policy.max_queue:
            self.counts.refused += 1
            raise OverloadedError(f"{are(self._queued, 'image')} waiting; try again later")
        waiting = _Waiting(images, asyncio.get_running_loop().time())
        self._queue.append(waiting)
        self._queued += len(images)
        self._send_off()
        try:
            return await waiting.scores
        finally:
            if waiting in self._queue:  # cancelled, as its client went away
                self._queue.remove(waiting)
                self._queued -= len(images)
                self.counts.dropped += 1

    def close(self) -> None:
        """Let the threads end; nothing is submitted any more."""
        if self._alarm:
            self._alarm.cancel()
        self._threads.shutdown(wait=True)

    def _send_off(self) -> None:
        """Give idle lanes their batches, or see to it that this is tried again in time."""
        while self._idle and self._queue:
            batch = self._first_batch()
            full = len(batch) < len(self._queue) or _size(batch) == self._policy.max_batch
            due = batch[0].since + self._policy.max_delay
            if not full and asyncio.get_running_loop().time() < due:
                self._wake_at(due)
                return
            for _ in batch:
                self._queue.popleft()
            self._queued -= _size(batch)
            self._execute(self._idle.pop(), batch)

    def _first_batch(self) -> list[_Waiting]:
        """Those that have waited longest, as far as they fit together; a request is never divided."""
        batch: list[_Waiting] = []
        size = 0
        for waiting in self._queue:
            size += len(waiting.images)
            if size > self._policy.max_batch:
                break
            batch.append(waiting)
        return batch

    def _wake_at(self, when: float) -> None:
        if self._alarm:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, self._send_off)

    def _execute(self, lane: Execute, batch: list[_Waiting]) -> None:
        self.counts.executions += 1
        portions = [waiting.images for waiting in batch]
        running = asyncio.get_running_loop().run_in_executor(self._threads, lane, portions)

        def answer(done: "asyncio.Future[list[Scores]]") -> None:
            self._idle.append(lane)
            error = done.exception()
            self.counts.failed_in_a_row = self.counts.failed_in_a_row + 1 if error else 0
            for number, waiting in enumerate(batch):
                if waiting.scores.done():  # its client went away meanwhile
                    self.counts.dropped += 1
                elif error is not None:
                    waiting.scores.set_exception(_failure(error))
                else:
                    self.counts.requests += 1
                    self.counts.images += len(waiting.images)
                    waiting.scores.set_result(done.result()[number])
            self._send_off()

        running.add_done_callback(answer)


def _failure(error: BaseException) -> ComputingError:
    failure = ComputingError(f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    failure.__cause__ = error
    return failure


def _size(batch: Sequence[_Waiting]) -> int:
    return sum(len(waiting.images) for waiting in batch)
