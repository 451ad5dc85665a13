"""`falconet train photos/`: the implied config and what the data decides."""

import json

import pytest
import yaml

from falconet.train import defaults
from falconet.train.defaults import FEWEST_EPOCHS, MOST_EPOCHS, epochs_for
from layouts import class_folders

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


def test_the_data_folder_of_other_data_implies_nothing(falconet):
    assert planned(falconet("train --data digits --data-dir nowhere --plan"))["data"] == "digits"


def test_a_mistyped_folder_names_the_data_it_may_have_meant(falconet):
    answer = falconet("train digits")
    assert answer.code == 2
    assert "digits: no such folder" in answer.err
    assert "did you mean --data digits?" in answer.err


@pytest.mark.parametrize(("images", "epochs"), [(10, MOST_EPOCHS), (6_000, 10), (1_000_000, FEWEST_EPOCHS)])
def test_small_data_is_repeated_more_often(images, epochs):
    assert epochs_for(images) == epochs


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
