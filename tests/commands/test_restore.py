"""`falconet restore`: a killed run continues bit for bit, and what cannot be continued is refused."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.checkpoint import format, weight_average
from falconet.errors import CheckpointError
from falconet.report.run_files import read_run
from falconet.train import summary
from runs import assert_bitwise, stop_at, updates, wait_for
from tiny import TINY

VALIDATED = re.compile(r"^ +\d+/\d+ +\S+ +\S+ +[\d.]+ +[\d.]+% ", re.M)  # the row of an epoch that was validated

RUNS = {
    "momentum, mixing, moving average": (
        "--mixup-alpha 0.3 --cutmix-lambda-low 0.2 --cutmix-lambda-high 0.8 --cutmix-disable-prob 0.3"
        " --ema-half-life 0.5 --augment shift-flip --label-smoothing 0.1"
    ),
    "dropout, rmsprop, accumulation": "--model mobilenet-v3-small --image-size 32 --optimizer rmsprop_tf --lr 0.001"
    " --gradient-accumulation 2 --optimizer-eps 0.001",
    "combined velocity, workers": "--optimizer sgd_combined --dataloader-workers 3",
    "adamw, bf16": "--optimizer adamw --lr 0.001 --precision bf16.32",
    "16.16, stochastic rounding, automatic scale": (
        "--precision 16.16 --enable-stochastic-rounding --auto-loss-scaling --ema-half-life 1"
    ),
    "bf16.bf16, stochastic rounding, adamw": (
        "--precision bf16.bf16 --enable-stochastic-rounding --optimizer adamw --lr 0.001"
    ),
    "16.32, stepped scale, recompute": (
        "--precision 16.32 --loss-scaling 128 --initial-loss-scaling 64 --optimizer lars --enable-recompute"
    ),
    "lars, group norm": "--optimizer lars --norm-type group --norm-num-groups 4",
    "part of an epoch, log points across epochs": "--epoch 2.5 --log-interval 3",
}


def stops():
    """Every run with every update; in turns, one of each run is for every commit."""
    for number, name in enumerate(RUNS):
        for update in range(1, 8):
            marks = () if update == 1 + number % 7 else pytest.mark.slow
            yield pytest.param(RUNS[name], update, marks=marks, id=f"{name}, update {update}")


@pytest.mark.parametrize(("extra", "update"), [*stops()])
def test_restore_continues_bit_for_bit_from_any_update(falconet, monkeypatch, extra, update):
    line = f"train {TINY} {extra} --logs-per-epoch 3"
    assert falconet(f"{line} --run-dir straight").code == 0

    with monkeypatch.context() as patched:
        stop_at(patched, update)
        assert falconet(f"{line} --run-dir other").code == 130
    again = falconet("restore --checkpoint-input-path other")
    assert again.code == 0, again.err
    assert_bitwise(Path("straight"), Path("other"))


@pytest.mark.parametrize(("epochs", "stopped_in"), [(2, 1), (2, 2), (3, 2)], ids=["first", "last", "not saved in turn"])
def test_run_stopped_during_a_validation_repeats_it_when_restored(falconet, monkeypatch, epochs, stopped_in):
    """Ctrl-C comes when the model was measured and its moving average is about to be."""
    from falconet.data.loader import EvaluationLoader

    line = f"train {TINY} --epoch {epochs} --checkpoint-save-freq {1 if epochs == 2 else 3} --ema-half-life 1"
    assert falconet(f"{line} --run-dir straight").code == 0
    plain, seen = EvaluationLoader.batches, []

    def batches(loader):
        seen.append(None)
        for batch in plain(loader):
            if len(seen) == 2 * stopped_in:  # the second of them is the moving average's
                seen.append(signal.raise_signal(signal.SIGINT))
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(EvaluationLoader, "batches", batches)
        stopped = falconet(f"{line} --run-dir other")
    assert (stopped.code, stopped.err) == (130, "")
    assert len(VALIDATED.findall(stopped.out)) == stopped_in - 1
    assert format.newest_whole(Path("other"), note=print).name == f"resnet8-cifar_generated_{stopped_in}"
    again = falconet("restore --checkpoint-input-path other")
    assert again.code == 0, again.err
    assert len(VALIDATED.findall(again.out)) == epochs - stopped_in + 1
    assert_bitwise(Path("straight"), Path("other"))
    one, other = (format.read_manifest(format.checkpoints_in(Path(run))[-1]) for run in ("straight", "other"))
    assert one.metrics.keys() == other.metrics.keys()
    assert one.content["best"] == other.content["best"]


# Waits at an update of its last epoch, so that it cannot end before a slow test kills it.
STANDING = """
import sys, time
from falconet.cli import main
from falconet.train.log import Log
plain = Log.log
def log(own, meter):
    plain(own, meter)
    time.sleep(600 if own.state.progress.update == 45 else 0)
