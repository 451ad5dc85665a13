"""`falconet export --int8`: calibrated, measured on other images, and refused where it cannot be."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from falconet.cli import main
from falconet.commands import export
from falconet.export import photos
from falconet.export.formats import FORMATS, torch_engine

QUICK = "--threads 1 --latency-batch 8"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(f"train --epoch 2 --threads 1 --device cpu --run-dir {folder}".split()) == 0
    return folder


@pytest.fixture
def run(trained, falconet, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch):
    """A file that only copies the scores of the model, so that what surrounds it is tested in less time."""

    def write(graph, folder, device):
        (folder / "model.onnx").write_bytes(b"as they are")

    def opened(graph, folder, device):
        return torch_engine(graph.module(), device)

    def quantise(plain, target, batches, *, reduce_range):
        shutil.copy(plain, target)
        assert sum(1 for _ in batches) > 0

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(write=write, open=opened))
    monkeypatch.setattr(export, "quantise", quantise)


def test_a_run_is_quantised_and_measured_on_its_validation_images(run, falconet):
    answer = falconet(f"export run --int8 --preprocessing --calibration-images 50 {QUICK}")
    assert (answer.code, answer.err) == (0, "")
    expected = [
        r"loaded run/checkpoints/resnet8-cifar_digits_2, saved after epoch 2",
        r"calibrated on 50 training images; accuracy is measured on others",
        r"input: images, uint8 .*",
        r"output: logits, .*",
        r"int8 on 360 validation images: \d\d\.\d\d % right, in fp32 \d\d\.\d\d % \(tolerance 1 % of the images\);"
        r" same best class for [\d.]+ %; logits differ by at most [\d.]+, by [\d.]+ on average",
        r"latency of a batch of 1: [\d.]+ ms, in fp32 [\d.]+ ms, in Falconet [\d.]+ ms \(cpu, 1 thread\)",
        r"latency of a batch of 8: [\d.]+ ms, in fp32 [\d.]+ ms, in Falconet [\d.]+ ms \(cpu, 1 thread\)",
        r"written to run/export/onnx-int8: model.onnx, 0.\d MB \(0.\d MB in fp32\), and export.json",
    ]
    lines = answer.out.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    folder = run / "export/onnx-int8"
    record = json.loads((folder / "export.json").read_text())
    assert record["precision"] == "int8"
    assert record["calibration"] == {"images": 50, "photos": "training image", "reduce_range": False}
    assert record["int8"]["passed"]
    assert record["int8"]["right_in_fp32"] > 250
    assert record["latency_ms"]["batch of 1"].keys() == {"exported", "fp32", "falconet"}
    assert record["files"]["model.onnx"]["bytes"] < 0.4 * record["bytes_in_fp32"]
    assert sorted(path.name for path in folder.iterdir()) == ["export.json", "model.onnx"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert session.run(None, {"images": np.zeros((5, 8, 8, 3), np.uint8)})[0].shape == (5, 10)


def test_only_training_images_calibrate(image_folder, falconet, quick, monkeypatch):
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --warmup-epoch 0"
    assert falconet(f"{line} --threads 1 --device cpu --run-dir run").code == 0
    seen, divided = [], photos.divided_run
    monkeypatch.setattr(
        photos, "divided_run", lambda *given, **named: seen.append(divided(*given, **named)) or seen[-1]
    )
    answer = falconet(f"export run --int8 --calibration-images 10 {QUICK}")
    assert answer.code == 0, answer.err
    assert "calibrated on 10 training images" in answer.out
    assert "int8 on 8 validation images: " in answer.out
    (images,) = seen
    for sample, part in ((images.calibration, "train"), (images.measured, "val")):
        assert {Path(sample.source.where(number)).parts[-3] for number in sample.chosen.tolist()} == {part}


def test_photos_of_a_folder_calibrate_and_measure_weights_without_a_run(image_folder, falconet, quick):
    answer = falconet(f"export --model resnet8-cifar --image-size 16 --photos photos --int8 {QUICK}")
    assert answer.code == 0, answer.err
    assert "note: no accuracy, because the model does not know the classes of the photos" in answer.out
    assert "calibrated on 24 photos of photos; accuracy" in answer.out
    assert "int8 on 8 photos of photos: same best class for 100.00 % (tolerance 10 % others)" in answer.out
    assert Path("export/onnx-int8/export.json").exists()


def test_lost_accuracy_is_exit_code_1_and_keeps_the_earlier_file(run, falconet, quick, monkeypatch):
    assert falconet(f"export run --int8 {QUICK}").code == 0
    before = (run / "export/onnx-int8/export.json").read_bytes()
    opened, engines = FORMATS["onnx"].open, []

    def worse(graph, folder, device):
        engines.append(opened(graph, folder, device))
        return engines[-1] if len(engines) % 2 else lambda images: np.roll(engines[0](images), 1, axis=1)

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(open=worse))
    answer = falconet(f"export run --int8 --overwrite {QUICK}")
    assert answer.code == 1
    last = answer.out.splitlines()[-1]
    assert last.startswith(
        "nothing is written to run/export/onnx-int8: int8 loses more right answers than the tolerance allows; try"
        " --calibration-images 512, --reduce-range if the processor lacks VNNI, --tolerance 0."
    )
    assert (run / "export/onnx-int8/export.json").read_bytes() == before
    assert [path.name for path in (run / "export").iterdir()] == ["onnx-int8"]
    accepted = re.search(r"--tolerance ([\d.]+)", last)[1]
    assert falconet(f"export run --int8 --overwrite --tolerance {accepted} {QUICK}").code == 0


MISTAKES = {
    "export run --int8 --half": "--int8: contradicts --half; expected only one of the two",
    "export run --int8 --format pt2": "--int8: --format pt2 is not written in int8; expected --format onnx",
    "export run --int8 --format triton": "--int8: --format triton is not written in int8; expected --format onnx",
    "export --model resnet8-cifar --int8": "--int8: needs photos to measure ranges on; expected --photos DIR as well",
    "export run --int8 --photos empty": "--photos: empty: holds no photo that can be read",
    "export run --int8 --photos nowhere": "nowhere: no such folder; expected a folder of photos for --photos",
    "export run --int8 --photos photos/train --val-fraction 1": "--photos: no training images; expected some to",
    "export run --int8 --calibration-images 0": "--calibration-images: got '0', expected a whole number, at least 1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line, run, image_folder, falconet, tmp_path, quick):
    (tmp_path / "empty").mkdir()
    answer = falconet(line)
    assert answer.code == 2
    assert MISTAKES[line] in answer.err
    assert len(answer.err.splitlines()) == 1
    assert list(tmp_path.rglob("export.json")) == []


def test_images_that_are_gone_are_one_line(image_folder, falconet, quick, tmp_path):
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --warmup-epoch 0"
    assert falconet(f"{line} --threads 1 --device cpu --run-dir run").code == 0
    image_folder.rename(tmp_path / "away")
    answer = falconet(f"export run --int8 {QUICK}")
    assert answer.code == 2
    assert answer.err.startswith("falconet export: --int8: photos: no such folder")
    assert answer.err.endswith("expected --photos DIR, a folder of photos to measure ranges on\n")


def test_options_of_int8_are_noted_without_it(run, falconet, quick):
    out = falconet(f"export run --calibration-images 9 --reduce-range {QUICK}").out
    for option in ("--calibration-images", "--reduce-range"):
        assert f"note: {option} has no effect without --int8" in out
