"""`falconet train`: what a run prints, leaves behind and refuses."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.checkpoint import format
from runs import stop_at, updates, wait_for
from tiny import TINY

SMALL = "--model resnet8-cifar --image-size 32"


def test_run_writes_a_complete_run_folder(falconet):
    answer = falconet(f"train {TINY} --run-dir r --logs-per-epoch 2")
    assert answer.code == 0, answer.err
    assert {p.name for p in Path("r").iterdir()} == {
        "config.yaml",
        "plan.txt",
        "metrics.jsonl",
        "updates.jsonl",
        "report",
        "report.html",
        "results.csv",
        "summary.json",
        "checkpoints",
    }
    assert [p.name for p in format.checkpoints_in(Path("r"))] == [
        "resnet8-cifar_generated_1",
        "resnet8-cifar_generated_2",
    ]
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "train/loss" in line] == [2, 4, 6, 8]
    assert [line["update"] for line in lines if "validation/accuracy" in line] == [4, 8]
    times = [json.loads(line) for line in Path("r/updates.jsonl").read_text().splitlines()]
    assert [(line["update"], len(line["milliseconds"])) for line in times] == [(2, 2), (4, 2), (6, 2), (8, 2)]
    assert min(time for line in times for time in line["milliseconds"]) > 0
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["updates"] == 8
    assert summary["images_per_second"] > 0


def test_each_epoch_is_a_row_and_the_end_says_what_is_where_and_what_comes_next(falconet):
    out = falconet(f"train {TINY} --run-dir r").out
    *_, header, first, second, blank = out.partition("\n\n")[2].partition("best accuracy")[0].split("\n")[:-1]
    assert re.split("  +", header.strip()) == [
        *("epoch", "train loss", "train acc", "val loss", "val acc", "lr", "images/s", "time"),
    ]
    numbers = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    for row, epoch, train, validation in zip((first, second), "12", numbers[::2], numbers[1::2], strict=True):
        shown = row.split()[:6]
        assert shown[:3] == [f"{epoch}/2", f"{train['train/loss']:.4f}", f"{train['train/accuracy']:.2f}%"]
        assert shown[3] == f"{validation['validation/loss']:.4f}"
        assert shown[4] == f"{validation['validation/accuracy']:.2f}%"
    assert blank == ""
    best = max(numbers[1::2], key=lambda each: (each["validation/accuracy"], -each["validation/loss"]))
    assert f"\nbest accuracy        {best['validation/accuracy']:.2f}% after epoch {best['update'] // 4} (*)" in out
    assert f"\nbest checkpoint      r/checkpoints/resnet8-cifar_generated_{best['update'] // 4}\n" in out
    assert out.endswith(
        "\nrun folder           r\nnext                 falconet predict r photo.jpg\n"
        "                     falconet validate r\n"
    )


def test_a_best_accuracy_of_the_moving_average_is_called_so(falconet):
    out = falconet(f"train {TINY} --ema-half-life 0.5 --lr 1 --run-dir r").out
    assert format.choose(Path("r"), "best", print).manifest.better_stem == "ema"
    assert re.search(r"^best accuracy        \d+\.\d\d% \(moving average\) after epoch 2 \(\*\)$", out, re.M)


@pytest.mark.parametrize("line", ["train", "restore"])
def test_no_line_of_the_originals_is_printed(falconet, line):
    if line == "restore":
        assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    out = falconet({"train": f"train {TINY}", "restore": "restore r --epoch 2"}[line]).out
    assert not re.search(r"Epoch|throughput:|loss:|accuracy:|Accuracy on test set|samples/sec", out), out


def test_plan_is_printed_first_and_plan_alone_trains_nothing(falconet):
    answer = falconet(f"train {TINY} --gradient-accumulation 2 --plan")
    assert answer.code == 0
    assert "global batch 16 = micro-batch 8 x accumulation 2 x replicas 1" in answer.out
    assert "8 updates = 2 epochs x 4 updates; 64 images" in answer.out
    assert re.search(r"^gradient-accumulation: 2  # command line$", answer.out, re.M)
    assert re.search(r"^optimizer: sgd  # default$", answer.out, re.M)
    assert not Path("runs").exists()


def test_length_in_updates_ends_within_an_epoch_and_can_be_extended(falconet):
    """TINY has 4 updates an epoch."""
    answer = falconet(f"train {TINY} --run-dir r --updates 6")
    assert answer.code == 0, answer.err
    assert "6 updates = 1.5 epochs x 4 updates; 32 images" in answer.out
    assert "note: --epoch has no effect without a length in epochs: --updates replaces it" in answer.out
    assert json.loads(Path("r/summary.json").read_text())["updates"] == 6
    again = falconet("restore --checkpoint-input-path r")
    assert "nothing left to train: all 6 updates are done; a larger --updates continues the run" in again.out
    longer = falconet("restore --checkpoint-input-path r --updates 7")
    assert longer.code == 0, longer.err
    assert json.loads(Path("r/summary.json").read_text())["updates"] == 7


ALL_WARMUP = "note: all updates are warm-up, so the learning rate never reaches its peak; --warmup-epoch shortens it\n"


@pytest.mark.parametrize(
    ("line", "is_all"), [("", False), ("--warmup-epoch 1.75", False), ("--warmup-epoch 1.8", True)]
)
def test_a_warm_up_that_lasts_to_the_end_is_noted(falconet, line, is_all):
    answer = falconet(f"train {TINY} {line} --plan")  # eight updates, four per epoch
    assert answer.code == 0, answer.err
    assert (ALL_WARMUP in answer.out) == is_all


def test_a_few_updates_of_the_digits_are_all_warm_up(falconet):
    assert ALL_WARMUP in falconet("train --updates 5 --plan").out
    assert ALL_WARMUP not in falconet("train --plan").out


def test_options_without_effect_are_noted(falconet):
    assert (
        "note: --lr-decay has no effect without --lr-schedule step or exponential"
        in falconet(f"train {TINY} --lr-decay 0.1 --plan").out
    )


def test_synthetic_data_trains_without_validation(falconet):
    answer = falconet(f"train {TINY} --data synthetic --classes 3")
    assert answer.code == 0, answer.err
    assert "so nothing is validated" in answer.out
    assert re.search(r"^ +2/2 ", answer.out, re.M)
    assert "falconet validate" not in answer.out  # there are no images for it


def test_folder_of_photos_trains(falconet, image_folder):
    answer = falconet(f"train --data-dir {image_folder} {SMALL} --micro-batch-size 8 --epoch 3 --threads 1")
    assert answer.code == 0, answer.err
    manifest = format.read_manifest(format.checkpoints_in(next(Path("runs").iterdir()))[-1])
    assert manifest.class_names == ("dark", "light")
    assert manifest.preprocessing["resize"] == 36


def test_best_checkpoint_outlives_the_newest_three(falconet):
    falconet(f"train {TINY} --epoch 6 --run-dir r --checkpoints-kept 2 --lr 0.2 --seed 1")
    lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "validation/accuracy" in line]
    best = max(measured, key=lambda line: (line["validation/accuracy"], -line["validation/loss"]))["update"]
    assert best < 20
    left = {format.read_manifest(folder).progress.update for folder in format.checkpoints_in(Path("r"))}
    assert left == {best, 20, 24}


MISTAKES = {
    "": (0, "usage: falconet COMMAND"),
    "trian": (2, "falconet: 'trian' is not a command; did you mean 'train'?"),
    "train --data folder --data-dir nowhere": (2, "nowhere"),
    f"train {TINY} --micro-batch-size 8 --iterations 1 --gradient-accumulation 1 --run-dir taken/x": (
        2,
        "falconet train: --run-dir: cannot write to taken/x: Not a directory",
    ),
    f"train {TINY} --checkpoint-output-path taken": (
        2,
        "falconet train: --checkpoint-output-path: cannot write to taken: File exists",
    ),
    "train --micro-batch-size 5000": (2, "a global batch of 5,000 is more than the 1,437 training images"),
    "train --model timm:resnet5O": (2, "--model: "),
    "train --norm-type group": (
        2,
        "--norm-num-groups: got 32, which does not divide the 16 channels of layer 'bn1'; 16 divides every layer",
    ),
    "train --device cuda": (2, "falconet train: device cuda: PyTorch finds no CUDA device here"),
}


@pytest.mark.parametrize(("line", "expected"), MISTAKES.items())
def test_mistake_is_one_line_and_exit_code_2(falconet, line, expected):
    import torch

    if "cuda" in line and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    Path("taken").write_text("a file")
    answer = falconet(line)
    assert answer.code == expected[0]
    assert expected[1] in answer.out + answer.err
    assert answer.code == 0 or answer.err.count("\n") == 1


def test_second_run_in_the_same_folder_is_refused(falconet):
    falconet(f"train {TINY} --run-dir r")
    before = sorted(Path("r").rglob("*"))
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 2
    assert "--run-dir: r already holds a run; `falconet restore r`" in answer.err
    assert sorted(Path("r").rglob("*")) == before


def test_nan_loss_stops_the_run_and_names_the_last_good_checkpoint(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 1")
    answer = falconet("restore --checkpoint-input-path r --epoch 3 --lr 1e30 --lr-schedule step")
    assert answer.code == 2
    assert re.search(r"falconet restore: update \d+: the loss is (nan|inf); the last good checkpoint is r/", answer.err)
    format.verify(format.checkpoints_in(Path("r"))[-1])


def test_corrupt_photo_is_named_and_stops_the_run_beyond_the_allowed_number(falconet, image_folder):
    (image_folder / "train/dark/3.png").write_bytes(b"not a photo")
    line = f"train --data-dir {image_folder} {SMALL} --micro-batch-size 8 --epoch 1 --threads 1"
    refused = falconet(f"{line} --bad-images-allowed 0 --check-images no")
    assert refused.code == 2
    assert "train/dark/3.png" in refused.err
    assert "at most 0 allowed" in refused.err
    allowed = falconet(f"{line} --bad-images-allowed 1 --check-images no")
    assert allowed.code == 0, allowed.err
    assert allowed.out.count("train/dark/3.png") == 1


def test_tensorboard_and_wandb_are_written_when_asked_for(falconet, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    answer = falconet(f"train {TINY} --run-dir r --tensorboard --epoch 1")
    assert answer.code == 0, answer.err
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "r/tensorboard"))
    events.Reload()
    assert {"train/loss", "validation/accuracy"} <= set(events.Tags()["scalars"])


OFFLINE = "logging offline to r/wandb, which `wandb sync` uploads\n"
ALONE = "http://127.0.0.1:1"  # nothing listens there
KEYED = {"WANDB_API_KEY": 40 * "0", "WANDB_BASE_URL": ALONE}


@pytest.mark.run
@pytest.mark.parametrize(
    ("chosen", "note"),
    [
        ({"WANDB_MODE": "offline"}, ""),
        (KEYED, f"note: --wandb: no connection to {ALONE}: Connection refused; {OFFLINE}"),
    ],
    ids=["asked", "no connection"],
)
def test_wandb_works_offline(tmp_path, chosen, note):
    env = os.environ | {"HOME": str(tmp_path), "WANDB_SILENT": "true"} | chosen  # wandb looks for keys at home
    line = [sys.executable, "-m", "falconet", "train", *TINY.split(), "--epoch", "1", "--run-dir", "r", "--wandb"]
    run = subprocess.run(
        line, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert "".join(text for text in run.stdout.splitlines(keepends=True) if "--wandb" in text) == note
    assert list((tmp_path / "r/wandb").glob("offline-run-*"))


@pytest.mark.run
def test_wandb_without_a_key_works_offline_and_asks_nothing_on_a_terminal(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    line = [sys.executable, "-m", "falconet", "train", *TINY.split(), "--epoch", "1", "--run-dir", "r", "--wandb"]
    ours, its = pty.openpty()
    env |= {"HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"}
    run = subprocess.Popen(line, cwd=tmp_path, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the end: nothing holds the other side any more
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert run.wait() == 0, shown.decode()
    note = f"note: --wandb: no API key, which `wandb login` stores; {OFFLINE}"
    assert note.replace("\n", "\r\n").encode() in shown
    assert b"Enter your choice" not in shown
    assert list((tmp_path / "r/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupted_run_saves_reports_how_to_continue_and_exits_130(tmp_path, number, falconet):
    line = [sys.executable, "-m", "falconet", "train", *TINY.split(), "--epoch", "5000", "--run-dir", "r"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: updates(tmp_path / "r"), "the first update")
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "to continue: falconet restore r" in out
    saved = Path(re.search(r"^saved (.*)$", out, re.M).group(1))
    update = format.verify(tmp_path / saved).progress.update
    answer = falconet(f"restore --checkpoint-input-path r --epoch {update // 4 + 1}")
    assert answer.code == 0, answer.err
    assert f"update {update:,} of" in answer.out


def test_folder_with_checkpoints_of_another_run_is_refused(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 1")
    answer = falconet(f"train {TINY} --checkpoint-output-path r/checkpoints")
    assert answer.code == 2
    assert "--checkpoint-output-path: r/checkpoints holds checkpoints of another run" in answer.err


def test_disk_too_full_for_metrics_is_one_line(falconet, monkeypatch):
    import errno

    from falconet.report.sinks import JsonLines

    def full(sink, update, metrics):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(JsonLines, "write", full)
    answer = falconet(f"train {TINY}")
    assert answer.code == 2
    assert answer.err == (
        "falconet train: the disk is full (metrics.jsonl); make room; there is no checkpoint to continue from; the"
        " same command starts over\n"
    )


def test_disk_that_fills_up_reports_how_to_continue(falconet, monkeypatch):
    import errno

    from falconet.report.sinks import JsonLines

    plain = JsonLines.write

    def full_after_an_epoch(sink, update, metrics):
        if update > 4:
            raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        plain(sink, update, metrics)

    monkeypatch.setattr(JsonLines, "write", full_after_an_epoch)
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 2
    assert answer.err == (
        "falconet train: the disk is full (metrics.jsonl); make room; to continue: falconet restore r\n"
    )


def test_run_without_a_terminal_reports_its_start(falconet):
    assert "training starts: update 1 of 8\n" in falconet(f"train {TINY} --run-dir r", "pytorch").out


@pytest.mark.parametrize("saved", [True, False])
def test_a_second_signal_reports_what_is_lost(falconet, monkeypatch, saved):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    stop_at(monkeypatch, 7, twice)
    answer = falconet(f"train {TINY} --run-dir r --checkpoint-save-freq {1 if saved else 2}")
    assert (answer.code, answer.err) == (130, "")
    lost = (
        "3 updates lost since r/checkpoints/resnet8-cifar_generated_1; to continue: falconet restore r"
        if saved
        else "7 updates lost; there is no checkpoint to continue from; the same command starts over"
    )
    assert answer.out.splitlines()[-1] == f"stopped at once: {lost}"


def test_second_signal_while_saving_reports_what_is_lost(falconet, monkeypatch):
    from falconet.train.save import Saving

    finish = Saving.finish

    def again(saving):
        signal.raise_signal(signal.SIGINT)
        return finish(saving)

    stop_at(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(Saving, "finish", again)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err) == (130, "")
    assert answer.out.splitlines()[-1] == (
        "stopped at once: 0 updates lost since r/checkpoints/resnet8-cifar_generated_0+00003;"
        " to continue: falconet restore r"
    )


def test_stored_config_runs_again_without_notes_and_keeps_auto(falconet):
    falconet(f"train {TINY} --run-dir r --epoch 1")
    assert "replicas: auto  # default" in Path("r/config.yaml").read_text()
    answer = falconet("train --config r/config.yaml --plan")
    assert answer.code == 0, answer.err
    assert "note:" not in answer.out


def test_run_folder_without_a_checkpoint_may_be_reused(falconet):
    Path("r").mkdir()
    Path("r/config.yaml").write_text("epoch: 1\n")
    assert falconet(f"train {TINY} --run-dir r --epoch 1").code == 0


def test_plan_names_the_photo_decoder(falconet, image_folder):
    out = falconet(f"train --data folder --data-dir {image_folder} {SMALL} --micro-batch-size 8 --plan").out
    assert re.search(r"decoded by (the native decoder \((avx2|portable)\)|Pillow: \S+)", out)


def test_synthetic_data_notes_the_options_it_ignores(falconet):
    out = falconet(f"train {TINY} --data synthetic --mixup-alpha 0.2 --plan").out
    assert "note: --mixup-alpha has no effect without data from the host (not --data synthetic)" in out
