"""The TensorFlow program's options of training that need more than a word: what is kept, filtered, left out."""

import pytest

from falconet.dialects.translate import translate
from falconet.errors import ConfigError

IMAGENET = "--dataset imagenet --data-dir d"


def settings(line, program="tf1:train.py"):
    found = translate(program, line.split())
    return {setting.option: " ".join(setting.values) for setting in found.settings}


KEEPING = [  # the original's rule: at the offset, then at every interval from there
    (IMAGENET, {"initial-checkpoint": ""}),
    (f"{IMAGENET} --epochs-per-ckpt 4", {"checkpoint-save-freq": "4", "initial-checkpoint": ""}),
    (f"{IMAGENET} --epochs-per-ckpt 4 --ckpt-epochs-offset 1", {"checkpoint-first-epoch": "1"}),
    (f"{IMAGENET} --ckpt-epochs-offset 30", {"checkpoint-first-epoch": "30"}),
    (f"{IMAGENET} --no-logs", {"temporary": ""}),
    (f"{IMAGENET} --no-logs --logs-path x --name-suffix y", {"temporary": ""}),
    ("--dataset ImageNet --data-dir d", {"data": "imagenet", "model": "resnet18"}),
    ("--dataset CiFar-100 --data-dir d", {"data": "cifar100"}),
    ("--dataset IMAGENET --data-dir d --model ResNeXt --model-size 50", {"model": "resnext50"}),
    ("--dataset Cifar-10 --data-dir d --model EfficientNet --model-size cifar", {"model": "efficientnet-cifar"}),
]


@pytest.mark.parametrize(("line", "expected"), KEEPING)
def test_what_is_kept_and_how_names_are_spelled(line, expected):
    found = settings(line)
    assert {name: found.get(name) for name in expected} == expected


def test_without_checkpoints_there_is_none_before_the_first_update_either():
    assert {"initial-checkpoint", "checkpoint-first-epoch"}.isdisjoint(
        settings(f"{IMAGENET} --ckpts-per-epoch 0 --ckpt-epochs-offset 3")
    )


def test_a_run_without_logs_names_no_folder():
    assert "run-dir" not in settings(f"{IMAGENET} --no-logs --logs-path x")


def test_a_wrong_data_set_is_answered_in_small_letters():
    with pytest.raises(ConfigError, match="--dataset: got 'imagenett', wanted imagenet or cifar-10 or cifar-100; did"):
        settings("--dataset ImageNett --data-dir d")
