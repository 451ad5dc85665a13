"""The HTTP server: routes, limits per client, and a shutdown that finishes requests in progress."""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import falconet
from falconet.errors import ConfigError
from falconet.exits import DONE, INTERRUPTED
from falconet.infer.predictor import Pixels, Scores
from falconet.serve import protocol
from falconet.serve.batching import ComputingError, Counts, OverloadedError
from falconet.serve.protocol import RequestError, Served

BODY_SECONDS = 60.0  # to receive a whole request body
IDLE_SECONDS = 75.0  # to receive a request line and headers; aiohttp's default is an hour
DRAIN_SECONDS = 60.0  # to finish requests in progress after a request to stop
RETRY_SECONDS = 0.1  # between a failed accept and the next
READ_AHEAD = 1 << 20  # bytes buffered per connection
PAGE = 2 << 20  # bytes that the system may allocate on the first write: a huge page
AT_ONCE = 64 << 10  # longer JSON is parsed in another thread
MOST_FAILED = 3  # failed batches in a row after which the server is not ready: a broken device fails on all
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Bytes = npt.NDArray[np.uint8]  # one dimension
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Submit = Callable[[Pixels], Coroutine[None, None, Scores]]
Take = Callable[[socket.socket], None]  # a new connection


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens; port 0 means any free port."""

    host: str
    port: int

    def open(self) -> socket.socket:
        """Open a listening socket, or raise a one-line error."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {self.port} is in use; choose another port, or 0 for any free one"
            elif error.errno == errno.EACCES:
                why = f"port {self.port} needs privileges; choose a port from 1024 up"
            else:
                why = error.strerror or str(error)
            raise ConfigError(f"cannot listen on '{self.host}': {why}") from error


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
        # One long JSON at a time: parsed, it takes up to thirty times its size, which `memory` does not count.
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="json")
        self.is_ready = True

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
                return _refusal(404, f"there is no model '{name[:80]}'; this server has '{self._served.name}'")
            if version != protocol.VERSION:
                return _refusal(404, f"{name} has no version '{version[:80]}'; its version is {protocol.VERSION}")
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
        if length is None:
            return _refusal(411, "Content-Length: required")
        if length > self._served.most_bytes:
            return _refusal(413, f"Content-Length: got {length:,}, expected at most {self._served.most_bytes:,}")
        if "Content-Encoding" in request.headers:
            return _refusal(400, "Content-Encoding: not supported; send the body uncompressed")
        with self._memory.reserved(length) as incoming:
            await _read_into(incoming, request)
            body = incoming.bytes
            header = request.headers.get(protocol.HEADER)
            if header is None and length > AT_ONCE:
                loop = asyncio.get_running_loop()
                asked = await loop.run_in_executor(
                    self._parsing, protocol.read_request, body.data, header, self._served
                )
            else:
                asked = protocol.read_request(body.data, header, self._served)
            scores = await self._submit(asked.images)
            answer, headers = protocol.write_answer(scores, asked, self._served)
        return web.Response(body=answer, headers=headers)


async def serve(fronts: Callable[[], Sequence[FrontEnd]], listening: socket.socket) -> int:
    """Serve until a signal, then finish requests in progress; return 130 for Ctrl-C, 0 for SIGTERM."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()
    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        if asked.done():
            task.cancel()  # the second signal stops at once
        else:
            asked.set_result(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    async with answering(fronts(), listening):
        reason = await asked
    return INTERRUPTED if reason == signal.SIGINT else DONE


@contextlib.asynccontextmanager
async def answering(fronts: Sequence[FrontEnd], listening: socket.socket) -> AsyncIterator[None]:
    """Inside the context, distribute connections over the front ends; on exit, finish requests in progress.

    The first front end runs in this thread, each of the others in its own thread and event loop: reading bodies can
    limit a fast device, and half of that work is done in the kernel, without the GIL.
    """
    async with contextlib.AsyncExitStack() as stack:
        takers = [await stack.enter_async_context(_running(fronts[0]))]
        for front in fronts[1:]:
            takers.append(await stack.enter_async_context(_running_in_thread(front)))
        try:
            with _accepting(listening, takers):
                yield
        finally:
            listening.close()
            for front in fronts:
                front.is_ready = False


@contextlib.contextmanager
def _accepting(listening: socket.socket, takers: Sequence[Take]) -> Iterator[None]:
    """Inside the context, hand new connections to the takers in turn.

    The loop's `sock_accept` would not do: cancelled as a connection arrives, it loses it and prints a traceback.
    """
    loop, turns = asyncio.get_running_loop(), itertools.cycle(takers)
    later: list[asyncio.TimerHandle] = []

    def accept() -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # the client has gone, or this process is out of file descriptors: wait for some to close
            loop.remove_reader(listening)
            later[:] = [loop.call_later(RETRY_SECONDS, loop.add_reader, listening, accept)]
        else:
            next(turns)(connection)

    listening.setblocking(False)
    loop.add_reader(listening, accept)
    try:
        yield
    finally:
        loop.remove_reader(listening)
        for handle in later:
            handle.cancel()


@contextlib.asynccontextmanager
async def _running(front: FrontEnd) -> AsyncIterator[Take]:
    """Serve a front end in the running loop; the yielded function hands it connections from any thread."""
    runner = web.AppRunner(
        front.application(),
        access_log=None,
        logger=_logger(),
        shutdown_timeout=DRAIN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        handler_cancellation=True,  # when the client disconnects
        read_bufsize=READ_AHEAD,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None
    loop, connecting = asyncio.get_running_loop(), set[asyncio.Task[object]]()

    def begin(connection: socket.socket) -> None:
        task = loop.create_task(loop.connect_accepted_socket(runner.server, connection))  # type: ignore[arg-type]
        connecting.add(task)
        task.add_done_callback(connecting.discard)

    def take(connection: socket.socket) -> None:
        loop.call_soon_threadsafe(begin, connection)

    try:
        yield take
    finally:
        await asyncio.sleep(0)  # let the last connection start
        if connecting:
            await asyncio.wait(connecting)  # otherwise they would never be closed
        await runner.cleanup()
        front.close()


@contextlib.asynccontextmanager
async def _running_in_thread(front: FrontEnd) -> AsyncIterator[Take]:
    """Serve a front end in another thread."""
    started: Future[tuple[Take, Callable[[], object]]] = Future()

    async def work() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with _running(front) as take:
            started.set_result((take, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)  # a second Ctrl-C does not wait
    thread.start()
    take, stop = await asyncio.wrap_future(started)
    try:
        yield take
    finally:
        stop()
        await asyncio.to_thread(thread.join)


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
        return _refusal(400, str(error))
    except OverloadedError as error:
        return _refusal(503, str(error), {"Retry-After": "1"})
    except ComputingError as error:
        _logger().error("%s", error, exc_info=error)
        return _refusal(500, str(error))
    except web.HTTPException as error:  # from the router: unknown path or method
        return _refusal(error.status, f"{request.method} {request.path[:80]}: {error.reason.lower()}")


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)


def _always(content: dict[str, object]) -> Handler:
    text = json.dumps(content)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer


def _server_metadata() -> dict[str, object]:
    return {"name": "falconet", "version": falconet.__version__, "extensions": list(protocol.EXTENSIONS)}


def _logger() -> logging.Logger:
    """Logs failures of the server; malformed requests are answered, not logged."""
    logger = logging.getLogger("falconet.serve")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, HttpProcessingError)
