"""`falconet train --resume`: the same command line continues its run and touches no other."""

from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.errors import CheckpointError
from tiny import TINY

LINE = f"train {TINY} --logs-per-epoch 4 --run-dir r --resume"


def weights(run):
    folder = format.checkpoints_in(Path(run))[-1]
    return format.read_tensors(folder, "model", verified=format.verify(folder))


def test_without_an_earlier_run_resume_starts_one(falconet):
    answer = falconet(LINE)
    assert answer.code == 0, answer.err
    assert "restored" not in answer.out
    assert format.verify(format.checkpoints_in(Path("r"))[-1]).progress.update == 8


def test_a_run_cut_short_resumes_bit_for_bit(falconet):
    assert falconet(LINE.replace("--run-dir r", "--run-dir straight --checkpoint-save-freq 0.5")).code == 0
    line = f"{LINE} --checkpoint-save-freq 0.5"
    assert falconet(line).code == 0
    for folder in format.checkpoints_in(Path("r"))[1:]:
        for path in (*folder.iterdir(), folder):
            path.rmdir() if path.is_dir() else path.unlink()
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "restored r/checkpoints/" in answer.out
    one, other = weights("straight"), weights("r")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_finished_run_is_left_alone(falconet):
    falconet(LINE)
    before = {path: path.stat().st_mtime_ns for path in Path("r/checkpoints").rglob("*")}
    answer = falconet(LINE)
    assert answer.code == 0
    assert "nothing left to train" in answer.out
    assert {path: path.stat().st_mtime_ns for path in Path("r/checkpoints").rglob("*")} == before


def test_a_run_that_died_after_its_last_update_is_ended(falconet, monkeypatch):
    from falconet.train import summary

    def dies(*_, **__):
        raise CheckpointError("died")

    with monkeypatch.context() as patched:
        patched.setattr(summary, "write", dies)
        assert falconet(LINE).code == 2
    assert not Path("r/summary.json").exists()
    answer = falconet(LINE)
    assert answer.code == 0, answer.err
    assert Path("r/summary.json").exists()
    assert "nothing left to train" in falconet(LINE).out


def test_a_run_that_saved_elsewhere_keeps_its_log_when_that_place_is_not_named(falconet):
    assert falconet(f"{LINE} --checkpoint-output-path ck").code == 0
    before = Path("r/metrics.jsonl").read_text()
    answer = falconet(LINE)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--resume: the checkpoints of r are in ck; expected --checkpoint-output-path ck" in answer.err
    assert Path("r/metrics.jsonl").read_text() == before


def test_a_run_with_only_torn_checkpoints_is_refused_with_the_reason(falconet):
    falconet(LINE)
    for folder in format.checkpoints_in(Path("r")):
        (folder / "model.safetensors").write_bytes(b"")
    answer = falconet(LINE)
    assert answer.code == 2
    assert "r/checkpoints: none of its 2 checkpoints is complete; r/checkpoints/resnet8-cifar_generated_" in answer.err
    assert answer.err.endswith("(truncated); expected another --run-dir, to start a new run\n")


OTHERS = {
    "--lr 0.3": "was trained with --lr 0.1, but this command line has 0.3",
    "--replicas 2": "was trained with --replicas 1, but this command line has 2",
    "--ema-half-life 1": "was trained with --ema-half-life unset, but this command line has 1",
}


@pytest.mark.parametrize(("extra", "message"), OTHERS.items())
def test_another_run_in_the_folder_is_refused(falconet, extra, message):
    falconet(LINE)
    answer = falconet(f"{LINE} {extra}")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


MISTAKES = {
    f"train {TINY} --resume": "--resume: needs --run-dir",
    "restore --checkpoint-input-path r --resume": "--resume: is for train",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_resume_is_refused_where_it_makes_no_sense(falconet, line, message):
    falconet(LINE)
    answer = falconet(line)
    assert answer.code == 2
    assert message in answer.err


def test_a_run_on_a_relative_path_resumes_whatever_its_checkpoints_call_it(falconet, image_folder):
    line = "train photos --config photos --pretrained none --model resnet8-cifar --image-size 16 --epoch 1 --threads 1"
    line += " --device cpu --run-dir r --resume"
    assert falconet(line).code == 0
    assert f"data-dir: {image_folder}  # command line\n" in Path("r/config.yaml").read_text()
    for spelling in ("photos", f"{image_folder}"):
        assert "nothing left to train" in falconet(line.replace("photos", spelling, 1)).out
    assert "--data-dir" in falconet(line.replace("photos", "photos/train", 1)).err
