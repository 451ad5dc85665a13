"""Every command of the originals' documents that starts a program, against plans worked out by hand.

tests/data/expected_plans.tsv has the arithmetic beside each. Placeholders are filled in here, and launchers are read
instead of run.
"""

import csv
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from falconet.config.commands import RestoreOptions, TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_environment
from falconet.legacy.poprun import read_poprun, with_script
from falconet.legacy.table import Place
from falconet.legacy.translate import translate
from falconet.optim.schedules import Schedule
from translations import lacking, wrong

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
COMMANDS = (DATA / "seed_commands.txt").read_text().splitlines()
ROWS = list(csv.DictReader((DATA / "expected_plans.tsv").read_text().splitlines(), delimiter="\t"))
STARTS_NOTHING = {
    2: "the benchmark runner, tests/legacy/test_programs.py",
    3: "the benchmark runner, tests/legacy/test_programs.py",
    **dict.fromkeys((12, 13, 19, 38, 40, 42), "sets a variable"),
    **dict.fromkeys((15, 18, 48, 49, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75), "sets up or tests"),
    44: "prints the help, tests/legacy/test_programs.py",
    46: "lists IPUs",
}
TWO_WORKERS = '{"cluster":{"worker":["worker0:3636","worker1:3636"]},"task":{"type":"worker","index":0}}'
MY_CONFIG = """
base: &base {model: resnet, model_size: 50, dataset: imagenet, optimiser: momentum, lr_schedule: cosine}
my_config:
  <<: *base
  batch_size: 8
  gradient_accumulation_count: 8
  replicas: 16
  epochs: 65
"""
FOLDERS = {
    "pytorch": ROOT / "compat/pytorch/train",
    "tf1": ROOT / "compat/tensorflow",
    "popart": ROOT / "compat/popart",
}


def filled(number, config):
    """The command as a shell would see it, without placeholders."""
    line = COMMANDS[number - 1].replace("<config name>", config).replace("<File path>", "run").replace("<path>", "run")
    line = line.replace("<path-to/imagenet>", "imagenet").replace("$DATASETS_DIR", "imagenet").replace("[--help]", "")
    line = line.replace("your_dataset_dir_path", "imagenet").replace("your_dataset_path", "imagenet")
    line = line.replace("<number of instances>", "2").replace("<Total number of repicas>", "4")
    line = line.replace(" ...", f" python3 train.py --config {config} --imagenet-data-path imagenet", number == 9)
    line = line.replace("[...]", COMMANDS[38].partition("train.py ")[2])
    before = {
        45: "python train.py --dataset imagenet --data-dir imagenet --model-size 50 --pipeline-splits b1/2/relu ",
        63: "python3 train.py --data generated ",
        64: "python3 train.py --data generated ",
    }
    return before.get(number, "") + line


def launched(words):
    """The program's own words, and what its launcher says: replicas in all, processes of a replica."""
    if "poprun" in words:
        asked = read_poprun(words[words.index("poprun") + 1 :])
        program, _ = with_script(asked.program, ["train.py"])
        return list(program[2:]), asked.replicas, asked.stages
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    replicas = re.search(r"--num-replicas[= ](\d+)", " ".join(words[:script]))
    return words[script + 1 :], int(replicas[1]) if replicas else None, None


