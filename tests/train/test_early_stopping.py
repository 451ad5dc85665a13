"""`--early-stopping`: a training that no longer improves ends as if its plan had."""

import json
from pathlib import Path

import pytest

from falconet.checkpoint import format
from runs import assert_bitwise, stop_at
from tiny import TINY

# A rate of 0 changes only batch norm's statistics; with this seed, which the tiny data's random labels do not reward
# after the third epoch.
LINE = f"train {TINY} --epoch 30 --lr 0 --warmup-epoch 0 --seed 3 --run-dir r"


def summary(run="r"):
    return json.loads((Path(run) / "summary.json").read_text())


def test_training_ends_after_the_patience_without_a_better_validation(falconet):
    answer = falconet(f"{LINE} --early-stopping 2")
    assert answer.code == 0, answer.err
    found = summary()
    per_epoch = 4
    assert found["ended_early"]
    assert found["best"]["update"] > per_epoch, "else nothing has become better"
    assert found["updates"] == found["best"]["update"] + 2 * per_epoch < 30 * per_epoch
    assert "validates every epoch, ends after 2 epochs without a better one" in answer.out
    after = found["best"]["update"] // per_epoch
    assert f"{found['best']['validation_accuracy']:.2f}% after epoch {after} " in answer.out
    assert f"ended early          after epoch {after + 2}: 2 epochs without a better validation" in answer.out


def test_the_last_state_is_saved_and_averaged_although_its_turn_has_not_come(falconet):
    answer = falconet(f"{LINE} --early-stopping 2 --checkpoint-save-freq 25 --weight-avg-strategy mean")
    assert answer.code == 0, answer.err
    saved, average = format.checkpoints_in(Path("r"))
    assert format.read_manifest(saved).progress.update == summary()["updates"]
    assert average.name == f"{saved.name}_averaged"
    assert "averaged 1 checkpoint (mean)" in answer.out


def test_a_restored_run_counts_the_epochs_before_it_stopped(falconet, monkeypatch):
    assert falconet(f"{LINE} --early-stopping 2".replace("-dir r", "-dir straight")).code == 0
    updates = summary("straight")["updates"]
    with monkeypatch.context() as patch:
        stop_at(patch, updates - 4)  # at the end of an epoch: its validation is still due
        assert falconet(f"{LINE} --early-stopping 2").code == 130
    answer = falconet("restore r")
    assert answer.code == 0, answer.err
    assert summary()["updates"] == updates
    assert summary()["best"] == summary("straight")["best"]
    assert_bitwise(Path("straight"), Path("r"))


def test_restoring_a_run_that_ended_early_says_so_and_more_patience_continues_it(falconet):
    assert falconet(f"{LINE} --early-stopping 2").code == 0
    updates = summary()["updates"]
    answer = falconet("restore r")
    assert answer.code == 0
    assert f"nothing left to train: it ended early after {updates // 4} epochs, the best validation, " in answer.out
    assert "a larger --early-stopping, or None, continues the run" in answer.out
    answer = falconet("restore r --early-stopping 4")
    assert answer.code == 0, answer.err
    assert summary()["updates"] == summary()["best"]["update"] + 4 * 4 > updates


def test_another_global_batch_changes_no_patience(falconet, image_folder):
    """24 photos: 3 updates of 8 per epoch, then 6 of 4."""
    photos = LINE.replace("--data generated", "--data folder --data-dir photos --model resnet8-cifar --pretrained none")
    line = f"{photos} --epoch 4 --validation-mode after --early-stopping 2"  # so the best is the newest
    assert falconet(line).code == 0
    answer = falconet("restore r --micro-batch-size 4 --epoch 5 --validation-mode during")
    assert answer.code == 0, answer.err
    assert "nothing left to train" not in answer.out
    assert summary()["updates"] == 4 * 3 + 6


def test_the_checkpoint_between_two_validations_continues(falconet, monkeypatch):
    """Not every epoch is validated: the patience is over only when a validation says so."""
    line = f"{LINE} --early-stopping 1 --validation-frequency 3"
    assert falconet(line.replace("-dir r", "-dir straight")).code == 0
    with monkeypatch.context() as patch:
        stop_at(patch, summary("straight")["updates"] - 3)
        assert falconet(line).code == 130
    assert falconet("restore r").code == 0
    assert summary()["updates"] == summary("straight")["updates"]


REFUSED = {
    "--early-stopping 0": "--early-stopping: got '0', expected a whole number, at least 1",
    "--early-stopping 2 --half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean": (
        "--early-stopping: does not work with --half-res-training"
    ),
}


@pytest.mark.parametrize(("extra", "message"), REFUSED.items())
def test_wrong_patience_is_refused_in_one_line(falconet, extra, message):
    answer = falconet(f"{LINE} {extra}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


def test_patience_has_no_effect_without_validations_during_training(falconet):
    answer = falconet(f"{LINE} --epoch 2 --early-stopping 1 --validation-mode after")
    assert "note: --early-stopping has no effect without --validation-mode during" in answer.out
    assert not summary()["ended_early"]
