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

from falconet import exits
from falconet.bench.execution import terminated_as_interrupted
from falconet.config.commands import ServeOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.config.options import Serving
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
from falconet.serve.tls import Identity

PORT = 8000
WAITING_BATCHES = 16  # full batches that may wait
MEMORY = 512 << 20  # bytes of all request bodies, or four times the largest body
WATCH_SECONDS = 2.0  # between two looks for newer checkpoints
LAST_SECONDS = 1.0  # for what is computed after the last answer


def run(loaded: Loaded[ServeOptions]) -> int:
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # it would log what is wrong with a client's photo
    keep_freed_memory(os.environ)  # on a GPU, too: the memory of request bodies
    screen, options, before = Screen(), loaded.options, set(threading.enumerate())
    serving, may_load = options.serving, options.models.repository is not None
    address = connections.Address(host=serving.host, port=value_or(serving.port, PORT))
    allowed, metrics = access.from_options(options.access, host=serving.host), Metrics()
    identity = tls.read_identity(options.access.tls_certificate, options.access.tls_key)
    with contextlib.ExitStack() as held:
        listening = held.enter_context(address.open())  # first, because a mistake here is found at once
        reserved = _reserve(serving, listening.getsockname()[1], screen.line)
        if reserved is not None:
            held.enter_context(reserved)
        following = held.enter_context(telemetry.from_options(options.telemetry, metrics, screen.line))
        memory = Memory(max(MEMORY, 4 * (serving.max_body << 20)))
        with terminated_as_interrupted():  # a conversion must not outlive this process
            repository = _repository(loaded, memory, metrics, screen.line)
        front = FrontEnd(
            repository,
            memory=memory,
            most_body=serving.max_body << 20,
            seconds=serving.request_timeout,
            may_load=may_load,
            access=allowed,
            telemetry=following,
        )
        end = "" if identity is None else "s"
        urls = [f"http{end}://{_shown(listening)}", *([f"grpc{end}://{_shown(reserved)}"] if reserved else [])]
        lines = [
            *_exposed(serving.host, allowed, identity),
            *_lines(repository, urls, needs_key=allowed.keys is not None),
        ]

        async def serve() -> Stopped:
            async with contextlib.AsyncExitStack() as running:
                running.callback(end_exports)
                drains: list[Drain] = []
                if reserved is not None:
                    from falconet.serve import grpc_access, grpc_service  # need grpcio, which may be missing

                    security = grpc_service.Security(
                        credentials=None if identity is None else grpc_access.credentials(identity),
                        interceptors=[grpc_access.Guard(allowed.keys, following)],
                    )
                    service = grpc_service.GrpcService(
                        repository, memory=memory, seconds=serving.request_timeout, may_load=may_load
                    )
                    bodies = [each.served.most_bytes for each in repository.models]
                    calls = grpc_service.answering(
                        service,
                        reserved,
                        most_bytes=max([serving.max_body << 20 if may_load else 0, *bodies]),
                        drain_seconds=serving.drain_timeout,
                        security=security,
                    )
                    drains.append(await running.enter_async_context(calls))
                if options.models.watch:
                    watching = asyncio.ensure_future(repository.watch(seconds=WATCH_SECONDS, say=screen.line))
                    watching.add_done_callback(_log_end)
                    running.callback(watching.cancel)
                return await connections.serve(
                    front,
                    listening,
                    drain_seconds=serving.drain_timeout,
                    started=lambda: _say(screen, lines),
                    tls=None if identity is None else identity.context,
                    drains=drains,
                )

        gc.freeze()  # else each full collection looks at all of torch's objects, and stops every thread meanwhile
        try:
            code, cut = asyncio.run(serve())
        except asyncio.CancelledError:
            code, cut = INTERRUPTED, 0  # the second Ctrl-C
        finally:
            gc.unfreeze()  # nanobind reports what is left at the end as leaks
            repository.close()
        if cut:
            late = counted(cut, "request")
            screen.line(f"cut off {late} that had not finished after {serving.drain_timeout:g} s (--drain-timeout)")
        totals = repository.counts
        batches = counted(totals.executions, "batch")
        screen.line(f"stopped: {counted(totals.requests, 'request')}, {counted(totals.images, 'image')} in {batches}")
    if not _have_ended(set(threading.enumerate()) - before):
        end_exports()  # begun since the last time
        exits.now(code)  # not after a batch that is still being computed, perhaps for ever by a broken device
    return code


def _have_ended(threads: set[threading.Thread]) -> bool:
    """Whether these threads, for which Python would wait at its end, have ended, or do so at once."""
    logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)  # what they compute has no loop to go to
    until = time.monotonic() + LAST_SECONDS
    for thread in threads:
        if not thread.daemon:
            thread.join(max(until - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads if not thread.daemon)


def _log_end(watching: "asyncio.Future[None]") -> None:
    """Log why newer checkpoints are no longer looked for, unless the server is stopping."""
    if not watching.cancelled():
        LOG.error("newer checkpoints are no longer swapped in", exc_info=watching.exception())


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


def _exposed(host: str, allowed: Access, identity: Identity | None) -> list[str]:
    """What others on the network can do."""
    if is_loopback(host):
        return []
    if allowed.keys is None:
        return [f"everyone who can reach {host} may use this server; --api-key-file admits only holders of a key"]
    return ["keys and photos travel unencrypted; --tls-certificate encrypts them"] if identity is None else []


def _reserve(serving: Serving, port: int, say: Say) -> socket.socket | None:
    """A socket at the address of gRPC; None if that is turned off, or if it cannot be had and was not asked for."""
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


def _shown(at: socket.socket) -> str:
    host, port = at.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _lines(repository: Repository, urls: list[str], *, needs_key: bool) -> list[str]:
    """What is served where, and how a photo is sent."""
    url, where = urls[0], " and ".join(urls)
    models = [f"serving {model.served.name} at {where}: {model.about}" for model in repository.models]
    others = sum(each.state != "READY" for each in repository.index())
    if others:
        models.append(f"{counted(others, 'model')} not loaded; POST {url}/v2/repository/models/NAME/load loads one")
    if not repository.models:
        models[:] = [f"serving no model yet at {where}: {models[-1] if models else 'the repository is empty'}"]
    key = ' -H "X-API-Key: $KEY"' if needs_key else ""
    return [*models, f"drop photos on {url}, or: curl{key} --data-binary @photo.jpg {url}/predict; Ctrl-C stops"]


def _say(screen: Screen, lines: list[str]) -> None:
    for line in lines:
        screen.line(line)
