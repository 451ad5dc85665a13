"""One client process of a load test: `python -m falconet.bench.client` reads a job and prints its times.

It imports only the standard library, numpy and our errors, so that eight clients start in a second and none takes a
core from the server to import torch. The first line of stdin is the job as JSON. The client connects, prints "ready",
and sends its requests after another line of input; the result is one line of JSON. Times are CLOCK_MONOTONIC, which all
processes of a machine share.
"""

import http.client
import json
import math
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from falconet.errors import printable

HEADER = "Inference-Header-Content-Length"
SECONDS = 120.0  # without a byte from the server before a client gives up
FORMATS = {"FP16": np.float16, "FP32": np.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a client is to send."""

    host: str
    port: int
    path: str  # of the model's infer route
    input: str  # names of the model's tensors
    output: str
    images: str  # a .npy file: batches x N x 3 x S x S, uint8; sent in turn
    expected: str | None  # a .npy file: batches x N x classes; None to accept any answer
    tolerance: float  # relative to the largest score of an image
    window: int  # requests in progress at a time
    count: int  # requests in all


@dataclass(kw_only=True)
class Outcome:
    """What a client measured."""

    times: list[tuple[float, float]] = field(default_factory=list)  # seconds: sent, answered
    wrong: int = 0  # answers that differ from the expected ones by more than the tolerance
    apart: float = 0.0  # the largest difference, relative to the largest score of the image
    error: str | None = None


class Client:
    """Sends the requests from several threads."""

    def __init__(self, job: Job) -> None:
        self._job, self._outcome = job, Outcome()
        self._lock, self._next = threading.Lock(), 0
        batches: npt.NDArray[np.uint8] = np.load(job.images)
        self._bodies = [_body(job, batch) for batch in batches]
        self._expected = None if job.expected is None else np.load(job.expected)
        self._connections = [http.client.HTTPConnection(job.host, job.port, timeout=SECONDS) for _ in range(job.window)]

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

    def _ask_all(self, connection: http.client.HTTPConnection) -> None:
        try:
            while (number := self._take()) is not None:
                which = number % len(self._bodies)
                text, pixels = self._bodies[which]
                headers = {HEADER: str(len(text)), "Content-Length": str(len(text) + len(pixels))}
                sent = time.monotonic()
                connection.request("POST", self._job.path, body=iter((text, pixels)), headers=headers)
                response = connection.getresponse()
                answer = response.read()
                answered = time.monotonic()
                if response.status != 200:
                    raise OSError(f"status {response.status}: {printable(answer[:200].decode(errors='replace'))}")
                with self._lock:
                    self._outcome.times.append((sent, answered))
                if self._expected is not None:
                    self._compare(_scores(answer, response.headers.get(HEADER)), self._expected[which])
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


def _scores(answer: bytes, header: str | None) -> npt.NDArray[Any]:
    length = len(answer) if header is None else int(header)
    (output,) = json.loads(answer[:length])["outputs"]
    kind = FORMATS[output["datatype"]]
    flat = np.array(output["data"], dtype=kind) if "data" in output else np.frombuffer(answer[length:], dtype=kind)
    return flat.reshape(output["shape"])


def main() -> None:
    client = Client(Job(**json.loads(sys.stdin.readline())))
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
