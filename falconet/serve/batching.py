"""Dynamic batching: requests that arrive together are computed together, from a queue of limited length."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from falconet.infer.predictor import Pixels, Scores
from falconet.report.console import are

Execute = Callable[[Sequence[Pixels]], list[Scores]]  # returns the scores of each portion; blocks its thread


class OverloadedError(Exception):
    """The queue is full; the client should retry later."""


class ComputingError(Exception):
    """The model failed on a batch; after a device fault it fails on every other one too."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a batch is started, and how much may wait."""

    max_batch: int  # images
    max_delay: float  # seconds that the first request of a batch waits for others when a lane is free
    max_queue: int  # images


@dataclass(kw_only=True)
class Counts:
    """What a batcher has done so far."""

    requests: int = 0  # answered
    images: int = 0
    executions: int = 0
    refused: int = 0
    dropped: int = 0  # abandoned by their client before they were answered
    failed_in_a_row: int = 0  # failed executions since the last success


@dataclass(eq=False)
class _Waiting:
    images: Pixels
    since: float  # time of the event loop
    scores: "asyncio.Future[Scores]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Gathers waiting requests into batches for the lanes; belongs to one event loop."""

    def __init__(self, lanes: Sequence[Execute], policy: Policy) -> None:
        self.counts = Counts()
        self._policy = policy
        self._idle = list(lanes)
        self._threads = ThreadPoolExecutor(len(lanes), thread_name_prefix="lane")
        self._queue: deque[_Waiting] = deque()
        self.waiting = 0  # images in the queue
        self._alarm: asyncio.TimerHandle | None = None

    async def submit(self, images: Pixels) -> Scores:
        """Compute the scores of 1 to `max_batch` images; raise OverloadedError at once if the queue is full."""
        assert 0 < len(images) <= self._policy.max_batch
        if self.waiting + len(images) > self._policy.max_queue:
            self.counts.refused += 1
            raise OverloadedError(f"{are(self.waiting, 'image')} waiting; try again later")
        waiting = _Waiting(images, asyncio.get_running_loop().time())
        self._queue.append(waiting)
        self.waiting += len(images)
        self._start_batches()
        try:
            return await waiting.scores
        finally:
            if waiting in self._queue:  # cancelled, because its client disconnected
                self._queue.remove(waiting)
                self.waiting -= len(images)
                self.counts.dropped += 1

    def close(self, *, wait: bool = True) -> None:
        """Let the threads end, after the batches that they compute."""
        if self._alarm:
            self._alarm.cancel()
        self._threads.shutdown(wait=wait)

    def _start_batches(self) -> None:
        """Start batches on idle lanes, or set an alarm for when the next one is due."""
        while self._idle and self._queue:
            batch = self._first_batch()
            full = len(batch) < len(self._queue) or _size(batch) == self._policy.max_batch
            due = batch[0].since + self._policy.max_delay
            if not full and asyncio.get_running_loop().time() < due:
                self._wake_at(due)
                return
            for _ in batch:
                self._queue.popleft()
            self.waiting -= _size(batch)
            self._execute(self._idle.pop(), batch)

    def _first_batch(self) -> list[_Waiting]:
        """The requests that have waited longest and fit together; a request is never split."""
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
        self._alarm = asyncio.get_running_loop().call_at(when, self._start_batches)

    def _execute(self, lane: Execute, batch: list[_Waiting]) -> None:
        self.counts.executions += 1
        portions = [waiting.images for waiting in batch]
        running = asyncio.get_running_loop().run_in_executor(self._threads, lane, portions)

        def answer(done: "asyncio.Future[list[Scores]]") -> None:
            self._idle.append(lane)
            error = done.exception()
            self.counts.failed_in_a_row = self.counts.failed_in_a_row + 1 if error else 0
            for number, waiting in enumerate(batch):
                if waiting.scores.done():  # its client disconnected meanwhile
                    self.counts.dropped += 1
                elif error is not None:
                    waiting.scores.set_exception(_failure(error))
                else:
                    self.counts.requests += 1
                    self.counts.images += len(waiting.images)
                    waiting.scores.set_result(done.result()[number])
            self._start_batches()

        running.add_done_callback(answer)


def _failure(error: BaseException) -> ComputingError:
    failure = ComputingError(f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    failure.__cause__ = error
    return failure


def _size(batch: Sequence[_Waiting]) -> int:
    return sum(len(waiting.images) for waiting in batch)
