"""What the server tells about its requests: metrics, access log and traces."""

import asyncio
import contextlib
import errno
import http.server
import importlib.util
import io
import json
import os
import re
import socket
import threading
import time

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from falconet import inputs
from falconet.config.commands import ServeOptions
from falconet.config.load import parse, read_line
from falconet.config.tool_options import Telemetry as Options
from falconet.errors import ConfigError
from falconet.serve import access_log, records, telemetry, tracing
from falconet.serve.access import Access, Keys
from falconet.serve.access_log import AccessLog
from falconet.serve.prometheus import Metrics
from falconet.serve.records import Record
from falconet.serve.repository import Opened, Source
from falconet.serve.telemetry import Telemetry
from falconet.serve.tracing import Tracing
from served import (
    LIMIT,
    NAME,
    PATH,
    SIDE,
    Held,
    answers,
    binary,
    connected,
    decoded,
    infer,
    pixels,
    received,
    running,
    until,
)

INFER = "/v2/models/{model}/infer"


def observed(observer):
    return Telemetry(Metrics(), [observer])


def record(**known):
    return Record(id="7", client="127.0.0.1", method="GET", route="/v2", **known)


def samples(found, headers=None):
    status, sent, text = found.request(None, headers, method="GET", path="/metrics")
    assert status == 200
    assert sent["Content-Type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


# Metrics.


def test_requests_images_batches_and_bytes_are_counted():
    with running(max_batch=8) as found:
        for count in (1, 3):
            found.scores(pixels(count))
        values = samples(found)
        sent = sum(len(binary(pixels(count))[0]) for count in (1, 3))
    assert values["falconet_requests_total", *sorted([INFER, NAME, "200"])] == 2
    assert values["falconet_request_seconds_count", INFER] == 2
    assert values["falconet_received_bytes_total", INFER] == sent
    assert values["falconet_images_total", NAME] == 4
    assert values["falconet_batch_images_count", NAME] == 2
    assert values["falconet_batch_images_sum", NAME] == 4
    assert values["falconet_batch_images_bucket", *sorted(["1.0", NAME])] == 1
    assert values["falconet_batch_images_bucket", *sorted(["4.0", NAME])] == 2
    assert values["falconet_queue_seconds_count", NAME] == 2
    assert values["falconet_compute_seconds_count", NAME] == 2
    assert 0 < values["falconet_compute_seconds_sum", NAME] < LIMIT
    assert values["falconet_model_info", *sorted([NAME, "1"])] == 1
    assert values["falconet_requests_in_flight",] == 1  # the one that asks
    assert values["process_resident_memory_bytes",] > 1 << 20


def test_photos_are_counted_with_those_that_cannot_be_read():
    begun = time.perf_counter()
    metrics = Metrics()
    done = record(model=NAME, photos=3, unreadable=1)
    done.add_stage("decode", begun, 0.02)
    metrics.add(done)
    text = metrics.exposition("")[0].decode()
    assert f'falconet_photos_total{{model="{NAME}"}} 3.0' in text
    assert f'falconet_unreadable_photos_total{{model="{NAME}"}} 1.0' in text
    assert f'falconet_decode_seconds_bucket{{le="0.025",model="{NAME}"}} 1.0' in text
    assert f'falconet_decode_seconds_bucket{{le="0.01",model="{NAME}"}} 0.0' in text


def test_the_queue_and_its_limit_are_shown_while_requests_wait():
    lane = Held()
    head, body = infer(pixels(5))
    with (
        running(lane, max_batch=8, max_queue=64) as found,
        connected(found.port) as first,
        connected(found.port) as then,
    ):
        first.sendall(head + body)
        assert lane.begun.acquire(timeout=LIMIT)
        then.sendall(head + body)
        until(lambda: found.batcher.waiting == 5)
        values = samples(found)
        lane.go.set()
        assert values["falconet_queue_images", NAME] == 5
        assert values["falconet_queue_limit_images", NAME] == 64
        assert values["falconet_requests_in_flight",] == 3
        for asking in (first, then):
            assert asking.recv(1000).startswith(b"HTTP/1.1 200")
    assert samples_of(found)["falconet_queue_images", NAME] == 0


def samples_of(found):
    text = found.front._telemetry.metrics.exposition("")[0].decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_refusals_are_counted_by_reason():
    with running(max_queue=8, access=Access(keys=Keys(["k" * 16]))) as found:
        key = {"X-API-Key": "k" * 16}
        for _ in range(2):
            assert found.request(b"[", key)[0] == 400
        assert found.request(b"{}")[0] == 401
        assert found.request(b"{}", key, path="/v2/models/x/infer")[0] == 404
        assert found.request(None, key, method="GET", path="/nothing")[0] == 404
        assert found.request(None, {**key, "Content-Length": str(1 << 30)})[0] == 413
        values = samples(found, key)
    reasons = {name[1]: value for name, value in values.items() if name[0] == "falconet_refused_total"}
    assert reasons == {"request": 2, "unauthorized": 1, "unknown_model": 1, "not_found": 1, "too_large": 1}


def test_what_clients_make_up_does_not_become_a_label():
    with running() as found:
        before = len(samples(found))
        samples(found)
        for number in range(50):
            found.request(None, method="GET", path=f"/made-up-{number}")
            found.request(b"{}", path=f"/v2/models/made-up-{number}/infer")
            found.request(b"{}", {"X-Request-Id": f"made-up-{number}"}, method="PROPFIND", path=f"/x{number}")
        values = samples(found)
    assert not any("made" in part or "/x" in part for name in values for part in map(str, name))
    assert values["falconet_requests_total", *sorted(["none", "", "404"])] == 100
    assert len(values) < before + 100  # three new routes, each with its buckets


MALFORMED = {
    "noise": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "malformed"),
    "no method": (b"/v2 HTTP/1.1\r\n\r\n", 400, "malformed"),
    "a bad header": (b"GET /v2 HTTP/1.1\r\nHost localhost\r\n\r\n", 400, "malformed"),
    "a long header": (
        b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        431,
        "request_header_fields_too_large",
    ),
    "another expectation": (
        b"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: x\r\nContent-Length: 1\r\n\r\na",
        417,
        "expectation_failed",
    ),
}