Log.log = log
main(sys.argv[1:])
"""


@pytest.mark.parametrize("kill_after", [21, *(pytest.param(each, marks=pytest.mark.slow) for each in range(3, 40, 4))])
def test_killed_run_continues_bit_for_bit_from_its_newest_checkpoint(tmp_path, falconet, kill_after):
    """Killed after that many updates of 48, or somewhat later, whatever it does then."""
    line = ["train", *TINY.split(), "--epoch", "6", "--iterations", "8", "--logs-per-epoch", "8"]
    line += ["--checkpoint-save-freq", "0.25", "--checkpoints-kept", "all", "--ema-half-life", "1"]
    assert falconet(" ".join([*line, "--run-dir", "straight"])).code == 0
    command = [sys.executable, "-c", STANDING, *line, "--run-dir", "killed"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed/metrics.jsonl"
    saved = tmp_path / "killed/checkpoints/resnet8-cifar_generated_0+00002"
    wait_for(lambda: saved.exists() and log.read_text().count("train/loss") >= kill_after, f"update {kill_after}")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    answer = falconet("restore --checkpoint-input-path killed")
    assert answer.code == 0, answer.err
    assert_bitwise(tmp_path / "straight", tmp_path / "killed")
    assert updates(tmp_path / "killed") == updates(tmp_path / "straight")  # what it repeated is there once


def test_newest_whole_checkpoint_is_taken_and_the_torn_one_named(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 3")
    newest = Path("r/checkpoints/resnet8-cifar_generated_3")
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-5])
    answer = falconet("restore --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    assert "skipped r/checkpoints/resnet8-cifar_generated_3/model.safetensors: 5 bytes short" in answer.out
    assert "restored r/checkpoints/resnet8-cifar_generated_2, update 8 of 12" in answer.out
    assert format.verify(newest).progress.update == 12


def test_torn_checkpoint_asked_for_by_name_is_refused_and_a_whole_one_offered(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 2")
    newest = Path("r/checkpoints/resnet8-cifar_generated_2")
    flipped = bytearray((newest / "optimizer.safetensors").read_bytes())
    flipped[-1] ^= 1
    (newest / "optimizer.safetensors").write_bytes(flipped)
    answer = falconet(f"restore --checkpoint-input-path {newest}")
    assert answer.code == 2
    assert "optimizer.safetensors: contents changed since it was written (digest mismatch)" in answer.err
    assert "the newest complete one is r/checkpoints/resnet8-cifar_generated_1" in answer.err
    assert newest.exists()


def test_complete_run_is_reported_and_more_epochs_continue(falconet):
    falconet(f"train {TINY} --run-dir r")
    assert "nothing left to train: all 2 epochs are done" in falconet("restore --checkpoint-input-path r").out
    answer = falconet("restore --checkpoint-input-path r --epoch 3")
    assert answer.code == 0, answer.err
    assert " 3/3 " in answer.out


def test_older_checkpoint_continues_in_a_new_folder_beside_the_old_one(falconet):
    falconet(f"train {TINY} --run-dir all/r --epoch 3")
    old = Path("all/r")
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    line = f"restore --checkpoint-input-path {old}/checkpoints/resnet8-cifar_generated_1"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    (new,) = {*Path("all").iterdir()} - {old}
    assert [path.name for path in Path().iterdir()] == ["all"]
    said = f"continuing resnet8-cifar_generated_1 in another run folder, {new}; {old} stays as it is"
    assert answer.out.splitlines().count(said) == 1
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before
    assert [folder.name[-1] for folder in format.checkpoints_in(new)] == ["2", "3"]
    assert_bitwise(old, new)
    assert updates(new) == updates(old)  # its log starts with what the old one has up to there
    again = falconet(f"restore {new} --epoch 4")
    assert again.code == 0, again.err
    assert updates(new) == [4, 8, 12, 16]


def test_older_checkpoint_outside_a_run_folder_asks_for_another_run_dir(falconet):
    falconet(f"train {TINY} --run-dir r --checkpoint-output-path ck")
    answer = falconet("restore ck/resnet8-cifar_generated_1 --run-dir r")
    assert answer.code == 2
    assert "--run-dir: ck holds checkpoints newer than resnet8-cifar_generated_1" in answer.err
    assert answer.err.endswith("; expected another folder\n")
    assert falconet("restore ck/resnet8-cifar_generated_1 --run-dir other").code == 0


def test_older_checkpoint_does_not_continue_where_newer_ones_are(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 3")
    before = {path: path.stat().st_mtime_ns for path in Path("r/checkpoints").rglob("*")}
    line = "restore --checkpoint-input-path r/checkpoints/resnet8-cifar_generated_1 --lr 0.01"
    answer = falconet(f"{line} --run-dir r")
    assert answer.code == 2
    assert "--run-dir: r/checkpoints holds checkpoints newer than resnet8-cifar_generated_1, such as" in answer.err
    assert "such as resnet8-cifar_generated_3; expected another folder, or no --run-dir" in answer.err
    assert {path: path.stat().st_mtime_ns for path in Path("r/checkpoints").rglob("*")} == before
    again = falconet(f"{line} --run-dir other")
    assert again.code == 0, again.err
    assert [folder.name[-1] for folder in format.checkpoints_in(Path("other"))] == ["2", "3"]


@pytest.mark.usefixtures("two_cores", "forked_workers")
def test_older_checkpoint_continues_in_several_processes(falconet):
    falconet(f"train {TINY} --run-dir all/r --epoch 2")
    old = "all/r/checkpoints/resnet8-cifar_generated_1"
    answer = falconet(f"restore {old} --replicas 2 --gradient-accumulation 1 --micro-batch-size 4")
    assert answer.code == 0, answer.err
    (new,) = {*Path("all").iterdir()} - {Path("all/r")}
    place = f"all/{new.name}; all/r stays as it is"
    assert f"continuing resnet8-cifar_generated_1 in another run folder, {place}" in answer.out
    assert [folder.name[-1] for folder in format.checkpoints_in(new)] == ["2"]


def test_another_global_batch_works_between_epochs_and_is_refused_within_one(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 1 --checkpoint-save-freq 0.25 --checkpoints-kept all")
    within = "r/checkpoints/resnet8-cifar_generated_0+00001"
    answer = falconet(f"restore --checkpoint-input-path {within} --micro-batch-size 16")
    assert answer.code == 2
    assert "the checkpoint is 8 images into an epoch, which a global batch of 16 does not divide" in answer.err
    assert falconet("restore --checkpoint-input-path r --epoch 2 --micro-batch-size 16").code == 0


# 24 photos: 3 updates of 8 per epoch, 2 of 12, 6 of 4.
PHOTOS = f"{TINY} --data folder --data-dir photos --model resnet8-cifar --pretrained none"


@pytest.mark.parametrize(("size", "counted"), [(12, [3, 6, 9, 11, 13]), (4, [3, 6, 9, 15, 21])])
def test_updates_of_another_global_batch_are_counted_on(falconet, image_folder, size, counted):
    assert falconet(f"train {PHOTOS} --micro-batch-size {size} --epoch 5 --run-dir straight").code == 0
    assert falconet(f"train {PHOTOS} --epoch 3 --run-dir r").code == 0
    answer = falconet(f"restore r --micro-batch-size {size} --epoch 5")
    assert answer.code == 0, answer.err
    assert f"restored r/checkpoints/resnet8-cifar_folder_3, update 9 of {counted[-1]}\n" in answer.out
    mixed = f"{counted[-1]} updates in 5 epochs, the earlier ones with another global batch; now {24 // size} updates"
    assert f"{mixed} per epoch; 24 images\n" in Path("r/plan.txt").read_text()
    logs = {run: Path(run, "metrics.jsonl").read_text().splitlines() for run in ("straight", "r")}
    rows = {run: [json.loads(line) for line in lines] for run, lines in logs.items()}
    trained, straight = ([row for row in rows[run] if "train/lr" in row] for run in ("r", "straight"))
    assert [(row["update"], row["epoch"]) for row in trained] == list(zip(counted, range(1, 6), strict=True))
    assert [row["train/lr"] for row in trained[3:]] == [row["train/lr"] for row in straight[3:]]
    assert [row["update"] for row in rows["r"] if "validation/loss" in row] == counted
    run = read_run(Path("r"))
    assert (run.state, [moment.epoch for moment in run.moments]) == ("done", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert falconet("restore r --epoch 6").code == 0
    assert json.loads(Path("r/summary.json").read_text())["updates"] == counted[-1] + counted[-1] - counted[-2]


@pytest.mark.parametrize("size", [4, 12])
def test_a_length_in_updates_is_kept_with_another_global_batch(falconet, image_folder, size):
    assert falconet(f"train {PHOTOS} --updates 6 --run-dir r").code == 0
    answer = falconet(f"restore r --updates 12 --micro-batch-size {size}")
    assert answer.code == 0, answer.err
    assert "restored r/checkpoints/resnet8-cifar_folder_2, update 6 of 12\n" in answer.out
    assert json.loads(Path("r/summary.json").read_text())["updates"] == 12
    assert "nothing left to train: all 12 updates are done; a larger --updates" in falconet("restore r").out


def test_checkpoints_named_by_their_updates_do_not_replace_those_of_another_global_batch(falconet, image_folder):
    line = f"train {PHOTOS} --micro-batch-size 4 --epoch 3 --checkpoints-kept all --run-dir r"
    assert falconet(line, "tensorflow").code == 0
    assert falconet("restore r --micro-batch-size 12 --epoch 6 --checkpoints-kept all", "tensorflow").code == 0
    assert [path.name for path in format.checkpoints_in(Path("r"))] == [
        f"ckpt-{update}" for update in (6, 12, 18, 20, 22, 24)
    ]


def test_the_last_epochs_are_averaged_whatever_their_global_batch_was(falconet, image_folder):
    assert falconet(f"train {PHOTOS} --epoch 3 --checkpoints-kept all --run-dir r").code == 0
    average = "--weight-avg-strategy mean --weight-avg-epochs 3"
    assert falconet(f"restore r --micro-batch-size 4 --epoch 5 --checkpoints-kept all {average}").code == 0
    made = format.read_manifest(Path("r/checkpoints/resnet8-cifar_folder_5_averaged")).content["averaged"]
    assert made["of"] == [f"resnet8-cifar_folder_{epoch}" for epoch in (2, 3, 4, 5)]


TIMED = ("train/images_per_second", "train/waiting_percent", "validation/seconds")


def stated(run):
    """What the summary states, but for how long it took."""
    content = json.loads(Path(run, "summary.json").read_text())
    metrics = {name: value for name, value in content["metrics"].items() if name not in TIMED}
    return metrics, *(content[name] for name in ("updates", "epochs", "ended_early", "phase", "best"))


def measured(run):
    """What metrics.jsonl has of which update, line by line."""
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [(line["update"], sorted(line.keys() - {*TIMED, "time"})) for line in lines]


def dying(*_, **__):
    raise CheckpointError("died")


ENDS = {
    "at the end of an epoch": "--epoch 2",
    "within an epoch": "--updates 6",
    "early": "--epoch 30 --lr 0 --norm-type group --norm-num-groups 4 --early-stopping 1",  # nothing changes
    "not validated": "--epoch 2 --validation-mode none",
}


@pytest.mark.parametrize("extra", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("owner", "name"), [(weight_average, "write"), (summary, "write")], ids=["average", "summary"])
def test_a_run_that_died_after_its_last_update_is_ended_by_restore(falconet, monkeypatch, extra, owner, name):
    line = f"train {TINY} --weight-avg-strategy mean --run-dir r".replace("--epoch 2 ", "") + f" {extra}"
    assert falconet(line.replace("-dir r", "-dir straight")).code == 0
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        assert falconet(line).code == 2
    answer = falconet("restore r")
    assert answer.code == 0, answer.err
    assert "every update was made; what follows the last one is left\n" in answer.out
    assert stated("r") == stated("straight")
    assert measured("r") == measured("straight")
    assert_bitwise(Path("straight"), Path("r"))
    for run in ("straight", "r"):
        assert "nothing left to train: " in falconet(f"restore {run}").out


@pytest.mark.parametrize("conventions", ["pytorch", "tensorflow"])
def test_a_run_that_is_ended_by_restore_has_each_row_of_its_tables_once(falconet, conventions):
    line = f"train {TINY} --weight-avg-strategy mean --validation-mode after --run-dir r"
    assert falconet(line, conventions).code == 0
    counted = first_columns("training.csv"), first_columns("validation.csv")
    Path("r/summary.json").unlink()
    answer = falconet("restore r", conventions)
    assert answer.code == 0, answer.err
    assert (first_columns("training.csv"), first_columns("validation.csv")) == counted


def first_columns(table):
    """Epoch and update of each row of a table of the run."""
    return [line.split(",")[:2] for line in Path("r", table).read_text().splitlines()]


MISTAKES = {
    "restore": "falconet restore: expected a run, such as runs/my-run, a checkpoint",
    "restore --checkpoint-input-path nowhere": "nowhere: no such file or folder",
    "restore --checkpoint-input-path r --model resnet14-cifar": "does not fit resnet14-cifar: 36 missing",
    "restore --checkpoint-input-path r --optimizer lars": "--optimizer: got 'lars', expected 'sgd', whose state",
    "restore --checkpoint-input-path r --data digits": "was trained on 3 classes, the data has 10",
    "restore r --ema-half-life 1": "--ema-half-life: asks for a moving average, but r/checkpoints/resnet8-cifar_",
    "restore r --loss-scaling 128": "--loss-scaling: asks for a loss scale, but r/checkpoints/resnet8-cifar_",
    "restore r --auto-loss-scaling": "--auto-loss-scaling: asks for a loss scale, but ",
    "restore r --precision 16.32": "--precision: asks for a loss scale, but ",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_what_cannot_be_continued_is_refused_in_one_line(falconet, line, message):
    falconet(f"train {TINY} --run-dir r --epoch 1 --classes 3")
    before = {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")}
    answer = falconet(line)
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")} == before


def test_a_fixed_loss_scale_cannot_become_automatic(falconet):
    """A half-precision run always has a loss scale, which may change but for its kind."""
    line = f"train {TINY} --precision bf16.bf16 --epoch 1".replace("--epoch 2 ", "")
    assert falconet(f"{line} --run-dir r").code == 0
    answer = falconet("restore r --epoch 2 --auto-loss-scaling")
    folder = "r/checkpoints/resnet8-cifar_generated_1"
    assert (answer.code, answer.err) == (
        2,
        f"falconet restore: --auto-loss-scaling: asks for an automatic loss scale, but {folder} is of a run with a"
        " fixed or stepped one; expected --loss-scaling N, which may change, or a new run with its weights: `falconet"
        f" train --auto-loss-scaling --init-path {folder}`\n",
    )
    assert falconet("restore r --epoch 2 --loss-scaling 128").code == 0
    assert falconet(f"{line} --auto-loss-scaling --run-dir s").code == 0
    assert falconet("restore s --epoch 2").code == 0
    assert falconet("restore s --epoch 3 --no-auto-loss-scaling").code == 0


def test_full_disk_is_reported_and_the_run_continues(falconet, monkeypatch):
    import errno
    import os

    real, failed = os.fsync, []

    def fsync(descriptor):
        if "generated_2" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and not failed:
            failed.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    answer = falconet(f"train {TINY} --run-dir r --epoch 3")
    assert answer.code == 0, answer.err
    assert "cannot save r/checkpoints/resnet8-cifar_generated_2: No space left on device; saving again\n" in answer.out
    assert [folder.name[-1] for folder in format.checkpoints_in(Path("r")) if format.verify(folder)] == ["1", "3"]


def test_full_disk_at_the_end_is_an_error_and_the_older_checkpoint_stays_whole(falconet, monkeypatch):
    import errno
    import os

    from falconet.train import save

    for name in ("SHORTEST", "LONGEST", "GLANCE", "PATIENCE"):
        monkeypatch.setattr(save, name, 0.01)
    real = os.fsync

    def fsync(descriptor):
        if "generated_2" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    answer = falconet(f"train {TINY} --run-dir r --epoch 2")
    assert answer.code == 1
    assert "cannot save r/checkpoints/resnet8-cifar_generated_2: No space left on device; gave up after" in answer.err
    assert "; to continue: falconet restore r\n" in answer.err
    assert format.verify(format.newest_whole(Path("r"), note=print)).progress.epoch == 1
