"""A load test: start a server, run client processes against it, and combine their times."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

from falconet.bench.client import Job, Outcome
from falconet.errors import ConfigError, WorldError, printable
from falconet.parallel.host import none_left

DROPPED = 2  # first requests of each client, which are not counted
GRACE = 30.0  # seconds for a process to exit after SIGTERM
STARTED = re.compile(r"serving (\S+) at (http://\S+?)(?: and grpc://(\S+?))?:? ")
SECONDS = 10.0  # for the server to answer a query


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model on a server."""

    protocol: Literal["http", "grpc"] = "http"
    host: str
    port: int  # of that protocol
    base: str = ""  # the path before /v2, over HTTP
    model: str

    @classmethod
    def at(cls, url: str, model: str, protocol: Literal["http", "grpc"] = "http") -> "Target":
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"got '{url}', expected an address such as http://127.0.0.1:8000")
        return cls(protocol=protocol, host=parts.hostname, port=port, base=parts.path.rstrip("/"), model=model)

    @property
    def path(self) -> str:
        return f"{self.base}/v2/models/{self.model}"

    def metadata(self) -> dict[str, Any]:
        """The server's description of the model."""
        return self._get() if self.protocol == "http" else self._call("metadata")

    def statistics(self) -> dict[str, Any]:
        """The numbers of images and batches that the server has computed with the model."""
        return self._get("/stats") if self.protocol == "http" else self._call("statistics")

    def _call(self, what: Literal["metadata", "statistics"]) -> dict[str, Any]:
        from falconet.bench import grpc_calls  # needs grpcio, which the command line has checked

        model = grpc_calls.Model(self.host, self.port, self.model)
        try:
            model.connect()
            found = model.metadata(seconds=SECONDS) if what == "metadata" else model.statistics(seconds=SECONDS)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.host}:{self.port}: {error}; expected a gRPC server with {self.model}") from error
        finally:
            model.close()
        return found

    def _get(self, end: str = "") -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        where = f"http://{self.host}:{self.port}{self.path}{end}"
        try:
            connection.request("GET", self.path + end)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{where}: {error or type(error).__name__}; expected a running server") from error
        finally:
            connection.close()
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if response.status != 200 or not isinstance(content, dict):
            raise ConfigError(f"{where}: status {response.status}: {printable(' '.join(text[:200].split()))}")
        return content


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The input and output of a model, from its server's description."""

    input: str
    output: str
    image_size: int
    channels_last: bool  # whether the input is N x S x S x 3, as in an exported model; else N x 3 x S x S
    datatype: str  # of the output

    @classmethod
    def of(cls, target: Target) -> "Tensors":
        about = target.metadata()
        try:
            (taken,), (given,) = about["inputs"], about["outputs"]
            _, *shape = taken["shape"]
            side = shape[1]
            found = cls(
                input=taken["name"],
                output=given["name"],
                image_size=side,
                channels_last=shape != [3, side, side],
                datatype=given["datatype"],
            )
            fits = taken["datatype"] == "UINT8" and shape in ([3, side, side], [side, side, 3])
            fits = fits and type(side) is int and side > 0
        except (KeyError, IndexError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ConfigError(
                f"{target.model} takes {about.get('inputs')}, expected one UINT8 tensor [-1, 3, S, S] or [-1, S, S, 3]"
            )
        return found


@contextlib.contextmanager
def started(argv: Sequence[str], protocol: Literal["http", "grpc"] = "http") -> Iterator[Target]:
    """Run a server in another process, and stop it at the end."""
    with none_left():
        yield from _started(argv, protocol)


def _started(argv: Sequence[str], protocol: Literal["http", "grpc"]) -> Iterator[Target]:
    process = subprocess.Popen(
        [sys.executable, "-m", "falconet", *argv],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # Clients have no key.
        env={name: value for name, value in os.environ.items() if name != "FALCONET_API_KEY"},
    )
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: None)
    try:
        for line in process.stdout:
            found = STARTED.match(line)
            if found:
                # Keep reading, so that its later output cannot fill the pipe.
                reader = threading.Thread(target=process.stdout.read, daemon=True)
                reader.start()
                model, url, address = found.groups()
                if protocol == "grpc" and address is None:
                    raise ConfigError("--protocol grpc: Falconet's server has only HTTP here; expected --server triton")
                yield Target.at(url if protocol == "http" else address, model, protocol)
                return
        # It has explained itself on stderr, which is this process's.
        raise WorldError(f"the server did not start: exit code {process.wait()}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stdout.close()


@contextlib.contextmanager
def cores_apart(count: int) -> Iterator[tuple[int, ...]]:
    """The last `count` cores, for clients; meanwhile, this process and servers that it starts use the others."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"--client-cores: got {count}, expected 0: only Linux gives cores to processes")
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        raise ConfigError(f"--client-cores: got {count} of {len(cores)}, expected at least one left for the server")
    os.sched_setaffinity(0, cores[: len(cores) - count])
    try:
        yield tuple(cores[len(cores) - count :])
    finally:
        os.sched_setaffinity(0, cores)


def run_clients(job: Job, clients: int) -> list[Outcome]:
    """Run several clients that start together; none of them outlives this call."""
    with none_left():
        return _run_clients(job, clients)


def _run_clients(job: Job, clients: int) -> list[Outcome]:
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(clients):
            processes.append(_start(job))
        ready = [_line(process) for process in processes]
        for number, line in enumerate(ready):
            if line != "ready":
                raise WorldError(
                    f"client {number}: {json.loads(line)['error'] if line else 'exited before it was ready'}"
                )
        for process in processes:
            _send(process, "go")
        return [_outcome(number, _line(process)) for number, process in enumerate(processes)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _start(job: Job) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "falconet.bench.client"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    _send(process, json.dumps(asdict(job)))
    return process


def _send(process: "subprocess.Popen[str]", line: str) -> None:
    """Send a line to a client; if it has exited already, its missing answer shows that."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _outcome(number: int, text: str) -> Outcome:
    if not text:
        raise WorldError(f"client {number}: exited before its last answer")
    found = Outcome(**json.loads(text))
    if found.error:
        raise WorldError(f"client {number}: {found.error}")
    return replace(found, times=[(sent, answered) for sent, answered in found.times])


@dataclass(frozen=True, kw_only=True)
class Together:
    """The combined times of all clients, while all of them were sending."""

    latencies: list[float]  # seconds, of every request except the first ones of each client
    spacing: list[float]  # seconds of consecutive stretches, in each of which `requests` were answered
    requests: int


def together(outcomes: Sequence[Outcome], *, in_flight: int) -> Together:
    """Combine the times of all clients; `in_flight` is the number of requests in progress over all of them."""
    kept = [outcome.times[min(DROPPED, len(outcome.times) - 1) :] for outcome in outcomes]
    start = max(times[0][0] for times in kept)
    ended = min(max(answered for _, answered in times) for times in kept)
    answered = sorted(end for times in kept for _, end in times if start < end <= ended)
    if not answered:  # so few requests that the clients did not overlap
        start, answered = min(times[0][0] for times in kept), sorted(end for times in kept for _, end in times)
    # Answers come in bursts, one per batch, so a stretch spans as many requests as are in progress.
    size = max(1, min(in_flight, len(answered) // 6))
    marks = [start, *answered[size - 1 :: size]]
    latencies = [end - sent for times in kept for sent, end in times]
    return Together(latencies=latencies, spacing=[after - before for before, after in pairwise(marks)], requests=size)
