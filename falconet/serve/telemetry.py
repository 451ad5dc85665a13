"""Telemetry: follows each request, and passes its record to metrics, log and traces when it ends."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Middleware

from falconet.config.tool_options import Telemetry as TelemetryOptions
from falconet.report.console import Say
from falconet.serve.access import Handler, route_of
from falconet.serve.access_log import AccessLog
from falconet.serve.prometheus import Metrics
from falconet.serve.records import CURRENT, LONGEST, Observer, Record

ID = "X-Request-Id"
GONE = "499"  # the client disconnected before its answer; HTTP has no number for it, and proxies use this one
_SANE = re.compile(r"[\x21-\x7e]{1,128}")


class Telemetry:
    """Follows a server's requests, and passes each to the metrics and to other observers when it ends."""

    def __init__(self, metrics: Metrics, observers: Sequence[Observer] = ()) -> None:
        self.metrics = metrics
        self._observers = (*observers, metrics.add)
        self.in_flight = 0

    @contextlib.contextmanager
    def following(self, record: Record) -> Iterator[Record]:
        """Follow the request that is answered within the context."""
        self.in_flight += 1
        CURRENT.set(record)  # until the request's task ends, which puts its id into the answer's headers
        try:
            yield record
        finally:
            self.in_flight -= 1
            record.seconds = time.perf_counter() - record.begun
            for observe in self._observers:
                observe(record)

    def refused(self, *, client: str, status: int, error: str, bytes_out: int) -> Record:
        """Record a request refused before it could be followed: not HTTP, or with too long headers."""
        record = Record(id=request_id(None), client=client, method="", route="")
        with self.following(record):
            record.status, record.error, record.bytes_out = str(status), error, bytes_out
            record.reason = "malformed" if status == 400 else reason_of_status(status)
        return record

    def follow(self, app: web.Application) -> None:
        """Follow an application's requests, outside the middlewares that are added later."""
        app.middlewares.append(self._followed())
        app.on_response_prepare.append(_identified)

    def _followed(self) -> Middleware:
        @web.middleware
        async def followed(request: web.Request, handler: Handler) -> web.StreamResponse:
            route = route_of(request)
            record = Record(
                id=request_id(request.headers.get(ID)),
                client=request.remote or "",
                method=request.method if route else request.method[:LONGEST],
                route=route,
                path="" if route else request.path[:LONGEST],
                sent=request.headers,
            )
            with self.following(record):
                try:
                    response = await handler(request)
                    record.status = str(response.status)
                    if isinstance(response, web.Response):
                        record.bytes_out = response.content_length or 0
                except web.HTTPException as error:  # from the router
                    record.status, record.reason = str(error.status), reason_of_status(error.status)
                    record.error = error.reason.lower()
                    raise
                except asyncio.CancelledError:
                    record.status, record.reason = GONE, "client_gone"
                    raise
                finally:
                    record.bytes_in = request.content.total_bytes
            return response

        return followed


async def _identified(_: web.Request, response: web.StreamResponse) -> None:
    if (record := CURRENT.get()) is not None:
        response.headers[ID] = record.id


def reason_of_status(status: int) -> str:
    """The reason, in a word, of a refusal by aiohttp."""
    return HTTPStatus(status).phrase.lower().replace(" ", "_")


def request_id(sent: str | None) -> str:
    """The id of a request: the client's if it is short and printable, else a new one."""
    return sent if sent is not None and _SANE.fullmatch(sent) else f"{random.getrandbits(64):016x}"


@contextlib.contextmanager
def from_options(options: TelemetryOptions, metrics: Metrics, say: Say) -> Iterator[Telemetry]:
    """The telemetry that the options ask for; on exit, remaining logs and traces are written unless that takes long."""
    with contextlib.ExitStack() as closing:
        observers: list[Observer] = []
        if options.opentelemetry:
            from falconet.serve.tracing import Tracing  # needs the packages of an extra

            traces = Tracing(say)
            closing.callback(traces.close)
            observers.append(traces.add)
        if options.access_log is not None:
            log = AccessLog(options.access_log)
            closing.callback(log.close)
            observers.append(log.add)  # after the traces, whose ids it shows
            metrics.count_lost_lines(lambda: log.lost)
        yield Telemetry(metrics, observers)
