"""A server measured by clients in processes of their own: who starts them, and what their times mean together."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from falconet.bench.client import Job, Outcome
from falconet.errors import ConfigError, WorldError
from falconet.parallel.host import none_left

DROPPED = 2  # first requests of each client, as the originals had it
GRACE = 30.0  # seconds for a process to end when it is asked to
STARTED = re.compile(r"serving (\S+) at (http://\S+?):? ")
SECONDS = 10.0  # for the server to tell what it serves


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model on a server."""

    host: str
    port: int
    base: str  # the path before /v2
    model: str

    @classmethod
    def at(cls, url: str, model: str) -> "Target":
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"--url: got '{url}', wanted an address such as http://127.0.0.1:8000")
        return cls(host=parts.hostname, port=port, base=parts.path.rstrip("/"), model=model)

    @property
    def path(self) -> str:
        return f"{self.base}/v2/models/{self.model}"

    def get(self, end: str = "") -> dict[str, Any]:
        """What the server says about the model."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        where = f"http://{self.host}:{self.port}{self.path}{end}"
        try:
            connection.request("GET", self.path + end)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--url: {where}: {error or type(error).__name__}; wanted a server that runs") from error
        finally:
            connection.close()
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if response.status != 200 or not isinstance(content, dict):
            raise ConfigError(f"--url: {where}: status {response.status}: {' '.join(text[:200].split())}")
        return content


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What a model takes and gives, as its server tells."""

    input: str
    output: str
    image_size: int
    datatype: str  # of the output

    @classmethod
    def of(cls, target: Target) -> "Tensors":
        about = target.get()
        try:
            (taken,), (given,) = about["inputs"], about["outputs"]
            _, channels, height, width = taken["shape"]
            found = cls(input=taken["name"], output=given["name"], image_size=height, datatype=given["datatype"])
            fits = (taken["datatype"], channels, width) == ("UINT8", 3, height) and type(height) is int and height > 0
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ConfigError(
                f"--url: {target.model} takes {about.get('inputs')}, wanted one UINT8 tensor [-1, 3, S, S]"
            )
        return found


@contextlib.contextmanager
def started(argv: Sequence[str]) -> Iterator[Target]:
    """A server of our own, in a process; it is asked to stop at the end."""
    with none_left():
        yield from _started(argv)


def _started(argv: Sequence[str]) -> Iterator[Target]:
    process = subprocess.Popen(
        [sys.executable, "-m", "falconet", *argv],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: None)
    try:
        for line in process.stdout:
            found = STARTED.match(line)
            if found:
                # What it says later must not fill the pipe up.
                reader = threading.Thread(target=process.stdout.read, daemon=True)
                reader.start()
                yield Target.at(found[2], found[1])
                return
        # It has said why on standard error, which is ours.
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


def run_clients(job: Job, clients: int) -> list[Outcome]:
    """What each of several clients saw, who began together; every one ends with this."""
    with none_left():
        return _run_clients(job, clients)


def _run_clients(job: Job, clients: int) -> list[Outcome]:
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(clients):
            processes.append(_start(job))
        ready = [_line(process) for process in processes]
        for number, said in enumerate(ready):
            if said != "ready":
                raise WorldError(f"client {number}: {json.loads(said)['error'] if said else 'ended before it began'}")
        for process in processes:
            _say(process, "go")
        return [_outcome(number, _line(process)) for number, process in enumerate(processes)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _start(job: Job) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "falconet.bench.client"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    _say(process, json.dumps(asdict(job)))
    return process


def _say(process: "subprocess.Popen[str]", line: str) -> None:
    """Tell a client; of one that has ended already, its next line that does not come tells."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _outcome(number: int, text: str) -> Outcome:
    if not text:
        raise WorldError(f"client {number}: ended before its last answer")
    found = Outcome(**json.loads(text))
    if found.error:
        raise WorldError(f"client {number}: {found.error}")
    return replace(found, times=[(sent, answered) for sent, answered in found.times])


@dataclass(frozen=True, kw_only=True)
class Together:
    """The times of all clients: while each of them was at work."""

    latencies: list[float]  # seconds, of every request but the first ones of each client
    spacing: list[float]  # seconds in which `requests` were answered, one stretch after the other
    requests: int


def together(outcomes: Sequence[Outcome], *, in_flight: int) -> Together:
    """Throughput and latency over all clients; `in_flight`: requests of all of them at a time."""
    kept = [outcome.times[min(DROPPED, len(outcome.times) - 1) :] for outcome in outcomes]
    begun = max(times[0][0] for times in kept)
    ended = min(max(answered for _, answered in times) for times in kept)
    answered = sorted(end for times in kept for _, end in times if begun < end <= ended)
    if not answered:  # so few requests that no two clients were at work at the same time
        begun, answered = min(times[0][0] for times in kept), sorted(end for times in kept for _, end in times)
    # Answers come in bursts, as many as were computed together: a stretch has as many as are in flight.
    size = max(1, min(in_flight, len(answered) // 6))
    marks = [begun, *answered[size - 1 :: size]]
    latencies = [end - start for times in kept for start, end in times]
    return Together(latencies=latencies, spacing=[after - before for before, after in pairwise(marks)], requests=size)
