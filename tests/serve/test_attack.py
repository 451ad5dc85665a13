"""Hostile clients: JSON made to stall the server, and randomly damaged requests, all on the loopback address."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import re
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from falconet.errors import printable
from falconet.serve import app, json_body
from falconet.serve.protocol import HEADER, MOST_JSON, read_request
from falconet.serve.refusals import RequestError
from served import LIMIT, PATH, SIDE, about, answers, binary, connected, infer, pixels, running, served

SERVER = (
    f"--model resnet8-cifar --image-size {SIDE} --classes 5 --port 0 --threads 1 --device cpu --max-batch 8"
    " --engine torch"
)
LIVE = "/v2/health/live"
FUZZ_SECONDS = 40.0


def filled(unit, size=MOST_JSON - 1000):
    """A body of this many bytes that repeats a text."""
    return b'{"inputs": [' + (unit * (size // len(unit) + 1))[: size - 12]


def with_data(text):
    return json.dumps({"inputs": [PIXELS | {"data": "HERE"}]}).encode().replace(b'"HERE"', text)


IMAGES = 8 * 3 * SIDE * SIDE
PIXELS = {"name": "input_0", "shape": [8, 3, SIDE, SIDE], "datatype": "UINT8"}
HOSTILE = {
    "empty lists": filled(b"[],"),
    "empty objects": filled(b"{},"),
    "nested lists": filled(b"[[1]],"),
    "texts": filled(b'"a",'),
    "open brackets": filled(b"["),
    "many keys": filled(b'{"data":[1]},'),
    "too many numbers": with_data(b"[" + b"1," * 2_090_000 + b"1]"),
    "white space": with_data(b"[" + b"1," * (IMAGES - 1) + b" " * 4_000_000 + b"256]"),
    "numbers in the wrong places": with_data(b"[1" + b"[,]" * 1_390_000 + b"]"),
    "large numbers": with_data(b"[" + b"9" * 4_000_000 + b"]"),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_takes_little_memory(body):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            read_request(memoryview(body), None, about())
        assert tracemalloc.get_traced_memory()[1] < 15 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_the_interpreters_parser_reads_only_a_little_of_hostile_json(body, monkeypatch):
    """It stops all other threads meanwhile: for these bodies, half a second."""
    read, lengths = json.loads, []

    def watched(text, **options):
        lengths.append(len(text))
        return read(text, **options)

    monkeypatch.setattr(json_body.json, "loads", watched)
    with pytest.raises(RequestError):
        read_request(memoryview(body), None, about())
    assert sum(lengths) <= json_body.MOST_REST


def test_health_is_answered_while_hostile_json_is_read(monkeypatch):
    begun, go = threading.Semaphore(0), threading.Event()

    def held(*given):
        begun.release()
        assert go.wait(LIMIT)
        return read_request(*given)

    monkeypatch.setattr(app.protocol, "read_request", held)
    bodies = [HOSTILE[name] for name in ("empty lists", "nested lists", "too many numbers")] * 2
    with running() as found, concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
        attack = [threads.submit(found.request, body) for body in bodies]
        assert begun.acquire(timeout=LIMIT)
        assert found.request(None, method="GET", path=LIVE)[0] == 200
        go.set()
        assert {one.result()[0] for one in attack} == {400}


def memory(process, name):
    """The memory of a process in MiB: VmRSS is the current one, VmHWM the peak."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) / 1024


@pytest.mark.slow
@pytest.mark.dist
def test_twenty_clients_with_hostile_json_do_not_fill_the_memory_of_a_server_that_goes_on_answering():
    latencies, statuses, stop = [], [], threading.Event()

    def ask(port, method, path, body=None):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            return response.status

    def probe(port):
        while not stop.is_set():
            started = time.monotonic()
            assert ask(port, "GET", LIVE) == 200
            latencies.append(time.monotonic() - started)
            time.sleep(0.005)

    def attack(port):
        for body in HOSTILE.values():
            statuses.append(ask(port, "POST", PATH, body))

    with served(SERVER) as (process, port, _):
        before = memory(process, "VmHWM")
        with concurrent.futures.ThreadPoolExecutor(21) as threads:
            probing = threads.submit(probe, port)
            attacking = [threads.submit(attack, port) for _ in range(20)]
            for one in attacking:
                one.result(LIMIT)
            stop.set()
            probing.result(LIMIT)
        grown = memory(process, "VmHWM") - before
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stderr.read() == ""
    print(
        f"liveness p50 {np.percentile(latencies, 50) * 1e3:.1f} ms, p99 {np.percentile(latencies, 99) * 1e3:.1f} ms,"
        f" max {max(latencies) * 1e3:.1f} ms; memory grew by {grown:.0f} MiB"
    )
    assert set(statuses) <= {400, 429}
    assert latencies
    assert grown < 400  # 20 bodies of 4 MiB in memory and on the way, and one that is read


