"""The gRPC server: the Open Inference Protocol's methods and health checks, in the HTTP server's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format

from falconet.errors import ConfigError, UserError, printable
from falconet.serve import bodies, grpc_messages, protocol, records
from falconet.serve.bodies import Memory
from falconet.serve.connections import GLANCE_SECONDS, Drain, log_failure
from falconet.serve.grpc_messages import HEALTH, SERVICE, Split, message, parsed
from falconet.serve.refusals import (
    OverloadedError,
    RefusedError,
    RequestError,
    SlowError,
    UnavailableError,
    UnknownModelError,
)
from falconet.serve.repository import Repository, require_control

AT_ONCE = 4 << 10  # bytes; a message of at most this size, without raw tensors, needs no other thread
RECEIVING = 32  # requests that are received at once, each of up to the largest size; further ones wait
MOST_STREAMS = 64  # open at once; each may hold an incomplete request of the largest size
MOST_AHEAD = 16  # requests of one stream computed at once; the stream is not read further meanwhile
IDLE_SECONDS = 600  # before a connection without calls is closed; clients reconnect by themselves
ALIVE_SECONDS = 75  # between two pings to a silent client
SPARE_SECONDS = 1.0  # to send the last answers after a drain
RETRY = (("grpc-retry-pushback-ms", "1000"),)  # what HTTP calls Retry-After
CODES = {  # by HTTP's status; 429 is UNAVAILABLE in gRPC's own table, and clients retry it
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.INVALID_ARGUMENT,  # not DEADLINE_EXCEEDED: the client's own deadline has not passed
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,  # gRPC's own answer to a message that is too large
    429: grpc.StatusCode.UNAVAILABLE,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
Call = Callable[[Any], Awaitable[Any]]  # a message -> its answer
_T = TypeVar("_T")


class GrpcService:
    """Answers gRPC calls with the models of a repository; belongs to one event loop."""

    def __init__(self, repository: Repository, *, memory: Memory, seconds: float, may_load: bool = False) -> None:
        """`seconds`: until a request is late; `may_load`: whether clients may load models."""
        self._repository, self._memory, self._seconds, self._may_load = repository, memory, seconds, may_load
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="protobuf")
        self._inferring, self._asking = asyncio.Semaphore(RECEIVING), asyncio.Semaphore(RECEIVING)
        self._readers: set[asyncio.Task[None]] = set()  # of open streams
        self._in_progress = 0  # requests for inference
        self.is_ready = True  # until the server is asked to stop

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The handlers of all methods.

        Each is declared to take a stream, which makes no difference to clients. For any other, gRPC would receive the
        message before it calls the handler, without limits on how many are received, or for how long.
        """
        answers: dict[str, dict[str, Call]] = {
            SERVICE: {
                "ServerLive": self._server_live,
                "ServerReady": self._server_ready,
                "ModelReady": self._model_ready,
                "ServerMetadata": self._server_metadata,
                "ModelMetadata": self._metadata,
                "ModelConfig": self._config,
                "ModelStatistics": self._statistics,
                "RepositoryIndex": self._index,
                "RepositoryModelLoad": self._load,
                "RepositoryModelUnload": self._unload,
            },
            HEALTH: {"Check": self._check},
        }
        handlers: dict[str, dict[str, grpc.RpcMethodHandler]] = {
            service: {name: self._method(grpc_messages.request_of(service, name), call) for name, call in calls.items()}
            for service, calls in answers.items()
        }
        handlers[SERVICE]["ModelInfer"] = grpc.stream_unary_rpc_method_handler(self._infer)
        handlers[SERVICE]["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return [grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items()]

    def close(self) -> None:
        """Let the parsing thread end, after the last request."""
        self._parsing.shutdown(wait=False)

    async def drained(self, seconds: float) -> int:
        """Finish requests in progress and take no more from open streams; return how many were not finished."""
        self.is_ready = False
        for reader in self._readers:
            reader.cancel()
        until = asyncio.get_running_loop().time() + seconds
        while self._in_progress and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(GLANCE_SECONDS)
        return self._in_progress

    def _method(self, kind: Any, call: Call) -> grpc.RpcMethodHandler:
        async def answered(_: object, context: Any) -> bytes:
            async with _refusing(context):
                return bytes((await call(parsed(kind, await _received(context, self._asking)))).SerializeToString())

        return grpc.stream_unary_rpc_method_handler(answered)

    # Health and metadata.

    async def _server_live(self, _: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _: Any) -> Any:
        return message("ServerReadyResponse")(ready=self._works())

    async def _check(self, request: Any) -> Any:
        if request.service not in ("", SERVICE):
            raise UnknownModelError(f"there is no service '{request.service[: protocol.SHOWN]}'; this is {SERVICE}")
        kind = message("HealthCheckResponse", "grpc.health.v1")
        return kind(status="SERVING" if self._works() else "NOT_SERVING")

    def _works(self) -> bool:
        return self.is_ready and all(model.works for model in self._repository.models)

    async def _model_ready(self, request: Any) -> Any:
        try:
            ready = self.is_ready and (await self._repository.find(request.name, request.version)).works
        except (UnknownModelError, UnavailableError):  # clients ask until it is loaded
            ready = False
        return message("ModelReadyResponse")(ready=ready)

    async def _server_metadata(self, _: Any) -> Any:
        return _message("ServerMetadataResponse", protocol.server_metadata())

    async def _metadata(self, request: Any) -> Any:
        found = await self._repository.find(request.name, request.version)
        return _message("ModelMetadataResponse", protocol.metadata(found.served))

    async def _config(self, request: Any) -> Any:
        found = await self._repository.find(request.name, request.version)
        return _message("ModelConfigResponse", {"config": found.configuration()})

    async def _statistics(self, request: Any) -> Any:
        models = self._repository.models
        asked = [await self._repository.find(request.name, request.version)] if request.name else models
        return _message("ModelStatisticsResponse", {"model_stats": [model.statistics() for model in asked]})

    # The repository of models.

    async def _index(self, request: Any) -> Any:
        listed = [each for each in await self._repository.indexed() if each.state == "READY" or not request.ready]
        return _message("RepositoryIndexResponse", {"models": [each._asdict() for each in listed]})

    async def _load(self, request: Any) -> Any:
        require_control(self._may_load)
        for name in request.parameters:
            raise RequestError(
                f"parameters: got {name[: protocol.SHOWN]!r}, expected none; a run has its own configuration"
            )
        await self._repository.load(request.model_name)
        return message("RepositoryModelLoadResponse")()

    async def _unload(self, request: Any) -> Any:
        require_control(self._may_load)
        await self._repository.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    # Inference.

    async def _infer(self, _: object, context: Any) -> bytes:
        async with _refusing(context):
            with self._counted():
                body = await _received(context, self._inferring)
                return bytes((await self._answer(body, context.time_remaining())).SerializeToString())

    async def _stream(self, _: object, context: Any) -> None:
        """Answer a stream in the order of its requests, which are computed side by side."""
        async with _refusing(context):
            if len(self._readers) >= MOST_STREAMS:
                raise OverloadedError(f"{MOST_STREAMS} streams are open; try again later")
            answers: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
            ahead = asyncio.Semaphore(MOST_AHEAD)
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(context, ahead, answers, group))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
                while (answer := await answers.get()) is not None:
                    written = (await answer).SerializeToString()
                    await context.write(written)
                    records.note_sent(len(written))
                    ahead.release()
            if reader.cancelled():
                raise UnavailableError("the server is stopping")

    async def _read(
        self,
        context: Any,
        ahead: asyncio.Semaphore,
        answers: "asyncio.Queue[asyncio.Task[Any] | None]",
        group: asyncio.TaskGroup,
    ) -> None:
        """Start an answer to each request in a stream; None marks its end."""
        try:
            while await ahead.acquire() and (body := await context.read()) is not grpc.aio.EOF:
                records.note_received(len(body))
                answers.put_nowait(group.create_task(self._streamed(body, context)))
        finally:
            answers.put_nowait(None)

    async def _streamed(self, body: bytes, context: Any) -> Any:
        """The answer to a request in a stream; a refusal does not end the stream."""
        kind = message("ModelStreamInferResponse")
        try:
            with self._counted():
                answer = await self._answer(body, context.time_remaining())
        except RefusedError as error:
            log_failure(error)
            return kind(error_message=printable(str(error)), infer_response={"id": grpc_messages.id_of(body)})
        answer.parameters["triton_final_response"].bool_param = True  # each request has only one response
        return kind(infer_response=answer)

    async def _answer(self, body: bytes, remaining: float | None) -> Any:
        """The answer as a ModelInferResponse; `remaining`: seconds until the call's deadline."""
        received = asyncio.get_running_loop().time()
        with self._memory.held(len(body)):
            sent = grpc_messages.split(body)
            request = await self._apart(sent, grpc_messages.read_message, sent)
            with (await self._repository.find(request.model_name, request.model_version)).used() as model:
                asked = await self._apart(sent, grpc_messages.read_request, request, sent.raw, model.served)
                seconds = min(self._seconds, *(each for each in (remaining, asked.seconds) if each is not None), 1e9)
                computed = await model.computed(asked.images, deadline=received + seconds)
                return grpc_messages.write_answer(computed.scores, asked, model.served)

    async def _apart(self, sent: Split, work: Callable[..., _T], *parameters: object) -> _T:
        """Do work on a long message in a thread, because a long list of numbers would stop all other requests."""
        if len(sent.rest) <= AT_ONCE:
            return work(*parameters)
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work, *parameters)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1


