"""Combined times of several clients, worked out by hand, and clients against a real server."""

import contextlib
import http.server
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest

from falconet.bench import load_test
from falconet.bench.client import Client, Job, Outcome, difference
from falconet.bench.load_test import Target, Tensors, together
from falconet.errors import ConfigError, WorldError
from falconet.infer.predictor import Predictor
from served import NAME, SIDE, pixels, running, small_classifier


def test_throughput_covers_the_time_when_all_clients_send():
    """One client starts a second later, the other ends two seconds earlier; a request takes a second."""
    early = Outcome(times=[(float(t), t + 1.0) for t in range(10)])
    late = Outcome(times=[(t + 1.0, t + 2.0) for t in range(11)])
    found = together([early, late], in_flight=2)
    # Without two each: from 3.0, where both have begun, to 10.0, where the first has ended: 7 answers each.
    assert found.requests == 2
    assert found.spacing == [1.0] * 7
    assert found.latencies == [1.0] * (8 + 9)


def test_a_burst_of_answers_is_one_stretch():
    """Four clients whose requests are always answered together, every half second."""
    bursts = Outcome(times=[(t / 2, (t + 1) / 2) for t in range(20)])
    found = together([bursts] * 4, in_flight=4)
    assert found.spacing == [0.5] * 18
    assert found.requests == 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_clients_that_do_not_overlap_still_have_a_throughput(count):
    found = together([Outcome(times=[(float(t), t + 1.0) for t in range(count)])], in_flight=8)
    assert found.spacing == found.latencies == [1.0]
    apart = [Outcome(times=[(0.0, 1.0)]), Outcome(times=[(5.0, 6.0)])]
    assert together(apart, in_flight=2).latencies == [1.0, 1.0]


def test_difference_is_relative_to_the_largest_score():
    expected = np.array([[0.0, -10.0], [1.0, 0.5]])
    assert difference(expected, expected) == 0
    assert difference(expected + np.array([[0.1, 0], [0, 0]]), expected) == pytest.approx(0.01)
    assert difference(expected + np.array([[0, 0], [0, 0.1]]), expected) == pytest.approx(0.1)
    assert difference(expected[:1], expected) == math.inf
    assert difference(expected * math.nan, expected) == math.inf


CLIENT = (sys.executable, "-m", "falconet.bench.client")
LINES = {
    "serving m at http://127.0.0.1:8000: input": ("m", "http://127.0.0.1:8000", None),
    "serving m at http://[::1]:1 and grpc://[::1]:2: input": ("m", "http://[::1]:1", "[::1]:2"),
}


@pytest.mark.parametrize(("line", "parts"), LINES.items())
def test_a_servers_first_line_says_where_it_is(line, parts):
    found = load_test.STARTED.match(line)
    assert found.groups() == parts
    if parts[2]:
        assert Target.at(parts[2], "m", "grpc") == Target(protocol="grpc", host="::1", port=2, model="m")


@pytest.fixture
def job(tmp_path):
    """Clients with two batches of three images and their expected scores."""
    batches = np.stack([pixels(3, seed=number) for number in range(2)])
    (lane,) = Predictor(small_classifier(), max_batch=8).lanes()
    np.save(tmp_path / "images.npy", batches)
    np.save(tmp_path / "expected.npy", np.stack([lane([batch])[0] for batch in batches]))
    return Job(
        host="127.0.0.1",
        port=1,
        model=NAME,
        input="input_0",
        output="output_0",
        images=str(tmp_path / "images.npy"),
        expected=str(tmp_path / "expected.npy"),
        tolerance=1e-4,
        window=3,
        count=10,
    )


@pytest.mark.dist
def test_client_processes_get_the_models_answers(job):
    with running() as found:
        outcomes = load_test.run_clients(replace(job, port=found.port), 2)
        assert [len(outcome.times) for outcome in outcomes] == [10, 10]
        assert [outcome.wrong for outcome in outcomes] == [0, 0]
        assert all(sent < answered for outcome in outcomes for sent, answered in outcome.times)
        assert found.batcher.counts.images == 60
        about = Tensors.of(Target.at(f"http://127.0.0.1:{found.port}", NAME))
        assert about == Tensors(
            input="input_0", output="output_0", image_size=SIDE, channels_last=False, datatype="FP32"
        )


