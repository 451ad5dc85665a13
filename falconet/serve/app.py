"""The HTTP application: routes, limits on memory and time, and errors as the protocol has them."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from aiohttp import web

import falconet
from falconet.errors import memory_shortage
from falconet.infer.predictor import Pixels, Scores
from falconet.serve import protocol
from falconet.serve.batching import ComputingError, Counts, OverloadedError
from falconet.serve.connections import LOG, refusal
from falconet.serve.protocol import Asked, RequestError, Served

BODY_SECONDS = 60.0  # to receive a whole request body
PAGE = 2 << 20  # bytes that the system may allocate on the first write: a huge page
AT_ONCE = 4 << 10  # bytes of JSON, or scores to write as JSON, that do not need another thread
MOST_FAILED = 3  # failed batches in a row after which the server is not ready: a broken device fails on all
Bytes = npt.NDArray[np.uint8]  # one dimension
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Submit = Callable[[Pixels], Coroutine[None, None, Scores]]


class Memory:
    """A limit on the memory of all request bodies, so that no number of clients can exhaust the machine."""

    def __init__(self, most: int) -> None:
        self._free, self._lock = most, threading.Lock()  # bytes

    @contextlib.contextmanager
    def reserved(self, length: int) -> Iterator["Body"]:
        """A buffer of this many bytes; only what has been received counts against the limit."""
        body = Body(length, self._take)
        try:
            yield body
        finally:
            with self._lock:
                self._free += body.counted

    def _take(self, length: int) -> None:
        with self._lock:
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


class FrontEnd:
    """Answers requests about one model."""

    def __init__(self, served: Served, submit: Submit, *, counts: Counts, memory: Memory, max_delay: float) -> None:
        self._served, self._submit, self._counts, self._memory = served, submit, counts, memory
        self._config = protocol.configuration(served, max_delay=max_delay)
        # One long JSON at a time: numpy takes ten times its size to read it, which `memory` does not count.
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="json")
        self.is_ready = True  # until the server is asked to stop

    def close(self) -> None:
        """Let the parsing thread end, after the last request."""
        self._parsing.shutdown(wait=False)

    def application(self) -> web.Application:
        """All routes of the protocol."""
        app = web.Application(middlewares=[_in_one_line])
        app.router.add_get("/v2", _always(_server_metadata()))
        app.router.add_get("/v2/health/live", _always({"live": True}))
        app.router.add_get("/v2/health/ready", self._ready)
        for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_get(base, self._of_model(_always(protocol.metadata(self._served))))
            app.router.add_get(f"{base}/ready", self._of_model(self._ready))
            app.router.add_get(f"{base}/config", self._of_model(_always(self._config)))
            app.router.add_get(f"{base}/stats", self._of_model(self._statistics))
            app.router.add_post(f"{base}/infer", self._of_model(self._infer))
        return app

    def _of_model(self, handler: Handler) -> Handler:
        """Wrap a handler to answer 404 for any other model or version."""

        async def checked(request: web.Request) -> web.StreamResponse:
            name, version = request.match_info["model"], request.match_info.get("version", protocol.VERSION)
            if name != self._served.name:
                return refusal(404, f"there is no model '{name[:80]}'; this server has '{self._served.name}'")
            if version != protocol.VERSION:
                return refusal(404, f"{name} has no version '{version[:80]}'; its version is {protocol.VERSION}")
            return await handler(request)

        return checked

    async def _ready(self, _: web.Request) -> web.Response:
        ready = self.is_ready and self._counts.failed_in_a_row < MOST_FAILED
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _statistics(self, _: web.Request) -> web.Response:
        counts = self._counts
        return web.json_response(
            {
                "model_stats": [
                    {
                        "name": self._served.name,
                        "version": protocol.VERSION,
                        "inference_count": counts.images,
                        "execution_count": counts.executions,
                        "falconet": asdict(counts),
                    }
                ]
            }
        )

    async def _infer(self, request: web.Request) -> web.Response:
        length = request.content_length
        header = request.headers.get(protocol.HEADER)
        most = protocol.MOST_JSON if header is None else self._served.most_binary
        if length is None:
            return refusal(411, "Content-Length: required")
        if length > most:
            kind = "a request of JSON alone" if header is None else f"a request with {protocol.HEADER}"
            return refusal(413, f"Content-Length: got {length:,}, expected at most {most:,} for {kind}")
        if "Content-Encoding" in request.headers:
            return refusal(400, "Content-Encoding: not supported; send the body uncompressed")
        with self._memory.reserved(length) as incoming:
            await _read_into(incoming, request)
            asked = await self._read(incoming.bytes, header)
            scores = await self._submit(asked.images)
            answer, headers = await self._written(scores, asked)
        return web.Response(body=answer, headers=headers)

    async def _read(self, body: Bytes, header: str | None) -> Asked:
        if len(body) <= AT_ONCE or (header is not None and len(header) < len(str(AT_ONCE))):
            return protocol.read_request(body.data, header, self._served)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parsing, protocol.read_request, body.data, header, self._served)

    async def _written(self, scores: Scores, asked: Asked) -> tuple[bytes, dict[str, str]]:
        if asked.binary or scores.size <= AT_ONCE:
            return protocol.write_answer(scores, asked, self._served)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parsing, protocol.write_answer, scores, asked, self._served)


def from_other_threads(submit: Submit) -> Submit:
    """Make the running loop's `submit` callable from the loops of other threads."""
    loop = asyncio.get_running_loop()

    async def submitted(images: Pixels) -> Scores:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(submit(images), loop))

    return submitted


async def _read_into(body: Body, request: web.Request) -> None:
    """Receive the whole body in place; `request.read()` would copy it twice more."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                body.add(chunk)
    except TimeoutError:
        raise RequestError(
            f"received only {body.received:,} of {len(body.bytes):,} bytes in {BODY_SECONDS:g} s"
        ) from None
    if body.received < len(body.bytes):
        raise RequestError(f"the body ends after {body.received:,} of {len(body.bytes):,} bytes")


@web.middleware
async def _in_one_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors as the protocol does: JSON with one line."""
    try:
        return await handler(request)
    except RequestError as error:
        return refusal(400, str(error))
    except OverloadedError as error:
        return refusal(503, str(error), {"Retry-After": "1"})
    except ComputingError as error:
        is_short = error.__cause__ is not None and memory_shortage(error.__cause__) is not None
        LOG.error("%s", error, exc_info=None if is_short else error)
        return refusal(500, str(error))


def _always(content: dict[str, object]) -> Handler:
    text = json.dumps(content)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer


def _server_metadata() -> dict[str, object]:
    return {"name": "falconet", "version": falconet.__version__, "extensions": list(protocol.EXTENSIONS)}
