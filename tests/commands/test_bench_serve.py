"""`falconet bench serve`: the lines, the file, the answers checked, another server, and nothing left running."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from falconet.bench import triton_server
from falconet.config.commands import ServeOptions
from falconet.config.fields import options_of
from served import running
from watched import children, wait_until_gone

SIZES = "--image-size 8 --classes 5 --micro-batch-size 3 --iterations 8"
SMALL = f"bench serve --data generated {SIZES} --threads 1 --device cpu"
pytestmark = pytest.mark.dist


def test_bench_serve_prints_its_lines_writes_its_file_and_checks_answers(falconet):
    before = children(os.getpid())  # a server that forks may be among them
    line = f"{SMALL} --clients 2 --request-type ASYNC --window 2 --check-answers --output o.json"
    line += " --client-cores 1" if len(os.sched_getaffinity(0)) > 1 else ""
    answer = falconet(line, "pytorch")
    assert answer.code == 0, answer.err
    (rate,) = re.findall(r"throughput: *(.*?) samples\/sec", answer.out)
    (latency,) = re.findall(r"latency avg: *(.*?) ms", answer.out)
    assert float(rate) > 0
    assert float(latency) > 0
    for words in (
        "resnet8-cifar results:",
        "micro_batch_size: 3",
        "served to 2 clients, ASYNC, 2 requests in flight each",
        "p50",
        "all 16 answers match the model's output here",
        "server: 48 images in ",
    ):
        assert words in answer.out
    content = json.loads(Path("o.json").read_text())
    assert len(content["latency_seconds"]) == 2 * (8 - 2)
    assert content["images_per_batch"] % 3 == 0
    assert not set(children(os.getpid())) - set(before)


def test_running_server_is_measured_and_wrong_answers_are_reported(falconet):
    with running() as found:
        line = f"{SMALL} --url http://127.0.0.1:{found.port} --port 9 --window 2"
        answer = falconet(line)
        assert answer.code == 0, answer.err
        assert "note: --port has no effect with --url" in answer.out
        assert "note: --window has no effect without --request-type ASYNC" in answer.out
        assert "[INFO]" not in answer.out, "an original's lines come with its conventions alone"
        assert "served to 1 client, SYNC" in answer.out
        wrong = falconet(f"{line} --check-answers")
        assert wrong.code == 1
        assert "8 of 8 answers differ from the model's output here" in wrong.err


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Triton is for Linux on x86-64"
)
def test_falconets_and_tritons_server_are_compared_in_one_run(falconet):
    before = children(os.getpid())
    answer = falconet(f"{SMALL} --server both --clients 2 --check-answers --output o.json --max-delay 1")
    assert answer.code == 0, answer.err
    assert "served to 2 clients, SYNC, 5 turns of 3 requests of each client:" in answer.out
    found = {
        name: [
            float(number.replace(",", ""))
            for number in re.search(rf"{name} +(.+?) \((.+?) to (.+?)\)", answer.out).groups()
        ]
        for name in ("falconet ", "triton ", "falconet / triton:")
    }
    assert all(0 < low <= middle <= high for middle, low, high in found.values())
    for name in ("falconet", "triton"):  # a turn to warm up, and five
        assert f"{name}: all {6 * 2 * 3} answers match the model's output here" in answer.out
    assert answer.out.count("has random weights") == 1
    content = json.loads(Path("o.json").read_text())
    assert [len(content["turns"][name]) for name in ("falconet", "triton")] == [5, 5]
    assert len(content["ratios"]) == 5
    assert not set(children(os.getpid())) - set(before)


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Triton is for Linux on x86-64"
)
def test_tritons_server_is_measured_over_grpc(falconet):
    line = f"{SMALL} --server triton --protocol grpc --clients 2 --request-type ASYNC --check-answers --max-queue 9"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    for words in (
        "note: --max-queue has no effect on Triton's server",
        "served to 2 clients, ASYNC, 4 requests in flight each, gRPC",
        "all 16 answers match the model's output here",
        "server: 5",  # 48 images of requests, and those of the warm-up
    ):
        assert words in answer.out


def test_falconets_server_is_measured_over_grpc(falconet):
    answer = falconet(f"{SMALL} --protocol grpc --clients 2 --check-answers")
    if "grpc-port" in options_of(ServeOptions):
        assert answer.code == 0, answer.err
        assert "served to 2 clients, SYNC, gRPC" in answer.out
        assert "all 16 answers match the model's output here" in answer.out
    else:
        assert answer.code == 2
        assert answer.err.startswith("falconet bench serve: --protocol grpc: Falconet's server has only HTTP here")


def test_a_missing_tritonserver_is_reported_before_anything_starts(falconet, monkeypatch, tmp_path):
    monkeypatch.setattr(triton_server, "ENVIRONMENT", tmp_path)
    monkeypatch.setenv("PATH", "")
    answer = falconet(f"{SMALL} --server triton")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("falconet bench serve: --server: needs NVIDIA's Triton server, and there is none")


MISTAKES = {
    f"{SMALL} --url http://127.0.0.1:1 --server both": "--server both: contradicts --url",
    f"{SMALL} --url 127.0.0.1:1 --protocol grpc": "--url: 127.0.0.1:1: ",
    f"{SMALL} --url http://127.0.0.1:1": "--url: http://127.0.0.1:1/v2/models/resnet8-cifar: ",
    f"{SMALL} --data synthetic": "--data synthetic: exists only on the device",
    f"{SMALL} --request-type sync": "--request-type: got 'sync', expected SYNC or ASYNC",
    f"{SMALL} --max-batch 2": "--max-batch: got 2, expected at least --micro-batch-size, the 3 images of one request",
    f"{SMALL} --checkpoint-input-path none": "none: no such file or folder",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistake_is_one_line(falconet, line, message):
    answer = falconet(line)
    assert answer.code == 2
    assert answer.err.startswith(f"falconet bench serve: {message}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_interruption_leaves_no_process(tmp_path, number):
    slow = (
        "--iterations 1000 --clients 2 --max-batch 64 --max-delay 1000"  # a second for each: it does not end by itself
    )
    argv = [sys.executable, "-m", "falconet", *SMALL.split(), *slow.split()]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    started = []
    while len(started) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
        started = children(process.pid)  # the server and two clients
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert len(started) == 3
    assert (process.returncode, said) == (130, b"")
    wait_until_gone(*started)
