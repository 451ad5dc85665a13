"""Answers usual inference requests directly, without the layers of aiohttp.

Aiohttp's requests, router, middlewares and responses take as long as all else that Python does for an answer. They get
unusual requests and those refused before their body is read: aiohttp has parsed them, and nothing is consumed.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import hdrs, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11, RawRequestMessage

from falconet.errors import printable
from falconet.serve import records
from falconet.serve.access import Access
from falconet.serve.bodies import Memory
from falconet.serve.connections import (
    IDLE_SECONDS,
    INTERNAL,
    LOG,
    LONGEST,
    READ_AHEAD,
    SOFTWARE,
    Connection,
    log_failure,
)
from falconet.serve.protocol import AT_ONCE, HEADER
from falconet.serve.records import Record
from falconet.serve.refusals import RefusedError
from falconet.serve.repository import Model, Repository
from falconet.serve.telemetry import GONE, ID, Telemetry, request_id

# Computes the body and headers of the answer to a body; the value of HEADER gives the length of its JSON.
Infer = Callable[[Model, memoryview, str], Awaitable[tuple[bytes, Mapping[str, str]]]]
SOON_SECONDS = 1.0  # for a request's body to arrive; slower ones are left to aiohttp, with the time that it gives them
_PATH = re.compile(r"/v2/models/([\w.-]+)(?:/versions/([\w.-]+))?/infer", re.ASCII)
_ROUTE, _VERSIONED = "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"
_UNUSUAL = (hdrs.ORIGIN, hdrs.EXPECT, hdrs.CONTENT_ENCODING)
_JSON = {"Content-Type": "application/json; charset=utf-8"}  # for refusals


class Request(NamedTuple):
    """A request whose headers have been received."""

    path: str
    name: str  # the model's
    version: str
    json_length: str  # as the client sent it
    record: Record


class Direct:
    """Answers inference requests that have a binary tensor, as the application would."""

    def __init__(
        self, repository: Repository, infer: Infer, *, memory: Memory, access: Access, telemetry: Telemetry
    ) -> None:
        self._repository, self._infer, self._memory = repository, infer, memory
        self._access, self.telemetry = access, telemetry

    def begin(self, message: object, client: str) -> Request | None:
        """The request with these headers, if it is to be answered directly; `client` is an address."""
        if not isinstance(message, RawRequestMessage) or message.method != "POST":
            return None
        found, headers = _PATH.fullmatch(message.path), message.headers
        length, json_length = headers.get(hdrs.CONTENT_LENGTH), headers.get(HEADER, "")
        if found is None or length is None or not 0 < len(json_length) < len(str(AT_ONCE)):
            return None
        is_usual = message.version == HttpVersion11 and not (message.should_close or message.upgrade)
        if not is_usual or self._access.origins or any(name in headers for name in _UNUSUAL):
            return None
        name, version = found.groups("")
        try:
            self._access.require(headers)
        except RefusedError:
            return None
        model = self._repository.present(name, version)
        if model is None or int(length) > min(READ_AHEAD, model.served.most_binary):
            return None
        record = Record(
            id=request_id(headers.get(ID)),
            client=client,
            method=message.method,
            route=_VERSIONED if version else _ROUTE,
            sent=headers,
        )
        return Request(message.path, name, version, json_length, record)

    async def answer(self, request: Request, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """The status, headers and body of the answer to a request that has fully arrived."""
        record = request.record
        with self.telemetry.following(record):
            record.bytes_in = len(body)
            try:
                status, (answer, headers) = 200, await self._answered(request, body)
            except RefusedError as error:
                log_failure(error)
                records.note_refusal(error)
                status, headers = error.status, {**_JSON, **error.headers}
                answer = _error(str(error))
            except asyncio.CancelledError:
                record.status, record.reason = GONE, "client_gone"
                raise
            record.status, record.bytes_out = str(status), len(answer)
        return status, {**headers, ID: record.id}, answer

    async def _answered(self, request: Request, body: bytes) -> tuple[bytes, Mapping[str, str]]:
        found = await self._repository.find(request.name, request.version)
        with found.used() as model, self._memory.held(len(body)):
            return await self._infer(model, memoryview(body), request.json_length)

    def forget(self, request: Request, received: int) -> None:
        """Record that a client disconnected before its request was looked at."""
        with self.telemetry.following(request.record) as record:
            record.status, record.reason, record.bytes_in = GONE, "client_gone", received


class DirectConnection(Connection):
    """A connection on which usual requests are answered directly, and all others by aiohttp.

    While its waiter is held back, aiohttp parses and queues requests, and considers the connection busy.
    """

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, direct: Direct) -> None:
        super().__init__(server, loop, direct.telemetry)
        self._direct = direct
        self._held: asyncio.Future[None] | None = None  # aiohttp's waiter
        self._begun: Request | None = None  # the first request in the queue, until its body has arrived
        self._slow: asyncio.TimerHandle | None = None  # limits the wait for that body
        self._answering: asyncio.Task[None] | None = None
        self._is_last = False  # whether the answer in progress ends the connection

    def data_received(self, data: bytes) -> None:
        """Take data, which is empty when aiohttp lets its parser go on after a pause."""
        if data and self._held is None and self.is_idle:
            self._held, self._waiter = self._waiter, None
        super().data_received(data)
        if data and self._held is not None and self._answering is None:
            self._proceed()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # otherwise aiohttp would call its parser for nothing, twice per request
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._begun is not None:
            self._direct.forget(self._begun, self._messages[0][1].total_bytes)
            self._leave()
        if self._answering is not None:
            self._answering.cancel()
        super().connection_lost(exc)

    def _proceed(self) -> None:
        """Answer the first request in the queue if it is a usual one that has arrived; else leave it to aiohttp."""
        if self._begun is None and self._messages and not (self.is_draining or self.writing_paused):
            client = self.peername[0] if isinstance(self.peername, tuple) else ""
            self._begun = self._direct.begin(self._messages[0][0], client)
        if self._begun is None:
            self._let_aiohttp()
        elif (payload := self._messages[0][1]).is_eof():
            request = self._leave()
            self._messages.popleft()
            assert self._parser is not None
            self._parser.message_consumed()
            if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                self._resume_reading_if_drained()  # aiohttp stops reading while 32 requests wait
            body = payload.read_nowait()
            self._answering = self._clock.create_task(self._answer(request, body))
            self._answering.add_done_callback(lambda done: self._ended(request, len(body), done))
        elif self._slow is None:
            self._slow = self._clock.call_later(SOON_SECONDS, self._let_aiohttp)

    def _leave(self) -> Request:
        """Stop waiting for the begun request's body."""
        request, self._begun = self._begun, None
        assert request is not None
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        return request

    def _let_aiohttp(self) -> None:
        """Let aiohttp go on with the queue, if there is one: nothing of it has been consumed."""
        if self._begun is not None:
            self._leave()
        waiter, self._held = self._held, None
        if waiter is not None and not waiter.done():
            self._waiter = waiter
            if self._messages:
                waiter.set_result(None)

    async def _answer(self, request: Request, body: bytes) -> None:
        status, headers, answer = await self._direct.answer(request, body)
        self._send(status, headers, answer)

    def _send(self, status: int, headers: Mapping[str, str], answer: bytes) -> None:
        if self.is_draining and not self._messages:  # the queue has requests sent without waiting for this answer
            headers, self._is_last = {**headers, "Connection": "close"}, True
        if self.transport is not None:
            self.transport.write(written(status, headers, answer))

    def _ended(self, request: Request, received: int, done: "asyncio.Task[None]") -> None:
        self._answering = None
        if done.cancelled():  # the client has gone
            if request.record.status != GONE:  # it went before the task began
                self._direct.forget(request, received)
            return
        if (error := done.exception()) is not None:
            LOG.error("%s", printable(f"POST {request.path[:LONGEST]}"), exc_info=error)
            self._is_last = True
            self._send(500, {**_JSON, "Connection": "close", ID: request.record.id}, _error(INTERNAL))
        self._next_keepalive_close_time = self._clock.time() + IDLE_SECONDS
        if self._keepalive_handle is None:
            self._keepalive_handle = self._clock.call_at(self._next_keepalive_close_time, self._process_keepalive)
        if self._is_last:
            self._let_aiohttp()
            self.force_close()
        else:
            self._proceed()


def _error(reason: str) -> bytes:
    return json.dumps({"error": printable(reason)}).encode()


def written(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of a response."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}Content-Length: {len(body)}\r\n"
        f"Date: {rfc822_formatted_time()}\r\nServer: {SOFTWARE}\r\n\r\n"
    ).encode("ascii") + body