@pytest.mark.parametrize(("sent", "status", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_refused_before_the_application_is_counted_and_logged_once(tmp_path, sent, status, reason):
    log = AccessLog(tmp_path / "access.log")
    with running(telemetry=observed(log.add)) as found:
        for number in range(3):
            with connected(found.port) as connection:
                connection.sendall(sent.replace(b"\r\n", b"%d\r\n" % number, 1) if reason == "malformed" else sent)
                ((code, headers, content),) = answers(received(connection))
        values = samples(found)
    log.close()
    assert code == status
    assert values["falconet_requests_total", *sorted(["none", "", str(status)])] == 3
    assert values["falconet_refused_total", reason] == 3
    *_, last, _ = rows = lines_of(tmp_path / "access.log")
    assert len(rows) == 4  # and the request for the metrics
    assert (last["client"], last["status"], last["reason"]) == ("127.0.0.1", status, reason)
    assert (last["error"], last["id"]) == (content["error"], headers["x-request-id"])
    assert last["bytes_out"] == int(headers["content-length"])


def test_a_client_that_leaves_is_counted_as_gone():
    lane = Held()
    head, body = infer(pixels(1))
    with running(lane) as found:
        with connected(found.port) as leaving:
            leaving.sendall(head + body)
            assert lane.begun.acquire(timeout=LIMIT)
        until(lambda: ("falconet_refused_total", "client_gone") in samples(found))
        lane.go.set()
        values = samples(found)
    assert values["falconet_requests_total", *sorted([INFER, NAME, "499"])] == 1


def test_a_failure_of_the_server_is_counted_and_has_an_id(monkeypatch, caplog):
    monkeypatch.setattr("falconet.serve.protocol.read_request", lambda *_: 1 / 0)
    with running() as found:
        status, headers, _ = found.request(*binary(pixels(1)))
        values = samples(found)
    assert status == 500
    assert re.fullmatch("[0-9a-f]{16}", headers["X-Request-Id"])
    assert values["falconet_requests_total", *sorted([INFER, NAME, "500"])] == 1
    assert "ZeroDivisionError" in caplog.text


def test_openmetrics_is_sent_to_clients_that_ask_for_it():
    with running() as found:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        _, headers, text = found.request(None, accept, method="GET", path="/metrics")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_servers_share_no_metrics():
    first, second = Metrics(), Metrics()
    first.add(record(status="200"))
    assert b'falconet_requests_total{model="",route="/v2",status="200"} 1.0' in first.exposition("")[0]
    assert b"falconet_requests_total{" not in second.exposition("")[0]


# Request ids.


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "{}/~"])
def test_a_sane_request_id_is_echoed(sent):
    with running() as found:
        assert found.request(None, {"X-Request-Id": sent}, method="GET", path="/v2")[1]["X-Request-Id"] == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a\tb", "\u00e9"])
