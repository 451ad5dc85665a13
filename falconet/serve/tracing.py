"""OpenTelemetry traces of requests, with spans for decoding, waiting and computing."""

import logging
import textwrap
import threading

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import falconet
from falconet.errors import printable
from falconet.report.console import Say
from falconet.serve.records import LONGEST, Record

FLUSH_SECONDS = 2.0  # at the end, to send what is waiting
SERVERS_FAULT = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")  # in gRPC


class Tracing:
    """Sends a span per request; a trace that the client began is continued.

    Spans are made from a request's record when it has ended: nothing is kept open meanwhile. A thread of the SDK sends
    them, and drops what it cannot send.
    """

    def __init__(self, say: Say, processor: SpanProcessor | None = None) -> None:
        """`say` gets the first failure to send; `processor` replaces the exporter that OTEL_* describe."""
        self._quiet = _OneLine(say)
        logging.getLogger("opentelemetry").addHandler(self._quiet)
        logging.getLogger("opentelemetry").propagate = False  # otherwise the SDK prints tracebacks
        named = Resource({SERVICE_NAME: "falconet"}).merge(OTELResourceDetector().detect())  # the environment wins
        self._provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("falconet.serve", falconet.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def add(self, record: Record) -> None:
        """Send the spans of a request that has ended."""
        begun = round(record.at * 1e9)  # in nanoseconds
        span = self._tracer.start_span(
            f"{record.method} {record.route}".strip(),
            context=self._propagator.extract(record.sent),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=begun,
        )
        inside = trace.set_span_in_context(span)
        for name, stage in record.stages.items():
            since = begun + round((stage.begun - record.begun) * 1e9)
            part = self._tracer.start_span(name, context=inside, start_time=since)
            part.end(since + round(stage.seconds * 1e9))
        if record.status in SERVERS_FAULT or record.status.startswith("5"):
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(begun + round(record.seconds * 1e9))
        record.trace = trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is waiting, unless that takes long; failures are no longer reported."""
        self._quiet.has_said = True
        # The SDK's own limit does not end an attempt in progress.
        closing = threading.Thread(target=self._provider.shutdown, name="opentelemetry-end", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)


def _attributes(record: Record) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "client.address": record.client,
        "falconet.request_id": record.id,
        "falconet.bytes_in": record.bytes_in,
        "falconet.bytes_out": record.bytes_out,
    }
    if record.status.isdigit():
        found |= {"http.request.method": record.method, "http.response.status_code": int(record.status)}
        if record.route:
            found["http.route"] = record.route
    else:
        found |= {"rpc.system": "grpc", "rpc.method": record.route, "rpc.response.status_code": record.status}
    if record.model:
        found |= {"falconet.model": record.model, "falconet.version": record.version, "falconet.images": record.images}
    if record.reason:
        found["error.type"] = record.reason
    return found


class _OneLine(logging.Handler):
    """Reports the SDK's first failure in one line, and no later ones."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say, self.has_said = say, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.has_said:
            self.has_said = True
            cause = record.exc_info[1] if record.exc_info else None
            why = textwrap.shorten(f"{record.getMessage()} {cause or ''}", LONGEST, placeholder="...")
            self._say(printable(f"opentelemetry: {why}; traces are lost until that works; this is reported only once"))
