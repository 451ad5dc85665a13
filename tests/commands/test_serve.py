"""`falconet serve` as a process: its lines, its signals, its exit codes, and a checkpoint's classes and scores."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import time
import urllib.request

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2 as published

from falconet.checkpoint import format
from falconet.checkpoint.manifest import write_manifest
from falconet.commands import serve
from falconet.config.settings import LINE, Setting
from falconet.config.tool_options import Serving
from falconet.errors import ConfigError
from falconet.evaluation.saved_model import open_checkpoint
from falconet.infer.predictor import open_served
from falconet.serve.interface import descriptors
from falconet.serve.protocol import HEADER
from gloo import free_port
from grpc_requests import request
from served import LIMIT, answers, binary, connected, infer, received, served, until
from tiny import TINY

SMALL = (
    "--model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --max-batch 4 --engine torch"
)
pytestmark = pytest.mark.dist


def ask(port, images, *, model="resnet8-cifar"):
    body, headers = binary(images)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        response = connection.getresponse()
        answer = response.read()
    assert response.status == 200, answer
    return np.frombuffer(answer[int(response.headers[HEADER]) :], dtype=np.float32).reshape(len(images), -1)


def grpc_address(lines):
    return re.search(r" and grpc://(127\.0\.0\.1:\d+): ", "".join(lines))[1]


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_signal_stops_the_server_after_requests_in_progress(number, code):
    head, body = infer(np.zeros((1, 3, 8, 8), dtype=np.uint8))
    with served(f"{SMALL} --max-delay 400") as (process, port, lines):
        url = f"http://127.0.0.1:{port}"
        assert lines[-2:] == [
            f"serving resnet8-cifar at {url} and grpc://{grpc_address(lines)}:"
            " 5 classes, 8 x 8 pixels, up to 4 at once, 32.32 on cpu\n",
            f"drop photos on {url}, or: curl --data-binary @photo.jpg {url}/predict; Ctrl-C stops\n",
        ]
        with connected(port) as whole, connected(port) as half, connected(port) as idle:
            whole.sendall(head + body)
            half.sendall(head + body[:50])
            os.kill(process.pid, number)
            time.sleep(0.2)
            half.sendall(body[50:])
            for asking in (whole, half):
                ((status, headers, _),) = answers(received(asking))
                assert (status, headers["connection"]) == (200, "close")
            assert received(idle) == b""
        assert process.wait(LIMIT) == code
        assert re.fullmatch(r"stopped: 2 requests, 2 images in [12] batch(es)?\n", process.stdout.read())
        assert process.stderr.read() == ""


def test_requests_that_outlast_the_drain_timeout_are_cut_with_one_line():
    head, body = infer(np.zeros((1, 3, 8, 8), dtype=np.uint8))
    with served(f"{SMALL} --drain-timeout 0.5") as (process, port, _), connected(port) as slow:
        slow.sendall(head + body[:50])
        os.kill(process.pid, signal.SIGTERM)
        assert received(slow) == b""
        assert process.wait(LIMIT) == 0
        assert process.stdout.read() == (
            "cut off 1 request that had not finished after 0.5 s (--drain-timeout)\n"
            "stopped: 0 requests, 0 images in 0 batches\n"
        )
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 0)]
)
def test_signal_stops_the_server_after_calls_in_progress(number, code):
    with served(f"{SMALL} --max-delay 2000") as (process, port, lines):
        with grpc.insecure_channel(grpc_address(lines)) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call = infer.future(request().SerializeToString(), timeout=LIMIT)
            until(lambda: waiting(port) == 1 or call.done())
            os.kill(process.pid, number)
            answer = published.ModelInferResponse.FromString(call.result(LIMIT))
            assert list(answer.outputs[0].shape) == [1, 5]
        assert process.wait(LIMIT) == code
        assert process.stdout.read() == "stopped: 1 request, 1 image in 1 batch\n"
        assert process.stderr.read() == ""


def waiting(port):
    """Images in the queue of the server's model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        return float(re.search(r"^falconet_queue_images\{.*\} (\S+)$", answer.read().decode(), re.M)[1])


