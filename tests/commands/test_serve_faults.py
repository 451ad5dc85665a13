"""Faults of `falconet serve`: torn and vanishing models, a full disk, computation that hangs, stops at a bad time."""

import concurrent.futures
import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from falconet.checkpoint import format
from falconet.config.commands import ServeOptions
from falconet.config.load import load_options
from falconet.config.settings import LINE, Setting
from falconet.data.encoded import PhotoDecoder
from falconet.errors import CheckpointError
from falconet.serve import served_runs
from falconet.serve.served_runs import ServedRuns
from served import LIMIT, served, until
from tiny import TINY

pytestmark = pytest.mark.dist
SERVER = "--port 0 --threads 1 --device cpu"
TORCH = f"{SERVER} --engine torch"
SIDE = 16


def ask(port, method, path, body=b""):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def scores(port, name, seed=0):
    """The version that answers, and its scores."""
    image = np.random.default_rng(seed).integers(0, 256, 3 * SIDE * SIDE).tolist()
    tensor = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": image}
    status, content = ask(port, "POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}))
    assert status == 200, content
    return content["model_version"], content["outputs"][0]["data"]


def scored(*values, run="r"):
    """The run's checkpoints, oldest first, with these scores of a validation."""
    found = format.checkpoints_in(Path(run))
    for folder, value in zip(found, values, strict=False):
        metrics = format.read_manifest(folder).content["metrics"]
        format.amend(folder, {"metrics": {**metrics, "validation_accuracy": value, "score": value}})
    return found


class Said:
    """The lines of a server as they come."""

    def __init__(self, process):
        self.lines = []
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, stream):
        for line in stream:
            self.lines.append(line)

    def wait_for(self, text, times=1):
        until(lambda: sum(text in line for line in self.lines) >= times)

    def end(self):
        self._thread.join(LIMIT)
        return self.lines


def stopped(process, said):
    """End a server, which must have logged nothing; its lines."""
    process.terminate()
    assert process.wait(LIMIT) == 0
    lines = said.end()
    assert process.stderr.read() == ""
    return lines


def test_a_torn_checkpoint_is_named_in_one_line_and_swapped_in_once_it_is_whole(falconet):
    assert falconet(f"train {TINY} --run-dir r").code == 0
    _, second = scored(90.0, 10.0)
    with served(f"r --watch {TORCH}") as (process, port, _):
        said, before = Said(process), scores(port, "r")
        weights = second / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-100])
        scored(90.0, 95.0)
        said.wait_for("skipped ")
        assert scores(port, "r") == before
        weights.write_bytes(whole)  # its manifest stays as it is, as if a copy of the folder ended
        said.wait_for("takes the place")
        assert scores(port, "r")[0] == "2"
        lines = stopped(process, said)
    assert [line for line in lines if line.startswith(("skipped", "r: "))] == [
        f"skipped {weights}: 100 bytes short of {len(whole):,} (truncated)\n",
        "r: version 2 takes the place of 1\n",
    ]


def test_a_run_folder_that_is_deleted_is_named_and_the_model_stays_until_it_is_back(falconet):
    assert falconet(f"train {TINY} --run-dir r").code == 0
    scored(90.0, 10.0)
    with served(f"r --watch {TORCH}") as (process, port, _):
        said, before = Said(process), scores(port, "r")
        shutil.move("r", "elsewhere")
        said.wait_for("r: stays at version 1: ")
        assert scores(port, "r") == before
        scored(90.0, 95.0, run="elsewhere")
        shutil.move("elsewhere", "r")
        said.wait_for("r: version 2 takes the place of 1")
        assert scores(port, "r")[0] == "2"
        lines = stopped(process, said)
    assert sum("stays" in line for line in lines) == 1


def test_a_weights_file_that_becomes_garbage_is_named_and_a_good_one_swapped_in(falconet):
    for seed in (1, 2):
        assert falconet(f"train {TINY} --epoch 1 --seed {seed} --run-dir r{seed}").code == 0
    files = [format.checkpoints_in(Path(f"r{seed}"))[0] / "model.safetensors" for seed in (1, 2)]
    shutil.copy(files[0], "w.safetensors")
    how = f"w.safetensors --model resnet8-cifar --image-size {SIDE} --watch {TORCH}"
    with served(how) as (process, port, _):
        said, before = Said(process), scores(port, "w")
        Path("w.safetensors").write_bytes(files[1].read_bytes()[:-7])
        said.wait_for("w: stays at version 1: ")
        assert scores(port, "w") == before
        shutil.copy(files[1], "new")
        Path("new").replace("w.safetensors")
        said.wait_for("takes the place")
        assert scores(port, "w")[1] != before[1]
        stopped(process, said)


