"""The application over real connections: right answers, one line for bad requests, and limits on memory."""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.data.image_files import UnreadableImageError
from falconet.infer.predictor import Predictor
from falconet.serve import app, bodies, classification, repository
from falconet.serve.protocol import HEADER, MOST_JSON
from served import (
    LIMIT,
    NAME,
    PATH,
    SIDE,
    Held,
    binary,
    connected,
    decoded,
    nothing_logged,
    pixels,
    running,
    small_classifier,
    until,
)


@pytest.fixture(scope="module")
def small():
    with running() as found:
        yield found


def test_concurrent_requests_share_batches_and_get_their_own_scores():
    """Eight clients, batches of eight, and a delay that never ends: each batch waits for all of them."""
    with running(max_delay=LIMIT) as found, concurrent.futures.ThreadPoolExecutor(8) as threads:
        images = [pixels(1, seed=number) for number in range(64)]
        answers = list(threads.map(found.scores, images))
        (lane,) = Predictor(small_classifier(), max_batch=8).lanes()
        for answer, each in zip(answers, images, strict=True):
            np.testing.assert_allclose(answer, lane([each])[0], rtol=1e-4, atol=1e-5)
        assert (found.batcher.counts.requests, found.batcher.counts.executions) == (64, 8)


def test_json_and_binary_requests_get_the_same_answer(small):
    images = pixels(2)
    tensor = {"name": "input_0", "shape": [2, 3, SIDE, SIDE], "datatype": "UINT8", "data": images.ravel().tolist()}
    status, _, answer = small.request(json.dumps({"inputs": [tensor]}))
    assert status == 200
    data = np.array(json.loads(answer)["outputs"][0]["data"], dtype=np.float32)
    assert np.array_equal(data.reshape(2, -1), small.scores(images))


def test_a_stopped_server_leaves_no_parsing_thread():
    def parsing():
        return {thread for thread in threading.enumerate() if thread.name.startswith("json")}

    before = parsing()  # from the servers of other tests
    with running() as found:
        tensor = {"name": "input_0", "shape": [8, 3, SIDE, SIDE], "datatype": "UINT8"}
        tensor["data"] = pixels(8).ravel().tolist()
        body = json.dumps(
            {"inputs": [tensor], "padding": " " * app.AT_ONCE}
        )  # too long to be parsed in the server's thread
        assert found.request(body)[0] == 200
        assert parsing() - before  # of which some may have ended meanwhile
    until(lambda: not parsing() - before)


READ = {
    "/v2": {"name": "falconet"},
    "/v2/health/live": {"live": True},
    "/v2/health/ready": {"ready": True},
    f"/v2/models/{NAME}": {"name": NAME, "versions": ["1"]},
    f"/v2/models/{NAME}/ready": {"ready": True},
    f"/v2/models/{NAME}/versions/1": {"name": NAME},
    f"/v2/models/{NAME}/versions/1/ready": {"ready": True},
    f"/v2/models/{NAME}/config": {"max_batch_size": 8},
}


@pytest.mark.parametrize(("path", "expected"), READ.items())
def test_get_routes_answer_json(small, path, expected):
    status, headers, answer = small.request(None, method="GET", path=path)
    assert (status, headers.get_content_type()) == (200, "application/json")
    assert expected.items() <= json.loads(answer).items()


def test_statistics_count_images_and_batches(small):
    def ask():
        return json.loads(small.request(None, method="GET", path=f"/v2/models/{NAME}/stats")[2])["model_stats"][0]

    before = ask()
    small.scores(pixels(3))
    after = ask()
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 1