def test_another_request_id_is_replaced(sent):
    assert re.fullmatch("[0-9a-f]{16}", telemetry.request_id(sent))


def test_every_answer_has_its_own_id():
    with running() as found, connected(found.port) as both:
        both.sendall(
            b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\nGET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        text = b""
        while more := both.recv(1 << 16):
            text += more
    assert len(set(re.findall(rb"X-Request-Id: ([0-9a-f]{16})\r\n", text))) == 2


# The access log.


def lines_of(file):
    return [json.loads(text) for text in file.read_text().splitlines()]


def test_each_request_is_a_line_of_json(tmp_path):
    file = tmp_path / "access.log"
    log = AccessLog(file)
    with running(telemetry=observed(log.add)) as found:
        found.request(*binary(pixels(2)))
        found.request(b"[", {"X-Request-Id": "mine"}, path=f"{PATH}?private=1")
        found.request(None, method="GET", path="/nothing?private=1")
    log.close()
    good, bad, unknown = lines_of(file)
    assert good.keys() == {
        *("time", "id", "client", "method", "path", "status", "bytes_in", "bytes_out", "milliseconds"),
        *("model", "version", "images"),
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", good["time"])
    assert (good["client"], good["method"], good["path"], good["status"]) == ("127.0.0.1", "POST", INFER, 200)
    assert (good["model"], good["version"], good["images"]) == (NAME, "1", 2)
    assert good["bytes_in"] == len(binary(pixels(2))[0])
    assert good["bytes_out"] > 40
    spent = good["milliseconds"]
    assert spent.keys() == {"total", "queue", "compute"}
    assert 0 < spent["compute"] <= spent["queue"] + spent["compute"] <= spent["total"]
    assert (bad["id"], bad["status"], bad["reason"]) == ("mine", 400, "request")
    assert bad["error"].startswith("the request's JSON: ")
    assert (unknown["status"], unknown["path"], unknown["error"]) == (404, "/nothing", "not found")
    assert "private" not in file.read_text()


def test_loading_and_unloading_name_their_model(tmp_path):
    log = AccessLog(tmp_path / "access.log")
    options = {"may_load": True, "sources": lambda: {NAME: Source(open=lambda: opened, stamp=lambda: 0)}}
    with running(telemetry=observed(log.add), **options) as found:
        opened = Opened(found.served, found.batcher._lanes, decoded, stamp=0, about="")
        for what, name in (("load", NAME), ("unload", NAME), ("unload", NAME), ("load", "made-up")):
            found.request(None, path=f"/v2/repository/models/{name}/{what}")
    log.close()
    named = [(row["status"], row.get("model"), row.get("version")) for row in lines_of(tmp_path / "access.log")]
    assert named == [(200, NAME, "1"), (200, NAME, "1"), (404, None, None), (404, None, None)]


def test_control_characters_stay_within_their_line():
    text = access_log.line(record(path="x", error='a\nb\x1b"\u2028'))
    assert text.count(b"\n") == 1
    assert json.loads(text)["error"] == 'a\nb\x1b"\u2028'


def test_a_renamed_log_is_opened_again(tmp_path):
    file, old = tmp_path / "access.log", tmp_path / "access.log.1"
    log = AccessLog(file)
    log.add(record(status="200"))
    until(lambda: file.read_text().endswith("\n"))
    file.rename(old)
    log.add(record(status="201"))
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    file.unlink()
    log.add(record(status="202"))
    log.close()
    assert [[row["status"] for row in lines_of(each)] for each in (old, file)] == [[200], [202]]
    assert log.lost == 0


def test_a_full_disk_loses_only_whole_lines(tmp_path, monkeypatch):
    room, really = [100], os.write

    def write(handle, data):
        if threading.current_thread().name != "access-log":
            return really(handle, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = really(handle, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(access_log.os, "write", write)
    file = tmp_path / "access.log"
    log = AccessLog(file)
    log.add(record(status="200"))
    until(lambda: room[0] == 0)
    log.add(record(status="201"))  # lost; before it, the rest of the first line
    until(lambda: log.lost == 1)
    room[0] = 1 << 20
    log.add(record(status="202"))
    log.close()
    assert [row["status"] for row in lines_of(file)] == [200, 202]
    assert log.lost == 1


@contextlib.contextmanager
def piped():
    """Let stdout be a pipe; gives what closes its other end."""
    kept, (reading, writing) = os.dup(1), os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    try:
        yield lambda: os.close(reading)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_a_reader_that_does_not_read_holds_up_no_request(monkeypatch):
    """The log is a pipe that is full; requests are answered, and the rest is lost."""
    monkeypatch.setattr(access_log, "MOST_WAITING", 10)
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 0.2)
    with piped() as close_reader:
        log = AccessLog(access_log.STDOUT)
        with running(telemetry=observed(log.add)) as found:
            while log.lost < 10:
                assert found.request(None, method="GET", path="/v2/health/live")[0] == 200
                for _ in range(100):
                    log.add(record(error="x" * 200))
        log.close()
        close_reader()
        log._thread.join(LIMIT)


def test_a_closed_pipe_holds_up_no_request():
    with piped() as close_reader:
        close_reader()
        log = AccessLog(access_log.STDOUT)
        with running(telemetry=observed(log.add)) as found:
            assert found.request(None, method="GET", path="/v2/health/live")[0] == 200
            until(lambda: log.lost == 1)
        log.close()


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"--access-log: .*Is a directory"):
        AccessLog(tmp_path)
    with pytest.raises(ConfigError, match=r"--access-log: .*No such file"):
        AccessLog(tmp_path / "missing" / "log")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--access-log: .*No such device"):
        AccessLog(tmp_path / "pipe")


def test_lost_lines_are_shown_in_the_metrics(tmp_path):
    metrics = Metrics()
    with telemetry.from_options(Options(access_log=tmp_path / "log"), metrics, print):
        assert b"falconet_access_log_lost_lines 0.0" in metrics.exposition("")[0]
    assert (tmp_path / "log").exists()


# Traces.


@pytest.fixture
def spans():
    """The spans that the SDK's in-memory exporter receives."""
    said, exporter = [], InMemorySpanExporter()
    traces = Tracing(said.append, SimpleSpanProcessor(exporter))
    yield traces, exporter.get_finished_spans
    traces.close()
    assert said == []


def test_a_request_is_a_span_with_its_stages(spans):
    traces, finished = spans
    with running(telemetry=observed(traces.add)) as found:
        found.request(*binary(pixels(2)))
    queue, compute, whole = finished()
    assert (queue.name, compute.name, whole.name) == ("queue", "compute", f"POST {INFER}")
    assert {queue.parent.span_id, compute.parent.span_id} == {whole.context.span_id}
    assert whole.parent is None
    assert whole.attributes["http.route"] == INFER
    assert whole.attributes["http.response.status_code"] == 200
    assert (whole.attributes["falconet.model"], whole.attributes["falconet.images"]) == (NAME, 2)
    assert whole.start_time <= queue.start_time <= queue.end_time <= compute.end_time <= whole.end_time
    assert abs(queue.end_time - compute.start_time) < 1e6
    assert whole.resource.attributes["service.name"] == "falconet"


def png():
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE)).save(file, "png")
    return file.getvalue()


