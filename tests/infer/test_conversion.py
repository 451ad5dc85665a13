"""Conversions are made by `falconet export` in another process, kept, and never trusted blindly."""

import os
import shutil
import sys
import threading
import time

import numpy as np
import pytest

from falconet.cli import main
from falconet.config.commands import ServeOptions
from falconet.config.load import read_line
from falconet.errors import CheckpointError
from falconet.infer import conversion
from falconet.infer.conversion import Conversion, ConversionError, cache_folder, converted, read_export
from falconet.infer.engines import BY_HAND, open_engine
from falconet.infer.predictor import open_served

SMALL = "--model resnet8-cifar --image-size 8 --classes 5 --threads 1 --device cpu"
pytestmark = pytest.mark.dist


class Server:
    """What a server does when it starts with a command line and a cache."""

    def __init__(self, line, cache):
        self.notes = []
        self.line = read_line(ServeOptions, [*line.split(), "--model-cache-path", str(cache)])
        self.classifier, self.options = open_served(self.line, self.notes.append)
        self.notes.clear()
        self.conversion = Conversion("onnx", False, self.options.model, self.line)
        self.cache = cache_folder(cache)
        self.entry = self.cache / self.conversion.key(self.classifier)

    def start(self):
        return open_engine(self.classifier, self.options, self.line, self.notes.append, max_batch=4)

    def convert(self):
        return converted(self.classifier, self.conversion, self.cache, self.notes.append)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache with the conversion of a small model, made by a real export."""
    server = Server(SMALL, tmp_path_factory.mktemp("cache"))
    server.start()
    return server


@pytest.fixture
def server(made, tmp_path, monkeypatch):
    """A server with a copy of that cache, and exports that copy what was made before."""
    shutil.copytree(made.cache, tmp_path / "cache" / "engines")
    exports = []

    def convert(_, __, output):
        exports.append(output)
        shutil.copytree(made.entry, output)
        return read_export(output)

    monkeypatch.setattr(conversion, "_convert", convert)
    found = Server(SMALL, tmp_path / "cache")
    found.exports = exports
    return found


def scores(engine, side=8):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, side, side), np.uint8)
    return engine.lanes.each[0]([pixels])[0]


def test_the_first_start_converts_and_says_so(made):
    converting, line = made.notes
    assert converting == f"converting resnet8-cifar for ONNX Runtime; the result is kept in {made.cache}"
    assert line.startswith("engine: ONNX Runtime ")
    assert sorted(path.name for path in made.entry.iterdir()) == ["export.json", "model.onnx"]
    assert [path.name for path in made.cache.iterdir()] == [made.entry.name]
    assert read_export(made.entry).record["parity"]["passed"]


def test_the_second_start_uses_the_kept_conversion(server):
    found = scores(server.start())
    assert server.exports == []
    assert len(server.notes) == 1
    torch = open_engine(
        server.classifier,
        open_served(read_line(ServeOptions, f"{SMALL} --engine torch".split()), print)[1],
        server.line,
        print,
        max_batch=4,
    )
    np.testing.assert_allclose(found, scores(torch), rtol=1e-4, atol=1e-5)


def test_a_torn_conversion_is_made_again(server):
    model = server.entry / "model.onnx"
    for content in (model.read_bytes()[:-7], b""):
        model.write_bytes(content)
        server.start()
        assert read_export(server.entry)
    (server.entry / "export.json").unlink()
    server.start()
    shutil.rmtree(server.entry)
    server.entry.symlink_to("nowhere")
    server.start()
    assert len(server.exports) == 4
    assert [path.name for path in server.cache.iterdir()] == [server.entry.name]


def test_a_conversion_with_other_scores_is_noticed_and_made_again(server, tmp_path):
    line = f"export {SMALL} --norm-eps 0.05 --preprocessing --latency-batch 1 --output {tmp_path / 'other'}"
    assert main(line.split()) == 0  # another function, but the same facts in its record
    shutil.rmtree(server.entry)
    shutil.copytree(tmp_path / "other", server.entry)
    server.start()
    assert len(server.exports) == 1
    assert read_export(server.entry).files != read_export(tmp_path / "other").files


def test_another_model_has_another_key(server, tmp_path):
    keys = {
        Server(line, tmp_path / "other").entry.name
        for line in (SMALL, f"{SMALL} --norm-eps 0.01", SMALL.replace("classes 5", "classes 6"))
    }
    assert len(keys) == 3
    assert server.entry.name in keys
    int8, openvino = (server.conversion._replace(**change) for change in ({"int8": True}, {"kind": "openvino"}))
    assert len({each.key(server.classifier) for each in (server.conversion, int8, openvino)}) == 3


def test_servers_that_start_together_convert_once(server, monkeypatch):
    shutil.rmtree(server.entry)
    plain, begun = conversion._convert, threading.Barrier(3)

    def slowly(*given):
        time.sleep(0.3)
        return plain(*given)

    monkeypatch.setattr(conversion, "_convert", slowly)
    found = []

    def start():
        begun.wait()
        found.append(server.convert())

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.exports) == 1
    assert len(found) == 3


def test_only_the_conversions_used_last_are_kept(server, monkeypatch):
    monkeypatch.setattr(conversion, "KEPT", 3)
    for number in range(4):
        folder = server.cache / f"{number:032x}"
        folder.mkdir()
        os.utime(folder, (number, number))
    (server.cache / "mine").mkdir()  # whatever else is there
    shutil.rmtree(server.entry)
    server.convert()
    assert {path.name for path in server.cache.iterdir()} == {
        "mine",
        server.entry.name,
        *(f"{number:032x}" for number in (2, 3)),
    }


def test_without_a_cache_the_model_is_converted_at_each_start(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    server.cache = tmp_path / "file" / "engines"
    server.convert()
    server.cache = None
    server.convert()
    assert len(server.exports) == 2
    begun = "converting resnet8-cifar for ONNX Runtime; the result is not kept for the next start"
    assert server.notes == [
        f"{begun} ({tmp_path / 'file' / 'engines'}: Not a directory)",
        f"{begun} (there is no home folder)",
    ]
    assert not any(output.exists() for output in server.exports)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "falconet" / "engines"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    monkeypatch.setenv("HOME", "/home/me")
    assert str(cache_folder(None)) == "/home/me/.cache/falconet/engines"
    assert cache_folder(tmp_path) == tmp_path / "engines"


ENDS = {
    "falconet export: resnet8-cifar cannot be converted by ONNX: no\n": (2, "resnet8-cifar cannot be converted by ONN"),
    "Traceback (most recent call last):\n  ...\nValueError: 7\n": (1, "ValueError: 7"),
    "": (-9, "`falconet export` was killed by signal 9"),
}


@pytest.mark.parametrize("said", ENDS)
def test_an_export_that_fails_is_reported_in_one_line(said, tmp_path, monkeypatch):
    code, reason = ENDS[said]
    end = f"sys.exit({code})" if code > 0 else f"os.kill(os.getpid(), {-code})"
    script = f"import os, sys; sys.stdout.write({'input: images' if said else ''!r}); sys.stderr.write({said!r}); {end}"
    finished = conversion._finished
    monkeypatch.setattr(conversion, "_finished", lambda _: finished([sys.executable, "-c", script]))
    server = Server(SMALL, tmp_path)
    engine = server.start()
    assert engine.name.startswith("torch")
    assert server.notes[1].startswith(f"note: torch computes, because ONNX Runtime {reason}")
    assert list(server.cache.iterdir()) == []
    asked = Server(f"{SMALL} --engine onnxruntime", tmp_path)
    with pytest.raises(ConversionError) as error:
        asked.start()
    assert str(error.value).startswith(f"--engine onnxruntime: {reason}")


def test_a_full_disk_is_reported_in_one_line(server, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "/cache/model.onnx")

    shutil.rmtree(server.entry)
    monkeypatch.setattr(conversion, "_convert", full)
    assert server.start().name.startswith("torch")
    assert server.notes[1] == "note: torch computes, because ONNX Runtime /cache/model.onnx: No space left on device"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(f"train --epoch 1 --threads 1 --device cpu --run-dir {folder}".split()) == 0
    return folder


def test_int8_is_calibrated_on_the_run_and_says_its_accuracy(run, tmp_path):
    before = files(run)
    server = Server(f"{run} --int8 --threads 1 --device cpu", tmp_path)
    engine = server.start()
    assert files(run) == before  # nothing is written there
    converting, line, accuracy = server.notes
    assert converting.startswith(
        "converting resnet8-cifar for ONNX Runtime in int8, with images of its run; the result"
    )
    assert " in int8, 1 thread: " in line
    (entry,) = server.cache.iterdir()
    found = read_export(entry).record["int8"]
    right, full = (f"{100 * found[key] / 360:.2f} %" for key in ("right", "right_in_fp32"))
    assert accuracy == f"int8: {right} of 360 validation images right, in fp32 {full}"
    assert scores(engine).shape == (3, 10)
    again = Server(f"{run} --int8 --threads 1 --device cpu", tmp_path)
    again.start()
    assert again.notes[-1] == accuracy
    assert len(again.notes) == 2


def test_a_run_with_generated_images_is_not_served_in_int8(tmp_path):
    line = "train --data generated --image-size 16 --iterations 2 --micro-batch-size 8 --epoch 1 --warmup-epoch 0"
    assert main(f"{line} --threads 1 --device cpu --run-dir {tmp_path / 'run'}".split()) == 0
    with pytest.raises(ConversionError) as error:
        Server(f"{tmp_path / 'run'} --int8 --threads 1 --device cpu", tmp_path).start()
    assert str(error.value) == f"--int8: the run's images are generated, so they show no accuracy; {BY_HAND}"


def test_the_checkpoint_that_is_served_is_converted(run, tmp_path):
    """A run in progress may have a newer one by then."""
    server = Server(f"{run} --threads 1 --device cpu", tmp_path)
    argv = server.conversion.argv(server.classifier, tmp_path / "output", tmp_path / "photos")
    assert f"--checkpoint-input-path={server.classifier.checkpoint}" in argv
    assert str(run) not in argv
    assert f"--output={tmp_path / 'output'}" in argv


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"export.json: missing"):
        read_export(tmp_path)