def test_a_run_that_cannot_be_loaded_has_its_reason_and_the_older_version_stays(falconet):
    assert falconet(f"train {TINY} --run-dir runs/birds").code == 0
    folders = scored(90.0, 10.0, run="runs/birds")
    weights = [folder / "model.safetensors" for folder in folders]
    whole = [file.read_bytes() for file in weights]
    with served(f"--repository runs {TORCH}") as (process, port, _):
        said = Said(process)
        load = "/v2/repository/models/birds/load"
        assert ask(port, "POST", load) == (200, {})
        before = scores(port, "birds")
        for file in weights:
            file.write_bytes(b"garbage")
        status, content = ask(port, "POST", load)
        assert (status, "none of its 2 checkpoints is complete" in content["error"]) == (400, True)
        assert scores(port, "birds") == before
        (listed,) = ask(port, "POST", "/v2/repository/index")[1]
        assert (listed["state"], listed["reason"]) == ("READY", content["error"])
        shutil.move("runs/birds", "elsewhere")
        assert ask(port, "POST", load)[0] == 404
        assert scores(port, "birds") == before
        shutil.move("elsewhere", "runs/birds")
        for file, content in zip(weights, whole, strict=True):
            file.write_bytes(content)
        scored(90.0, 95.0, run="runs/birds")
        assert ask(port, "POST", load) == (200, {})
        assert scores(port, "birds")[0] == "2"
        stopped(process, said)


def test_a_checkpoint_that_vanishes_between_choice_and_reading_is_refused_in_one_line(falconet, monkeypatch):
    assert falconet(f"train {TINY} --run-dir r").code == 0
    values = {"checkpoint-input-path": "r", "device": "cpu", "threads": "1", "engine": "torch"}
    line = [Setting(name, (value,), LINE) for name, value in values.items()]
    (source,) = ServedRuns(load_options(ServeOptions, line), PhotoDecoder(), lambda _: None).first.values()
    opened = served_runs.open_served

    def vanishing(*arguments):
        shutil.rmtree(Path("r") / "checkpoints")
        return opened(*arguments)

    monkeypatch.setattr(served_runs, "open_served", vanishing)
    with pytest.raises(CheckpointError, match=r"^[^\n]*r[^\n]*$"):
        source.open()


