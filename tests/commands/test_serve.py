"""`falconet serve` as a process: its lines, its signals, its exit codes, and a checkpoint's classes and scores."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from falconet.checkpoint import format
from falconet.serve.protocol import HEADER
from falconet.train.saved_model import open_checkpoint
from served import LIMIT, binary
from tiny import TINY

SMALL = "--model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --max-batch 4"
pytestmark = pytest.mark.dist


@contextlib.contextmanager
def served(line):
    """The process, its port, and the lines before it was ready."""
    argv = [sys.executable, "-m", "falconet", "serve", *line.split()]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    lines = []
    try:
        for text in process.stdout:
            lines.append(text)
            if found := re.search(r"at http://127\.0\.0\.1:(\d+): input_0", text):
                break
        else:
            pytest.fail(f"exit code {process.wait()}: {lines}")
        yield process, int(found[1]), lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(port, images, *, model="resnet8-cifar"):
    body, headers = binary(images)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        response = connection.getresponse()
        answer = response.read()
    assert response.status == 200, answer
    return np.frombuffer(answer[int(response.headers[HEADER]) :], dtype=np.float32).reshape(len(images), -1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_stops_the_server_after_requests_in_flight(number, code):
    with served(f"{SMALL} --max-delay 400") as (process, port, lines):
        assert lines[-1] == (
            f"serving resnet8-cifar at http://127.0.0.1:{port}: input_0 uint8 [1 to 4, 3, 8, 8], 32.32 on cpu;"
            " Ctrl-C stops\n"
        )
        body, headers = binary(np.zeros((1, 3, 8, 8), dtype=np.uint8))
        fields = {"Host": "x", "Content-Length": len(body), "Expect": "100-continue", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        with (
            socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as asking,
            socket.create_connection(("127.0.0.1", port)),  # one that asks for nothing
        ):
            asking.sendall(f"POST /v2/models/resnet8-cifar/infer HTTP/1.1\r\n{head}\r\n".encode())
            assert asking.recv(1000).startswith(b"HTTP/1.1 100")  # it is in flight
            asking.sendall(body)
            os.kill(process.pid, number)
            assert asking.recv(1000).startswith(b"HTTP/1.1 200")
        assert process.wait(LIMIT) == code
        assert process.stdout.read() == "stopped: 1 request, 1 image in 1 batch\n"


def test_checkpoint_supplies_classes_preprocessing_and_scores(falconet):
    assert falconet(f"train {TINY} --data digits --run-dir r").code == 0
    with served("--checkpoint-input-path r --port 0 --threads 1 --device cpu") as (_, port, lines):
        assert lines[0].startswith("loaded r/checkpoints/")
        name = re.search(r"serving (\S+) at", lines[-1])[1]
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


def test_mistakes_are_one_line(falconet):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistakes = {
            f"--model resnet8-cifar --port {port}": f"cannot listen on '127.0.0.1': port {port} is in use",
            "--port 0": "--checkpoint-input-path: required, or --model NAME to measure with random weights",
            "--port 0 --checkpoint-input-path none": "none: no such file or folder",
            "--port 0 --model resnet5": "--model: 'resnet5' is not a model; did you mean 'resnet50'?",
            "--port 70000 --model resnet50": "--port: got '70000', expected a whole number, from 0 to 65535, or auto",
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