@pytest.mark.dist
def test_wrong_answers_are_counted(job):
    def wrong(portions):
        return [np.zeros((len(portion), 5), dtype=np.float32) for portion in portions]

    with running(wrong) as found:
        (outcome,) = load_test.run_clients(replace(job, port=found.port, count=4), 1)
    assert outcome.wrong == 4
    assert outcome.apart == pytest.approx(1.0)


@pytest.mark.dist
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_clients_run_on_cores_of_their_own(job):
    before = os.sched_getaffinity(0)
    with load_test.cores_apart(1) as cores, running() as found:
        assert os.sched_getaffinity(0) == before - set(cores)
        with subprocess.Popen(CLIENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            client.stdin.write(json.dumps(asdict(replace(job, port=found.port, cores=cores))) + "\n")
            client.stdin.flush()
            assert client.stdout.readline() == "ready\n"
            assert os.sched_getaffinity(client.pid) == set(cores)
            client.stdin.close()
    assert os.sched_getaffinity(0) == before
    assert len(cores) == 1


def test_the_server_keeps_a_core():
    count = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=f"got {count} of {count}, expected at least one left for the server"):
        load_test.cores_apart(count).__enter__()


@pytest.mark.dist
def test_a_failing_client_is_reported_and_none_is_left(job):
    with pytest.raises(WorldError, match=r"client 0: cannot connect: .*refused"):
        load_test.run_clients(job, 2)
    with running() as found, pytest.raises(WorldError, match=r"client 0: OSError: status 404: .*there is no model"):
        load_test.run_clients(replace(job, port=found.port, model="x"), 1)


def test_control_characters_of_a_foreign_server_are_escaped(job):
    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(500)
            self.wfile.write(b"\x1b[31mred")

        def log_message(self, *_):
            pass

        def send_error(self, code):
            self.send_response_only(code)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        client = Client(replace(job, port=server.server_port, window=1, count=1))
        assert client.run().error == r"OSError: status 500: \x1b[31mred"
        thread.join()


def test_a_client_that_exits_early_is_reported():
    """Its broken pipe must not be mistaken for a closed stdout."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        load_test._send(process, "go")
        assert load_test._line(process) == ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


URLS = {
    "ftp://x": "got 'ftp://x', expected an address such as http://127.0.0.1:8000",
    "http://x:port": "got 'http://x:port'",
    "http://": "got 'http://'",
    "127.0.0.1:1": "http://127.0.0.1:1/v2/models/m: .*refused; expected a running server",
}


@pytest.mark.parametrize(("url", "message"), URLS.items())
def test_an_address_without_a_server_is_refused_in_one_line(url, message):
    with pytest.raises(ConfigError, match=message):
        Target.at(url, "m").metadata()


def test_an_address_without_a_grpc_server_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1: .*refused; expected a gRPC server with m"):
        Target.at("127.0.0.1:1", "m", "grpc").metadata()


def test_a_model_with_other_inputs_is_refused(monkeypatch):
    """Not an image, not square, of another type, or with several inputs."""
    fitting = {"name": "x", "shape": [-1, 8, 8, 3], "datatype": "UINT8"}
    inputs = [
        [fitting | {"shape": shape}] for shape in ([-1, 8], [-1, 8, 9, 3], [-1, 1, 8, 8], [-1, 3, -1, -1], [-1], [])
    ]
    for each in (*inputs, [fitting | {"datatype": "FP32"}], [fitting, fitting]):
        about = {"inputs": each, "outputs": [{"name": "y", "datatype": "FP32"}]}
        monkeypatch.setattr(Target, "metadata", lambda self, about=about: about)
        with pytest.raises(
            ConfigError, match=r"m takes .*, expected one UINT8 tensor \[-1, 3, S, S\] or \[-1, S, S, 3\]"
        ):
            Tensors.of(Target.at("http://x", "m"))


@pytest.mark.parametrize(("shape", "channels_last"), [([-1, 3, 8, 8], False), ([-1, 8, 8, 3], True)])
def test_the_order_of_a_models_pixels_is_read_from_its_shape(monkeypatch, shape, channels_last):
    inputs = [{"name": "x", "shape": shape, "datatype": "UINT8"}]
    monkeypatch.setattr(
        Target, "metadata", lambda _: {"inputs": inputs, "outputs": [{"name": "y", "datatype": "FP16"}]}
    )
    expected = Tensors(input="x", output="y", image_size=8, channels_last=channels_last, datatype="FP16")
    assert Tensors.of(Target.at("http://x", "m")) == expected