def test_a_photo_is_decoded_in_a_span_and_counted(spans):
    traces, finished = spans
    with running(telemetry=observed(traces.add), decode=lambda _: np.zeros((SIDE, SIDE, 3), np.uint8)) as found:
        status, _, answer = found.request(png(), {"Content-Type": "image/png"}, path="/predict")
        assert status == 200, answer
        values = samples(found)
    decode, _, _, whole, _ = finished()  # the last is that of /metrics
    assert (decode.name, whole.name) == ("decode", "POST /predict")
    assert whole.start_time <= decode.start_time <= decode.end_time <= whole.end_time
    assert values["falconet_photos_total", NAME] == 1
    assert values["falconet_unreadable_photos_total", NAME] == 0


def test_the_clients_trace_is_continued(spans):
    traces, finished = spans
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    rows = []
    with running(telemetry=Telemetry(Metrics(), [traces.add, rows.append])) as found:
        found.request(None, {"traceparent": f"00-{trace}-{parent}-01"}, method="GET", path="/v2")
        found.request(None, {"traceparent": "nonsense"}, method="GET", path="/v2")
    continued, own = finished()
    assert (f"{continued.context.trace_id:032x}", f"{continued.parent.span_id:016x}") == (trace, parent)
    assert own.parent is None
    assert [row.trace for row in rows] == [trace, f"{own.context.trace_id:032x}"]
    assert json.loads(access_log.line(rows[0]))["trace"] == trace


