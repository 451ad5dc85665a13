"""Options without effect are noted once, in every command that has them, if the user asked for them."""

import pytest

from falconet.config import commands
from falconet.config.effects import ELSEWHERE, OTHERWISE, REPLACED_BY, notes
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import LINE, Setting, from_checkpoint, from_line

COMMANDS = {
    "train": commands.TrainOptions,
    "validate": commands.ValidateOptions,
    "average": commands.AverageOptions,
    "bench infer": commands.InferOptions,
    "data bench": commands.DataBenchOptions,
}


def noted(line):
    command = next(name for name in COMMANDS if line.startswith(name))
    kind = COMMANDS[command]
    loaded = load(kind, from_line(line.removeprefix(command).split(), options_of(kind)))
    return list(notes(loaded.options, loaded.sources))


WITHOUT_EFFECT = {
    "train --wandb-project x": "--wandb-project has no effect without --wandb",
    "validate --norm-num-groups 8": "--norm-num-groups has no effect without --norm-type group",
    "validate --iterations 5": "--iterations has no effect without --data generated or synthetic",
    "validate --batchnorm-momentum 0.2": "--batchnorm-momentum has no effect on a model that is not being trained",
    "average --micro-batch-size 8": "--micro-batch-size has no effect without --validate or --batchnorm-images",
    "average --device cpu": "--device has no effect without --validate or --batchnorm-images",
    "average --weight-avg-exp-decay 0.5": (
        "--weight-avg-exp-decay has no effect without --weight-avg-strategy exponential"
    ),
    "bench infer --classes 7": "--classes has no effect without --data generated or synthetic",
    "bench infer --dataset-cache": (
        "--dataset-cache has no effect because batches are read once, before the clock starts"
    ),
    "bench infer --data synthetic --dataloader-workers 2": (
        "--dataloader-workers has no effect without data from the host (not --data synthetic)"
    ),
    "data bench --norm-type group": "--norm-type has no effect on the input pipeline, which has no model",
    "data bench --mixup-alpha 0.2": "--mixup-alpha has no effect on the input pipeline, which has no model",
    "data bench --split validation --augment none": "--augment has no effect without --split train",
    "data bench --md5 --seconds 3": "--seconds has no effect with --md5",
}


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_option_without_effect_is_noted(line):
    assert noted(line) == [WITHOUT_EFFECT[line]]


WITH_EFFECT = [
    "validate --data generated --iterations 5",
    "validate --model resnet50 --norm-type group --norm-num-groups 8 --micro-batch-size 8",
    "average --validate --micro-batch-size 8 --device cpu",
    "average --batchnorm-images 100 --micro-batch-size 8",
    "average --weight-avg-strategy exponential --weight-avg-exp-decay 0.5",
    "bench infer --iterations 5 --model resnet50 --micro-batch-size 8",
    "data bench --augment none --micro-batch-size 8 --dataloader-workers 2",
    "data bench --data generated --iterations 5",
]


@pytest.mark.parametrize("line", WITH_EFFECT)
def test_option_with_effect_is_not_noted(line):
    assert noted(line) == []


WITHOUT_LENGTH = ["--epoch has no effect without a length in epochs: --updates replaces it"]


@pytest.mark.parametrize(
    ("epoch", "updates", "expected"),
    [
        ("config digits", LINE, []),
        ("config digits", "mine.yaml", []),  # which extends it
        (LINE, LINE, WITHOUT_LENGTH),
        ("mine.yaml", "mine.yaml", WITHOUT_LENGTH),
    ],
)
def test_an_option_that_a_later_source_replaces_is_not_noted(epoch, updates, expected):
    loaded = load(commands.TrainOptions, [Setting("epoch", ("7",), epoch), Setting("updates", ("5",), updates)])
    assert list(notes(loaded.options, loaded.sources)) == expected


def test_an_option_that_is_stated_again_after_what_replaced_it_is_noted():
    settings = [Setting("epoch", ("7",), "config digits"), Setting("updates", ("5",), "mine.yaml")]
    loaded = load(commands.TrainOptions, [*settings, Setting("epoch", ("4",), LINE)])
    assert list(notes(loaded.options, loaded.sources)) == WITHOUT_LENGTH


def test_checkpoint_options_without_effect_are_not_noted():
    options = options_of(commands.AverageOptions)
    loaded = load(commands.AverageOptions, from_checkpoint({"micro-batch-size": {"value": "8"}}, options))
    assert list(notes(loaded.options, loaded.sources)) == []


def test_tables_name_real_options():
    for command, rows in ELSEWHERE.items():
        assert {name for name, _, _ in rows} <= options_of(command).keys()
    assert all(name in options_of(command) for command, name in OTHERWISE)
    assert {*REPLACED_BY, *REPLACED_BY.values()} <= options_of(commands.TrainOptions).keys()
