"""Direct answers are the same as the application's, which gets everything unusual."""

import numpy as np
import pytest

from falconet.serve import direct, repository
from falconet.serve.access import Access, Keys
from falconet.serve.app import FrontEnd
from falconet.serve.prometheus import Metrics
from falconet.serve.telemetry import Telemetry
from served import LIMIT, NAME, PATH, Held, answers, binary, connected, infer, nothing_logged, pixels, running, until

KEY = "0123456789abcdef"


@pytest.fixture
def application(monkeypatch):
    """The addresses of inference requests that the application received."""
    seen, before = [], FrontEnd._infer

    async def watched(front, request):
        seen.append(request.path_qs)
        return await before(front, request)

    monkeypatch.setattr(FrontEnd, "_infer", watched)
    return seen


def first(connection, count=1):
    """The first answers on a connection that stays open."""
    raw = b""
    while len(found := answers(raw, partial=True)) < count:
        raw += connection.recv(1 << 16)
    return found


def settled(found):
    """A connection on which aiohttp waits for a request."""
    connection = connected(found.port)
    connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert first(connection)[0][0] == 200
    until(lambda: found.connections[-1].is_idle)  # the next one would be aiohttp's before
    return connection


def test_a_usual_request_is_answered_as_the_application_does(application):
    head, body = infer(pixels(2))
    with nothing_logged(), running() as found, settled(found) as connection:
        connection.sendall(head + body)
        (direct_one,) = first(connection)
        assert application == []
        connection.sendall(head.replace(b"/infer ", b"/infer?x ") + body)
        (other,) = first(connection)
        assert application == [f"{PATH}?x"]
    assert direct_one[0] == other[0] == 200
    assert direct_one[2] == other[2]
    assert set(direct_one[1]) == set(other[1])
    changing = ("date", "x-request-id")
    assert all(other[1][name] == value for name, value in direct_one[1].items() if name not in changing)


UNUSUAL = {
    "a web page's": b"Origin: http://localhost\r\n",
    "an expectation": b"Expect: 100-continue\r\n",
    "the last one": b"Connection: close\r\n",
}


