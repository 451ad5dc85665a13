"""Connections: accepted, limited in time, refused in JSON, and drained when the server stops."""

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aiohttp import hdrs, web
from aiohttp.http import HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy

from falconet import exits
from falconet.errors import ConfigError, memory_shortage, printable
from falconet.exits import DONE, INTERRUPTED
from falconet.serve.bodies import IS_EXPECTED, WIRE
from falconet.serve.records import CURRENT
from falconet.serve.refusals import ComputingError, RefusedError
from falconet.serve.telemetry import ID, Telemetry

IDLE_SECONDS = 75.0  # for receiving a request line and headers; aiohttp's default is an hour
ANSWER_SECONDS = 60.0  # for a client to take what was sent
HANDSHAKE_SECONDS = 10.0  # for a client to agree on TLS
GRACE_SECONDS = 1.0  # for a handshake to end when the server stops, and for a client to confirm the end of TLS
LINGER_SECONDS = 2.0  # to keep reading after a refusal: a client that is still sending would get a reset instead
RETRY_SECONDS = 0.1  # between a failed accept and the next try
GLANCE_SECONDS = 0.01  # between checks of the connections while they are drained
LOOKS = 10  # turns of the loop that read everything sent before a request to stop
AT_ONCE = struct.pack("ii", True, 0)  # seconds to linger
READ_AHEAD = 1 << 20  # bytes buffered per connection
LONGEST = 200  # characters in an error
INTERNAL = "internal error, which the server has logged"
SOFTWARE = "falconet"  # the name in answers; versions would tell an attacker what to try
Drain = Callable[[], Coroutine[None, None, int]]  # finishes requests in progress, and returns how many were cut
LOG = logging.getLogger("falconet.serve")  # failures of the server; bad requests are answered, not logged


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens; port 0 means any free port."""

    host: str
    port: int

    def open(self) -> socket.socket:
        """Open a listening socket; ConfigError, in one line, if that fails."""
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


class Answering(Protocol):
    """Answers the requests of connections."""

    is_ready: bool

    def application(self) -> web.Application: ...

    def connection(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> "Connection": ...

    def close(self) -> None: ...


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as in the protocol: JSON with one printable line."""
    return web.json_response({"error": printable(reason)}, status=status, headers=headers)


def log_failure(error: RefusedError) -> None:
    """Log a failure of the server; clients' mistakes are only answered."""
    if isinstance(error, ComputingError):
        is_short = error.__cause__ is not None and memory_shortage(error.__cause__) is not None
        LOG.error("%s", error, exc_info=None if is_short else error)


class Connection(web.RequestHandler):
    """A client's connection, whose errors are JSON, even those before there is a request."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, telemetry: Telemetry) -> None:
        super().__init__(
            server,
            loop=loop,
            logger=LOG,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            read_bufsize=READ_AHEAD,
            auto_decompress=False,
        )
        self.is_draining = False
        self._is_torn = False  # whether a body was cut short, so that no request can follow
        self._telemetry = telemetry
        self._made, self._request_factory = self._request_factory, self._request
        self._clock = loop
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own while the last bytes are still being sent
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        # So that `pause_writing` reports the first byte that is not taken; at 0, TLS would report none as well.
        transport.set_write_buffer_limits(0 if transport.get_extra_info("sslcontext") is None else 1, 0)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._unread:
            self._unread.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._clock.call_later(ANSWER_SECONDS, self.cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._unread is not None
        self._unread.cancel()

    def _request(self, message: RawRequestMessage, *others: Any) -> web.BaseRequest:
        """Make a request whose client is not asked for the body before it is needed.

        Aiohttp would ask before it looks at a key, an address or a length, and the client would send it for nothing.
        """
        assert self._made is not None
        expected = message.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and message.version == HttpVersion11
        if expected:
            fields = [(name, value) for name, value in message.headers.items() if name.lower() != "expect"]
            message = message._replace(headers=CIMultiDictProxy(CIMultiDict(fields)))
        request = self._made(message, *others)
        if expected:
            request[IS_EXPECTED] = True
        if self.ssl_context is None and not message.chunked:
            request[WIRE] = self
        return request

    def step_aside(self) -> None:
        self._is_torn = True

    def step_back(self) -> None:
        """Expect a new request, with a new parser: the old one still waits for what it has not seen."""
        self._is_torn = False
        self._parser = HttpRequestParser(
            self,
            self._clock,
            READ_AHEAD,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=self._max_msg_queue_size,
        )

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a request's headers, by the test that aiohttp's own timeout uses."""
        return self._waiter is not None and not self._waiter.done()

    def cut(self) -> None:
        """Reset the connection, so that the system, too, drops what it has not sent."""
        if self._wire is not None:
            with contextlib.suppress(OSError):  # it is already closed
                self._wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self._wire.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP; answer a failure of the server, and log it."""
        if isinstance(exc, ConnectionError):  # the client has gone
            raise exc
        if status >= 500:
            LOG.error("%s", printable(f"{request.method} {request.path[:LONGEST]}"), exc_info=exc)
            message = INTERNAL
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has been started")
        if isinstance(exc, LineTooLong):
            status, message = 431, f"a header, or the address, has more than {self.max_field_size:,} bytes"
        elif message == "Too many headers received":
            status, message = 431, f"got more than {self.max_headers} headers"
        response = refusal(
            status, f"the request is not HTTP: {_first_line(message)}" if status == 400 else message or ""
        )
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; while draining, the connection's last one says so."""
        if isinstance(resp, web.HTTPException):  # from the router: unknown path or method
            allowed = {"Allow": resp.headers["Allow"]} if "Allow" in resp.headers else {}
            expected = "".join(f"; expected {methods.replace(',', ' or ')}" for methods in allowed.values())
            asked = f"{request.method} {request.path[:80]}"
            resp = refusal(resp.status, f"{asked}: {resp.reason.lower()}{expected}", allowed)
        if CURRENT.get() is None:  # refused before it reached the application
            assert isinstance(resp, web.Response)
            error = json.loads(resp.text or "{}")["error"]
            record = self._telemetry.refused(
                client=request.remote or "", status=resp.status, error=error, bytes_out=resp.content_length or 0
            )
            resp.headers[ID] = record.id
        resp.headers[hdrs.SERVER] = SOFTWARE  # otherwise aiohttp's and Python's versions
        is_last = self._is_torn or resp.headers.get(hdrs.CONNECTION) == "close"  # aiohttp would send it, but not close
        # While draining, requests that were sent without waiting for this answer are still answered.
        if is_last or (self.is_draining and not self._messages):
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