BODY, HEADERS = binary(pixels(1))
TENSOR = json.dumps(
    {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": [0] * 3 * SIDE**2}
).encode()
REFUSED = {
    "no such address": ("GET", "/x", None, {}, 404, "GET /x: not found"),
    "no such model": ("POST", "/v2/models/x/infer", b"{}", {}, 404, "there is no model 'x'; this server has"),
    "no such version": ("GET", f"/v2/models/{NAME}/versions/2", None, {}, 404, "has no version '2'; its version is 1"),
    "another method": ("GET", PATH, None, {}, 405, "method not allowed; expected POST"),
    "another method of two": ("PUT", "/v2", b"", {}, 405, "method not allowed; expected GET or HEAD"),
    "an unknown parameter": (
        "POST",
        "/predict?tpo=3",
        b"x",
        {},
        400,
        "?tpo: unknown, expected model, top, version; did you mean 'top'?",
    ),
    "compressed": ("POST", PATH, BODY, {**HEADERS, "Content-Encoding": "gzip"}, 400, "Content-Encoding: not supported"),
    "in chunks": ("POST", PATH, iter([BODY]), HEADERS, 411, "Content-Length: required"),
    "too long": ("POST", PATH, b"", {"Content-Length": str(MOST_JSON + 1)}, 413, "expected at most"),
    "not JSON": ("POST", PATH, b"[", {}, 400, "the request's JSON: "),
    "much that is not JSON": ("POST", PATH, b"[" * 70_000, {}, 400, "70,000 bytes besides the numbers of data"),
    "a timeout of 400 digits": (
        *("POST", PATH, b'{"inputs": [%s], "parameters": {"timeout": 1%s}}' % (TENSOR, b"0" * 400), {}, 400),
        "parameters.timeout: got 1000",
    ),
    "a boundary of 5,000 digits": (
        *("POST", "/predict", b"--x--", {"Content-Type": f"multipart/form-data; boundary*{'9' * 5000}=x"}, 400),
        "Content-Type: its boundary cannot be read",
    ),
    "not a length": ("POST", PATH, BODY, {HEADER: "x"}, 400, f"{HEADER}: got 'x'"),
}


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_answered_in_one_line(small, method, path, body, headers, status, message):
    found, kind, answer = small.request(body, headers, method=method, path=path)
    assert found == status
    assert kind.get_content_type() == "application/json"
    assert message in json.loads(answer)["error"]


@settings(max_examples=60, deadline=None)
@given(
    cut=st.integers(0, len(BODY) - 1), at=st.integers(0, len(BODY) - 1), byte=st.integers(0, 255), header=st.booleans()
)
def test_a_corrupted_request_never_stops_the_server(small, cut, at, byte, header):
    damaged = bytearray(BODY)
    damaged[at] ^= byte
    status, _, answer = small.request(bytes(damaged[: len(BODY) - cut]), HEADERS if header else {})
    assert status in (200, 400), answer
    assert small.request(None, method="GET", path="/v2/health/live")[0] == 200


def test_a_full_queue_is_answered_429_and_recovers():
    held = Held()
    with running(held, max_queue=8, max_delay=0.0) as found, concurrent.futures.ThreadPoolExecutor(4) as threads:
        working = threads.submit(found.scores, pixels(8))
        assert held.begun.acquire(timeout=LIMIT)
        waiting = threads.submit(found.scores, pixels(8))
        until(lambda: found.batcher.waiting == 8)
        status, headers, answer = found.request(*binary(pixels(1)))
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(answer) == {"error": "8 images are waiting; try again later"}
        held.go.set()
        assert working.result(LIMIT).shape == waiting.result(LIMIT).shape == (8, 5)
        assert found.scores(pixels(1)).shape == (1, 5)


def test_a_failing_model_is_not_ready_until_it_works_again(caplog):
    (lane,) = Predictor(small_classifier(), max_batch=8).lanes()
    broken = threading.Event()

    def fragile(portions):
        if broken.is_set():
            raise RuntimeError("CUDA error: an illegal memory access\nsecond line")
        return lane(portions)

    def ready():
        return found.request(None, method="GET", path="/v2/health/ready")[0]

    with running(fragile, max_delay=0.0) as found:
        assert (found.request(*binary(pixels(1)))[0], ready()) == (200, 200)
        broken.set()
        for _ in range(repository.MOST_FAILED):
            assert ready() == 200
            status, _, answer = found.request(*binary(pixels(1)))
            assert status == 500
            assert json.loads(answer) == {
                "error": "the model failed: RuntimeError: CUDA error: an illegal memory access"
            }
        assert ready() == 503
        assert "second line" in caplog.text
        broken.clear()
        assert (found.request(*binary(pixels(1)))[0], ready()) == (200, 200)


def test_incoming_bodies_stay_within_the_memory_limit(monkeypatch):
    monkeypatch.setattr(bodies, "STEP_SECONDS", LIMIT)  # after which the slow body would give way
    body, headers = binary(pixels(8))
    with running(memory=len(body) + 10) as found, socket.create_connection(("127.0.0.1", found.port)) as slow:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{HEADER}: {headers[HEADER]}\r\n\r\n"
        slow.sendall(head.encode() + body[:10])
        until(lambda: found.memory._free == 10)  # bytes; a request instead might leave none for the slow one
        status, _, answer = found.request(body, headers)
        assert (status, json.loads(answer)["error"]) == (429, "out of memory for request bodies; try again later")
        slow.sendall(body[10:])
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        assert found.request(body, headers)[0] == 200


ANNOUNCED = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {4 << 20}\r\n\r\n".encode()


def test_clients_that_announce_much_and_send_little_do_not_block_others():
    with running(memory=256 << 20) as found, contextlib.ExitStack() as stack:
        for _ in range(100):  # 400 MiB if announced bytes counted
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", found.port)))
            slow.sendall(ANNOUNCED + b"{")
        assert found.request(*binary(pixels(8)))[0] == 200


def test_a_body_over_the_memory_limit_is_refused_before_its_end():
    with running(memory=3 << 20) as found, socket.create_connection(("127.0.0.1", found.port), timeout=LIMIT) as large:
        large.sendall(ANNOUNCED)
        with contextlib.suppress(OSError):  # it may be closed already
            large.sendall(b" " * (4 << 20))
        assert large.recv(100).startswith(b"HTTP/1.1 429")
        assert found.request(*binary(pixels(8)))[0] == 200


def test_a_client_that_disconnects_is_dropped_and_others_are_served():
    held = Held()
    with running(held, max_delay=0.0) as found, concurrent.futures.ThreadPoolExecutor(1) as threads:
        working = threads.submit(found.scores, pixels(8))
        assert held.begun.acquire(timeout=LIMIT)
        body, headers = binary(pixels(4))
        half = http.client.HTTPConnection("127.0.0.1", found.port)
        half.putrequest("POST", PATH)
        half.putheader("Content-Length", str(len(body)))
        half.endheaders(body[:100])
        whole = http.client.HTTPConnection("127.0.0.1", found.port)
        whole.request("POST", PATH, body, headers)
        until(lambda: found.batcher.waiting == 4)
        half.close()
        whole.close()
        until(lambda: found.batcher.counts.dropped == 1)
        held.go.set()
        assert working.result(LIMIT).shape == (8, 5)
        assert (found.batcher.counts.dropped, found.batcher.counts.executions) == (1, 1)


def test_long_json_is_parsed_one_at_a_time(monkeypatch):
    read, parsing, overlapped = app.protocol.read_request, threading.Lock(), []

    def watched(*arguments):
        alone = parsing.acquire(blocking=False)
        overlapped.append(not alone)
        try:
            return read(*arguments)
        finally:
            if alone:
                parsing.release()

    monkeypatch.setattr(app.protocol, "read_request", watched)
    body = json.dumps({"inputs": [], "padding": "x" * (4_000_000)})  # long enough for parsers to overlap
    with running() as found, concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert {answer[0] for answer in threads.map(found.request, [body] * 4)} == {400}
    assert overlapped == [False] * 4


# Photos that wait to be decoded.


@pytest.fixture
def two_decoders(monkeypatch):
    """Decode with the same number of threads on every machine."""
    for module in (app, repository):
        monkeypatch.setattr(module, "DECODERS", 2)


def upload(*numbers):
    """A request with photos of noise, each with its number as its first byte."""
    photos = []
    for number in numbers:
        photo = pixels(1, seed=number)[0].transpose(1, 2, 0).copy()
        photo.flat[0] = number
        photos.append(base64.b64encode(photo.tobytes()).decode())
    return json.dumps({"images": photos}).encode()


class Decoder:
    """A decoder that waits until it is released; `begun`: the numbers of the photos that it has begun."""

    def __init__(self):
        self.begun, self.go = [], threading.Event()

    def __call__(self, encoded):
        self.begun.append(encoded[0])
        assert self.go.wait(LIMIT)
        return decoded(encoded)


@contextlib.contextmanager
def sending(found, *uploads):
    """The answers to requests with photos, sent side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(uploads)) as threads:
        yield [threads.submit(found.request, each, path="/predict") for each in uploads]


def test_photos_that_wait_to_be_decoded_fill_the_queue(two_decoders):
    """Two are being decoded and eight wait; later they form two batches."""
    decoder, most = Decoder(), 10
    with nothing_logged(), running(decode=decoder, max_queue=8, max_batch=5, max_delay=LIMIT) as found:
        with sending(found, *map(upload, range(most))) as answers:
            until(lambda: found.model._decoding == most)
            status, headers, answer = found.request(upload(200), path="/predict")
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(answer) == {"error": "8 images are waiting; try again later"}
            assert found.batcher.counts.refused == 1
            decoder.go.set()
            assert [each.result(LIMIT)[0] for each in answers] == [200] * most
        assert (len(decoder.begun), found.model._decoding) == (most, 0)
        assert found.request(upload(*range(201, 206)), path="/predict")[0] == 200


def test_a_full_queue_refuses_photos_before_they_are_decoded():
    held, decoder = Held(), Decoder()
    decoder.go.set()
    with (
        nothing_logged(),
        running(held, decode=decoder, max_queue=8, max_delay=0.0) as found,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        working = threads.submit(found.scores, pixels(8))
        assert held.begun.acquire(timeout=LIMIT)
        waiting = threads.submit(found.scores, pixels(8))
        until(lambda: found.batcher.waiting == 8)
        assert found.request(upload(1), path="/predict")[0] == 429
        held.go.set()
        assert working.result(LIMIT).shape == waiting.result(LIMIT).shape
    assert decoder.begun == []


def test_photos_that_are_late_are_not_decoded(two_decoders):
    decoder, most = Decoder(), 5
    with nothing_logged(), running(decode=decoder, seconds=0.2) as found:
        with sending(found, *map(upload, range(most))) as answers:
            assert [each.result(LIMIT)[0] for each in answers] == [504] * most
        assert json.loads(answers[0].result()[2])["error"] == (
            "not computed within 0.2 s, the time limit of the request"
        )
        assert (found.batcher.counts.late, found.model._decoding) == (most, 0)
        decoder.go.set()
    assert len(decoder.begun) <= 2


def test_photos_of_clients_that_have_left_are_not_decoded(two_decoders):
    decoder, most = Decoder(), 6
    body = upload(100, 101, 102)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with nothing_logged(), running(decode=decoder) as found:
        with sending(found, *map(upload, range(most))) as answers:
            until(lambda: found.model._decoding == most)
            with connected(found.port) as leaving:
                leaving.sendall(head + body)
                until(lambda: found.model._decoding == most + 3)
            until(lambda: found.model._decoding == most)
            decoder.go.set()
            assert [each.result(LIMIT)[0] for each in answers] == [200] * most
        assert found.model._decoding == 0
    assert sorted(decoder.begun) == list(range(most))


@pytest.mark.parametrize(
    ("error", "status"), [(UnreadableImageError("torn"), 400), (RuntimeError("broken"), 500)], ids=["photo", "server"]
)
def test_photos_that_cannot_be_decoded_leave_the_queue(error, status):
    def fail(encoded):
        raise error

    with running(decode=fail) as found:
        for _ in range(3):
            assert found.request(upload(*range(20)), path="/predict")[0] == status
            until(lambda: found.model._decoding == 0)


def test_a_photo_is_decoded_between_those_of_a_large_request(two_decoders, monkeypatch):
    monkeypatch.setattr(classification, "AHEAD", 2)
    decoder = Decoder()
    with nothing_logged(), running(decode=decoder) as found, sending(found, upload(*range(100))) as large:
        until(lambda: found.model._decoding == 32)  # half of the queue
        with sending(found, upload(200)) as single:
            until(lambda: found.model._decoding == 33)
            decoder.go.set()
            assert [each.result(LIMIT)[0] for each in (*large, *single)] == [200] * 2
    assert decoder.begun.index(200) < 50


def test_a_request_of_more_photos_than_may_wait_is_answered():
    with running(max_batch=4, max_queue=8) as found:
        status, _, answer = found.request(upload(*range(50)), path="/predict")
        alone = found.request(upload(49), path="/predict")[2]
    assert status == 200, answer
    labels = [each["label"] for each in json.loads(answer)["predictions"]]
    assert len(labels) == 50
    assert labels[-1] == json.loads(alone)["predictions"][0]["label"]
