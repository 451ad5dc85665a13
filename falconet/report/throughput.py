"""Images per second, and how much of the time went to waiting for them."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


@dataclass
class Rate:
    """Images and seconds of a stretch of training."""

    images: int
    seconds: float
    waiting: float  # seconds of it in which the loop waited for data

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def waiting_percent(self) -> float:
        return 100.0 * self.waiting / max(self.seconds, 1e-9)


class Moments(Protocol):
    """How the ends of updates are marked; the time between two marks may be asked for later, when it is known."""

    def mark(self) -> Any: ...
    def between(self, first: Any, second: Any) -> float: ...  # seconds


@dataclass(frozen=True)
class HostMoments:
    """By the host's clock, for a device that is the host."""

    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> float:
        return self.clock()

    def between(self, first: float, second: float) -> float:
        return second - first


@dataclass
class Stopwatch:
    """Training time: runs while updates are made, stands while the run validates or saves."""

    clock: Callable[[], float] = time.perf_counter
    moments: Moments | None = None  # None: by the clock
    _seconds: float = 0.0
    _waiting: float = 0.0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._moments: Moments = self.moments or HostMoments(self.clock)
        self._begun = self._moments.mark()
        self._updates: list[tuple[Any, Any]] = []  # marks of the beginning and the end of each

    def updated(self) -> None:
        """An update is made, or will have been when the device comes to it."""
        now = self._moments.mark()
        self._updates.append((self._begun, now))
        self._begun = now

    def update_seconds(self) -> list[float]:
        """Of each update since the last call, the waiting for its images included; the device has made them."""
        seconds = [self._moments.between(*marks) for marks in self._updates]
        self._updates.clear()
        return seconds

    def waits(self, updates: Iterable[T]) -> Iterator[T]:
        """The same updates; the time until each is there counts as waiting."""
        iterator = iter(updates)
        while True:
            asked = self.clock()
            try:
                update = next(iterator)
            except StopIteration:
                return
            self._waiting += self.clock() - asked
            yield update

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Time in here is not training time."""
        self._seconds += self.clock() - self._since
        try:
            yield
        finally:
            self._since = self.clock()
            self._begun = self._moments.mark()

    def lap(self) -> tuple[float, float]:
        """Seconds of training and of waiting so far."""
        now = self.clock()
        self._seconds, self._since = self._seconds + now - self._since, now
        return self._seconds, self._waiting


class Laps:
    """Rates of the stretches between calls."""

    def __init__(self, watch: Stopwatch, *, already: int = 0) -> None:
        """`already`: images in the first stretch that somebody else trained on, before this run was restored."""
        self._watch = watch
        self._last, self._already = watch.lap(), already

    def end(self, images: int) -> Rate:
        """The rate since the last call, in which `images` were trained on."""
        seconds, waiting = self._watch.lap()
        before, self._last = self._last, (seconds, waiting)
        own, self._already = images - self._already, 0
        return Rate(own, seconds - before[0], waiting - before[1])
