"""A small model served from a thread or a process, for the tests of the server and its clients."""

import asyncio
import contextlib
import http.client
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from falconet.data.preprocessing import Preprocessing
from falconet.infer.classifier import Classifier
from falconet.infer.predictor import Lanes, Predictor
from falconet.models import zoo
from falconet.numerics.precision import REGIMES
from falconet.serve import app, connections, grpc_access, grpc_service
from falconet.serve.access import OPEN
from falconet.serve.batching import Policy
from falconet.serve.bodies import Memory
from falconet.serve.interface import descriptors
from falconet.serve.prometheus import Metrics
from falconet.serve.protocol import HEADER, Served
from falconet.serve.repository import Opened, Repository
from falconet.serve.telemetry import Telemetry

try:
    descriptors.read()
except descriptors.NotBuiltError:  # the package was installed before the interface was changed
    descriptors.build(descriptors.HERE)

SIDE, CLASSES = 8, 5
NAME = "resnet8-cifar"
PATH = f"/v2/models/{NAME}/infer"
LIMIT = 100  # seconds; far more than any test needs


def until(condition):
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def small_classifier(precision="32.32"):
    device, regime = torch.device("cpu"), REGIMES[precision]
    model = zoo.build(NAME, classes=CLASSES, seed=0).train()
    with torch.no_grad():  # statistics other than 0 and 1, so that a forgotten `eval` shows
        model(torch.randn(64, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)))
    return Classifier(
        name=NAME,
        model=regime.prepare(model, device).eval(),
        preprocessing=Preprocessing(image_size=SIDE, resize=9, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        class_names=tuple("abcde"),
        regime=regime,
        device=device,
    )


def pixels(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)


def about(max_batch=8, name=NAME, version="1"):
    classifier = small_classifier()
    return Served(
        name=name,
        version=version,
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        output="float32",
        max_batch=max_batch,
    )


def decoded(encoded):
    """A photo whose bytes are its pixels."""
    return np.frombuffer(encoded, dtype=np.uint8).reshape(SIDE, SIDE, 3)


class Held:
    """A lane that waits until it is released."""

    def __init__(self):
        self.lane = Predictor(small_classifier(), max_batch=8).lanes()[0]
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self, portions):
        self.begun.release()
        assert self.go.wait(LIMIT)
        return self.lane(portions)


