"""What the originals' users read of a run that was killed and restored: no row twice, nothing starts again."""

import csv
import json
from pathlib import Path

import pytest

from falconet.checkpoint import format
from falconet.report.throughput import Reading
from falconet.train.log import Log
from falconet.train.validation import Validation
from tiny import TINY

LINE = f"train {TINY} --epoch 3 --logs-per-epoch 4 --checkpoints-kept all --label-smoothing 0.1"
TIMED = ("train_img_per_sec", "it_time", "img_per_sec", "total_time", "val_time", "latency")


class KilledError(Exception):
    """Ends a run where `kill -9` would: nothing more is saved."""


def killed(monkeypatch, falconet, line, conventions, *, owner, method, when):
    """Run a line until `method` of `owner` has been called and `when` holds."""
    plain = getattr(owner, method)

    def call(own, *arguments):
        result = plain(own, *arguments)
        if when(own):
            raise KilledError
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, call)
        with pytest.raises(KilledError):
            falconet(line, conventions)


def rows(path, *, timed=False):
    with Path(path).open(newline="") as file:
        return [{name: row[name] for name in row if timed or name not in TIMED} for row in csv.DictReader(file)]


def numbers(path):
    return [json.loads(line)["update"] for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("conventions", ["pytorch", "tensorflow"])
def test_restored_run_leaves_the_files_of_a_straight_one(falconet, monkeypatch, conventions):
    assert falconet(f"{LINE} --run-dir straight", conventions).code == 0
    at = {"owner": Log, "method": "log", "when": lambda log: log.state.progress.update == 7}
    killed(monkeypatch, falconet, f"{LINE} --run-dir other", conventions, **at)
    assert [row["iteration"] for row in rows("other/training.csv")] == [str(number) for number in range(1, 8)]
    answer = falconet("restore other", conventions)
    assert answer.code == 0, answer.err
    assert "update 4 of 12" in answer.out
    for name in ("training.csv", "validation.csv"):
        assert rows(f"other/{name}") == rows(f"straight/{name}")
    for name in ("metrics.jsonl", "updates.jsonl"):
        assert numbers(f"other/{name}") == numbers(f"straight/{name}")


@pytest.mark.parametrize("conventions", ["pytorch", "tensorflow"])
def test_validation_that_was_not_noted_in_the_checkpoint_is_listed_once(falconet, monkeypatch, conventions):
    assert falconet(f"{LINE} --run-dir straight", conventions).code == 0
    at = {"owner": Validation, "method": "run", "when": lambda validation: validation.state.progress.update == 8}
    killed(monkeypatch, falconet, f"{LINE} --run-dir other", conventions, **at)
    answer = falconet("restore other", conventions)
    assert answer.code == 0, answer.err
    for name in ("training.csv", "validation.csv"):
        assert rows(f"other/{name}") == rows(f"straight/{name}")
    assert numbers("other/metrics.jsonl") == numbers("straight/metrics.jsonl")


def test_step_and_total_time_continue(falconet, monkeypatch):
    monkeypatch.setattr("falconet.report.throughput.Stopwatch.lap", one_second_more)
    assert falconet(f"{LINE} --epoch 1 --run-dir a", "tensorflow").code == 0
    before = rows("a/training.csv", timed=True)[-1]
    answer = falconet("restore a --epoch 2", "tensorflow")
    assert answer.code == 0, answer.err
    after = rows("a/training.csv", timed=True)[4:]
    assert [row["step"] for row in after] == ["5", "6", "7", "8"]
    assert float(after[0]["total_time"]) > float(before["total_time"])
    assert "step:      5, iteration:      5" in answer.out


def one_second_more(watch):
    """A clock on which every reading takes a second of training."""
    watch.seconds += 1.0
    return Reading(watch.seconds, waiting=0.0, moment=0.0)


def test_popart_counts_its_steps_on(falconet):
    assert falconet(f"{LINE} --epoch 1 --run-dir a", "popart").code == 0
    assert "step:      5, epoch:" in falconet("restore a --epoch 2", "popart").out


def test_means_weigh_the_first_interval_after_a_restore_by_its_updates(falconet):
    line = f"train {TINY} --iterations 12 --logs-per-epoch 3 --checkpoints-kept all"
    assert falconet(f"{line} --epoch 1 --run-dir a", "pytorch").code == 0
    assert falconet("restore a --epoch 2", "pytorch").code == 0
    second = rows("a/training.csv")[3:]
    mean = sum(float(row["loss_batch"]) for row in second) / 3  # four updates each
    assert float(second[-1]["loss_avg"]) == pytest.approx(mean, rel=1e-12)


def test_checkpoint_has_the_loss_and_the_accuracy_of_its_epoch(falconet):
    assert falconet(f"{LINE} --epoch 2 --run-dir a", "pytorch").code == 0
    logged = rows("a/training.csv")
    for folder, four in zip(format.checkpoints_in(Path("a")), (logged[:4], logged[4:]), strict=True):
        stored = format.read_manifest(folder).metrics
        assert stored["train_loss"] == pytest.approx(sum(float(row["loss_batch"]) for row in four) / 4)
        assert stored["train_accuracy"] == pytest.approx(sum(float(row["train_accuracy_batch"]) for row in four) / 4)
        assert f"(train loss: {stored['train_loss']}" in falconet(f"validate {folder}", "pytorch").out
    assert json.loads(Path("a/metrics.jsonl").read_text().splitlines()[-2])["train/loss"] == float(
        four[-1]["loss_batch"]
    )


def test_checkpoint_within_an_epoch_has_the_mean_of_the_epoch_so_far(falconet):
    line = f"train {TINY} --epoch 1 --logs-per-epoch 4 --checkpoint-save-freq 0.5 --checkpoints-kept all --run-dir r"
    assert falconet(line).code == 0
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    half = next(each for each in format.checkpoints_in(Path("r")) if format.read_manifest(each).progress.update == 2)
    stored = format.read_manifest(half).content["metrics"]
    assert stored["train_loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert stored["train_loss"] != losses[1]


def test_edited_table_does_not_stop_a_restore(falconet):
    assert falconet(f"{LINE} --epoch 1 --run-dir a", "pytorch").code == 0
    Path("a/training.csv").write_text("notes\nof mine\n")
    Path("a/metrics.jsonl").write_text("nothing\n[1]\n")
    answer = falconet("restore a --epoch 2", "pytorch")
    assert answer.code == 0, answer.err
    assert Path("a/training.csv").read_text().startswith("notes\nof mine\n")


def test_older_checkpoint_is_not_called_the_latest(falconet):
    assert falconet(f"{LINE} --run-dir logs/a", "tensorflow").code == 0
    older, newest = (
        falconet(f"restore {path} --epoch 4", "tensorflow") for path in ("logs/a/checkpoints/ckpt-8", "logs/a")
    )
    assert "\nRestoring training from checkpoint: logs/a/checkpoints/ckpt-8\n" in older.out
    assert "\nRestoring training from latest checkpoint: logs/a/checkpoints/ckpt-12\n" in newest.out


def test_program_that_kept_all_checkpoints_is_not_asked_to(falconet):
    assert falconet(f"{LINE} --run-dir a", "tensorflow").code == 0
    answer = falconet("restore a --epoch 4", "tensorflow")
    assert answer.code == 0, answer.err
    assert "checkpoints-kept" not in answer.out + answer.err
    assert len(format.checkpoints_in(Path("a"))) == 4


def test_checkpoints_within_an_epoch_have_their_epoch_as_training_wrote_it(falconet):
    line = f"{LINE} --epoch 2 --checkpoint-save-freq 0.5 --validation-mode none --run-dir a"
    assert falconet(line, "tensorflow").code == 0
    answer = falconet("validate a --checkpoint all", "tensorflow")
    assert answer.code == 0, answer.err
    trained = {row["iteration"]: row["epoch"] for row in rows("a/training.csv")}
    found = {row["iteration"]: row["epoch"] for row in rows("a/validation.csv")}
    assert list(found.values()) == ["0.5", "1.0", "1.5", "2.0"]
    assert found.items() <= trained.items()
    assert "[ckpt-2] (iteration:      2, epoch:   0.50, " in answer.out


def test_pytorch_names_the_average_that_it_validates(falconet):
    answer = falconet(f"{LINE} --weight-avg-strategy mean --run-dir a", "pytorch")
    assert answer.code == 0, answer.err
    *_, named, testing, accuracy = (line for line in answer.out.splitlines() if line.startswith("[INFO] "))
    name = "resnet8-cifar_generated_3_averaged"
    assert named == f"[INFO] Restore the resnet8-cifar model to epoch 3 on generated dataset: {name}"
    assert (testing, accuracy[:29]) == ("[INFO] Testing the model", "[INFO] Accuracy on test set: ")
