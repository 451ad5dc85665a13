"""One client process of a load test: `python -m falconet.bench.client` reads a job and prints its times.

It imports only the standard library, numpy, our errors and, for gRPC, grpcio, so that eight clients start in a second
and none takes a core from the server to import torch. The first line of stdin is the job as JSON. The client connects,
prints "ready", and sends its requests after another line of input; the result is one line of JSON. Times are
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import http.client
import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from falconet.errors import printable

if TYPE_CHECKING:
    from falconet.bench import grpc_calls

HEADER = "Inference-Header-Content-Length"
SECONDS = 120.0  # without a byte from the server before a client gives up
FORMATS = {"FP16": np.float16, "FP32": np.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The requests that a client sends."""

    protocol: Literal["http", "grpc"] = "http"
    host: str
    port: int
    base: str = ""  # the path before /v2, over HTTP
    model: str
    input: str  # names of the model's tensors
    output: str
    images: str  # a .npy file: batches x N x 3 x S x S, uint8; sent in turn
    expected: str | None  # a .npy file: batches x N x classes; None to accept any answer
    tolerance: float  # relative to the largest score of an image
    window: int  # requests in progress at a time
    count: int  # requests in all
    cores: Sequence[int] = ()  # that it may use; empty: all


@dataclass(kw_only=True)
class Outcome:
    """The measurements of a client."""

    times: list[tuple[float, float]] = field(default_factory=list)  # seconds: sent, answered
    wrong: int = 0  # answers that differ from the expected ones by more than the tolerance
    apart: float = 0.0  # the largest difference, relative to the largest score of the image
    error: str | None = None


class Connection(Protocol):
    """A connection for one request at a time."""

    def connect(self) -> None:
        """Connect; OSError if no server answers."""

    def ask(self, which: int) -> "Answer":
        """Send one of the batches; OSError if the server reports an error."""

    def close(self) -> None:
        """Close the connection."""


class Answer(Protocol):
    """A server's answer before it is parsed, because parsing is not part of the time."""

    def scores(self) -> npt.NDArray[Any]:
        """The scores, N x classes."""


class Client:
    """Sends the requests from several threads."""

    def __init__(self, job: Job) -> None:
        self._job, self._outcome = job, Outcome()
        self._lock, self._next = threading.Lock(), 0
        self._images: npt.NDArray[np.uint8] = np.load(job.images)
        self._expected = None if job.expected is None else np.load(job.expected)
        self._connections = PROTOCOLS[job.protocol](job, self._images)

    def connect(self) -> None:
        for connection in self._connections:
            connection.connect()

    def run(self) -> Outcome:
        threads = [threading.Thread(target=self._ask_all, args=(one,)) for one in self._connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._outcome.times.sort()
        return self._outcome

    def _ask_all(self, connection: Connection) -> None:
        try:
            while (number := self._take()) is not None:
                which = number % len(self._images)
                sent = time.monotonic()
                answer = connection.ask(which)
                answered = time.monotonic()
                with self._lock:
                    self._outcome.times.append((sent, answered))
                if self._expected is not None:
                    self._compare(answer.scores(), self._expected[which])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            with self._lock:
                self._next = self._job.count  # stop the other threads too
                self._outcome.error = self._outcome.error or f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _take(self) -> int | None:
        with self._lock:
            number = self._next
            self._next += 1
        return number if number < self._job.count else None

    def _compare(self, scores: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        apart = difference(scores, expected)
        with self._lock:
            self._outcome.apart = max(self._outcome.apart, apart)
            self._outcome.wrong += not apart <= self._job.tolerance


class HttpConnection:
    """An HTTP connection that is kept open; pixels are sent as they lie in memory."""

    def __init__(self, job: Job, bodies: list[tuple[bytes, memoryview]]) -> None:
        self._path, self._bodies = f"{job.base}/v2/models/{job.model}/infer", bodies
        self._connection = http.client.HTTPConnection(job.host, job.port, timeout=SECONDS)
        self.connect, self.close = self._connection.connect, self._connection.close

    @classmethod
    def all(cls, job: Job, images: npt.NDArray[np.uint8]) -> list[Connection]:
        bodies = [_body(job, batch) for batch in images]
        return [cls(job, bodies) for _ in range(job.window)]

    def ask(self, which: int) -> "HttpAnswer":
        text, pixels = self._bodies[which]
        headers = {HEADER: str(len(text)), "Content-Length": str(len(text) + len(pixels))}
        self._connection.request("POST", self._path, body=iter((text, pixels)), headers=headers)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise OSError(f"status {response.status}: {printable(body[:200].decode(errors='replace'))}")
        return HttpAnswer(body, response.headers.get(HEADER))


class HttpAnswer(NamedTuple):
    """An answer in JSON, perhaps followed by the bytes of a tensor."""

    body: bytes
    header: str | None  # the length of the JSON

    def scores(self) -> npt.NDArray[Any]:
        length = len(self.body) if self.header is None else int(self.header)
        (output,) = json.loads(self.body[:length])["outputs"]
        kind = FORMATS[output["datatype"]]
        if "data" in output:
            return np.array(output["data"], dtype=kind).reshape(output["shape"])
        return np.frombuffer(self.body[length:], dtype=kind).reshape(output["shape"])


class GrpcConnection:
    """A gRPC channel; its messages are encoded once."""

    def __init__(self, model: "grpc_calls.Model", messages: list[bytes]) -> None:
        self._model, self._messages = model, messages
        self.connect, self.close = model.connect, model.close

    @classmethod
    def all(cls, job: Job, images: npt.NDArray[np.uint8]) -> list[Connection]:
        from falconet.bench import grpc_calls  # needs grpcio

        messages = [grpc_calls.request(job.model, batch, input=job.input, output=job.output) for batch in images]
        models = [grpc_calls.Model(job.host, job.port, job.model) for _ in range(job.window)]
        return [cls(model, messages) for model in models]

    def ask(self, which: int) -> "GrpcAnswer":
        return GrpcAnswer(self._model.infer(self._messages[which], seconds=SECONDS))


class GrpcAnswer(NamedTuple):
    """An answer as a message with one tensor."""

    message: bytes

    def scores(self) -> npt.NDArray[Any]:
        from falconet.bench import grpc_calls

        output, raw = grpc_calls.output(self.message)
        return np.frombuffer(raw, dtype=FORMATS[output["datatype"]]).reshape(output["shape"])


PROTOCOLS = {"http": HttpConnection.all, "grpc": GrpcConnection.all}


def difference(scores: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest difference, relative to the image's largest expected score; infinite if shapes differ."""
    if scores.shape != expected.shape:
        return math.inf
    exact = expected.astype(np.float64)
    share = np.abs(scores.astype(np.float64) - exact) / np.abs(exact).max(axis=1, keepdims=True)
    return float(share.max()) if np.isfinite(share).all() else math.inf


def _body(job: Job, batch: npt.NDArray[np.uint8]) -> tuple[bytes, memoryview]:
    tensor = {
        "name": job.input,
        "shape": list(batch.shape),
        "datatype": "UINT8",
        "parameters": {"binary_data_size": batch.nbytes},
    }
    output = {"name": job.output, "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return text, np.ascontiguousarray(batch).reshape(-1).data


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    client = Client(job)
    try:
        client.connect()
    except OSError as error:
        sys.stdout.write(json.dumps({"error": f"cannot connect: {error}"}) + "\n")
        return
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline():  # empty if the parent has exited
        sys.stdout.write(json.dumps(asdict(client.run())) + "\n")


if __name__ == "__main__":
    main()