async def _received(context: Any, slots: asyncio.Semaphore) -> bytes:
    """Receive the message of a call that has one."""
    try:
        async with asyncio.timeout(bodies.SECONDS), slots:
            body = await context.read()
    except TimeoutError:
        raise SlowError(f"the request was not received in {bodies.SECONDS:g} s") from None
    if body is grpc.aio.EOF:
        raise RequestError("the call ended without a request")
    records.note_received(len(body))
    return bytes(body)


@contextlib.asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    """End the call with the status of a refusal that is raised within the context."""
    try:
        yield
    except RefusedError as error:
        log_failure(error)
        records.note_refusal(error)  # with the same word as over HTTP
        retry = RETRY if isinstance(error, OverloadedError) else ()
        await _abort(context, CODES[error.status], error, retry)
    except UserError as error:  # a model that cannot be loaded
        records.note_refusal(error)
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)


async def _abort(
    context: Any, code: grpc.StatusCode, error: Exception, trailing: Sequence[tuple[str, str]] = ()
) -> None:
    """End a call; one that has ended, as after a message that gRPC itself refused, was cancelled."""
    try:
        await context.abort(code, printable(str(error)), trailing)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _message(name: str, content: dict[str, Any]) -> Any:
    """The message for what HTTP answers as JSON; gRPC's has fewer fields."""
    return json_format.ParseDict(content, message(name)(), ignore_unknown_fields=True)


