"""`falconet export`: what it writes and prints, when it refuses, and that nothing is left half done."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors.torch import save_file

from exported import CPU, graph_of
from falconet.checkpoint import format
from falconet.cli import main
from falconet.evaluation import saved_model
from falconet.export import checks, photos
from falconet.export.formats import FORMATS, torch_engine
from falconet.models import zoo

QUICK = "--threads 1 --latency-batch 2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the digits in half precision, whose validation images are built in."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    line = f"train --epoch 1 --precision 16.16 --loss-scaling 128 --threads 1 --device cpu --run-dir {folder}"
    assert main(line.split()) == 0
    return folder


@pytest.fixture
def run(trained, falconet, tmp_path):
    """A copy of it in the folder in which commands run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch):
    """A format that only copies the scores of the model, so that what surrounds it is tested in less time."""

    def write(graph, folder, device):
        (folder / "scores").write_bytes(b"as they are")

    def opened(graph, folder, device):
        assert (folder / "scores").exists()
        return torch_engine(graph.module(), device)

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(write=write, open=opened))


def hidden(folder):
    return [path.name for path in folder.rglob(".*")]


def test_a_run_is_written_checked_on_its_validation_images_and_recorded(run, falconet):
    answer = falconet(f"export run {QUICK}")
    assert (answer.code, answer.err) == (0, "")
    expected = [
        r"loaded run/checkpoints/resnet8-cifar_digits_1, saved after epoch 1",
        r"input: images, float32 \[N, 3, 8, 8\]: RGB photos, short side resized to 8, centre crop of 8, "
        r"\(pixel / 255 - \[0.3058, 0.3058, 0.3058\]\) / \[0.3763, 0.3763, 0.3763\]",
        r"output: logits, float32 \[N, 10\], before the softmax",
        r"parity on 32 validation images: logits differ by at most \d\.\de-\d\d, \d\.\de-\d\d of an image's largest "
        r"\(tolerance 0.0001\); same best class for 32 of 32",
        r"latency of a batch of 1: [\d.]+ ms, in Falconet [\d.]+ ms \(cpu, 1 thread\)",
        r"latency of a batch of 2: [\d.]+ ms, in Falconet [\d.]+ ms \(cpu, 1 thread\)",
        r"written to run/export/onnx: model.onnx, 0.\d MB, and export.json",
    ]
    lines = answer.out.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    folder = run / "export" / "onnx"
    record = json.loads((folder / "export.json").read_text())
    content = (folder / "model.onnx").read_bytes()
    assert record["files"] == {"model.onnx": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    assert record["class_names"] == [str(digit) for digit in range(10)]
    assert (record["format"], record["precision"], record["input"]["shape"]) == ("onnx", "fp32", ["N", 3, 8, 8])
    assert record["parity"]["passed"]
    assert record["latency_ms"].keys() == {"batch of 1", "batch of 2"}
    assert record["versions"]["onnxruntime"] == onnxruntime.__version__
    assert hidden(run) == []
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (scores,) = session.run(None, {"images": np.zeros((5, 3, 8, 8), np.float32)})
    assert scores.shape == (5, 10)


def test_earlier_export_is_replaced_only_on_request(run, falconet, quick):
    assert falconet(f"export run {QUICK}").code == 0
    before = (run / "export/onnx/export.json").read_bytes()
    again = falconet(f"export run {QUICK}")
    assert (again.code, again.err) == (
        2,
        "falconet export: run/export/onnx holds an export; expected --overwrite to replace it, or another --output\n",
    )
    assert (run / "export/onnx/export.json").read_bytes() == before
    assert falconet(f"export run --overwrite --tolerance 0.5 {QUICK}").code == 0
    assert json.loads((run / "export/onnx/export.json").read_text())["parity"]["tolerance"] == 0.5
    assert hidden(run) == []


def test_folder_of_other_files_is_never_replaced(run, falconet, tmp_path, quick):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    answer = falconet(f"export run --output thesis --overwrite {QUICK}")
    assert (answer.code, answer.err) == (
        2,
        "falconet export: --output: thesis exists and is not an export; expected another name\n",
    )
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"


def test_links_in_a_run_folder_are_not_followed(run, falconet, tmp_path, quick):
    (tmp_path / "elsewhere").mkdir()
    (run / "export").symlink_to(tmp_path / "elsewhere")
    answer = falconet(f"export run {QUICK}")
    assert answer.code == 2
    assert "run/export: is a symbolic link" in answer.err
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_wrong_scores_are_exit_code_1_and_leave_nothing(run, falconet, quick, monkeypatch):
    def wrong(graph, folder, device):
        compute = torch_engine(graph.module(), device)
        return lambda images: compute(images) * 1.01

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(open=wrong))
    answer = falconet(f"export run {QUICK}")
    assert answer.code == 1
    assert "1.0e-02 of an image's largest (tolerance 0.0001); same best class for 32 of 32" in answer.out
    assert answer.out.endswith(
        "nothing is written to run/export/onnx: the difference exceeds the tolerance (--tolerance)\n"
    )
    assert list((run / "export").iterdir()) == []
    assert falconet(f"export run --tolerance 0.02 {QUICK}").code == 0


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_not_numbers_do_not_pass(run, falconet, quick, monkeypatch, score):
    def broken(graph, folder, device):
        return lambda images: np.full((len(images), 10), score, np.float32)

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(open=broken))
    assert falconet(f"export run {QUICK}").code == 1