def poprun_of(script, arguments, tmp_path):
    """What a shell script hands to poprun."""
    fake = tmp_path / "poprun"
    fake.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        [FOLDERS["pytorch"] / script, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def translated(row, tmp_path):
    number, dialect = int(row["line"]), row["program"].partition(":")[0]
    words = shlex.split(filled(number, row["config"]))
    if words[0].endswith(".sh"):
        words = poprun_of(words[0], words[1:], tmp_path)
    arguments, replicas, _ = launched(words)
    configs = FOLDERS[dialect] / "configs.yml"
    if row["config"] == "my_config":
        configs = tmp_path / "configs.yml"
        configs.write_text(MY_CONFIG)
    environment = {"TF_CONFIG": TWO_WORKERS} if number in (39, 41) else {"DATA_DIR": "imagenet"}
    place = Place(environment=environment, configs=configs, replicas=replicas)
    return translate(row["program"], arguments, place=place)


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    """Every row's, by its line and config."""
    folder = tmp_path_factory.mktemp("plans")
    return {(row["line"], row["config"]): translated(row, folder) for row in ROWS}


def plan_of(translation):
    """What a row of the table says of a command."""
    value = {setting.option: setting.values for setting in translation.settings}

    def one(name, default):
        return value.get(name, (default,))[0]

    batch = int(one("micro-batch-size", "64")) * int(one("gradient-accumulation", "1")) * int(one("replicas", "1"))
    return {
        "command": translation.command,
        "global_batch": batch,
        "lr": float(one("lr", "0.1")),
        "stages": len(value.get("pipeline-splits", ())) + 1,
        "replicas": int(one("replicas", "1")),
        "optimizer": one("optimizer", "sgd"),
        "schedule": one("lr-schedule", "cosine"),
        "epochs": int(one("epoch", "30")),
    }


def test_every_command_means_what_was_worked_out_by_hand(translations):
    def expected(row):
        types = {"global_batch": int, "lr": float, "stages": int, "replicas": int, "epochs": int}
        names = ("command", "optimizer", "schedule", *types)
        return {name: types.get(name, str)(row[name]) for name in names if row[name]}

    cases = [((row["line"], row["config"]), expected(row)) for row in ROWS]
    assert lacking(cases, lambda case: plan_of(translations[case])) == []


def test_a_translated_line_is_a_canonical_one_that_breaks_no_rule(translations):
    for row in ROWS:
        if row["command"] in ("train", "restore") and row["lr"]:
            check_rules(row, translations[row["line"], row["config"]])


def check_rules(row, translation):
    command = RestoreOptions if row["command"] == "restore" else TrainOptions
    place = from_environment({"DATA_DIR": "imagenet"}, options_of(command))
    options = load(command, [*place, *translation.settings]).options
    rate = options.learning_rate
    schedule = Schedule(
        kind=rate.lr_schedule,
        peak=rate.lr,
        epochs=options.training.epoch,
        updates_per_epoch=100,
        warmup_epochs=rate.warmup_epoch,
        changes_per_epoch=rate.lr_scheduler_freq,
        decay=rate.lr_decay[0],
        drops=rate.lr_epoch_decay,
    )
    whole = 100 * options.training.epoch
    rates = [schedule.lr(update) for update in range(0, whole, whole // 50)]
    assert 0 < max(rates) <= rate.lr


def test_the_processes_of_a_launched_replica_are_the_stages_of_its_pipeline():
    """Of line 33 too, whose --ipus-per-replica has no value in print."""
    rows = [row for row in ROWS if "poprun" in COMMANDS[int(row["line"]) - 1] and row["stages"]]
    cases = [((int(row["line"]), row["config"]), int(row["stages"])) for row in rows]
    assert wrong(cases, lambda case: launched(shlex.split(filled(*case)))[2]) == []


def test_the_line_under_the_heading_validation_continues_training_and_names_what_validates(translations):
    """Line 36 is train.py with --restore-path: what it did, it does; the README meant validation.py."""
    (translation,) = (found for (line, _), found in translations.items() if line == "36")
    assert translation.command == "restore"
    assert (
        "--restore-path: continues training generated_checkpoints_dir_path;"
        " `validation.py --restore-path generated_checkpoints_dir_path` validates it"
    ) in translation.notes
    meant = translate("tf1:validation.py", ["--restore-path", "generated_checkpoints_dir_path"])
    assert meant.command == "validate"
    words = [word for setting in meant.settings[-2:] for word in setting.argv()]
    assert words == ["--checkpoint-input-path", "generated_checkpoints_dir_path", "--checkpoint", "all"]


def test_every_command_that_starts_a_program_has_a_plan():
    assert {int(row["line"]) for row in ROWS} | STARTS_NOTHING.keys() == set(range(1, len(COMMANDS) + 1))
    assert not {int(row["line"]) for row in ROWS} & STARTS_NOTHING.keys()


def test_the_exponential_schedule_of_tensorflow_drops_as_often_as_in_the_original():
    """146 drops in 350 epochs, of 0.97 each: floor(epoch x 146 / 350) of them by an epoch."""
    argv = shlex.split(
        "--model efficientnet --dataset imagenet --data-dir d --lr-schedule exponential --optimiser RMSprop"
    )
    value = {setting.option: setting.values for setting in translate("tf1:train.py", argv).settings}
    schedule = Schedule(
        kind="exponential",
        peak=1.0,
        epochs=350,
        updates_per_epoch=10,
        changes_per_epoch=float(value["lr-scheduler-freq"][0]),
        decay=float(value["lr-decay"][0]),
    )
    for epoch in (0, 1, 3, 100, 349):
        assert schedule.lr(10 * epoch) == pytest.approx(0.97 ** (epoch * 146 // 350))
