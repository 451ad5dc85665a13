"""Long bodies: the system writes them to their place, and the connection continues as if aiohttp had received them."""

import gc
import hashlib
import socket
import threading
import weakref
from operator import itemgetter

import numpy as np
import pytest

from falconet.serve import bodies
from falconet.serve.prometheus import Metrics
from falconet.serve.telemetry import Telemetry
from served import LIMIT, SIDE, answers, connected, nothing_logged, received, running, until

LENGTH = 600_000
PNG = b"\x89PNG\r\n\x1a\n"  # its first bytes


def photo(seed):
    """A request with one photo in a long body: headers and body."""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {LENGTH}\r\n\r\n"
    return head.encode(), PNG + np.random.default_rng(seed).bytes(LENGTH - len(PNG))


def decoded(encoded):
    """Pixels that depend on every byte."""
    digest = hashlib.shake_256(encoded).digest(3 * SIDE * SIDE)
    return np.frombuffer(digest, dtype=np.uint8).reshape(SIDE, SIDE, 3)


LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def in_place(monkeypatch):
    """For each body, the bytes received before the system began to write the rest to its place."""
    begun, receive = [], bodies.InPlace.receive

    def counted(self):
        begun.append(self._body.received)
        return receive(self)

    monkeypatch.setattr(bodies.InPlace, "receive", counted)
    return begun


def asked(port, sent, count, *, piece=1 << 30):
    """Send bytes in pieces on one connection; return the probabilities of all classes in `count` answers."""
    with connected(port) as connection:

        def send():
            for begin in range(0, len(sent), piece):
                connection.sendall(sent[begin : begin + piece])

        sending = threading.Thread(target=send)
        sending.start()
        raw = b""
        while len(found := answers(raw, partial=True)) < count:
            raw += connection.recv(1 << 16)
        sending.join(LIMIT)
    assert [status for status, _, _ in found] == [200] * count
    photos = [content["predictions"][0] for _, _, content in found if "predictions" in content]
    return np.array([[each["probability"] for each in sorted(one["top"], key=itemgetter("label"))] for one in photos])


def alone(port, seeds):
    found = np.concatenate([asked(port, b"".join(photo(seed)), 1) for seed in seeds])
    assert len(np.unique(found.round(3), axis=0)) == len(seeds), "each photo has an answer of its own"
    return found


@pytest.mark.parametrize("piece", [7_001, 1 << 16, 1 << 30])
def test_requests_follow_each_other_on_a_connection(monkeypatch, in_place, piece):
    with running(decode=decoded) as found:
        with monkeypatch.context() as usual:
            usual.setattr(bodies, "LONG", 1 << 30)
            expected = alone(found.port, range(3))
        assert in_place == []
        sent = b"".join(part for seed in range(3) for part in (*photo(seed), LIVE))
        with nothing_logged():
            results = asked(found.port, sent, 6, piece=piece)
        np.testing.assert_allclose(results, expected, atol=1e-5)
    assert 1 <= len(in_place) <= 3  # what has arrived while another is answered stays where it is
    assert all(received < LENGTH for received in in_place)


def test_clients_at_the_same_time_get_their_own_answers(in_place):
    with running(decode=decoded) as found:
        expected = alone(found.port, range(8))
        results = [None] * 8

        def ask(seed):
            results[seed] = asked(found.port, b"".join(photo(seed)) * 3, 3, piece=50_000)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        np.testing.assert_allclose(results, expected[:, None].repeat(3, axis=1), atol=1e-5)
        assert found.memory._free == found.memory._most
    assert len(in_place) > 8


def test_a_record_counts_every_byte(in_place):
    records = []
    with running(telemetry=Telemetry(Metrics(), [records.append]), decode=decoded) as found:
        asked(found.port, b"".join(photo(0)), 1)
    assert [record.bytes_in for record in records] == [LENGTH]
    assert len(in_place) == 1


@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
def test_a_client_that_leaves_in_the_middle_is_recorded(in_place, how):
    records = []
    head, body = photo(0)
    with nothing_logged(), running(telemetry=Telemetry(Metrics(), [records.append])) as found:
        with connected(found.port) as connection:
            connection.sendall(head + body[:400_000])
            until(lambda: any(each.received == 400_000 for each in list(found.memory._arriving)))
            if how == "half closed":
                connection.shutdown(socket.SHUT_WR)
                assert received(connection) == b""
            elif how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        until(lambda: records)
        assert found.memory._free == found.memory._most
    assert [(record.status, record.reason, record.bytes_in) for record in records] == [("499", "client_gone", 400_000)]
    assert len(in_place) == 1


def test_a_body_that_gives_way_is_refused_and_ends_the_connection(in_place):
    head, body = photo(0)
    with nothing_logged(), running() as found, connected(found.port) as slow:
        slow.sendall(head + body[:400_000])
        until(lambda: any(each.received == 400_000 for each in list(found.memory._arriving)))
        (arriving,) = found.memory._arriving
        found.call(lambda: found.memory.reclaim(arriving))
        slow.sendall(body[400_000:500_000])
        ((status, headers, content),) = answers(received(slow))
        assert (status, headers["connection"]) == (408, "close")
        assert content["error"].startswith("received only ")
        assert "their memory is needed for other requests" in content["error"]
        assert found.memory._free == found.memory._most
    assert len(in_place) == 1


def test_a_body_for_which_there_is_no_memory_is_refused_and_ends_the_connection(in_place):
    """The body begins, because only what arrives is counted, and what follows is not taken for a request."""
    head, body = photo(0)
    with nothing_logged(), running(memory=bodies.STEP) as found, connected(found.port) as connection:
        connection.sendall(head + body[:1000])
        until(lambda: len(in_place) == 1)
        connection.sendall(body[1000:] + LIVE)
        ((status, headers, content),) = answers(received(connection))
        assert (status, headers["connection"]) == (429, "close")
        assert content["error"] == "out of memory for request bodies; try again later"
        assert found.memory._free == found.memory._most
        assert found.request(None, method="GET", path="/v2/health/live")[0] == 200


def test_a_refused_body_frees_its_memory_at_once(in_place):
    """It no longer counts, so if it waited for the garbage collector, others would take as much again."""
    head, body = photo(0)
    gc.disable()
    try:
        with running(memory=bodies.STEP) as found, connected(found.port) as connection:
            connection.sendall(head + body[:1000])
            until(lambda: len(in_place) == 1)
            (kept,) = map(weakref.ref, found.memory._arriving)
            connection.sendall(body[1000:])
            ((status, _, _),) = answers(received(connection))
        assert status == 429
        assert kept() is None
    finally:
        gc.enable()


def test_a_body_for_which_the_system_has_no_memory_is_a_failure_of_the_server(monkeypatch, caplog, in_place):
    def fail(body):
        raise MemoryError("of the system")

    records = []
    head, body = photo(0)
    with running(telemetry=Telemetry(Metrics(), [records.append])) as found, connected(found.port) as connection:
        connection.sendall(head + body[:1000])
        until(lambda: len(in_place) == 1)
        monkeypatch.setattr(bodies.Body, "room", fail)
        connection.sendall(body[1000:])
        ((status, headers, content),) = answers(received(connection))
        assert (status, headers["connection"]) == (500, "close")
        assert content["error"] == "internal error, which the server has logged"
        assert found.memory._free == found.memory._most
    assert [record.name for record in caplog.records] == ["falconet.serve"]
    assert "of the system" in caplog.text
    assert [record.status for record in records] == ["500"]