def test_a_failure_leaves_nothing_behind(run, falconet, quick, monkeypatch):
    def full(graph, folder, device):
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device", str(folder / "half"))

    monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(write=full))
    answer = falconet(f"export run {QUICK}")
    assert (answer.code, "the disk is full" in answer.err) == (2, True)
    assert list((run / "export").iterdir()) == []


def test_what_a_killed_export_left_goes_with_the_next(run, falconet, quick):
    left = run / "export" / ".aoti.tmp-12-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "model.pt2").write_bytes(b"half")
    os.utime(left, (0, 0))
    assert falconet(f"export run {QUICK}").code == 0
    assert hidden(run) == []


def test_photos_of_a_folder_are_compared_on_request(run, image_folder, falconet, quick):
    answer = falconet(f"export run --photos {image_folder}/val {QUICK}")
    assert f"parity on 8 photos of {image_folder}/val: " in answer.out


def test_unreadable_photos_are_named_and_left_out(run, image_folder, falconet, quick):
    (image_folder / "val/dark/0.png").write_bytes(b"no photo")
    answer = falconet(f"export run --photos {image_folder}/val {QUICK}")
    assert f"{image_folder}/val/dark/0.png: cannot be decoded" in answer.out
    assert "parity on 7 photos of" in answer.out


def test_scores_are_compared_on_the_photos_that_the_seed_of_the_run_left_out(
    image_folder, falconet, quick, monkeypatch
):
    line = "train photos/train --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --seed 3"
    assert falconet(f"{line} --warmup-epoch 0 --threads 1 --device cpu --run-dir run").code == 0
    seen, batches = [], photos.Sample.batches
    monkeypatch.setattr(photos.Sample, "batches", lambda self, size: seen.append(self.source) or batches(self, size))
    for model in ("run", "--pretrained run --output also"):
        answer = falconet(f"export {model} {QUICK}")
        assert answer.code == 0, answer.err
        assert "parity on 6 validation images: " in answer.out
    chosen = format.choose(Path("run"), "best", pytest.fail)
    expected = saved_model.images_of(*chosen, [])[1].validation
    assert len(seen) == 2
    for source in seen:
        assert [source.where(number) for number in range(6)] == [expected.where(number) for number in range(6)]


def test_files_that_were_added_to_an_export_are_not_replaced(run, falconet, quick):
    assert falconet(f"export run {QUICK}").code == 0
    (run / "export/onnx/notes.txt").write_text("mine")
    answer = falconet(f"export run --overwrite {QUICK}")
    assert answer.code == 2
    assert "--overwrite: run/export/onnx also holds notes.txt, which is not the export's" in answer.err
    (run / "export/onnx/notes.txt").unlink()
    assert falconet(f"export run --overwrite {QUICK}").code == 0


def test_an_export_says_that_it_does_not_average_views(image_folder, falconet, quick):
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --tta flip"
    assert falconet(f"{line} --warmup-epoch 0 --threads 1 --device cpu --run-dir run").code == 0
    answer = falconet(f"export run {QUICK}")
    assert (
        "note: the run's validations average 2 views, the image and its mirror image; the export computes" in answer.out
    )
    assert json.loads(Path("run/export/onnx/export.json").read_text())["validated_with_tta"] == "flip"


def test_a_class_whose_folder_has_no_utf_8_name_is_exported(image_folder, falconet, quick):
    name = os.fsdecode(b"caf\xe9")
    for split in ("train", "val"):
        (image_folder / split / "dark").rename(image_folder / split / name)
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --warmup-epoch 0"
    assert falconet(f"{line} --threads 1 --device cpu --run-dir run").code == 0
    answer = falconet(f"export run {QUICK}")
    assert (answer.code, answer.err) == (0, "")
    record = Path("run/export/onnx/export.json").read_text(encoding="utf-8")
    assert json.loads(record)["class_names"] == [name, "light"]


def test_noise_stands_in_for_photos_that_are_gone(image_folder, falconet, quick, tmp_path):
    line = "--data folder --data-dir photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1"
    assert falconet(f"train {line} --warmup-epoch 0 --threads 1 --device cpu --run-dir run").code == 0
    answer = falconet(f"export run {QUICK}")
    assert "parity on 8 validation images: " in answer.out
    image_folder.rename(tmp_path / "away")
    answer = falconet(f"export run --overwrite {QUICK}")
    assert answer.code == 0
    assert "note: no validation images (photos: no such folder" in answer.out
    assert "parity on 32 images of noise, which --photos replaces: " in answer.out


