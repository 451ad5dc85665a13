"""Request bodies: received in place, within limits on time and on the memory of all of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
from aiohttp import web

from falconet.serve.refusals import OverloadedError, RefusedError, RequestError, SlowError, TooLargeError

SECONDS = 60.0  # to receive a whole body
STEP = 64 << 10  # bytes; a body that is not this much further after STEP_SECONDS is slow
STEP_SECONDS = 2.0
LONG = 256 << 10  # bytes of a body that the system writes to its place
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
            self.reclaim(max(slow, key=lambda body: body.stuck))
        self._free -= length

    def reclaim(self, body: "Body") -> None:
        """Let a body that is received give way."""
        self._arriving.discard(body)
        self._free += body.give_way()

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
        at, end = self.received, self.received + len(chunk)
        self._make_room(end)
        self.bytes[at:end] = np.frombuffer(chunk, dtype=np.uint8)  # releases the GIL
        self.grow(len(chunk))

    def room(self) -> memoryview:
        """Where the next bytes belong, if there are any: as many as have memory."""
        self._make_room(min(self.received + 1, self.length))
        return self.bytes.data[self.received : self.counted]

    def grow(self, size: int) -> None:
        """So many bytes have been written to their place."""
        self.received += size
        if self.received >= self._next:
            self._moved, self._next = time.monotonic(), self.received + STEP

    def _make_room(self, end: int) -> None:
        if end > self.counted:
            self._count(min(self.length, (end // PAGE + 1) * PAGE))
        if end > len(self.bytes):
            first, self.bytes = self.bytes, np.empty(self.length, dtype=np.uint8)  # unlike a bytearray, not zeros
            self.bytes[: self.received] = first[: self.received]

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
        if self._limit is not None and not self._limit.expired():  # in this turn of the loop
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


class Wire(Protocol):
    """The connection of a request, without encryption."""

    transport: asyncio.Transport | None

    def step_aside(self) -> None:
        """Let another protocol receive the rest of a request's body; until it has all, what follows is unknown."""

    def step_back(self) -> None:
        """Expect a new request: the rest has been received."""

    def connection_lost(self, exc: BaseException | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


WIRE = web.RequestKey("wire", Wire)  # of a request whose body may be received in place


class InPlace(asyncio.BufferedProtocol):
    """In the place of a connection, lets the system write the rest of a body to where it stays.

    Aiohttp would copy it twice more, in small pieces.
    """

    def __init__(self, body: Body, wire: Wire, transport: asyncio.Transport) -> None:
        self._body, self._wire, self._transport = body, wire, transport
        self._room = body.room()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def receive(self) -> None:
        self._wire.step_aside()
        self._transport.set_protocol(self)
        try:
            await self._done
        finally:
            self._leave()
            del self._done  # its error has a frame with this object: as a cycle, they would keep the body's memory

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._body.grow(nbytes)
        if self._body.has_given_way or self._done.done():  # the request will hear of it in a later turn of the loop
            self._leave()
            return
        try:
            self._room = self._body.room()
        except (RefusedError, MemoryError) as error:  # asyncio would end the connection, and its client not know why
            self._leave()
            self._done.set_exception(error)
            return
        if not self._room:
            self._leave()
            self._wire.step_back()
            self._done.set_result(None)

    def _leave(self) -> None:
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(cast(asyncio.Protocol, self._wire))

    def connection_lost(self, exc: Exception | None) -> None:
        self._done.cancel()
        self._wire.connection_lost(exc)

    def pause_writing(self) -> None:
        self._wire.pause_writing()

    def resume_writing(self) -> None:
        self._wire.resume_writing()


async def _received(body: Body, request: web.Request) -> None:
    """Everything that the client sends of it."""
    content, wire = request.content, request.get(WIRE)
    if wire is None or body.length < LONG:
        async for chunk in content.iter_any():
            body.add(chunk)
        return
    while chunk := content.read_nowait():  # lets the parser go on that had paused: afterwards it holds nothing back
        body.add(chunk)
    if body.received < body.length and wire.transport is not None:
        try:
            await InPlace(body, wire, wire.transport).receive()
        finally:
            content.total_bytes = body.received  # for the record of the request
        content.feed_eof()


async def receive(body: Body, request: web.Request) -> None:
    """Receive the whole body in place; `request.read()` would copy it twice more."""
    begun = time.monotonic()
    try:
        async with body.arriving():
            if request.get(IS_EXPECTED):  # not before now: the request might have been refused
                await request.writer.write(CONTINUE)
                request.writer.output_size = 0  # of the answer
            await _received(body, request)
    except TimeoutError:
        so_far = f"received only {body.received:,} of {body.length:,} bytes in {time.monotonic() - begun:.3g} s"
        why = ", and their memory is needed for other requests" if body.has_given_way else ""
        raise SlowError(f"{so_far}{why}; send faster, or less") from None
    if body.received < body.length:
        raise RequestError(f"the body ends after {body.received:,} of {body.length:,} bytes")
