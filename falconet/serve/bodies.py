"""Request bodies: received in place, within limits on time and on the memory of all bodies together."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
from aiohttp import web

from falconet.serve.refusals import OverloadedError, RefusedError, RequestError, SlowError, TooLargeError

SECONDS = 60.0  # for receiving a whole body
STEP = 64 << 10  # bytes; a body that is not this much further after STEP_SECONDS is slow
STEP_SECONDS = 2.0
LONG = 256 << 10  # bytes; the system writes bodies from this length on to their place
PAGE = 2 << 20  # bytes that the system may allocate at the first write: a huge page
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
IS_EXPECTED = web.RequestKey("is_expected", bool)  # whether the client waits for CONTINUE before sending the body
Bytes = npt.NDArray[np.uint8]  # one dimension


class Memory:
    """A limit on the memory of all request bodies, so that no number of clients can exhaust the machine.

    When it is reached, the slowest bodies still being received give way: clients that send little and hold on do not
    keep others out.
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
        """Provide a buffer of this many bytes; only what has been received counts against the limit."""
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
        """Count this many bytes, taken `by` a growing body; OverloadedError if there are not enough."""
        while length > self._free:
            slow = [body for body in self._arriving if body is not by and body.stuck > STEP_SECONDS]
            if not slow:
                raise OverloadedError("out of memory for request bodies; try again later")
            self.reclaim(max(slow, key=lambda body: body.stuck))
        self._free -= length

    def reclaim(self, body: "Body") -> None:
        """Make a body that is being received give way."""
        self._arriving.discard(body)
        self._free += body.give_way()

    @contextlib.contextmanager
    def may_reclaim(self, body: "Body") -> Iterator[None]:
        """Treat a body as being received within the context, where it may have to give way."""
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
        self.bytes: Bytes = np.empty(min(length, STEP), dtype=np.uint8)  # the rest only for clients that send more
        self.received = self.counted = 0
        self._limit: asyncio.Timeout | None = None  # limits the time to receive the body
        self.has_given_way = False
        self._memory = memory
        self._moved, self._next = time.monotonic(), STEP  # when it last grew by STEP; bytes at which it has again
        self._count(len(self.bytes))

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        at, end = self.received, self.received + len(chunk)
        self._make_room(end)
        self.bytes[at:end] = np.frombuffer(chunk, dtype=np.uint8)  # releases the GIL
        self.grow(len(chunk))

    def room(self) -> memoryview:
        """The memory for the next bytes, if there are any: as many as have been counted."""
        self._make_room(min(self.received + 1, self.length))
        return self.bytes.data[self.received : self.counted]

    def grow(self, size: int) -> None:
        """Note that this many bytes have been written to their place."""
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
        """Let the body arrive within the context; TimeoutError if that takes long, or if it has to give way."""
        async with asyncio.timeout(SECONDS) as self._limit:
            with self._memory.may_reclaim(self):
                yield
            if self.has_given_way:  # just as its last bytes arrived
                raise TimeoutError

    @property
    def stuck(self) -> float:
        """Seconds since the body last grew by STEP."""
        return time.monotonic() - self._moved

    def give_way(self) -> int:
        """Stop receiving the body; return the number of bytes set free."""
        self.has_given_way = True
        freed, self.counted = self.counted, 0
        if self._limit is not None and not self._limit.expired():  # in this same turn of the loop
            self._limit.reschedule(0)
        return freed


def announced(request: web.Request, *, most: int, kind: str) -> int:
    """The length of a body that may be received; `kind` says in words what is limited to `most` bytes."""
    length = request.content_length
    if length is None:
        raise LengthRequiredError("Content-Length: required")
    if length > most:
        raise TooLargeError(f"Content-Length: got {length:,}, expected at most {most:,} for {kind}")
    if "Content-Encoding" in request.headers:
        raise RequestError("Content-Encoding: not supported; send the body uncompressed")
    return length


class LengthRequiredError(RequestError):
    """The request does not announce the length of its body."""

    status = 411


class Wire(Protocol):
    """An unencrypted connection of a request."""

    transport: asyncio.Transport | None

    def step_aside(self) -> None:
        """Let another protocol receive the rest of a request's body; until it has all, what follows is unknown."""

    def step_back(self) -> None:
        """Expect a new request: the rest has been received."""

    def connection_lost(self, exc: BaseException | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


WIRE = web.RequestKey("wire", Wire)  # for a request whose body may be received in place


class InPlace(asyncio.BufferedProtocol):
    """Stands in for a connection, so that the system writes the rest of a body to its final place.

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
            del self._done  # its error has a frame with this object, and such a cycle would keep the body's memory

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._body.grow(nbytes)
        if self._body.has_given_way or self._done.done():  # the request is told in a later turn of the loop
            self._leave()
            return
        try:
            self._room = self._body.room()
        except (RefusedError, MemoryError) as error:  # asyncio would end the connection without telling the client why
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
    """Receive everything that the client sends of a body."""
    content, wire = request.content, request.get(WIRE)
    if wire is None or body.length < LONG:
        async for chunk in content.iter_any():
            body.add(chunk)
        return
    while chunk := content.read_nowait():  # lets a paused parser go on: afterwards it holds nothing back
        body.add(chunk)
    if body.received < body.length and wire.transport is not None:
        try:
            await InPlace(body, wire, wire.transport).receive()
        finally:
            content.total_bytes = body.received  # for the request's record
        content.feed_eof()


async def receive(body: Body, request: web.Request) -> None:
    """Receive the whole body in place; `request.read()` would copy it twice more."""
    begun = time.monotonic()
    try:
        async with body.arriving():
            if request.get(IS_EXPECTED):  # not earlier: the request might have been refused
                await request.writer.write(CONTINUE)
                request.writer.output_size = 0  # counts the answer
            await _received(body, request)
    except TimeoutError:
        so_far = f"received only {body.received:,} of {body.length:,} bytes in {time.monotonic() - begun:.3g} s"
        why = ", and their memory is needed for other requests" if body.has_given_way else ""
        raise SlowError(f"{so_far}{why}; send faster, or less") from None
    if body.received < body.length:
        raise RequestError(f"the body ends after {body.received:,} of {body.length:,} bytes")