def _first_line(message: str | None) -> str:
    """The first line of aiohttp's message, its reason; the sent bytes and an arrow follow."""
    return (message or "").strip().partition("\n")[0].rstrip(":")[:LONGEST]


class Stopped(NamedTuple):
    """How a server ended."""

    code: int
    cut: int  # requests that were not finished in time


async def serve(
    front: Answering,
    listening: socket.socket,
    *,
    drain_seconds: float,
    started: Callable[[], None],
    tls: ssl.SSLContext | None = None,
    drains: Sequence[Drain] = (),
) -> Stopped:
    """Serve until a signal, then finish requests in progress; the code is 130 after Ctrl-C, else 0.

    `drains`: functions that meanwhile finish the requests of other servers, and return how many were cut.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()
    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        exits.forget_lost_terminal()
        if not asked.done():
            asked.set_result(number)
        elif number != signal.SIGHUP:  # which both the system and the shell send
            task.cancel()  # the second signal stops at once

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # otherwise `nohup` is in use
            loop.add_signal_handler(number, stop, number)
    async with answering(front, listening, drain_seconds=drain_seconds, tls=tls) as cut:
        started()  # not before signals are handled
        reason = await asked
        draining = [loop.create_task(drain()) for drain in drains]
    others = await asyncio.gather(*draining)
    return Stopped(INTERRUPTED if reason == signal.SIGINT else DONE, sum(cut) + sum(others))


@contextlib.asynccontextmanager
async def answering(
    front: Answering, listening: socket.socket, *, drain_seconds: float, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[int]]:
    """Answer requests within the context; on exit, finish those in progress.

    The yielded list is empty until the exit, and then has the number of requests that were cut.
    """
    cut: list[int] = []
    runner = web.AppRunner(front.application(), shutdown_timeout=0, handler_cancellation=True)  # of a lost client's
    await runner.setup()
    server = runner.server
    assert server is not None
    loop, connecting = asyncio.get_running_loop(), set[asyncio.Task[object]]()
    encryption = _encryption(tls)

    def take(connection: socket.socket) -> None:
        opening = loop.connect_accepted_socket(lambda: front.connection(server, loop), connection, **encryption)
        task = loop.create_task(opening)
        connecting.add(task)
        task.add_done_callback(opened)

    def opened(task: asyncio.Task[object]) -> None:
        connecting.discard(task)
        if not task.cancelled() and not isinstance(error := task.exception(), OSError | None):
            raise error  # an OSError means a client that does not speak TLS, or has gone

    def connections() -> list[Connection]:
        return [one for one in server.connections if isinstance(one, Connection)]

    try:
        try:
            with _accepting(listening, take):
                yield cut
        finally:
            front.is_ready = False
        cut.append(await _drained(connections, connecting, until=loop.time() + drain_seconds))
    finally:
        await asyncio.sleep(0)  # let the last connection start
        for task in connecting if tls else ():
            task.cancel()  # a handshake that never ends
        if connecting:
            await asyncio.wait(connecting)  # otherwise the connections would never be closed
        for one in connections():
            one.cut()
        await runner.cleanup()
        front.close()


def _encryption(tls: ssl.SSLContext | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": GRACE_SECONDS}


async def _drained(
    connections: Callable[[], list[Connection]], connecting: Set[asyncio.Task[object]], *, until: float
) -> int:
    """Let requests in progress finish until a time on the loop's clock; return how many did not."""
    for one in connections():
        one.is_draining = True
    for _ in range(LOOKS):
        await asyncio.sleep(GLANCE_SECONDS)
    now = asyncio.get_running_loop().time
    agreed = now() + GRACE_SECONDS  # by then, handshakes in progress have ended or never will
    while ((left := connections()) or (connecting and now() < agreed)) and now() < until:
        for one in left:
            one.is_draining = True
            if one.is_idle:
                one.force_close()
        await asyncio.sleep(GLANCE_SECONDS)
    return sum(not one.is_idle for one in left)


@contextlib.contextmanager
def _accepting(listening: socket.socket, take: Callable[[socket.socket], None]) -> Iterator[None]:
    """Take new connections within the context, and refuse further ones at its end.

    The loop's `sock_accept` would not do: if cancelled as a connection arrives, it loses it and prints a traceback.
    """
    loop = asyncio.get_running_loop()
    later: list[asyncio.TimerHandle] = []

    def accept() -> bool:
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return False
        except OSError:  # the client has gone, or this process is out of file descriptors: wait for some to close
            loop.remove_reader(listening)
            later[:] = [loop.call_later(RETRY_SECONDS, loop.add_reader, listening, accept)]
            return False
        take(connection)
        return True

    listening.setblocking(False)
    loop.add_reader(listening, accept)
    try:
        yield
    finally:
        while accept():  # clients whose connections the system has already made
            pass
        loop.remove_reader(listening)
        for handle in later:
            handle.cancel()
        listening.close()
