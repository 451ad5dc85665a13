"""`falconet train photos/`: the implied config and what the data decides."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from falconet.train import defaults
from falconet.train.defaults import FEWEST_EPOCHS, MOST_EPOCHS, batch_for, epochs_for, warmup_for
from layouts import CLASSES, class_folders

SMALL = "--model resnet10 --image-size 32 --micro-batch-size 4"


@pytest.fixture
def photos(tmp_path):
    return class_folders(tmp_path / "photos")


def planned(answer):
    assert answer.code == 0, answer.err
    return yaml.safe_load(answer.out.partition("\n\n")[2])


@pytest.mark.parametrize("line", ["photos", "--data-dir photos", "--data folder --data-dir photos"])
@pytest.mark.usefixtures("photos")
def test_a_folder_of_photos_implies_the_config_for_photos(falconet, line):
    stated = planned(falconet(f"train {line} {SMALL} --plan"))
    assert (stated["data"], stated["optimizer"], stated["epoch"]) == ("folder", "adamw", MOST_EPOCHS)


@pytest.mark.usefixtures("photos")
def test_a_named_config_replaces_the_one_for_photos(falconet, tmp_path):
    (tmp_path / "mine.yaml").write_text("epoch: 3\n")
    stated = planned(falconet(f"train photos --config mine.yaml {SMALL} --plan"))
    assert (stated["data"], stated["optimizer"], stated["epoch"]) == ("folder", "sgd", 3)


LEFT_OUT = "note: mine.yaml has no `extends: photos`: what it leaves out has general defaults, such as random weights"


@pytest.mark.usefixtures("photos")
def test_a_file_that_leaves_out_the_config_for_photos_has_a_note(falconet, tmp_path):
    line = f"train photos --config mine.yaml {SMALL} --plan"
    for text, is_noted in {
        "epoch: 3\n": True,
        "extends: photos\nepoch: 3\n": False,
        "pretrained: none\nepoch: 3\n": False,
    }.items():
        (tmp_path / "mine.yaml").write_text(text)
        answer = falconet(line)
        assert answer.code == 0, answer.err
        assert (LEFT_OUT in answer.out.splitlines()) == is_noted, text
    (tmp_path / "mine.yaml").write_text("epoch: 3\n")
    assert LEFT_OUT not in falconet(f"{line} --pretrained none").out
    assert LEFT_OUT not in falconet(f"train --data digits --config mine.yaml {SMALL} --plan").out


def test_the_data_folder_of_other_data_implies_nothing(falconet):
    assert planned(falconet("train --data digits --data-dir nowhere --plan"))["data"] == "digits"


def test_a_mistyped_folder_names_the_data_it_may_have_meant(falconet):
    Path("digit").mkdir()  # a name as near; one question is enough
    answer = falconet("train digits")
    assert answer.code == 2
    assert "digits: no such folder" in answer.err
    assert answer.err.endswith("; did you mean --data digits?\n")
    assert answer.err.count("did you mean") == 1


@pytest.mark.parametrize(("images", "epochs"), [(10, MOST_EPOCHS), (600, 41), (10_000, 10), (1_000_000, FEWEST_EPOCHS)])
def test_small_data_is_repeated_more_often(images, epochs):
    assert epochs_for(images) == epochs


@pytest.mark.parametrize(("images", "batch"), [(1, 1), (7, 4), (8, 8), (31, 8), (64, 16), (200, 32), (10_000, 2048)])
def test_few_photos_are_trained_in_small_batches(images, batch):
    assert batch_for(images) == batch


@pytest.mark.parametrize(
    ("updates", "per_epoch", "warmup"),
    [(410, 10, 1), (50, 10, 0.5), (100, 100, 0.1), (10, 10, 0), (60, 1, 0), (1, 33, 0)],
)
def test_a_warm_up_is_a_tenth_of_short_runs_and_never_one_update_alone(updates, per_epoch, warmup):
    assert warmup_for(1, updates=updates, per_epoch=per_epoch) == warmup


def test_one_epoch_of_photos_is_not_all_warm_up(falconet, tmp_path):
    class_folders(tmp_path / "photos", train=24, validation=1)
    line = "train photos --model resnet10 --image-size 32 --pretrained none --micro-batch-size 2"
    assert planned(falconet(f"{line} --plan"))["warmup-epoch"] == 1
    assert planned(falconet(f"{line} --epoch 1 --plan"))["warmup-epoch"] == 0.1
    assert planned(falconet(f"{line} --epoch 1 --warmup-epoch 1 --plan"))["warmup-epoch"] == 1  # the line's
    assert planned(falconet(f"{line} --updates 18 --plan"))["warmup-epoch"] == 0.05
    assert planned(falconet(f"{line} --epoch 0.5 --plan"))["warmup-epoch"] == 0.05
    asked = falconet(f"{line} --epoch 0.5 --warmup-epoch 1 --plan")
    assert asked.code == 2
    assert "--epoch: got 0.5, but --warmup-epoch is 1; expected --warmup-epoch 0.05 too" in asked.err


def test_a_dozen_photos_learn_in_their_first_epoch(falconet, tmp_path):
    class_folders(tmp_path / "photos", train=4, validation=1)
    line = "train photos --model resnet10 --image-size 32 --pretrained none --epoch 20 --run-dir run --resume"
    assert planned(falconet(f"{line} --plan"))["warmup-epoch"] == 0
    assert falconet(f"{line.replace('20', '1')}").code == 0
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["train/lr"] == 5e-4
    again = falconet(f"{line.replace('20', '1')}")
    assert again.code == 0, again.err
    assert "nothing left to train" in again.out


def test_a_dozen_photos_just_train_and_resume_when_there_are_more(falconet, tmp_path):
    class_folders(tmp_path / "photos", train=4, validation=1)
    line = "train photos --model resnet10 --image-size 32 --pretrained none --updates 1 --run-dir run --resume"
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert ", 8 photos of " in answer.out
    for number in range(60):
        shutil.copyfile(
            *(tmp_path / f"photos/train/{CLASSES[0]}/{CLASSES[0]}_{name}.JPEG" for name in (0, 100 + number))
        )
    assert falconet(line).code == 0
    assert falconet(line.replace("--updates 1", "--updates 2")).code == 2  # other options, as for every run


@pytest.mark.usefixtures("photos")
def test_a_resumed_run_keeps_the_number_of_epochs_it_started_with(falconet, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("epoch: auto\nupdates: 1\n")
    line = f"train photos --config mine.yaml {SMALL} --run-dir run --resume"
    assert falconet(line).code == 0
    stored = json.loads(next((tmp_path / "run/checkpoints").glob("*/manifest.json")).read_text())
    assert stored["config"]["epoch"]["value"] == str(MOST_EPOCHS)
    monkeypatch.setattr(defaults, "epochs_for", lambda images: FEWEST_EPOCHS)  # as if photos had been added
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "nothing left to train" in answer.out


@pytest.mark.usefixtures("photos")
def test_photos_train_in_bf16_where_the_device_has_it(falconet, monkeypatch):
    monkeypatch.setattr(defaults, "automatic", lambda kind: {"cpu": "32.32"}[kind])
    assert planned(falconet(f"train photos {SMALL} --device cpu --plan"))["precision"] == 32.32
    monkeypatch.setattr(defaults, "automatic", lambda kind: {"cpu": "bf16.32"}[kind])
    assert planned(falconet(f"train photos {SMALL} --device cpu --plan"))["precision"] == "bf16.32"
    assert planned(falconet(f"train photos {SMALL} --device cpu --precision 32.32 --plan"))["precision"] == 32.32


def test_only_training_chooses_the_precision(falconet):
    answer = falconet("bench infer --precision auto")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--precision auto: is for train, which stores what it chose" in answer.err