def test_a_failure_of_the_server_is_an_error_in_its_trace(spans, caplog, monkeypatch):
    monkeypatch.setattr("falconet.serve.protocol.read_request", lambda *_: 1 / 0)
    traces, finished = spans
    with running(telemetry=observed(traces.add)) as found:
        found.request(*binary(pixels(1)))
        found.request(None, method="GET", path="/nothing")
    failed, refused = finished()
    assert failed.status.status_code is StatusCode.ERROR
    assert refused.status.status_code is StatusCode.UNSET
    assert (refused.name, refused.attributes["error.type"]) == ("GET", "not_found")


class Collector(http.server.BaseHTTPRequestHandler):
    """Receives traces as a collector does."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, self.headers, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    server.received = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(LIMIT)
    server.server_close()


def test_traces_are_sent_to_the_collector_that_the_environment_names(monkeypatch, collector):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=birds")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "bird-photos")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(1000 * LIMIT))  # all of them on exit
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", LIMIT)
    said = []
    with (
        telemetry.from_options(Options(opentelemetry=True), Metrics(), said.append) as following,
        running(telemetry=following) as found,
    ):
        found.request(*binary(pixels(1)))
    assert said == []
    ((path, headers, sent),) = collector.received
    assert (path, headers["x-team"]) == ("/v1/traces", "birds")
    (resource,) = sent.resource_spans
    values = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert values["service.name"] == "bird-photos"
    assert {span.name for span in resource.scope_spans[0].spans} == {"queue", "compute", f"POST {INFER}"}


def test_a_missing_collector_disturbs_nothing_and_is_reported_once(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    said = []
    with (
        telemetry.from_options(Options(opentelemetry=True), Metrics(), said.append) as following,
        running(telemetry=following) as found,
    ):
        for _ in range(3):
            assert found.request(None, method="GET", path="/v2")[0] == 200
        until(lambda: said)
    (line,) = said
    assert line.startswith("opentelemetry: ")
    assert "\n" not in line
    assert "Traceback" not in "".join(capfd.readouterr())


def sending():
    """Threads that still try to send traces after their server has ended."""
    return [each for each in threading.enumerate() if each.name == "opentelemetry-end"]


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
        traces = Tracing(print)
        traces.add(record(status="200"))
        traces.close()
        assert sending()
    until(lambda: not sending())  # which draws random numbers, and would disturb other tests


# Records.


def test_stages_of_several_batches_are_the_longest():
    found = record()
    found.add_stage("queue", 1.0, 0.1)
    found.add_stage("queue", 2.0, 0.3)
    found.add_stage("queue", 3.0, 0.2)
    assert found.stages["queue"] == (2.0, 0.3)


def test_notes_outside_a_request_are_ignored():
    records.note_model("x", "1")
    records.note_computed(1, queued=0.0, computed=0.0)
    records.note_photos(1, 0, begun=0.0, seconds=0.0)
    records.note_refusal(ValueError("x"))


def test_requests_side_by_side_have_records_of_their_own():
    following, seen = Telemetry(Metrics()), []

    async def request(name):
        with following.following(record()) as mine:
            await asyncio.sleep(0)
            records.note_model(name, "1")
            await asyncio.create_task(noted())
            await asyncio.sleep(0)
            seen.append((name, mine.model, mine.images))

    async def noted():
        records.note_computed(2, queued=0.0, computed=0.0)

    async def all_of_them():
        await asyncio.gather(*(asyncio.create_task(request(name)) for name in "abc"))

    asyncio.run(all_of_them())
    assert sorted(seen) == [("a", "a", 2), ("b", "b", 2), ("c", "c", 2)]
    assert following.in_flight == 0


def test_reasons_are_the_names_of_refusals_in_words():
    assert [records.reason_of(name) for name in ("TooLargeError", "LateError", "RequestError")] == [
        *("too_large", "late", "request")
    ]


def test_missing_packages_for_traces_are_reported_in_one_line(monkeypatch):
    really = importlib.util.find_spec
    monkeypatch.setattr(
        inputs.importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry") else really(name)
    )
    options = parse(ServeOptions, read_line(ServeOptions, ["--model", "resnet18", "--opentelemetry"])).options
    with pytest.raises(ConfigError, match=r"needs opentelemetry.*pip install 'falconet\[telemetry\]'"):
        inputs.check(options)