@contextlib.contextmanager
def full_disk(folder, size):
    """A file system of this many bytes."""
    folder.mkdir()
    how = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(how, capture_output=True).returncode:
        pytest.skip("a file system may not be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_a_server_without_conversions(falconet, tmp_path):
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    with (
        full_disk(tmp_path / "cache", 1 << 16),
        served(f"r {SERVER} --model-cache-path {tmp_path / 'cache'}") as (process, port, lines),
    ):
        (note,) = [line for line in lines if line.startswith("note: torch computes, because ONNX Runtime ")]
        assert "the disk is full; make room" in note
        assert scores(port, "r")[0] == "1"
        stopped(process, Said(process))


# A server that computes for ever on a white image.
HANGING = """
import sys, time
from falconet import exits
from falconet.cli import main
from falconet.infer.predictor import Predictor
from falconet.legacy.conventions import CONVENTIONS

lanes = Predictor.lanes

def hanging(lane):
    def execute(portions):
        while all(portion.min() == 255 for portion in portions):
            time.sleep(1)
        return lane(portions)
    return execute

Predictor.lanes = lambda predictor: [hanging(lane) for lane in lanes(predictor)]
exits.soon(main(sys.argv[1:], CONVENTIONS["falconet"]))
"""


def test_a_computation_that_hangs_ends_requests_by_their_deadline_and_does_not_hold_the_stop(tmp_path, monkeypatch):
    Path(tmp_path / "hanging.py").write_text(HANGING)
    start = subprocess.Popen

    def hanging(argv, **options):
        return start([sys.executable, str(tmp_path / "hanging.py"), *argv[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", hanging)
    how = f"--model resnet8-cifar --image-size {SIDE} --classes 5 --request-timeout 3 {TORCH}"
    with served(how) as (process, port, _):
        assert len(scores(port, "resnet8-cifar")[1]) == 5
        tensor = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": [255] * 3 * SIDE**2}
        body = json.dumps({"inputs": [tensor]})
        for _ in range(2):  # the second waits for the lane
            status, content = ask(port, "POST", "/v2/models/resnet8-cifar/infer", body)
            assert (status, content["error"].partition(" within ")[0]) == (504, "not computed")
        assert ask(port, "GET", "/v2/health/live")[0] == 200
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stdout.read() == "stopped: 1 request, 1 image in 2 batches\n"
        assert process.stderr.read() == ""


def exports():
    """Processes that convert a model for a server of this test, which is their parent's parent."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if b"export" in words and any(str(Path.cwd()).encode() in word for word in words):
                found.append(each.parent.name)
    return found


def test_a_stop_during_a_conversion_does_not_wait_for_it(falconet, tmp_path):
    assert falconet(f"train {TINY} --epoch 1 --run-dir runs/birds").code == 0
    cache = tmp_path / "cache"
    how = f"--repository {tmp_path / 'runs'} --model-cache-path {cache} --drain-timeout 0 {SERVER}"
    with served(how) as (process, port, _), concurrent.futures.ThreadPoolExecutor(1) as threads:
        said = Said(process)
        loading = threads.submit(ask, port, "POST", "/v2/repository/models/birds/load")
        said.wait_for("converting ")
        until(exports)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        assert isinstance(loading.exception(LIMIT), ConnectionError | http.client.HTTPException)
        assert [line for line in said.end() if "torch computes" in line] == []
        assert process.stderr.read() == ""
    until(lambda: not exports())
    assert list((cache / "engines").iterdir()) == []


def test_a_stop_during_the_first_conversion_leaves_no_process(falconet, tmp_path):
    line = f"serve --model resnet8-cifar --image-size 16 --model-cache-path {tmp_path / 'cache'} {SERVER}"
    argv = [sys.executable, "-m", "falconet", *line.split()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("converting "):
            assert process.poll() is None
        until(exports)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 130
        assert "Traceback" not in process.stderr.read()
    until(lambda: not exports())


def test_a_client_that_leaves_while_a_model_is_loaded_does_not_end_the_loading(falconet):
    assert falconet(f"train {TINY} --epoch 1 --run-dir runs/birds").code == 0
    with served(f"--repository runs {TORCH}") as (process, port, _):
        said = Said(process)
        for _ in range(5):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
                connection.request("POST", "/v2/repository/models/birds/load")
                time.sleep(0.02)
        until(lambda: ask(port, "GET", "/v2/models/birds/ready")[0] == 200)
        assert scores(port, "birds")[0] == "1"
        stopped(process, said)


@pytest.mark.slow
def test_no_request_is_lost_while_converted_models_are_swapped(falconet, tmp_path):
    assert falconet(f"train {TINY} --epoch 3 --run-dir r").code == 0
    scored(90.0, 10.0, 5.0)
    wrong, done, seen = [], threading.Event(), dict[str, list[float]]()
    with served(f"r --watch {SERVER} --model-cache-path {tmp_path / 'cache'}") as (process, port, lines):
        assert any(line.startswith("engine: ONNX Runtime") for line in lines)
        said = Said(process)

        def client():
            while not done.is_set():
                try:
                    version, found = scores(port, "r")
                except (AssertionError, OSError) as error:
                    wrong.append(repr(error))
                    continue
                if not np.allclose(seen.setdefault(version, found), found, rtol=1e-4, atol=1e-4):
                    wrong.append((version, found))

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            clients = [threads.submit(client) for _ in range(3)]
            for number, best in enumerate(([90.0, 95.0, 5.0], [90.0, 95.0, 99.0]), start=1):
                scored(*best)
                said.wait_for("takes the place", times=number)
                until(lambda number=number: str(number + 1) in seen)
            done.set()
            for each in clients:
                each.result(LIMIT)
        lines = stopped(process, said)
    assert wrong == []
    assert sorted(seen) == ["1", "2", "3"]
    assert len({tuple(np.round(each, 6)) for each in seen.values()}) == 3
    assert sum("converting " in line for line in lines) == 2


def test_a_full_disk_of_the_access_log_does_not_stop_answers(tmp_path):
    log = tmp_path / "disk" / "access.jsonl"
    how = f"--model resnet8-cifar --image-size {SIDE} --classes 5 {TORCH} --access-log {log}"
    with full_disk(log.parent, 4096), served(how) as (process, port, _):
        for number in range(100):  # of about 200 bytes each
            assert len(scores(port, "resnet8-cifar", seed=number)[1]) == 5
        until(lambda: "\n" in log.read_text())  # a thread writes it
        whole = log.read_text().rpartition("\n")[0]  # the rest of the last line follows when there is room
        written = [json.loads(line) for line in whole.splitlines()]
        assert 1 <= len(written) < 100
        stopped(process, Said(process))
