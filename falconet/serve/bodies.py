"""Request bodies: received in place, within limits on time and on the memory of all of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import numpy.typing as npt
from aiohttp import web

from falconet.serve.refusals import OverloadedError, RequestError, SlowError, TooLargeError

SECONDS = 60.0  # to receive a whole body
STEP = 64 << 10  # bytes; a body that is not this much further after STEP_SECONDS is slow
STEP_SECONDS = 2.0
PAGE = 2 << 20  # bytes that the system may allocate on the first write: a huge page
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
IS_EXPECTED = web.RequestKey("is_expected", bool)  # whether the client waits for CONTINUE before it sends the body
Bytes = npt.NDArray[np.uint8]  # one dimension


class Memory:
    """A limit on the memory of all request bodies, so that no number of clients can exhaust the machine.

    If it is reached, the slowest of the bodies that are still received give way: clients that send little and hold on
    do not keep out others.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most  # bytes
        self._arriving: set[Body] = set()

    def require(self, most: int) -> None:
        """Raise the limit to this many bytes, for a model with larger requests."""
        self._free += max(most - self._most, 0)
        self._most = max(most, self._most)

    @contextlib.contextmanager
    def reserved(self, length: int) -> Iterator["Body"]:
        """A buffer of this many bytes; only what has been received counts against the limit."""
        body = Body(length, self)
        try:
            yield body
        finally:
            self._free += body.counted

    @contextlib.contextmanager
    def held(self, length: int) -> Iterator[None]:
        """Count what was received elsewhere."""
        self.take(length)
        try:
            yield
        finally:
            self._free += length

    def take(self, length: int, by: "Body | None" = None) -> None:
        """Count so many bytes, `by` a body that grows; OverloadedError if there are not as many."""
        while length > self._free:
            slow = [body for body in self._arriving if body is not by and body.stuck > STEP_SECONDS]
            if not slow:
                raise OverloadedError("out of memory for request bodies; try again later")
            slowest = max(slow, key=lambda body: body.stuck)
            self._arriving.discard(slowest)
            self._free += slowest.give_way()
        self._free -= length

    @contextlib.contextmanager
    def may_reclaim(self, body: "Body") -> Iterator[None]:
        """Inside the context, a body is received, and may have to give way."""
        self._arriving.add(body)
        try:
            yield
        finally:
            self._arriving.discard(body)


class Body:
    """A request body as it arrives.

    Memory is allocated when it is first written: a client that announces much and sends little takes little.
    """

    def __init__(self, length: int, memory: Memory) -> None:
        self.length = length
        self.bytes: Bytes = np.empty(min(length, STEP), dtype=np.uint8)  # all of it only for those that send more
        self.received = self.counted = 0
        self._limit: asyncio.Timeout | None = None  # on the time to receive it
        self.has_given_way = False
        self._memory = memory
        self._moved, self._next = time.monotonic(), STEP  # when it was last not slow; bytes at which it is again
        self._count(len(self.bytes))

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        at, self.received = self.received, self.received + len(chunk)
        if self.received > len(self.bytes):
            self._count(min(self.length, (self.received // PAGE + 1) * PAGE))
            first, self.bytes = self.bytes[:at], np.empty(self.length, dtype=np.uint8)  # unlike a bytearray, not zeros
            self.bytes[:at] = first
        elif self.received > self.counted:
            self._count(min(self.length, (self.received // PAGE + 1) * PAGE))
        self.bytes[at : self.received] = np.frombuffer(chunk, dtype=np.uint8)  # releases the GIL
        if self.received >= self._next:
            self._moved, self._next = time.monotonic(), self.received + STEP

    def _count(self, reached: int) -> None:
        self._memory.take(reached - self.counted, by=self)
        self.counted = reached

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Inside the context, it is received; TimeoutError if that takes long, or if it has to give way to others."""
        async with asyncio.timeout(SECONDS) as self._limit:
            with self._memory.may_reclaim(self):
                yield
            if self.has_given_way:  # as its last bytes arrived
                raise TimeoutError

    @property
    def stuck(self) -> float:
        """Seconds in which it got no further by STEP."""
        return time.monotonic() - self._moved

    def give_way(self) -> int:
        """Be received no longer; returns the bytes that are free again."""
        self.has_given_way = True
        freed, self.counted = self.counted, 0
        if self._limit is not None:
            self._limit.reschedule(0)
        return freed


def announced(request: web.Request, *, most: int, kind: str) -> int:
    """The length of a body that may be received; `kind` is what is limited to `most` bytes, in words."""
    length = request.content_length
    if length is None:
        raise LengthRequiredError("Content-Length: required")
    if length > most:
        raise TooLargeError(f"Content-Length: got {length:,}, expected at most {most:,} for {kind}")
    if "Content-Encoding" in request.headers:
        raise RequestError("Content-Encoding: not supported; send the body uncompressed")
    return length


class LengthRequiredError(RequestError):
    """How long the body is was not announced."""

    status = 411


async def receive(body: Body, request: web.Request) -> None:
    """Receive the whole body in place; `request.read()` would copy it twice more."""
    begun = time.monotonic()
    try:
        async with body.arriving():
            if request.get(IS_EXPECTED):  # not before now: the request might have been refused
                await request.writer.write(CONTINUE)
                request.writer.output_size = 0  # of the answer
            async for chunk in request.content.iter_any():
                body.add(chunk)
    except TimeoutError:
        so_far = f"received only {body.received:,} of {body.length:,} bytes in {time.monotonic() - begun:.3g} s"
        why = ", and their memory is needed for other requests" if body.has_given_way else ""
        raise SlowError(f"{so_far}{why}; send faster, or less") from None
    if body.received < body.length:
        raise RequestError(f"the body ends after {body.received:,} of {body.length:,} bytes")
