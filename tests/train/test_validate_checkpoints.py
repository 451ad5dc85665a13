"""--validate-checkpoints: at its end a run measures each checkpoint of a folder, as `falconet validate` does."""

import csv
from pathlib import Path

import pytest

from falconet.parallel import world
from tiny import TINY

DATA = f"{TINY} --iterations 10 --epoch 3 --lr 0.2"
NAMES = [f"resnet8-cifar_generated_{epoch}" for epoch in (1, 2, 3)]


def rows(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


KINDS = {
    "one process": "",
    "a moving average": "--ema-half-life 0.5",
    "half": "--precision 16.16 --loss-scaling 64",
    "once at the end": "--validation-mode none",
}


@pytest.mark.parametrize("extra", KINDS.values(), ids=KINDS)
def test_a_runs_checkpoints_are_measured_as_validate_does(falconet, extra):
    answer = falconet(f"train {DATA} {extra} --run-dir r --validate-checkpoints r/checkpoints")
    assert answer.code == 0, answer.err
    assert "then validates each checkpoint in r/checkpoints\n" in answer.out
    assert "written to r/validation.csv\n" in answer.out
    found = rows("r/validation.csv")
    assert [row["checkpoint"] for row in found if "moving" not in row["checkpoint"]] == NAMES
    again = falconet("validate r --checkpoint all --output again.csv")
    assert again.code == 0, again.err
    assert found == rows("again.csv")
    table = again.out[again.out.index("checkpoint  ") : again.out.index("written to")]
    assert table in answer.out


STAGES = "--pipeline-splits layer3/0 --gradient-accumulation 2"


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("extra", ["--replicas 2", pytest.param(STAGES, marks=pytest.mark.slow)])
def test_several_processes_measure_checkpoints_together(falconet, monkeypatch, extra):
    monkeypatch.setattr(world, "cores", lambda processes=1: 2)
    answer = falconet(f"train {DATA} --epoch 2 {extra} --run-dir r --validate-checkpoints r/checkpoints")
    assert answer.code == 0, answer.err
    falconet("validate r --checkpoint all --output again.csv")
    ours, alone = rows("r/validation.csv"), rows("again.csv")
    assert [row | {"loss": ""} for row in ours] == [row | {"loss": ""} for row in alone]
    for one, other in zip(ours, alone, strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), abs=2e-4)  # summed in another order


def test_torn_checkpoints_and_those_of_another_model_are_skipped(falconet):
    assert falconet(f"train {DATA} --run-dir r").code == 0
    assert falconet(f"train {DATA} --epoch 1 --model resnet14-cifar --checkpoint-output-path other").code == 0
    Path("other/resnet14-cifar_generated_1").rename("r/checkpoints/resnet14-cifar_generated_1")
    torn = Path("r/checkpoints", NAMES[1], "model.safetensors")
    torn.write_bytes(torn.read_bytes()[:-1])
    answer = falconet(f"train {DATA} --epoch 1 --run-dir second --validate-checkpoints r")
    assert answer.code == 0, answer.err
    assert answer.out.count("skipped ") == 2
    assert "holds resnet14-cifar, expected resnet8-cifar, which was trained" in answer.out
    assert [row["checkpoint"] for row in rows("second/validation.csv")] == [NAMES[0], NAMES[2]]


def test_a_missing_folder_is_refused_before_training(falconet):
    answer = falconet(f"train {DATA} --run-dir r --validate-checkpoints nowhere")
    assert (answer.code, answer.err) == (2, "falconet train: nowhere: no such file or folder\n")
    assert not Path("r").exists()


def test_an_empty_folder_is_reported_after_training_is_saved(falconet):
    Path("empty").mkdir()
    answer = falconet(f"train {DATA} --epoch 1 --run-dir r --validate-checkpoints empty")
    assert answer.code == 2
    assert "--validate-checkpoints: empty holds no whole checkpoint of resnet8-cifar on generated" in answer.err
    assert "the training itself is complete and saved as r/checkpoints/resnet8-cifar_generated_1\n" in answer.err


def test_without_validation_images_it_has_no_effect_and_a_note(falconet):
    Path("empty").mkdir()
    line = f"train {DATA} --epoch 1 --data synthetic --run-dir r --validate-checkpoints empty"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "note: --validate-checkpoints has no effect without data from the host (not --data synthetic)" in answer.out


def test_with_an_originals_conventions_each_checkpoint_is_a_row_of_its_file(falconet):
    line = f"train {DATA} --validation-mode after --run-dir r --validate-checkpoints r"
    answer = falconet(line, "pytorch")
    assert answer.code == 0, answer.err
    found = rows("r/validation.csv")
    assert [row["validation_iteration"] for row in found] == ["30", "10", "20", "30"]  # the last weights come first
    assert found[0]["validation_accuracy"] == found[3]["validation_accuracy"]
    assert answer.out.count("Accuracy on test set: ") == 4
    restored = [line.rpartition(": ")[2] for line in answer.out.splitlines() if line.startswith("[INFO] Restore the ")]
    assert restored == NAMES, "the checkpoint is named before its accuracy"
