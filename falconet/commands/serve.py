"""`falconet serve`: serve models over HTTP and gRPC."""

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from falconet import exits
from falconet.bench.execution import terminated_as_interrupted
from falconet.config.commands import ServeOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.config.tool_options import Serving
from falconet.data.encoded import PhotoDecoder
from falconet.errors import ConfigError
from falconet.exits import INTERRUPTED
from falconet.infer.conversion import end_exports
from falconet.parallel.host import keep_freed_memory
from falconet.report.console import Say, Screen, counted
from falconet.serve import access, connections, telemetry, tls  # the command line has checked aiohttp
from falconet.serve.access import Access, is_loopback
from falconet.serve.app import FrontEnd
from falconet.serve.batching import Policy
from falconet.serve.bodies import Memory
from falconet.serve.connections import LOG, Drain, Stopped
from falconet.serve.interface import descriptors
from falconet.serve.prometheus import Metrics
from falconet.serve.protocol import Served
from falconet.serve.repository import Repository
from falconet.serve.served_runs import ServedRuns
from falconet.serve.telemetry import Telemetry
from falconet.serve.tls import Identity

PORT = 8000
WAITING_BATCHES = 16  # full batches that may wait
MEMORY = 512 << 20  # bytes of all request bodies, or four times the largest body
WATCH_SECONDS = 2.0  # between two looks for newer checkpoints
LAST_SECONDS = 1.0  # for what is computed after the last answer


@dataclass(frozen=True, kw_only=True)
class Server:
    """The models, the addresses where they are served, and the limits for clients."""

    options: ServeOptions
    repository: Repository
    listening: socket.socket  # for HTTP
    reserved: socket.socket | None  # for gRPC; None: it is not served
    access: Access
    identity: Identity | None  # None: no encryption
    telemetry: Telemetry
    memory: Memory  # of all request bodies

    @property
    def most_body(self) -> int:
        """The largest body of a request with photos, in bytes."""
        return self.options.serving.max_body << 20

    @property
    def may_load(self) -> bool:
        """Whether clients may load and unload models."""
        return self.options.models.repository is not None


def run(loaded: Loaded[ServeOptions]) -> int:
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # it would log what is wrong with a client's photo
    keep_freed_memory(os.environ)  # on a GPU, too: the memory of request bodies
    screen, before = Screen(), set(threading.enumerate())
    with contextlib.ExitStack() as held:
        code = _serve(_opened(loaded, held, screen.line), screen)
    if not _have_ended(set(threading.enumerate()) - before):
        end_exports()  # those begun since the last call
        exits.now(code)  # not after a batch that is still being computed, perhaps for ever by a broken device
    return code


def _opened(loaded: Loaded[ServeOptions], held: contextlib.ExitStack, say: Say) -> Server:
    """Reserve the addresses, then load the models; `held` closes what must be closed at the end."""
    options, serving, metrics = loaded.options, loaded.options.serving, Metrics()
    allowed = access.from_options(options.access, host=serving.host)
    identity = tls.read_identity(options.access.tls_certificate, options.access.tls_key)
    address = connections.Address(host=serving.host, port=value_or(serving.port, PORT))
    listening = held.enter_context(address.open())  # first, because a mistake here is found at once
    reserved = reserve(serving, listening.getsockname()[1], say)
    if reserved is not None:
        held.enter_context(reserved)
    following = held.enter_context(telemetry.from_options(options.telemetry, metrics, say))
    memory = Memory(max(MEMORY, 4 * (serving.max_body << 20)))
    with terminated_as_interrupted():  # a conversion must not outlive this process
        repository = _repository(loaded, memory, metrics, say)
    return Server(
        options=options,
        repository=repository,
        listening=listening,
        reserved=reserved,
        access=allowed,
        identity=identity,
        telemetry=following,
        memory=memory,
    )


def reserve(serving: Serving, port: int, say: Say) -> socket.socket | None:
    """A socket for gRPC beside HTTP's port; None if it is turned off, or is unavailable and was not asked for."""
    if serving.grpc_port == "none":
        return None
    try:
        if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
            raise ConfigError("needs grpcio and protobuf: pip install 'falconet[serve]'")
        try:
            descriptors.read()
        except descriptors.NotBuiltError as error:
            raise ConfigError(str(error)) from None
        following = 0 if serving.port == 0 else port + 1
        return connections.Address(host=serving.host, port=value_or(serving.grpc_port, following % 65536)).open()
    except ConfigError as error:
        if serving.grpc_port != "auto":
            raise ConfigError(f"--grpc-port: {error}") from error
        say(f"serving over HTTP only, without gRPC: {error}")
        return None


def _repository(loaded: Loaded[ServeOptions], memory: Memory, metrics: Metrics, say: Say) -> Repository:
    """The models of the line, loaded."""
    serving = loaded.options.serving
    runs = ServedRuns(loaded, PhotoDecoder(most_bytes=serving.max_body << 20), say)

    def policy(served: Served) -> Policy:
        most = value_or(serving.max_queue, WAITING_BATCHES * served.max_batch)
        memory.require(4 * served.most_bytes)
        return Policy(
            max_batch=served.max_batch, max_delay=serving.max_delay / 1000, max_queue=max(most, served.max_batch)
        )

    found = Repository(
        sources=runs.known, policy=policy, preferred=next(iter(runs.first), None), executed=metrics.add_batch
    )
    for name, source in runs.first.items():
        found.adopt(name, source.open())
    return found


