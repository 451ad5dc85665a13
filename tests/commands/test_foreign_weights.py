"""Weights of other programs on the command line: their names, their arguments, the side of their zero channels."""

import argparse
import csv
import json
import re
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.cli import main

SMALL = "--data digits --threads 1 --dataloader-workers 1 --device cpu"
TRAIN = f"{SMALL} --model resnet8-cifar --micro-batch-size 32 --epoch 2 --warmup-epoch 0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the digits whose shortcuts pad both sides."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    assert main(f"train {TRAIN} --shortcut-padding both --run-dir {folder}".split()) == 0
    return folder


def weights(run):
    newest = format.checkpoints_in(run)[-1]
    return format.read_tensors(newest, "model", verified=format.verify(newest))


def accuracy(run):
    metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["validation/accuracy"] for line in metrics if "validation/accuracy" in line][-1]


@pytest.fixture
def published(trained, tmp_path):
    """The same weights as akamaster's program saves them."""
    state = {
        f"module.{name.replace('fc.', 'linear.')}": tensor
        for name, tensor in weights(trained).items()
        if "num_batches" not in name
    }
    torch.save({"state_dict": state, "best_prec1": 91.7}, tmp_path / "resnet8-0a1b2c3d.th")
    return "resnet8-0a1b2c3d.th"


def measured(answer):
    assert answer.code == 0, answer.err
    written = Path(re.search(r"written to (\S+\.csv)", answer.out)[1])
    return float(list(csv.DictReader(written.read_text().splitlines()))[-1]["top1"])


CONCLUDED = "resnet8-0a1b2c3d.th has the layers of akamaster's pytorch_resnet_cifar10: --shortcut-padding both\n"


def test_published_weights_have_the_accuracy_of_their_training(falconet, trained, published):
    answer = falconet(f"validate --checkpoint-input-path {published} --model resnet8-cifar {SMALL}")
    assert measured(answer) == pytest.approx(accuracy(trained), abs=0.01)
    assert CONCLUDED in answer.out
    assert "warning" not in answer.out


def test_wrong_side_and_wrong_pixels_are_warned_of(falconet, trained, published):
    line = f"validate --checkpoint-input-path {published} --model resnet8-cifar {SMALL}"
    answer = falconet(f"{line} --shortcut-padding back")
    assert measured(answer) < accuracy(trained) - 5
    assert CONCLUDED not in answer.out
    assert answer.out.count("warning: ") == answer.out.count("; try --shortcut-padding both\n") == 1
    answer = falconet(f"{line} --normalization-location none")
    assert answer.code == 0
    assert re.search(r"warning: the first layer sees values \d+ times larger than in the training", answer.out)


def test_training_that_starts_with_them_keeps_the_side(falconet, published):
    answer = falconet(f"train {TRAIN} --epoch 1 --lr 0.001 --run-dir a --init-path {published}")
    assert answer.code == 0, answer.err
    assert f"note: {CONCLUDED}" in answer.out
    assert "warning" not in answer.out
    assert "shortcut-padding: both  # pretrained weights" in Path("a/config.yaml").read_text()
    Path(published).unlink()
    found = measured(falconet("validate --checkpoint-input-path a"))
    assert found == pytest.approx(accuracy(Path("a")), abs=0.01)
    assert "shortcut-padding: both" in falconet("restore --checkpoint-input-path a --epoch 2 --plan").out
    answer = falconet(f"train {TRAIN} --epoch 1 --run-dir b --init-path a --plan")
    assert "note: the checkpoint was trained with: --shortcut-padding both\n" in answer.out
    assert "shortcut-padding: both" in answer.out
    assert "shortcut-padding: both" in falconet(f"train {TRAIN} --epoch 1 --run-dir b --pretrained a --plan").out


def test_a_run_that_started_with_them_can_be_resumed(falconet, published):
    line = f"train {TRAIN} --epoch 1 --run-dir a --init-path {published} --resume"
    assert falconet(line).code == 0
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "nothing left to train" in answer.out


def test_training_warns_of_weights_that_do_not_fit_the_images_and_continues(falconet, published):
    answer = falconet(f"train {TRAIN} --epoch 1 --run-dir a --init-path {published} --shortcut-padding back")
    assert answer.code == 0, answer.err
    assert answer.out.count("warning: these weights fit better with the zero channels of shortcuts on the other") == 1


def test_weights_without_a_model_are_refused_with_the_model_they_fit(falconet, published):
    answer = falconet(f"validate --checkpoint-input-path {published} {SMALL}")
    assert (answer.code, answer.err) == (
        2,
        f"falconet validate: {published}: holds only weights; expected --model as well;"
        " these weights fit --model resnet8-cifar\n",
    )


def original(run, path, **arguments):
    """A checkpoint as the PyTorch program saves it."""
    whole = {
        "epoch": 2,
        "model_state_dict": weights(run),
        "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "loss": 0.5,
        "train_accuracy": 80.0,
    }
    torch.save(whole | {"args": argparse.Namespace(norm_type="batch", lr=0.1, **arguments)}, path)


def test_the_originals_checkpoints_name_their_model(falconet, trained):
    original(trained, "x_10.pt", model="resnet8-cifar")
    answer = falconet(f"validate --checkpoint-input-path x_10.pt --shortcut-padding both {SMALL}")
    assert measured(answer) == pytest.approx(accuracy(trained), abs=0.01)
    assert "x_10.pt was trained with: --model resnet8-cifar --norm-type batch\n" in answer.out
    original(trained, "x_9.pt", model="resnet8-cifar")
    folder = falconet(f"validate --checkpoint-input-path . --shortcut-padding both {SMALL}")
    assert re.findall(r"^x_\d+\.pt(?= +\d)", folder.out, re.MULTILINE) == ["x_9.pt", "x_10.pt"]


def test_training_starts_with_an_originals_checkpoint(falconet, trained):
    original(trained, "x.pt", model="resnet8-cifar")
    answer = falconet(
        f"train {TRAIN} --epoch 1 --lr 0 --run-dir a --init-path x.pt".replace("--model resnet8-cifar", "")
    )
    assert answer.code == 0, answer.err
    assert "note: x.pt was trained with: --model resnet8-cifar --norm-type batch\n" in answer.out
    assert torch.equal(weights(Path("a"))["fc.weight"], weights(trained)["fc.weight"])


def test_data_that_only_a_file_names_is_not_downloaded(falconet, trained, monkeypatch):
    def fetched(*_, **__):
        raise AssertionError("a download was started")

    monkeypatch.setattr("falconet.data.sources.cifar.download", fetched)
    original(trained, "x.pt", model="resnet8-cifar", data="cifar10")
    answer = falconet("validate --checkpoint-input-path x.pt")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "data that only a checkpoint names is not downloaded" in answer.err