@dataclass(frozen=True, kw_only=True)
class Security:
    """Who may connect, and how."""

    credentials: grpc.ServerCredentials | None = None  # None: no encryption
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()  # see each call before its handler


OPEN = Security()


@contextlib.asynccontextmanager
async def answering(
    service: GrpcService,
    reserved: socket.socket,
    *,
    most_bytes: int,
    drain_seconds: float,
    security: Security = OPEN,
) -> AsyncIterator[Drain]:
    """Answer calls within the context, at the address of a socket, which is closed: gRPC opens its own.

    The yielded function refuses further calls, finishes those in progress, and returns how many were cut.
    """
    options = [
        ("grpc.so_reuseport", 0),  # otherwise a second server could take half of the calls, unnoticed
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", round(ALIVE_SECONDS * 1000)),
    ]
    server = grpc.aio.server(options=options, interceptors=tuple(security.interceptors))
    server.add_generic_rpc_handlers(tuple(service.handlers()))
    host, port = reserved.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    reserved.close()
    try:
        if security.credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, security.credentials)
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen on {address}: {printable(str(error))}") from error
    await server.start()

    async def drain() -> int:
        # Refuse calls from now on; the longer time is for those that finish as the drain ends.
        stopping = asyncio.ensure_future(server.stop(drain_seconds + SPARE_SECONDS))
        await asyncio.sleep(0)  # let it begin: once the server says that it is not ready, calls are refused
        cut = await service.drained(drain_seconds)
        if cut:
            await server.stop(0)
        await stopping
        return cut

    try:
        yield drain
    finally:
        await server.stop(0)
        service.close()
