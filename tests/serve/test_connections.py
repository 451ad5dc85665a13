"""Connections of the server: malformed HTTP, slow clients, and a stop that loses no request."""

import asyncio
import base64
import concurrent.futures
import contextlib
import json
import re
import select
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.errors import ConfigError, printable
from falconet.serve import app, bodies, connections
from falconet.serve.access import Access, Keys
from falconet.serve.bodies import Memory
from falconet.serve.refusals import OverloadedError
from falconet.serve.repository import Repository
from served import (
    LIMIT,
    PATH,
    Held,
    answers,
    binary,
    connected,
    infer,
    nothing_logged,
    pixels,
    received,
    running,
    until,
)


@pytest.fixture(scope="module")
def small():
    with running() as found:
        yield found


POST = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
MALFORMED = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no address": (b"GET\r\n\r\n", 400),
    "no such version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no colon": (b"GET /v2 HTTP/1.1\r\nBad Header\r\n\r\n", 400),
    "NUL in a header": (b"GET /v2 HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
    "a broken address": (b"GET http://[::1/v2 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a long header": (b"GET /v2 HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 431),
    "a header without end": (b"GET /v2 HTTP/1.1\r\nA: " + b"x" * 90_000, 431),
    "a long address": (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
    "many headers": (b"GET /v2 HTTP/1.1\r\n" + b"A: x\r\n" * 500 + b"\r\n", 431),
    "a length of letters": (POST + b"Content-Length: abc\r\n\r\n", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a length and chunks": (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "chunks without length": (POST + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\nabc", 400),
    "chunks longer than announced": (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n", 400),
    "another expectation": (POST + b"Connection: close\r\nExpect: x\r\nContent-Length: 1\r\n\r\na", 417),
}


@pytest.mark.parametrize(("sent", "status"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_is_answered_in_json(small, sent, status):
    with nothing_logged(), connected(small.port) as connection:
        connection.sendall(sent)
        ((found, headers, content),) = answers(received(connection))
    assert (found, headers["content-type"]) == (status, "application/json; charset=utf-8")
    assert headers["server"] == "falconet"
    assert list(content) == ["error"]
    assert printable(content["error"]) == content["error"]


ASKED = {  # method, path, headers, status
    "answered": ("GET", "/v2/health/live", {}, 200),
    "a page": ("GET", "/", {}, 200),
    "an unknown address": ("GET", "/nowhere", {"X-Api-Key": "k" * 32}, 404),
    "another method": ("PUT", "/v2", {"X-Api-Key": "k" * 32}, 405),
    "without a key": ("GET", "/v2", {}, 401),
}


def test_no_answer_shows_versions_of_software(monkeypatch):
    with running(access=Access(keys=Keys(["k" * 32]))) as found:
        for method, path, headers, status in ASKED.values():
            got, answered, _ = found.request(None, headers, method=method, path=path)
            assert (got, answered.get_all("Server")) == (status, ["falconet"]), path
        body, headers = binary(pixels(1))
        headers |= {"X-Api-Key": "k" * 32}
        assert found.request(body, headers)[1].get_all("Server") == ["falconet"]
        monkeypatch.setattr(app.protocol, "read_request", lambda *_: 1 / 0)
        status, answered, _ = found.request(body, headers)
        assert (status, answered.get_all("Server")) == (500, ["falconet"])


def test_a_bad_chunk_after_the_answer_is_not_logged(small):
    with nothing_logged(), connected(small.port) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 411")
        connection.sendall(b"ZZZ\r\n")
        assert small.request(None, method="GET", path="/v2/health/live")[0] == 200


def test_a_client_that_leaves_before_it_may_send_its_body_is_not_logged(small):
    with nothing_logged():
        for _ in range(20):
            with connected(small.port) as connection:
                connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert small.request(None, method="GET", path="/v2/health/live")[0] == 200


def test_control_characters_of_a_request_are_escaped_in_the_error(small):
    content = json.loads(small.request(None, method="GET", path="/v2/models/%1b%5b31m%0a%7f")[2])
    assert content["error"].startswith(r"there is no model '\x1b[31m\n\x7f'; this server has")


def test_a_failure_of_the_server_is_json_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(app.protocol, "read_request", lambda *_: 1 / 0)
    with running() as found:
        status, headers, answer = found.request(*binary(pixels(1)))
    assert (status, headers.get_content_type()) == (500, "application/json")
    assert json.loads(answer) == {"error": "internal error, which the server has logged"}
    assert "ZeroDivisionError" in caplog.text


@settings(max_examples=40, deadline=None)
@given(sent=st.binary(min_size=1, max_size=80), proper=st.booleans())
def test_bytes_that_are_not_http_are_refused_and_not_logged(small, sent, proper):
    with nothing_logged(), connected(small.port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall((f"POST {PATH} HTTP/1.1\r\n".encode() if proper else b"") + sent + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1 << 16)
        assert answer == b"" or (answer.startswith(b"HTTP/1.") and answer.split()[1][:1] == b"4")
    assert small.request(None, method="GET", path="/v2/health/live")[0] == 200


def dribble(connection, sent, *, pause=0.02):
    """Send a byte at a time until the server closes the connection; return its answer."""
    for byte in sent:
        try:
            connection.sendall(bytes([byte]))
        except OSError:
            break
        if select.select([connection], [], [], pause)[0]:
            break
    return received(connection)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Half: "], ids=["nothing", "half of the headers"]
)
def test_a_connection_without_a_request_is_closed(monkeypatch, sent):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    with running() as found, connected(found.port) as idle:
        idle.sendall(sent)
        assert idle.recv(1000) == b""


def test_headers_a_byte_at_a_time_are_timed_out(monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    with nothing_logged(), running() as found, connected(found.port) as slow:
        assert dribble(slow, b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"x" * 5000) == b""


def test_a_body_a_byte_at_a_time_is_timed_out(monkeypatch):
    monkeypatch.setattr(bodies, "SECONDS", 0.3)
    with nothing_logged(), running() as found, connected(found.port) as slow:
        slow.sendall(POST + b"Connection: close\r\nContent-Length: 5000\r\n\r\n")
        ((status, _, content),) = answers(dribble(slow, b"x" * 5000))
        assert status == 408
        assert re.fullmatch(r"received only \d+ of 5,000 bytes in [\d.]+ s; send faster, or less", content["error"])


def test_no_request_is_answered_after_one_that_was_too_slow(monkeypatch):
    monkeypatch.setattr(bodies, "SECONDS", 0.3)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.0)
    with nothing_logged(), running() as found, connected(found.port) as slow:
        slow.sendall(POST + b"Content-Length: 5000\r\n\r\n")
        raw = slow.recv(1 << 16)
        slow.sendall(bytes(5000) + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        ((status, headers, _),) = answers(raw + received(slow))
    assert (status, headers["connection"]) == (408, "close")


SLOW = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"  # of at most 1 MiB


def test_slow_clients_take_little_memory():
    with running(memory=1 << 30) as found, contextlib.ExitStack() as stack:
        for _ in range(50):
            slow = stack.enter_context(connected(found.port))
            slow.sendall(SLOW + b"x")
        until(lambda: found.memory._most - found.memory._free == 50 * bodies.STEP)


def test_good_requests_are_answered_while_slow_clients_fill_the_memory(monkeypatch):
    """Four hold all of it and continue a byte at a time; they give way to anything that is sent faster."""
    monkeypatch.setattr(bodies, "STEP_SECONDS", 0.2)
    monkeypatch.setattr(bodies, "SECONDS", LIMIT)  # after which they would be refused for another reason
    good = pixels(8, seed=3)
    stop = threading.Event()

    def dribble_on(connection):
        with contextlib.suppress(OSError):
            while not stop.wait(0.01):
                connection.sendall(b"x")

    with nothing_logged(), running(memory=4_000_000) as found, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(found.port)) for _ in range(4)]
        for each in slow:
            each.sendall(SLOW + bytes(100_000))
        until(lambda: found.memory._free == 0)
        threads = [threading.Thread(target=dribble_on, args=(each,)) for each in slow]
        for each in threads:
            each.start()
        until(lambda: min(body.stuck for body in found.memory._arriving) > bodies.STEP_SECONDS)
        coded = base64.b64encode(pixels(1, seed=4)[0].transpose(1, 2, 0).tobytes()).decode()
        photo = json.dumps({"image": coded})
        numbers = {"name": "input_0", "shape": list(good.shape), "datatype": "UINT8", "data": good.ravel().tolist()}
        text = json.dumps({"inputs": [numbers], "padding": " " * 10_000})
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            answered = [clients.submit(found.request, photo, path="/predict") for _ in range(20)]
            answered += [clients.submit(found.request, text) for _ in range(20)]
            answered += [clients.submit(found.request, *binary(good)) for _ in range(20)]
            assert [each.result(LIMIT)[0] for each in answered] == [200] * 60
        stop.set()
        for each in threads:
            each.join()
        gave_way = [answers(received(each))[0] for each in slow if select.select([each], [], [], 0)[0]]
    assert gave_way
    for status, headers, content in gave_way:
        assert (status, headers["connection"]) == (408, "close")
        assert re.fullmatch(
            r"received only 1\d\d,\d+ of 1,000,000 bytes in [\d.]+ s, and their memory is needed for other requests;"
            r" send faster, or less",
            content["error"],
        )
    assert found.memory._free == found.memory._most


def test_a_body_that_goes_on_does_not_give_way():
    memory = Memory(1 << 20)
    with memory.reserved(1 << 20) as body, memory.may_reclaim(body):
        body.add(bytes(bodies.STEP + 1))
        with pytest.raises(OverloadedError):
            memory.take(1)


def test_a_body_whose_time_is_up_may_still_give_way():
    """Its request is told one turn of the loop later, when another request may already need the memory."""

    async def receive(memory):
        with memory.reserved(bodies.STEP) as body:
            async with body.arriving():
                body._limit.reschedule(0)
                asyncio.get_running_loop().call_soon(memory.reclaim, body)
                await asyncio.sleep(LIMIT)

    memory = Memory(1 << 20)
    with nothing_logged(), pytest.raises(TimeoutError):
        asyncio.run(receive(memory))
    assert memory._free == memory._most


EXPECTING = b"Expect: 100-continue\r\nConnection: close\r\n"
NOT_INVITED = {
    "too large": (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nContent-Length: 9999999\r\n", 413),
    "a tensor too large": (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode() + b"X-API-Key: %s\r\nContent-Length: 9999999\r\n",
        413,
    ),
    "without a key": (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-Other: %s\r\nContent-Length: 9\r\n", 401),
    "another host": (b"POST /predict HTTP/1.1\r\nHost: elsewhere\r\nX-API-Key: %s\r\nContent-Length: 9\r\n", 403),
    "no such address": (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nContent-Length: 9\r\n", 404),
    "no such model": (
        b"POST /predict?model=x HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nContent-Length: 9\r\n",
        404,
    ),
    "another method": (b"PUT /predict HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nContent-Length: 9\r\n", 405),
    "no length": (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\nTransfer-Encoding: chunked\r\n", 411),
}
KEY = b"k" * 16


@pytest.mark.parametrize(("head", "status"), NOT_INVITED.values(), ids=NOT_INVITED)
def test_a_request_that_is_refused_is_not_invited_to_send_its_body(monkeypatch, head, status):
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    access = Access(keys=Keys([KEY.decode()]), hosts=frozenset({"localhost"}))
    with nothing_logged(), running(access=access) as found, connected(found.port) as connection:
        connection.sendall(head % KEY + EXPECTING + b"\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"100 Continue" not in answer


def test_a_request_that_is_not_refused_is_invited_to_send_its_body():
    head, body = infer(pixels(2))
    with nothing_logged(), running() as found, connected(found.port) as connection:
        for _ in range(2):
            connection.sendall(head.replace(b"\r\n\r\n", b"\r\nExpect: 100-Continue\r\n\r\n"))
            assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


def small_buffers(found):
    """A connection that buffers only a few kilobytes in each direction."""
    found.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.settimeout(LIMIT)
    connection.connect(("127.0.0.1", found.port))
    return connection


@pytest.mark.parametrize("classes", [10_000, 1_000_000], ids=["40 kB", "4 MB"])
def test_a_client_that_does_not_read_its_answer_is_disconnected(monkeypatch, classes):
    """The shorter answer leaves the server's handler and waits in the event loop's buffer."""
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.3)

    def lane(portions):
        return [np.zeros((len(portion), classes), dtype=np.float32) for portion in portions]

    with nothing_logged(), running(lane, max_delay=0.0) as found, small_buffers(found) as deaf:
        deaf.sendall(b"".join(infer(pixels(1))))
        closed = select.poll()
        closed.register(deaf, select.POLLHUP)  # and not for bytes to read
        assert closed.poll(1000 * LIMIT)


def test_a_client_that_reads_its_answer_slowly_gets_all_of_it():
    def lane(portions):
        return [np.zeros((len(portion), 20_000), dtype=np.float32) for portion in portions]

    with nothing_logged(), running(lane, max_delay=0.0) as found, small_buffers(found) as slow:
        slow.sendall(b"".join(infer(pixels(1))))
        found.ask_to_stop()
        answer = b""
        while more := slow.recv(1000):
            answer += more
            time.sleep(0.002)
        assert len(answer) > 4 * 20_000
        assert answers(answer)[0][0] == 200


def test_a_request_half_sent_before_the_stop_is_answered():
    head, body = infer(pixels(8))
    with nothing_logged(), running() as found, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connected(found.port)) for _ in range(6)]
        for half in halves:
            half.sendall(head + body[:100])
        found.ask_to_stop()
        until(found.refuses_connections)
        time.sleep(0.2)
        for half in halves:
            half.sendall(body[100:])
        for half in halves:
            ((status, headers, _),) = answers(received(half))
            assert (status, headers["connection"]) == (200, "close")
    assert found.cut == 0


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.02, 0.1])
def test_a_stop_under_load_answers_every_request_that_it_has_read(delay):
    """Clients send one request after another; the last one of each is answered in full or was not read at all."""
    head, body = infer(pixels(2))

    def ask_until_closed(port):
        try:
            with connected(port) as connection:
                while True:
                    connection.sendall(head)
                    connection.sendall(body)
                    answer = b""
                    while not answers(answer, partial=True):
                        more = connection.recv(1 << 16)
                        if not more:
                            return answer
                        answer += more
                    ((status, headers, _),) = answers(answer)
                    assert status == 200
                    if headers.get("connection") == "close":
                        return received(connection)
        except ConnectionError:
            return b""

    with (
        nothing_logged(),
        concurrent.futures.ThreadPoolExecutor(8) as threads,
        running(max_delay=0.0) as found,
    ):
        clients = [threads.submit(ask_until_closed, found.port) for _ in range(8)]
        until(lambda: found.batcher.counts.requests >= 8)
        time.sleep(delay)
        found.ask_to_stop()
        assert [client.result(LIMIT) for client in clients] == [b""] * 8
    assert found.cut == 0


def test_idle_connections_are_closed_by_the_stop_and_others_learn_that_it_is_not_ready():
    head, body = infer(pixels(8))
    ready = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        nothing_logged(),
        running() as found,
        connected(found.port) as busy,
        connected(found.port) as idle,
        connected(found.port) as new,
    ):
        busy.sendall(head + body[:100])
        idle.sendall(ready)
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        found.ask_to_stop()
        assert received(idle) == received(new) == b""
        busy.sendall(body[100:] + ready)
        (first, _, _), (second, headers, content) = answers(received(busy))
        assert (first, second, content, headers["connection"]) == (200, 503, {"ready": False}, "close")


def test_requests_that_outlast_the_drain_are_cut_and_counted():
    head, body = infer(pixels(8))
    with nothing_logged(), running(drain_seconds=0.3) as found, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(found.port)) for _ in range(3)]
        for one in slow:
            one.sendall(head + body[:100])
        idle = stack.enter_context(connected(found.port))
        found.ask_to_stop()
        assert [received(one) for one in (*slow, idle)] == [b""] * 4
    assert found.cut == 3


def test_shutdown_finishes_requests_in_progress_and_accepts_no_more():
    held = Held()
    with running(held, max_delay=0.0) as found, concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(found.scores, pixels(8, seed=number)) for number in range(2)]
        assert held.begun.acquire(timeout=LIMIT)
        until(lambda: found.batcher.waiting == 8)
        found.ask_to_stop()
        until(lambda: found.refuses_connections())
        held.go.set()
        for answer in answers:
            assert answer.result(LIMIT).shape == (8, 5)


async def let_go(turns):
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_arrives_during_shutdown_is_closed_quietly(turns):
    """It arrives `turns` of the loop before the end, so that it is seen, accepted, or about to be served."""
    reported = []

    async def stopped():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        listening = connections.Address(host="127.0.0.1", port=0).open()
        address = listening.getsockname()
        repository = Repository(sources=dict, policy=pytest.fail)
        front = app.FrontEnd(repository, memory=Memory(1), most_body=1, seconds=LIMIT)
        async with connections.answering(front, listening, drain_seconds=LIMIT):
            await let_go(10)  # until the server waits for connections
            connection = socket.create_connection(address, timeout=LIMIT)
            await let_go(turns)
        return connection

    with asyncio.run(stopped()) as connection, contextlib.suppress(ConnectionResetError):
        assert not reported
        assert connection.recv(1) == b""


def test_an_unusable_address_is_refused_in_one_line():
    with connections.Address(host="127.0.0.1", port=0).open() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"^cannot listen on '127.0.0.1': port {port} is in use; choose another port"
        ):
            connections.Address(host="127.0.0.1", port=port).open()
    with pytest.raises(ConfigError, match=r"^cannot listen on 'no.such.host.invalid': "):
        connections.Address(host="no.such.host.invalid", port=0).open()