@pytest.mark.parametrize("field", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_requests_are_left_to_the_application(application, field):
    head, body = infer(pixels(1))
    with nothing_logged(), running() as found, settled(found) as connection:
        connection.sendall(head.replace(b"\r\n\r\n", b"\r\n" + field + b"\r\n") + body)
        assert first(connection)[0][0] == 200
    assert application == [PATH]


def test_requests_sent_without_waiting_are_answered_in_their_order():
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head, body = infer(pixels(1))
    with nothing_logged(), running() as found, settled(found) as connection:
        connection.sendall((head + body + live) * 3)
        found_answers = first(connection, 6)
    assert ["outputs" in content for _, _, content in found_answers] == [True, False] * 3


def test_more_requests_than_aiohttp_queues_are_all_answered():
    head, body = infer(pixels(1))
    with running() as found, settled(found) as connection:
        connection.sendall((head + body) * 100)
        assert [status for status, *_ in first(connection, 100)] == [200] * 100


def test_a_slow_body_is_left_to_the_application(application, monkeypatch):
    monkeypatch.setattr(direct, "SOON_SECONDS", 0.02)
    head, body = infer(pixels(2))
    with nothing_logged(), running() as found, settled(found) as connection:
        connection.sendall(head + body[:100])
        until(lambda: found.front._telemetry.in_flight == 1)  # which aiohttp follows
        connection.sendall(body[100:])
        assert first(connection)[0][0] == 200
    assert application == [PATH]


def test_a_client_that_leaves_before_its_body_has_arrived_is_recorded(monkeypatch):
    monkeypatch.setattr(direct, "SOON_SECONDS", LIMIT)  # until which the request is not aiohttp's
    records = []
    head, body = infer(pixels(1))
    with nothing_logged(), running(telemetry=Telemetry(Metrics(), [records.append])) as found:
        with settled(found) as connection:
            connection.sendall(head + body[:10])
            until(lambda: any(payload.total_bytes == 10 for _, payload in list(found.connections[-1]._messages)))
        until(lambda: any(record.status == "499" for record in records))
    (gone,) = [record for record in records if record.status == "499"]
    assert (gone.route, gone.bytes_in, gone.reason) == ("/v2/models/{model}/infer", 10, "client_gone")


def test_a_client_that_leaves_before_its_request_is_looked_at_is_recorded_once():
    """The connection is lost as the last bytes arrive, before the answering task has begun."""
    records = []
    head, body = infer(pixels(1))
    with nothing_logged(), running(telemetry=Telemetry(Metrics(), [records.append])) as found:
        with settled(found):
            lost = found.connections[-1]

            def receive_and_lose():
                lost.data_received(head + body)
                lost.connection_lost(None)

            found._loop.call_soon_threadsafe(receive_and_lose)
            until(lambda: len(records) > 1)
        found.request(None, method="GET", path="/v2/health/live")
    first_one, gone, last = records
    assert (gone.status, gone.reason, gone.bytes_in) == ("499", "client_gone", len(body))
    assert (first_one.status, last.status) == ("200", "200")


def test_a_client_that_leaves_while_it_waits_frees_its_place_and_is_recorded_once():
    lane, records = Held(), []
    head, body = infer(pixels(1))
    with nothing_logged(), running(lane, max_delay=0.0, telemetry=Telemetry(Metrics(), [records.append])) as found:
        with settled(found) as connection, connected(found.port) as working:
            working.sendall(head + body)
            lane.begun.acquire(timeout=LIMIT)
            connection.sendall(head + body)
            until(lambda: found.batcher.waiting == 1)
        until(lambda: found.batcher.waiting == 0)
        lane.go.set()
    assert found.memory._free == found.memory._most
    assert [record.status for record in records] == ["200", "499", "499"]  # health, and both that left


def test_refusals_are_those_of_the_application(application):
    def asked(connection, head, body):
        connection.sendall(head + body)
        return first(connection)[0]

    head, body = infer(pixels(1))
    torn = body.replace(b"UINT8", b"FLOAT")
    with nothing_logged(), running() as found, settled(found) as connection:
        status, headers, content = asked(connection, head, torn)
        assert application == []
        same_status, same_headers, same = asked(connection, head.replace(b"/infer ", b"/infer?x "), torn)
    assert (status, content, set(headers)) == (same_status, same, set(same_headers))
    assert (status, headers["content-type"]) == (400, same_headers["content-type"])


def test_a_timeout_of_400_digits_is_refused(application):
    image = pixels(1).tobytes()
    head, body = infer(pixels(1))
    text = body.removesuffix(image)
    timed = text.replace(b'{"binary_data_output"', b'{"timeout": 1%s, "binary_data_output"' % (b"0" * 400))
    for before, after in ((len(text), len(timed)), (len(body), len(timed + image))):
        head = head.replace(b"Content-Length: %d\r\n" % before, b"Content-Length: %d\r\n" % after)
    with nothing_logged(), running() as found, settled(found) as connection:
        connection.sendall(head + timed + image)
        status, _, content = first(connection)[0]
    assert (status, application) == (400, [])
    assert content["error"].startswith("parameters.timeout: got 1000")


def test_keys_and_names_are_required(application):
    access = Access(keys=Keys([KEY]), hosts=frozenset({"localhost"}))
    body, headers = binary(pixels(1))
    with nothing_logged(), running(access=access) as found:
        assert found.request(body, headers)[0] == 401
        assert found.request(body, {**headers, "X-API-Key": KEY})[0] == 200
        assert found.request(body, {**headers, "X-API-Key": KEY, "Host": "elsewhere"})[0] == 403
        assert found.request(body, {**headers, "X-API-Key": KEY}, path=f"/v2/models/{NAME}x/infer")[0] == 404


def test_what_is_remembered_about_a_request_does_not_answer_another():
    with nothing_logged(), running() as found:
        one, two = pixels(1, seed=1), pixels(1, seed=2)
        first_scores, second = found.scores(one), found.scores(two)
        assert np.array_equal(found.scores(one), first_scores)
        assert not np.array_equal(first_scores, second)


def test_a_model_whose_batch_hangs_is_not_ready(monkeypatch):
    monkeypatch.setattr(repository, "HUNG_SECONDS", 0.05)
    lane = Held()
    head, body = infer(pixels(1))
    with nothing_logged(), running(lane, max_delay=0.0) as found, connected(found.port) as connection:
        connection.sendall(head + body)
        lane.begun.acquire(timeout=LIMIT)
        until(lambda: found.request(None, method="GET", path="/v2/health/ready")[0] == 503)
        lane.go.set()
        assert first(connection)[0][0] == 200
        assert found.request(None, method="GET", path="/v2/health/ready")[0] == 200