class Fuzz:
    """Randomly damaged requests, the same for the same seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def request(self):
        """The bytes of one request, rarely a valid one."""
        kind = self.random.choice([self.noise, self.binary, self.json, self.headers, self.get])
        return kind()

    def noise(self):
        return self.random.randbytes(self.random.randrange(1, 300)) + b"\r\n\r\n"

    def get(self):
        path = self.random.choice(["/v2", LIVE, "/v2/health/ready", "/v2/models/resnet8-cifar/stats", "/%00\x7f", "*"])
        return self.damaged(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))

    def headers(self):
        head, body = infer(pixels(1))
        lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        more = [
            f"Content-Length: {self.number()}",
            f"{HEADER}: {self.number()}",
            "Transfer-Encoding: chunked",
            "Expect: 100-continue",
            "Expect: x",
            "Content-Encoding: gzip",
            "Connection: upgrade",
            "Upgrade: websocket",
            "X: " + "x" * self.random.choice([1, 8190, 9000]),
            "\x00: \x1b[31m",
        ]
        for _ in range(self.random.randrange(1, 4)):
            lines.insert(self.random.randrange(1, len(lines) + 1), self.random.choice(more).encode())
        if self.random.random() < 0.5:
            del lines[self.random.randrange(len(lines))]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def binary(self):
        head, body = infer(pixels(self.random.randrange(1, 9)))
        return self.damaged(head) + body if self.random.random() < 0.5 else head + self.damaged(body, same_size=True)

    def json(self):
        tensor = PIXELS | {"data": pixels(8).ravel().tolist()}
        content = {"inputs": [tensor], "id": "x", "parameters": {}, "outputs": [{"name": "output_0"}]}
        where = self.random.choice([content, tensor, content["outputs"][0]])
        where[self.random.choice([*where, "new"])] = self.value(0)
        body = json.dumps(content).encode()
        if self.random.random() < 0.5:
            body = self.damaged(body)
        return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def value(self, depth):
        simple = [None, True, -1, 2**70, 1e400, "\x1b[31m\x00", "\ud800", "x" * 2000, [], {}, [7] * 500]
        if depth > 3 or self.random.random() < 0.5:
            return self.random.choice(simple)
        return self.random.choice(
            [[self.value(depth + 1)] * self.random.randrange(4), {"data": self.value(depth + 1)}, self.deep()]
        )

    def deep(self):
        value = 1
        for _ in range(self.random.choice([20, 100])):
            value = [value]
        return value

    def number(self):
        return self.random.choice([0, 1, -1, 99, 2**31, 2**64, 10**30, "x", "0x1", "1 2", "+5", "\xb2"])

    def damaged(self, text, *, same_size=False):
        changed = bytearray(text)
        for _ in range(self.random.randrange(4)):
            at = self.random.randrange(len(changed))
            if same_size or self.random.random() < 0.5:
                changed[at] = self.random.choice([0, 10, 13, 27, 32, 34, 44, 48, 91, 93, 123, 125, 255])
            elif self.random.random() < 0.5:
                del changed[at : at + self.random.randrange(1, 40)]
            else:
                changed[at:at] = self.random.randbytes(self.random.randrange(1, 40))
            if not changed:
                break
        return bytes(changed)


def exchanged(port, fuzz):
    """Send some requests on one connection, in two pieces; return the answers until it was closed or left."""
    sent = b"".join(fuzz.request() for _ in range(fuzz.random.randrange(1, 4)))
    answer = b""
    with connected(port) as connection, contextlib.suppress(ConnectionError):
        cut = fuzz.random.randrange(len(sent) + 1)
        for piece in (sent[:cut], sent[cut:]):
            connection.sendall(piece)
        connection.settimeout(0.05)  # it may wait for the rest of a body
        with contextlib.suppress(TimeoutError):
            while fuzz.random.random() < 0.95 and (more := connection.recv(1 << 16)):  # else leave before its end
                answer += more
    return answer


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_requests_are_answered_in_json_and_harm_nothing(seed):
    fuzz, seen = Fuzz(seed), {}
    with served(f"{SERVER} --max-delay 0") as (process, port, _):
        for _ in range(200):
            exchanged(port, fuzz)
        before, deadline, rounds = memory(process, "VmRSS"), time.monotonic() + FUZZ_SECONDS / 2, 0
        while time.monotonic() < deadline:
            rounds += 1
            answer = exchanged(port, fuzz)
            if b"Content-Type: text/html" in answer:  # a damaged address may be that of the page
                assert b" 200 OK\r\n" in answer
                continue
            for status, headers, content in answers(answer, partial=True):
                seen[status] = seen.get(status, 0) + 1
                assert 200 <= status < 500, content
                assert headers["content-type"].startswith("application/json") or HEADER.lower() in headers
                if status >= 400:
                    assert list(content) == ["error"]
                    assert printable(content["error"]) == content["error"]
        print(rounds, "connections,", seen)
        assert {200, 400} <= set(seen)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
            body, headers = binary(pixels(2))
            connection.request("POST", PATH, body, headers)
            assert connection.getresponse().status == 200
        assert memory(process, "VmRSS") - before < 50
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stderr.read() == ""
