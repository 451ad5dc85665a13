"""What a run keeps: its weights before the first update, checkpoints from an epoch on, or nothing at all."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.models import zoo
from falconet.parallel import world
from tiny import TINY


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders go."""
    home = tmp_path / "temporary"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    return home


def saved(run):
    return [folder.name for folder in format.checkpoints_in(run)]


def weights(folder):
    return format.read_tensors(folder, "model", verified=format.verify(folder))


def test_initial_checkpoint_is_saved_and_kept(falconet, tmp_path):
    answer = falconet(f"train {TINY} --epoch 5 --initial-checkpoint --checkpoints-kept 1 --run-dir a --seed 3")
    assert answer.code == 0, answer.err
    ours = [f"resnet8-cifar_generated_{epoch}" for epoch in (0, 5)]
    assert set(ours) <= set(saved(tmp_path / "a"))
    built = zoo.build("resnet8-cifar", classes=10, seed=3).state_dict()
    found = weights(tmp_path / "a/checkpoints" / ours[0])
    assert found.keys() == built.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in built.items())


def test_run_restored_from_the_initial_checkpoint_equals_a_straight_one(falconet, tmp_path):
    assert falconet(f"train {TINY} --initial-checkpoint --checkpoints-kept all --run-dir a").code == 0
    first = tmp_path / "a/checkpoints/resnet8-cifar_generated_0"
    answer = falconet(f"restore --checkpoint-input-path {first} --run-dir b")
    assert answer.code == 0, answer.err
    assert saved(tmp_path / "b") == ["resnet8-cifar_generated_1", "resnet8-cifar_generated_2"]
    one, other = (weights(format.checkpoints_in(tmp_path / run)[-1]) for run in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_tensorflow_style_reports_and_validates_the_initial_checkpoint_but_does_not_average_it(falconet, tmp_path):
    line = f"train {TINY} --initial-checkpoint --checkpoints-kept all --run-dir a"
    answer = falconet(f"{line} --weight-avg-strategy mean", "tensorflow")
    assert answer.code == 0, answer.err
    assert [text for text in answer.out.splitlines() if text.startswith("Saved ")] == [
        "Saved initial checkpoint to a/checkpoints/ckpt-0",
        "Saved checkpoint to a/checkpoints/ckpt-4",
        "Saved checkpoint to a/checkpoints/ckpt-8",
    ]
    assert "averaged 2 checkpoints (mean)" in answer.out
    validated = falconet("validate a --checkpoint all", "tensorflow").out
    assert re.findall(r"accuracy \[(.*?)\]", validated)[:3] == ["ckpt-0", "ckpt-4", "ckpt-8"]
    # The original's weight_avg.py took every ckpt-N of a folder.
    assert "averaged 3 checkpoints (mean): ckpt-0, ckpt-4, ckpt-8" in falconet("average --checkpoint-input-path a").out


FIRST = {  # epochs of 6: what is saved
    "--checkpoint-first-epoch 4": [4, 5, 6],
    "--checkpoint-first-epoch 1 --checkpoint-save-freq 4": [1, 5, 6],
    "--checkpoint-first-epoch 9": [6],
}


@pytest.mark.parametrize(("line", "epochs"), FIRST.items())
def test_checkpoints_start_with_an_epoch_and_the_last_is_always_saved(falconet, tmp_path, line, epochs):
    answer = falconet(f"train {TINY} --epoch 6 --checkpoints-kept all --run-dir a {line}")
    assert answer.code == 0, answer.err
    assert saved(tmp_path / "a") == [f"resnet8-cifar_generated_{epoch}" for epoch in epochs]


def test_temporary_run_leaves_nothing(falconet, tmp_path, temporary):
    answer = falconet(f"train {TINY} --temporary")
    assert answer.code == 0, answer.err
    said = re.search(r"the run folder is temporary and removed after a clean end: (\S+)", answer.out)
    assert said
    assert Path(said[1]).parent == temporary
    assert f"removed the temporary run folder {said[1]}" in answer.out
    assert list(temporary.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [temporary]


def test_failed_temporary_run_stays_and_can_be_restored(falconet, temporary):
    failed = falconet(f"train {TINY} --temporary --initial-checkpoint --lr 1e38")
    assert failed.code != 0
    assert "removed the temporary" not in failed.out
    (kept,) = temporary.iterdir()
    restored = falconet(f"restore --checkpoint-input-path {kept} --lr 0.1")
    assert restored.code == 0, restored.err
    assert "temporary" not in restored.out.replace(str(kept), "")
    assert (kept / "summary.json").exists()


def test_workers_stopped_before_the_start_leave_nothing(falconet, temporary, monkeypatch):
    from falconet.parallel import launch

    monkeypatch.setattr(launch, "launch", lambda *_, **__: 130)
    assert falconet(f"train {TINY} --temporary --replicas 2").code == 130
    assert list(temporary.iterdir()) == []


def test_plan_of_a_temporary_run_makes_no_folder(falconet, temporary):
    assert falconet(f"train {TINY} --temporary --plan").code == 0
    assert list(temporary.iterdir()) == []


CONTRADICTIONS = {
    "train --temporary --run-dir a": "--temporary: contradicts --run-dir a, which is kept; expected only one",
    "train --temporary --checkpoint-output-path b": "--temporary: contradicts --checkpoint-output-path b, which is",
}


@pytest.mark.parametrize(("line", "message"), CONTRADICTIONS.items())
def test_temporary_contradicts_named_folders(falconet, line, message):
    answer = falconet(line)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


@pytest.mark.dist
@pytest.mark.slow
def test_temporary_run_of_two_processes_leaves_nothing(falconet, temporary, monkeypatch):
    monkeypatch.setattr(world, "cores", lambda processes=1: 2)
    answer = falconet(f"train {TINY} --temporary --replicas 2 --epoch 1")
    assert answer.code == 0, answer.err
    assert answer.out.count("the run folder is temporary") == 1
    assert list(temporary.iterdir()) == []
