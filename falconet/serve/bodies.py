"""Request bodies: received in place, within limits on time and on the memory of all of them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from aiohttp import web

from falconet.serve.refusals import OverloadedError, RequestError, TooLargeError

SECONDS = 60.0  # to receive a whole body
PAGE = 2 << 20  # bytes that the system may allocate on the first write: a huge page
Bytes = npt.NDArray[np.uint8]  # one dimension


class Memory:
    """A limit on the memory of all request bodies, so that no number of clients can exhaust the machine."""

    def __init__(self, most: int) -> None:
        self._most = self._free = most  # bytes

    def require(self, most: int) -> None:
        """Raise the limit to this many bytes, for a model with larger requests."""
        self._free += max(most - self._most, 0)
        self._most = max(most, self._most)

    @contextlib.contextmanager
    def reserved(self, length: int) -> Iterator["Body"]:
        """A buffer of this many bytes; only what has been received counts against the limit."""
        body = Body(length, self._take)
        try:
            yield body
        finally:
            self._free += body.counted

    @contextlib.contextmanager
    def held(self, length: int) -> Iterator[None]:
        """Count what was received elsewhere."""
        self._take(length)
        try:
            yield
        finally:
            self._free += length

    def _take(self, length: int) -> None:
        if length > self._free:
            raise OverloadedError("out of memory for request bodies; try again later")
        self._free -= length


class Body:
    """A request body as it arrives.

    Memory is allocated when it is first written: a client that announces much and sends little takes little.
    """

    def __init__(self, length: int, take: Callable[[int], None]) -> None:
        self.bytes: Bytes = np.empty(length, dtype=np.uint8)  # not filled with zeros first, unlike a bytearray
        self.received = self.counted = 0
        self._take = take
        self._count()

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        at, self.received = self.received, self.received + len(chunk)
        self._count()
        self.bytes[at : self.received] = np.frombuffer(chunk, dtype=np.uint8)  # releases the GIL

    def _count(self) -> None:
        """Count page by page, starting with the first."""
        reached = min(len(self.bytes), (self.received // PAGE + 1) * PAGE)
        if reached > self.counted:
            self._take(reached - self.counted)
            self.counted = reached


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
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.content.iter_any():
                body.add(chunk)
    except TimeoutError:
        raise RequestError(f"received only {body.received:,} of {len(body.bytes):,} bytes in {SECONDS:g} s") from None
    if body.received < len(body.bytes):
        raise RequestError(f"the body ends after {body.received:,} of {len(body.bytes):,} bytes")
