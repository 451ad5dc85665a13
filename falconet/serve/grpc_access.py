"""Keys, encryption and telemetry for gRPC: the same as for HTTP, around each call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from falconet.errors import printable
from falconet.serve import records
from falconet.serve.access import Keys
from falconet.serve.records import Record
from falconet.serve.refusals import UnauthorizedError
from falconet.serve.telemetry import ID, Telemetry, request_id
from falconet.serve.tls import Identity

HEALTH = frozenset(  # for probes, which know no key
    {
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
        "/grpc.health.v1.Health/Check",
    }
)
NAMES = {code.value[0]: code.name for code in grpc.StatusCode}  # by number
Behaviour = Callable[[Any, Any], Awaitable[Any]]  # what a call does with its request and its context


def credentials(identity: Identity) -> grpc.ServerCredentials:
    """The credentials with which gRPC encrypts."""
    return grpc.ssl_server_credentials([(identity.key, identity.certificate)])


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Requires a key of each call, if there are keys, and follows the call to its end.

    It expects methods that take a stream and are coroutines, as all methods of the service are declared.
    """

    def __init__(self, keys: Keys | None, telemetry: Telemetry) -> None:
        self._keys, self._telemetry = keys, telemetry

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:  # gRPC answers that there is no such method
            return None
        sent = {name: value for name, value in details.invocation_metadata if isinstance(value, str)}
        behaviour = handler.stream_stream if handler.response_streaming else handler.stream_unary
        try:
            if self._keys is not None and details.method not in HEALTH:
                self._keys.require(sent)
        except UnauthorizedError as error:
            behaviour = _refusing(error)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        followed = self._followed(behaviour, details.method, sent)
        return make(followed, handler.request_deserializer, handler.response_serializer)

    def _followed(self, behaviour: Behaviour, method: str, sent: dict[str, str]) -> Behaviour:
        async def followed(request: Any, context: Any) -> Any:
            record = Record(
                id=request_id(sent.get(ID.lower())),
                client=context.peer(),
                method="gRPC",
                route=method,
                sent=sent,
                status="UNKNOWN",
            )
            with self._telemetry.following(record):
                try:
                    answer = await behaviour(request, context)
                    record.status = "OK"
                    if isinstance(answer, bytes):  # otherwise a stream, which notes what it sends
                        record.bytes_out = len(answer)
                    return answer
                except grpc.aio.AbortError:
                    record.status, record.error = NAMES[_number(context.code())], _text(context.details())
                    record.reason = record.reason or record.status.lower()
                    raise
                except asyncio.CancelledError:
                    record.status, record.reason = "CANCELLED", "client_gone"
                    raise

        return followed


def _refusing(error: UnauthorizedError) -> Behaviour:
    async def refuse(_: Any, context: Any) -> None:
        records.note_refusal(error)  # with the same word as over HTTP
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, printable(str(error)))

    return refuse


def _number(code: Any) -> int:
    return int(code.value[0] if isinstance(code, grpc.StatusCode) else code)


def _text(details: str | bytes) -> str:
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else details