class Running:
    """A server in a thread of this process."""

    def __init__(
        self,
        lane,
        *,
        max_batch=8,
        max_delay=0.02,
        max_queue=64,
        memory=1 << 30,
        drain_seconds=LIMIT,
        seconds=LIMIT,
        decode=decoded,
        access=OPEN,
        telemetry=None,
        identity=None,
        most_bytes=None,
        may_load=False,
        sources=dict,
    ):
        self.served = about(max_batch)
        policy = Policy(max_batch=max_batch, max_delay=max_delay, max_queue=max_queue)
        telemetry = telemetry or Telemetry(Metrics())
        self.repository = Repository(sources=sources, policy=lambda _: policy, executed=telemetry.metrics.add_batch)
        self.repository.adopt(NAME, Opened(self.served, Lanes(each=(lane,)), decode, stamp=0, about=""))
        (self.model,) = self.repository.models
        self.batcher = self.model.batcher
        self.memory = Memory(memory)
        limits = {"memory": self.memory, "seconds": seconds, "may_load": may_load}
        self.front = app.FrontEnd(self.repository, most_body=1 << 20, access=access, telemetry=telemetry, **limits)
        self.service, self.most_bytes = None, most_bytes  # gRPC is served if that is given
        if most_bytes is not None:
            self.reserved = connections.Address(host="127.0.0.1", port=0).open()
            self.grpc = f"127.0.0.1:{self.reserved.getsockname()[1]}"
            self.service = grpc_service.GrpcService(self.repository, **limits)
        self._started = threading.Event()
        self.tls = None if identity is None else identity.context
        self.security = grpc_service.Security(
            credentials=None if identity is None else grpc_access.credentials(identity),
            interceptors=[grpc_access.Guard(access.keys, telemetry)],
        )
        self.drain_seconds, self.cut = drain_seconds, None
        self.socket = connections.Address(host="127.0.0.1", port=0).open()
        self.port = self.socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.connections, connection = [], self.front.connection  # the server's side of each, in their order
        self.front.connection = lambda *given: self.connections.append(connection(*given)) or self.connections[-1]
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._started.wait(LIMIT)

    async def _run(self):
        async with contextlib.AsyncExitStack() as stack:
            drains = []
            if self.service is not None:
                beside = grpc_service.answering(
                    self.service,
                    self.reserved,
                    most_bytes=self.most_bytes,
                    drain_seconds=self.drain_seconds,
                    security=self.security,
                )
                drains.append(await stack.enter_async_context(beside))
            async with connections.answering(
                self.front, self.socket, drain_seconds=self.drain_seconds, tls=self.tls
            ) as cut:
                self._started.set()
                await self._stop.wait()
                draining = [asyncio.ensure_future(drain()) for drain in drains]
            cut += await asyncio.gather(*draining)
        self.cut = sum(cut)
        await asyncio.sleep(0.01)  # let the last connections close
        await asyncio.get_running_loop().shutdown_default_executor()

    def call(self, do):
        """Do something in the server's thread."""
        self._loop.call_soon_threadsafe(do)

    def ask_to_stop(self):
        self.call(self._stop.set)

    def close(self):
        self.ask_to_stop()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        self.batcher.close()
        self.repository.close()
        self._loop.close()

    def request(self, body, headers=None, *, method="POST", path=PATH):
        """Send a request; return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        with contextlib.closing(connection):
            connection.request(method, path, body=body, headers=headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def refuses_connections(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was waiting to be accepted when the port was closed
            return False
        return False

    def scores(self, images):
        status, headers, answer = self.request(*binary(images))
        assert status == 200, answer
        length = int(headers[HEADER])
        (output,) = json.loads(answer[:length])["outputs"]
        return np.frombuffer(answer[length:], dtype=np.float32).reshape(output["shape"])


@contextlib.contextmanager
def nothing_logged():
    """Require the server's log to stay empty within the context."""
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    loggers = [logging.getLogger(name) for name in ("falconet.serve", "asyncio", "aiohttp", "grpc")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert [record.getMessage() for record in logged] == []


@contextlib.contextmanager
def running(lane=None, **options):
    if lane is None:
        (lane,) = Predictor(small_classifier(), max_batch=options.get("max_batch", 8)).lanes()
    found = Running(lane, **options)
    try:
        yield found
    finally:
        found.close()


def binary(images):
    """Body and headers of a request with a binary tensor."""
    tensor = {
        "name": "input_0",
        "shape": list(images.shape),
        "datatype": "UINT8",
        "parameters": {"binary_data_size": images.nbytes},
    }
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return text + images.tobytes(), {HEADER: str(len(text))}


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


def received(connection):
    """Everything until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            answer += more
    return answer


def answers(raw, *, partial=False):
    """Status, headers and content of each answer in these bytes, which must be JSON; `partial`: the last may be cut."""
    found = []
    while raw:
        head, end, rest = raw.partition(b"\r\n\r\n")
        first, *fields = head.decode("ascii").split("\r\n")
        if first == "HTTP/1.1 100 Continue":
            raw = rest
            continue
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        length = int(headers.get("content-length", 0))
        if partial and (not end or len(rest) < length):
            break
        assert len(rest) >= length > 0
        found.append((int(first.split()[1]), headers, json.loads(rest[: int(headers.get(HEADER.lower(), length))])))
        raw = rest[length:]
    return found


def infer(images, *, model=NAME):
    """A whole request as bytes: headers and body."""
    body, headers = binary(images)
    fields = {"Host": "localhost", "Content-Length": len(body), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{head}\r\n".encode(), body


@contextlib.contextmanager
def served(line):
    """A process of `falconet serve`, its port, and the lines before it was ready."""
    argv = [sys.executable, "-m", "falconet", "serve", *line.split()]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for text in process.stdout:
            lines.append(text)
            if found := re.search(r"^drop photos on https?://127\.0\.0\.1:(\d+), ", text):
                break
        else:
            pytest.fail(f"exit code {process.wait()}: {lines} {process.stderr.read()}")
        yield process, int(found[1]), lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