def test_weights_file_is_exported_beside_itself(falconet, tmp_path, quick):
    model = zoo.build("resnet8-cifar", classes=3, seed=1)
    (tmp_path / "weights").mkdir()
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, "weights/mine.safetensors")
    answer = falconet(f"export weights/mine.safetensors --model resnet8-cifar --classes 3 --image-size 16 {QUICK}")
    assert answer.code == 0, answer.err
    record = json.loads((tmp_path / "weights/export/onnx/export.json").read_text())
    assert record["output"]["shape"] == ["N", 3]


def test_weights_name_the_model_that_they_fit(falconet, tmp_path):
    model = zoo.build("resnet10", classes=3, seed=1)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, "mine.safetensors")
    answer = falconet(f"export mine.safetensors --image-size 32 --format timm {QUICK}")
    assert answer.code == 0, answer.err
    stored = json.loads((tmp_path / "export/timm/config.json").read_text())
    assert (stored["architecture"], stored["model_args"]) == ("resnet18", {"layers": [1, 1, 1, 1]})


def test_one_checkpoint_of_a_run_is_exported_to_the_run_folder(run, falconet, quick):
    assert falconet(f"export run/checkpoints/resnet8-cifar_digits_1 {QUICK}").code == 0
    assert (run / "export/onnx/export.json").exists()


NOTES = {
    "--precision 16.16": "note: --precision has no effect on an export, which is fp32, or fp16 with --half",
    "--device cpu": "note: --device has no effect without --format aoti: the file is for any device",
}


@pytest.mark.parametrize("option", NOTES)
def test_options_without_effect_are_noted(run, falconet, quick, option):
    assert NOTES[option] in falconet(f"export run {option} {QUICK}").out


def test_the_file_to_open_is_named_also_if_another_is_larger(run, falconet, monkeypatch):
    def write(graph, folder, device):
        (folder / "model.xml").write_bytes(b"x")
        (folder / "model.bin").write_bytes(b"many weights")

    def opened(graph, folder, device):
        return torch_engine(graph.module(), device)

    monkeypatch.setitem(FORMATS, "openvino", FORMATS["openvino"]._replace(write=write, open=opened))
    answer = falconet(f"export run --format openvino {QUICK}")
    assert answer.code == 0, answer.err
    assert "openvino: model.xml with model.bin, 0.0 MB, and export.json\n" in answer.out


MISTAKES = {
    "export": "falconet export: expected a run, such as runs/my-run, or --model NAME, which alone means random weights",
    "export nowhere": "nowhere: no such file or folder",
    "export run --format onxx": "--format: got 'onxx', expected onnx, pt2, aoti, timm, triton or openvino; did you",
    "export run --photos nowhere": "nowhere: no such folder; expected a folder of photos for --photos",
    "export run --photos empty": "--photos: empty: holds no photo that can be read",
    "export run --format timm": "--format: timm has no model like resnet8-cifar",
    "export run --pretrained": "--pretrained: contradicts run, which also gives the weights; expected one of them",
    "export run --output /proc/x": "--output: cannot write /proc/x: No such file or directory",
    "export run --output run/config.yaml/x": "--output: cannot write run/config.yaml/x: ",
    "export run --latency-batch 0": "--latency-batch: got '0', expected a whole number, at least 1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line, run, falconet, tmp_path, quick):
    (tmp_path / "empty").mkdir()
    answer = falconet(line)
    assert answer.code == 2
    assert MISTAKES[line] in answer.err
    assert len(answer.err.splitlines()) == 1
    assert list(tmp_path.rglob("export.json")) == []


@pytest.mark.parametrize(
    ("kind", "package", "pip"),
    [("onnx", "onnxscript", "'falconet[export]'"), ("triton", "onnx", "'falconet[export]'"), ("openvino",) * 3],
)
def test_missing_packages_are_one_line_with_the_command_that_helps(falconet, monkeypatch, kind, package, pip):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    answer = falconet(f"export run --format {kind}")
    assert (answer.code, answer.err) == (
        2,
        f"falconet export: --format {kind}: needs {package}, which is not installed: pip install {pip}\n",
    )


def test_parity_counts_images_whose_best_class_is_another():
    graph = graph_of()
    noise = photos.noise(graph)
    ours = torch_engine(graph.module(), CPU)
    swapped = lambda images: ours(images)[:, [1, 2, 0]]  # noqa: E731
    few = replace(noise, pixels=noise.pixels[:4])
    parity = checks.compare(graph, ours, swapped, few, tolerance=1e-4, batch=3)
    assert (parity.images, parity.same_top_1, parity.passed) == (4, 0, False)
    assert parity.largest_difference > 0
