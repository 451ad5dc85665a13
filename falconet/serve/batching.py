"""Dynamic batching: requests that arrive together are computed together, from a queue of limited length."""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from falconet.infer.predictor import Execute, Lanes, Pixels, Scores
from falconet.report.console import are
from falconet.serve.refusals import ComputingError, LateError, OverloadedError, RefusedError

Executed = Callable[[int, float], None]  # called for each batch, with its images and the seconds it took


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a batch is started, and how much may wait."""

    max_batch: int  # images
    max_delay: float  # seconds that a batch's first request waits for others when a lane is free
    max_queue: int  # images

    @property
    def share(self) -> int:
        """Images of one request that may wait at once: half of the queue, or a batch if that is more."""
        return max(self.max_queue // 2, self.max_batch)


@dataclass(kw_only=True)
class Counts:
    """What a batcher has done so far."""

    requests: int = 0  # answered
    images: int = 0
    executions: int = 0
    refused: int = 0
    dropped: int = 0  # left before they were answered: abandoned by their client, or late
    late: int = 0  # not computed before their deadline
    failed: int = 0  # requests in executions that failed
    failed_in_a_row: int = 0  # failed executions since the last success


@dataclass
class Batches:
    """The batches of one size."""

    count: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Spent:
    """The time spent, in seconds."""

    queued: float = 0.0  # by answered requests
    computed: float = 0.0  # by their batches; a batch counts once for each of its requests
    failed: float = 0.0  # by requests that were not answered, in total
    by_size: defaultdict[int, Batches] = field(default_factory=lambda: defaultdict(Batches))  # by number of images
    last: float = 0.0  # when the last request was answered, since 1970


class Computed(NamedTuple):
    """The scores of a request, and the time that it took."""

    scores: Scores
    queued: float  # seconds until its batch was started
    computed: float  # seconds that the batch took


Done = Callable[[Computed | RefusedError], None]  # called with a request's outcome, in the event loop


@dataclass(eq=False, slots=True)
class Waiting:
    """A request in the queue or in a batch."""

    images: Pixels
    since: float  # time of the event loop
    done: Done | None  # None: it has an outcome, or no longer needs one
    alarm: asyncio.TimerHandle | None = None  # at its deadline

    def settle(self) -> None:
        """Accept no further outcome."""
        self.done = None
        if self.alarm is not None:
            self.alarm.cancel()


class Batcher:
    """Gathers waiting requests into batches for the lanes; belongs to one event loop."""

    def __init__(self, lanes: Lanes, policy: Policy, executed: Executed = lambda *_: None) -> None:
        self._executed = executed
        self._lanes = lanes
        self.counts, self.spent = Counts(), Spent()
        self.policy = policy
        self._idle = list(lanes.each)
        self._has_all = False  # whether a batch is computed by all cores
        self._threads = ThreadPoolExecutor(len(lanes.each), thread_name_prefix="lane")
        self._queue: deque[Waiting] = deque()
        self._started: dict[int, float] = {}  # when each batch in progress was started
        self.waiting = 0  # images in the queue
        self._alarm: asyncio.TimerHandle | None = None

    async def submit(self, images: Pixels, *, deadline: float | None = None) -> Computed:
        """Enqueue a request and wait for its outcome; if the task is cancelled, the request is dropped."""
        answered: asyncio.Future[Computed] = asyncio.get_running_loop().create_future()

        def done(outcome: Computed | RefusedError) -> None:
            if answered.done():  # cancelled; the task has not seen it yet
                return
            if isinstance(outcome, RefusedError):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        waiting = self.enqueue(images, done, deadline=deadline)
        try:
            return await answered
        finally:
            self.drop(waiting)

    def enqueue(self, images: Pixels, done: Done, *, deadline: float | None = None) -> Waiting:
        """Compute the scores of 1 to `max_batch` images; raise OverloadedError at once if the queue is full.

        `deadline`: a time on the loop's clock, after which the request leaves the queue with LateError as its outcome.
        """
        assert 0 < len(images) <= self.policy.max_batch
        self.require_room(len(images))
        loop = asyncio.get_running_loop()
        waiting = Waiting(images, loop.time(), done)
        if deadline is not None:
            waiting.alarm = loop.call_at(deadline, self._late, waiting)
        self._queue.append(waiting)
        self.waiting += len(images)
        self._start_batches()
        return waiting

    def require_room(self, images: int, *, coming: int = 0) -> None:
        """Raise OverloadedError unless this many more images may wait; `coming`: images on their way to the queue."""
        waiting = self.waiting + coming
        if waiting + images > self.policy.max_queue:
            self.counts.refused += 1
            raise OverloadedError(f"{are(waiting, 'image')} waiting; try again later")

    def drop(self, waiting: Waiting) -> None:
        """Forget a request whose client has gone, unless it has an outcome."""
        if waiting.done is None:
            return
        waiting.settle()
        if waiting in self._queue:  # else it is counted when its batch ends
            self._queue.remove(waiting)
            self.waiting -= len(waiting.images)
            self.counts.dropped += 1

    def longest(self) -> float:
        """Seconds since the oldest batch in progress started; 0 if there is none."""
        return asyncio.get_running_loop().time() - min(self._started.values()) if self._started else 0.0

    def close(self, *, wait: bool = True) -> None:
        """Let the threads end after their current batches."""
        if self._alarm:
            self._alarm.cancel()
        self._threads.shutdown(wait=wait)

    def _late(self, waiting: Waiting) -> None:
        done, waited = waiting.done, asyncio.get_running_loop().time() - waiting.since
        assert done is not None
        self.drop(waiting)
        self.counts.late += 1
        self.spent.failed += waited
        done(LateError(f"not computed within {waited:.3g} s, the time limit of the request"))

    def _start_batches(self) -> None:
        """Start batches on idle lanes, or set an alarm for when the next one is due."""
        while self._queue and (free := self._free()) is not None:
            together = self._first(self.policy.max_batch)
            full = len(together) < len(self._queue) or _size(together) == self.policy.max_batch
            due = together[0].since + self.policy.max_delay
            if not full and asyncio.get_running_loop().time() < due:
                self._wake_at(due)
                return
            lane, most = free
            batch = self._first(most)
            for _ in batch:
                self._queue.popleft()
            self.waiting -= _size(batch)
            self._execute(lane, batch)

    def _free(self) -> tuple[Execute, int] | None:
        """The lane that may compute the head of the queue now, and how many images it should take."""
        lanes, number = self._lanes, len(self._lanes.each)
        if self._has_all:
            return None
        is_alone = len(self._idle) == number and len(self._queue) <= max(1, number // 2)
        if lanes.whole is not None and is_alone and self.waiting >= lanes.least_whole:
            return lanes.whole, self.policy.max_batch
        if not self._idle or (len(self._idle) < number and self.waiting < lanes.least_more):
            return None
        most = max(-(-self.waiting // len(self._idle)), lanes.least_more) if lanes.share else self.policy.max_batch
        return self._idle[-1], min(most, self.policy.max_batch)

    def _first(self, most: int) -> list[Waiting]:
        """Take the requests that have waited longest, up to this many images in total; no request is split."""
        batch: list[Waiting] = []
        size = 0
        for waiting in self._queue:
            size += len(waiting.images)
            if size > most and batch:
                break
            batch.append(waiting)
        return batch

    def _wake_at(self, when: float) -> None:
        if self._alarm:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, self._start_batches)

    def _execute(self, lane: Execute, batch: list[Waiting]) -> None:
        self.counts.executions += 1
        if lane is self._lanes.whole:
            self._has_all = True
        else:
            self._idle.remove(lane)
        loop = asyncio.get_running_loop()
        started = self._started[id(batch)] = loop.time()

        def computed(done: "Future[_Timed]") -> None:  # in the lane's thread, so that the loop is woken once per batch
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._ended, lane, batch, started, done)

        self._threads.submit(_timed, lane, batch).add_done_callback(computed)

    def _ended(self, lane: Execute, batch: Sequence[Waiting], started: float, done: "Future[_Timed]") -> None:
        """Let the lane continue first, then answer."""
        error = done.exception()
        del self._started[id(batch)]
        self.counts.failed_in_a_row = self.counts.failed_in_a_row + 1 if error else 0
        if lane is self._lanes.whole:
            self._has_all = False
        else:
            self._idle.append(lane)
        self._start_batches()
        if error is None:
            self._answer(batch, started, *done.result())
        else:
            self._fail(batch, error)

    def _answer(self, batch: Sequence[Waiting], started: float, scores: Sequence[Scores], seconds: float) -> None:
        size = _size(batch)
        self._executed(size, seconds)
        same = self.spent.by_size[size]
        same.count, same.seconds = same.count + 1, same.seconds + seconds
        self.spent.last = time.time()
        for waiting, found in zip(batch, scores, strict=True):
            if (answer := waiting.done) is None:  # late, or the client has disconnected
                self.counts.dropped += 1
                continue
            waiting.settle()
            queued = started - waiting.since
            self.counts.requests += 1
            self.counts.images += len(waiting.images)
            self.spent.queued += queued
            self.spent.computed += seconds
            answer(Computed(found, queued, seconds))

    def _fail(self, batch: Sequence[Waiting], error: BaseException) -> None:
        for waiting in batch:
            if (answer := waiting.done) is None:
                self.counts.dropped += 1
                continue
            waiting.settle()
            self.counts.failed += 1
            self.spent.failed += asyncio.get_running_loop().time() - waiting.since
            answer(_failure(error))


_Timed = tuple[list[Scores], float]


def _timed(lane: Execute, batch: Sequence[Waiting]) -> _Timed:
    """Compute the scores of each request, and measure the seconds that they took."""
    started = time.perf_counter()
    scores = lane([waiting.images for waiting in batch])
    return scores, time.perf_counter() - started


def _failure(error: BaseException) -> ComputingError:
    failure = ComputingError(f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    failure.__cause__ = error
    return failure


def _size(batch: Sequence[Waiting]) -> int:
    return sum(len(waiting.images) for waiting in batch)
