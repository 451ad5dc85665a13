"""Images per second, the share of time spent waiting for data, and the time left."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

# Updates that the host may be ahead of the device. Each keeps its images on the device. Capturing saves the host
# time, and the host's waits for the loader matter only if the device has nothing left to do.
AHEAD = 4


@dataclass
class Rate:
    """The images and seconds of a part of training."""

    images: int
    seconds: float
    waiting: float  # seconds of it spent waiting for data

    def __add__(self, other: "Rate") -> "Rate":
        """The rate of both parts together."""
        return Rate(self.images + other.images, self.seconds + other.seconds, self.waiting + other.waiting)

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def waiting_percent(self) -> float:
        return 100.0 * self.waiting / max(self.seconds, 1e-9)


class Reading(NamedTuple):
    """A stopwatch's state at one moment."""

    seconds: float  # of training
    waiting: float  # seconds of it spent waiting for data
    moment: float  # by the host's clock


class Moments(Protocol):
    """A clock that marks the ends of updates; the time between marks may be known only later, as with CUDA events."""

    def mark(self) -> Any: ...
    def reach(self, mark: Any) -> None: ...  # wait until it is there
    def between(self, first: Any, second: Any) -> float: ...  # seconds


@dataclass(frozen=True)
class HostMoments:
    """Marks from the host's clock, for training on a CPU."""

    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> float:
        return self.clock()

    def reach(self, mark: float) -> None: ...

    def between(self, first: float, second: float) -> float:
        return second - first


@dataclass
class Stopwatch:
    """Measures training time; paused while the run validates or saves."""

    clock: Callable[[], float] = time.perf_counter
    moments: Moments | None = None  # None for `clock`
    seconds: float = 0.0  # of training, those of earlier starts of the run included
    preparation: float = 0.0  # seconds of training in which kernels were compiled and updates captured
    _waiting: float = 0.0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._moments: Moments = self.moments or HostMoments(self.clock)
        self._started = self._moments.mark()
        self._anchor = self._since, self._started  # one moment by the host's clock and by the device's
        self._updates: list[tuple[Any, Any]] = []  # marks at the start and the end of each
        self._waits: list[tuple[float, Any, Any]] = []  # the host's seconds, marks at the start and the end of each

    def updated(self) -> None:
        """Mark the end of an update, which the device may not have reached yet; wait if it is far behind."""
        now = self._moments.mark()
        self._updates.append((self._started, now))
        self._started = now
        if len(self._updates) > AHEAD:
            self._moments.reach(self._updates[-1 - AHEAD][1])

    def update_seconds(self) -> list[float]:
        """Seconds of each update since the last call, with waits for data; the device must have finished them."""
        seconds = [self._moments.between(*marks) for marks in self._updates]
        self._updates.clear()
        return seconds

    def waits(self, updates: Iterable[T]) -> Iterator[T]:
        """Pass the updates through; the time until each arrives counts as waiting, unless the device was busy."""
        iterator = iter(updates)
        while True:
            start = self.clock()
            try:
                update = next(iterator)
            except StopIteration:
                return
            self._waits.append((self.clock() - start, self._started, self._moments.mark()))
            yield update

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Pause: time in this context is not training time, except for work that the device still had to finish."""
        self._moments.reach(self._moments.mark())
        self.seconds += self.clock() - self._since
        try:
            yield
        finally:
            self._since = self.clock()
            self._started = self._moments.mark()
            self._anchor = self._since, self._started

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count time in this context as training time and, separately, as preparation."""
        begun = self.clock()
        try:
            yield
        finally:
            self.preparation += self.clock() - begun

    def lap(self) -> Reading:
        self._add_waiting(self._waits)
        now = self.clock()
        self.seconds, self._since = self.seconds + now - self._since, now
        return Reading(self.seconds, self._waiting, now)

    def split(self) -> Callable[[], Reading]:
        """End a lap that the device may not have finished yet; call the result to wait for it and get its reading.

        Call it before the next lap ends.
        """
        now, (host, device) = self._moments.mark(), self._anchor
        waits, self._waits = self._waits, []
        before = self.seconds + host - self._since

        def read() -> Reading:
            self._moments.reach(now)
            self._add_waiting(waits)
            passed = self._moments.between(device, now)
            return Reading(before + passed, self._waiting, host + passed)

        return read

    def _add_waiting(self, waits: list[tuple[float, Any, Any]]) -> None:
        for host, begun, ended in waits:
            self._moments.reach(ended)
            self._waiting += min(host, self._moments.between(begun, ended))
        waits.clear()


class Laps:
    """The rates of successive laps."""

    def __init__(self, watch: Stopwatch, *, already: int = 0) -> None:
        """`already`: images of the first lap that were trained on before the restore."""
        self._watch = watch
        self._last, self._already = watch.lap(), already

    def end(self, images: int, *, at: Reading | None = None) -> Rate:
        """The rate since the last call, in which `images` images were trained on.

        `at`: the watch's reading at the end of the lap, if that is not now.
        """
        before, self._last = self._last, at or self._watch.lap()
        own, self._already = images - self._already, 0
        return Rate(own, self._last.seconds - before.seconds, self._last.waiting - before.waiting)


MARKS = 32  # over which the present speed is measured
KEPT = 0.9  # of the shown loss, when the next one is added


class Pace:
    """Current progress, loss, speed and time left, as the host sees them."""

    def __init__(self, *, total: int, done: int, images: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: updates of the run, each with `images` images; `done`: updates made before."""
        self._clock, self._total, self._images = clock, total, images
        self._done = self._first = done
        self._begun = clock()
        self.epoch_total, self.epoch_done = 0, 0  # updates of the epoch
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)  # seconds, updates done
        self.loss: float | None = None

    def begin_epoch(self, *, total: int, done: int) -> None:
        self.epoch_total, self.epoch_done = total, done
        self._marks.clear()  # what lies between two epochs is not training
        self.mark()

    def add(self) -> None:
        """Count an update."""
        self._done += 1
        self.epoch_done += 1

    def mark(self) -> None:
        self._marks.append((self._clock(), self._done))

    def show(self, loss: float) -> None:
        """Move the shown loss towards that of an update."""
        before = self.loss
        self.loss = loss if before is None or not math.isfinite(before) else KEPT * before + (1 - KEPT) * loss

    @property
    def percent(self) -> float:
        """The progress within the epoch."""
        return 100.0 * self.epoch_done / max(self.epoch_total, 1)

    @property
    def images_per_second(self) -> float | None:
        speed = self._speed()
        return None if speed is None else self._images * speed

    @property
    def epoch_seconds_left(self) -> float | None:
        speed = self._speed()
        return (self.epoch_total - self.epoch_done) / speed if speed else None

    @property
    def run_seconds_left(self) -> float | None:
        """The seconds left for the run, if validations and saves stay as frequent as so far; not less than the epoch's.

        The latter is at the present speed, which may be lower than that of the run so far.
        """
        made = self._done - self._first
        if not made:
            return None
        by_all = (self._clock() - self._begun) / made * (self._total - self._done)
        return max(by_all, self.epoch_seconds_left or 0.0)

    def _speed(self) -> float | None:
        """Updates per second."""
        if len(self._marks) < 2:
            return None
        (begun, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(now - begun, 1e-9) or None