def test_calls_that_outlast_the_drain_timeout_are_cut_with_one_line():
    with served(f"{SMALL} --drain-timeout 0.5 --max-delay 100000") as (process, port, lines):
        with grpc.insecure_channel(grpc_address(lines)) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call = infer.future(request().SerializeToString(), timeout=LIMIT)
            until(lambda: waiting(port) == 1)
            os.kill(process.pid, signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                call.result(LIMIT)
        assert process.wait(LIMIT) == 0
        assert process.stdout.read() == (
            "cut off 1 request that had not finished after 0.5 s (--drain-timeout)\n"
            "stopped: 0 requests, 0 images in 0 batches\n"
        )
        assert process.stderr.read() == ""


def test_grpc_is_turned_off_or_left_out_where_its_port_is_taken():
    with served(f"{SMALL} --grpc-port none") as (_, port, lines):
        assert lines[-2].startswith(f"serving resnet8-cifar at http://127.0.0.1:{port}: ")
    after = free_port() + 1  # two beside each other that nothing else takes while the server starts
    with (
        socket.create_server(("127.0.0.1", after)),
        served(f"{SMALL.replace('--port 0', '')} --port {after - 1}") as (_, port, lines),
    ):
        assert port == after - 1
        assert lines[0].startswith(
            f"serving over HTTP only, without gRPC: cannot listen on '127.0.0.1': port {after} is in use"
        )
        assert lines[-2].startswith(f"serving resnet8-cifar at http://127.0.0.1:{port}: ")


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf", "the interface"])
def test_grpc_is_left_out_where_it_cannot_be_and_was_not_asked_for(monkeypatch, missing):
    def not_built():
        raise descriptors.NotBuiltError("the gRPC interface is not compiled; `python -m x` compiles it")

    found = importlib.util.find_spec
    if missing == "the interface":
        monkeypatch.setattr(descriptors, "read", not_built)
        why = "the gRPC interface is not compiled; `python -m x` compiles it"
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
        why = "needs grpcio and protobuf: pip install 'falconet[serve]'"
    said = []
    assert serve.reserve(Serving(port=0), 1234, said.append) is None
    assert said == [f"serving over HTTP only, without gRPC: {why}"]
    with pytest.raises(ConfigError, match=re.escape(f"--grpc-port: {why}")):
        serve.reserve(Serving(port=0, grpc_port=0), 1234, said.append)


def test_grpc_follows_the_port_of_http():
    with socket.create_server(("127.0.0.1", 0)) as near, serve.reserve(Serving(port=0), 1234, print) as found:
        assert found.getsockname()[1] not in (0, 1235, near.getsockname()[1])
        free = found.getsockname()[1]
    with serve.reserve(Serving(), free - 1, print) as found:
        assert found.getsockname()[1] == free
    with serve.reserve(Serving(port=65535), 65535, print) as found:
        assert found.getsockname()[1] > 0


SLOW = (  # a batch takes seconds
    "--model resnet50 --image-size 192 --classes 5 --port 0 --threads 1 --device cpu --max-batch 64 --engine torch"
)


def test_a_batch_still_computing_at_the_end_of_the_drain_leaves_no_traceback():
    head, body = infer(np.zeros((64, 3, 192, 192), dtype=np.uint8), model="resnet50")
    with served(f"{SLOW} --drain-timeout 0.2 --max-delay 0") as (process, port, _), connected(port) as asking:
        asking.sendall(head + body)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        assert received(asking) == b""
        assert process.wait(LIMIT) == 0
        assert process.stdout.read().startswith(
            "cut off 1 request that had not finished after 0.2 s (--drain-timeout)\n"
        )
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_a_batch_whose_client_has_left_leaves_no_traceback():
    head, body = infer(np.zeros((64, 3, 192, 192), dtype=np.uint8), model="resnet50")
    with served(f"{SLOW} --max-delay 0") as (process, port, _):
        with connected(port) as asking:
            asking.sendall(head + body)
            time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        assert process.stdout.read().startswith("stopped: 0 requests, 0 images in 1 batch")
        assert process.stderr.read() == ""


def test_a_second_signal_stops_at_once():
    head, body = infer(np.zeros((1, 3, 8, 8), dtype=np.uint8))
    with (
        served(f"{SMALL} --drain-timeout {LIMIT}") as (process, port, _),
        connected(port) as slow,
        connected(port) as idle,
    ):
        slow.sendall(head + body[:50])
        os.kill(process.pid, signal.SIGTERM)
        assert received(idle) == b""  # it is draining
        os.kill(process.pid, signal.SIGHUP)  # which a lost terminal sends twice
        time.sleep(0.2)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 130
        assert process.stderr.read() == ""


def test_checkpoint_supplies_classes_preprocessing_and_scores(falconet):
    assert falconet(f"train {TINY} --data digits --run-dir r").code == 0
    with served("--checkpoint-input-path r --port 0 --threads 1 --device cpu --engine torch") as (_, port, lines):
        assert lines[0].startswith("loaded r/checkpoints/")
        name = re.search(r"^serving (\S+) at", lines[-2])[1]
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
            connection.request("GET", f"/v2/models/{name}")
            about = json.loads(connection.getresponse().read())
        folder = format.newest_whole(format.Path("r"), print)
        manifest = format.verify(folder)
        assert about["parameters"]["class_names"] == list(manifest.class_names)
        assert about["parameters"]["preprocessing"] == manifest.preprocessing
        opened = next(open_checkpoint(folder, []))
        side = about["inputs"][0]["shape"][-1]
        images = np.random.default_rng(0).integers(0, 256, (5, 3, side, side), dtype=np.uint8)
        normalise = opened.images.normalise(torch.device("cpu"))
        with torch.no_grad():
            expected = opened.model.eval()(normalise(torch.from_numpy(images))).numpy()
        np.testing.assert_allclose(ask(port, images, model=name), expected, rtol=1e-4, atol=1e-4)


def test_the_moving_average_is_served_where_it_validated_better(falconet):
    assert falconet(f"train {TINY} --data digits --ema-half-life 0.5 --run-dir r").code == 0
    folder = format.newest_whole(format.Path("r"), print)
    for score, stem, said in ((90.0, "ema", ", the moving average of its weights"), (50.0, "model", "")):
        format.amend(folder, {"metrics": {"validation_accuracy": 50.0, "score": score}})
        notes = []
        line = [Setting("checkpoint-input-path", (str(folder),), LINE), Setting("threads", ("1",), LINE)]
        classifier, _ = open_served(line, notes.append)
        weights = format.model_weights(folder, format.read_manifest(folder), stem)
        assert all(torch.equal(own, weights[name]) for name, own in classifier.model.state_dict().items())
        assert notes[0].partition(", saved after epoch 2")[2] == said


def test_a_checkpoint_with_impossible_preprocessing_is_refused_in_one_line(falconet):
    assert falconet(f"train {TINY} --data digits --run-dir r").code == 0
    folder = format.newest_whole(format.Path("r"), print)
    manifest = format.read_manifest(folder)
    changes = {
        "std": ([0.2, 0.2, 0], "std: got [0.2, 0.2, 0], expected three numbers"),
        "image_size": (10**9, "image_size: got 1000000000, expected a whole number"),
        "resize": (1, "resize 1 is less than the image size"),
    }
    for name, (value, message) in changes.items():
        changed = manifest.content | {"preprocessing": manifest.preprocessing | {name: value}}
        del changed["digest"]
        (folder / "manifest.json").unlink()
        write_manifest(folder / "manifest.json", changed, manifest.files)
        answer = falconet("serve --checkpoint-input-path r --port 0 --threads 1 --device cpu --engine torch")
        assert answer.code == 2
        assert answer.err.startswith(f"falconet serve: {folder}: preprocessing: {message}")
        assert answer.err.count("\n") == 1


def test_mistakes_are_one_line(falconet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistakes = {
            f"--model resnet8-cifar --port {port}": f"cannot listen on '127.0.0.1': port {port} is in use",
            "--port 0": "expected a run, as in `falconet serve runs/my-run`, or --model NAME, or --repository DIR",
            "--port 0 --checkpoint-input-path none": "none: no such file or folder",
            "--port 0 --model resnet5": "--model: 'resnet5' is not a model; did you mean 'resnet50'?",
            "--port 70000 --model resnet50": "--port: got '70000', expected a whole number, from 0 to 65535, or auto",
            f"--model resnet8-cifar --port 0 --grpc-port {port}": (
                f"--grpc-port: cannot listen on '127.0.0.1': port {port} is in use"
            ),
            "--grpc-port 8001x": "--grpc-port: got '8001x', expected a whole number, from 0 to 65535, or auto or none",
            "--max-batch 0": "--max-batch: got '0', expected a whole number, at least 1, or auto",
        }
        for line, message in mistakes.items():
            answer = falconet(f"serve {line}")
            assert answer.code == 2, line
            assert answer.err.startswith(f"falconet serve: {message}"), answer.err
            assert answer.err.count("\n") == 1


def test_images_too_small_for_the_model_are_refused(falconet):
    answer = falconet("serve --model squeezenet --image-size 8 --port 0 --threads 1 --device cpu")
    assert answer.code == 2
    assert answer.err.startswith("falconet serve: --image-size: got 8, expected at least 21 for squeezenet")
