"""Records of requests, filled in by everything that takes part in answering them."""

import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 200  # characters of a client's text in a log


class Stage(NamedTuple):
    """A part of a request's time."""

    begun: float  # by time.perf_counter
    seconds: float


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """What is known about a request so far."""

    id: str
    client: str  # its address, or the proxy's
    method: str  # GET, POST, or gRPC
    route: str  # the pattern of the request's address; empty: unknown
    path: str = ""  # only without a route; without the query, which may be private
    sent: Mapping[str, str] = field(default_factory=dict, repr=False)  # headers, which may continue a trace
    at: float = field(default_factory=time.time)  # since 1970
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    status: str = "500"  # HTTP's number, or gRPC's name
    bytes_in: int = 0
    bytes_out: int = 0
    model: str = ""
    version: str = ""
    photos: int = 0
    unreadable: int = 0  # photos
    images: int = 0  # computed
    stages: dict[str, Stage] = field(default_factory=dict)  # decode, queue and compute; the longest of each
    reason: str = ""  # why it was refused, in a word
    error: str = ""  # the line that the client got
    trace: str = ""  # the id of its trace

    def add_stage(self, name: str, begun: float, seconds: float) -> None:
        if name not in self.stages or self.stages[name].seconds < seconds:
            self.stages[name] = Stage(begun, seconds)


Observer = Callable[[Record], None]  # called when a request has been answered or has failed; must not raise

# Visible in a request's task and in the tasks that it starts: models, which serve both HTTP and gRPC, fill it in.
CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


def note_model(name: str, version: str) -> None:
    """Note the model of the request in progress."""
    if (record := CURRENT.get()) is not None:
        record.model, record.version = name, version


def note_received(size: int) -> None:
    """Note the size in bytes of a message that arrived for the request in progress."""
    if (record := CURRENT.get()) is not None:
        record.bytes_in += size


def note_sent(size: int) -> None:
    """Note the size in bytes of a message sent to the client of the request in progress."""
    if (record := CURRENT.get()) is not None:
        record.bytes_out += size


def note_photos(photos: int, unreadable: int, *, begun: float, seconds: float) -> None:
    """Note that photos of the request in progress were decoded."""
    if (record := CURRENT.get()) is not None:
        record.photos += photos
        record.unreadable += unreadable
        record.add_stage("decode", begun, seconds)


def note_computed(images: int, *, queued: float, computed: float) -> None:
    """Note that images of the request in progress were just computed, and the seconds they waited and took."""
    if (record := CURRENT.get()) is not None:
        began = time.perf_counter() - computed
        record.images += images
        record.add_stage("queue", began - queued, queued)
        record.add_stage("compute", began, computed)


def note_refusal(error: Exception) -> None:
    """Note that the request in progress is refused."""
    if (record := CURRENT.get()) is not None:
        record.reason, record.error = reason_of(type(error).__name__), str(error)


def reason_of(name: str) -> str:
    """The class of an error in words, too_large for TooLargeError: only as many words as classes."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()