def _serve(server: Server, screen: Screen) -> int:
    """Serve until the server is told to stop; returns the exit code."""
    front, lines = _front_end(server), _announced(server)
    gc.freeze()  # else each full collection looks at all of torch's objects, and stops every thread meanwhile
    try:
        code, cut = asyncio.run(_answer(server, front, screen, lines))
    except asyncio.CancelledError:
        code, cut = INTERRUPTED, 0  # the second Ctrl-C
    finally:
        gc.unfreeze()  # nanobind reports what is left at the end as leaks
        server.repository.close()
    for line in _totals(server, cut):
        screen.line(line)
    return code


def _front_end(server: Server) -> FrontEnd:
    return FrontEnd(
        server.repository,
        memory=server.memory,
        most_body=server.most_body,
        seconds=server.options.serving.request_timeout,
        may_load=server.may_load,
        access=server.access,
        telemetry=server.telemetry,
    )


async def _answer(server: Server, front: FrontEnd, screen: Screen, lines: Sequence[str]) -> Stopped:
    """Answer over HTTP and gRPC, and swap in newer checkpoints; `lines` are printed when the server has started."""
    async with contextlib.AsyncExitStack() as running:
        running.callback(end_exports)
        drains: list[Drain] = []
        if server.reserved is not None:
            drains.append(await running.enter_async_context(_calls(server, server.reserved)))
        if server.options.models.watch:
            watching = asyncio.ensure_future(server.repository.watch(seconds=WATCH_SECONDS, say=screen.line))
            watching.add_done_callback(_log_end)
            running.callback(watching.cancel)
        return await connections.serve(
            front,
            server.listening,
            drain_seconds=server.options.serving.drain_timeout,
            started=lambda: _say(screen, lines),
            tls=None if server.identity is None else server.identity.context,
            drains=drains,
        )


def _calls(server: Server, reserved: socket.socket) -> contextlib.AbstractAsyncContextManager[Drain]:
    """A context in which gRPC calls are answered, with the function that ends them."""
    from falconet.serve import grpc_access, grpc_service  # need grpcio, which may be missing

    serving, models = server.options.serving, server.repository.models
    security = grpc_service.Security(
        credentials=None if server.identity is None else grpc_access.credentials(server.identity),
        interceptors=[grpc_access.Guard(server.access.keys, server.telemetry)],
    )
    service = grpc_service.GrpcService(
        server.repository, memory=server.memory, seconds=serving.request_timeout, may_load=server.may_load
    )
    return grpc_service.answering(
        service,
        reserved,
        most_bytes=max([server.most_body if server.may_load else 0, *(model.served.most_bytes for model in models)]),
        drain_seconds=serving.drain_timeout,
        security=security,
    )


def _log_end(watching: "asyncio.Future[None]") -> None:
    """Log why newer checkpoints are no longer looked for, unless the server is stopping."""
    if not watching.cancelled():
        LOG.error("newer checkpoints are no longer swapped in", exc_info=watching.exception())


def _have_ended(threads: set[threading.Thread]) -> bool:
    """Whether threads for which Python would wait at its end have ended, or do so within LAST_SECONDS."""
    logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)  # their results have no loop to go to
    until = time.monotonic() + LAST_SECONDS
    for thread in threads:
        if not thread.daemon:
            thread.join(max(until - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads if not thread.daemon)


# What is printed.


def _announced(server: Server) -> list[str]:
    """The first lines: the models, their addresses, and how to send a photo."""
    end = "" if server.identity is None else "s"
    url = f"http{end}://{_shown(server.listening)}"
    where = url if server.reserved is None else f"{url} and grpc{end}://{_shown(server.reserved)}"
    repository = server.repository
    models = [f"serving {model.served.name} at {where}: {model.about}" for model in repository.models]
    others = sum(each.state != "READY" for each in repository.index())
    if others:
        models.append(f"{counted(others, 'model')} not loaded; POST {url}/v2/repository/models/NAME/load loads one")
    if not repository.models:
        models = [f"serving no model yet at {where}: {models[-1] if models else 'the repository is empty'}"]
    key = "" if server.access.keys is None else ' -H "X-API-Key: $KEY"'
    return [
        *exposed(server.options.serving.host, server.access, server.identity),
        *models,
        f"drop photos on {url}, or: curl{key} --data-binary @photo.jpg {url}/predict; Ctrl-C stops",
    ]


def exposed(host: str, allowed: Access, identity: Identity | None) -> list[str]:
    """Warnings about what others on the network can do."""
    if is_loopback(host):
        return []
    if allowed.keys is None:
        return [f"everyone who can reach {host} may use this server; --api-key-file admits only holders of a key"]
    return ["keys and photos travel unencrypted; --tls-certificate encrypts them"] if identity is None else []


def _shown(at: socket.socket) -> str:
    host, port = at.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(screen: Screen, lines: Sequence[str]) -> None:
    for line in lines:
        screen.line(line)


def _totals(server: Server, cut: int) -> list[str]:
    """The last lines: how much was served; `cut`: requests that the end of the server cut off."""
    timeout, totals = server.options.serving.drain_timeout, server.repository.counts
    requests, images = counted(totals.requests, "request"), counted(totals.images, "image")
    late = f"cut off {counted(cut, 'request')} that had not finished after {timeout:g} s (--drain-timeout)"
    return [
        *([late] if cut else []),
        f"stopped: {requests}, {images} in {counted(totals.executions, 'batch')}",
    ]
