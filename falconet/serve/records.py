"""What is known about a request: a record, filled in by all that take part in answering it."""

import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 200  # characters of what a client sent, in a log


class Stage(NamedTuple):
    """A part of a request's time."""

    begun: float  # of time.perf_counter
    seconds: float


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """What is known about a request so far."""

    id: str
    client: str  # its address; that of the proxy, if there is one
    method: str  # GET, POST, or gRPC
    route: str  # the pattern of its address; empty: there is none
    path: str = ""  # only if there is no route, without the query, which may be private
    sent: Mapping[str, str] = field(default_factory=dict, repr=False)  # headers, in which a trace may be continued
    at: float = field(default_factory=time.time)  # since 1970
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    status: str = "500"  # of HTTP, or the name of gRPC's
    bytes_in: int = 0
    bytes_out: int = 0
    model: str = ""
    version: str = ""
    photos: int = 0
    unreadable: int = 0  # of the photos
    images: int = 0  # computed
    stages: dict[str, Stage] = field(default_factory=dict)  # decode, queue and compute; the longest of several
    reason: str = ""  # of a refusal, in a word
    error: str = ""  # the line that the client got
    trace: str = ""  # the id of its trace

    def add_stage(self, name: str, begun: float, seconds: float) -> None:
        if name not in self.stages or self.stages[name].seconds < seconds:
            self.stages[name] = Stage(begun, seconds)


Observer = Callable[[Record], None]  # is called when a request has been answered, or has failed; must not raise

# Known to the whole of a request's task and to the tasks that it starts: the models, which fill it in, serve HTTP and
# gRPC alike.
CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


def note_model(name: str, version: str) -> None:
    """The request in progress is for this model."""
    if (record := CURRENT.get()) is not None:
        record.model, record.version = name, version


def note_received(size: int) -> None:
    """A message of the request in progress, of so many bytes, has arrived."""
    if (record := CURRENT.get()) is not None:
        record.bytes_in += size


def note_sent(size: int) -> None:
    """A message of so many bytes has been sent to the client of the request in progress."""
    if (record := CURRENT.get()) is not None:
        record.bytes_out += size


def note_photos(photos: int, unreadable: int, *, begun: float, seconds: float) -> None:
    """Photos of the request in progress were decoded."""
    if (record := CURRENT.get()) is not None:
        record.photos += photos
        record.unreadable += unreadable
        record.add_stage("decode", begun, seconds)


def note_computed(images: int, *, queued: float, computed: float) -> None:
    """Images of the request in progress have just been computed; in seconds, how long they waited and took."""
    if (record := CURRENT.get()) is not None:
        began = time.perf_counter() - computed
        record.images += images
        record.add_stage("queue", began - queued, queued)
        record.add_stage("compute", began, computed)


def note_refusal(error: Exception) -> None:
    """The request in progress is refused."""
    if (record := CURRENT.get()) is not None:
        record.reason, record.error = reason_of(type(error).__name__), str(error)


def reason_of(name: str) -> str:
    """The class of an error in words: TooLargeError is too_large; as few as there are classes."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()
