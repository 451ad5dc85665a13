"""The images of an export: those that calibrate int8 are never those that measure it."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from exported import graph_of
from falconet.config.options import Data
from falconet.errors import DataError
from falconet.export import photos
from falconet.export.photos import Divided

GRAPH = replace(graph_of(), class_names=("dark", "light"))


def divided(folder, *, graph=GRAPH, note=pytest.fail, calibration=128, share=0.2):
    return photos.divided_folder(folder, graph, note, share=share, calibration=calibration)


def names(sample):
    return [str(sample.source.where(number)) for number in sample.chosen.tolist()]


def check_apart(found: Divided, *, calibrate: int, measure: int):
    first, second = names(found.calibration), names(found.measured)
    assert (len({*first}), len({*second})) == (calibrate, measure)
    assert not {*first} & {*second}


def test_training_photos_calibrate_and_validation_photos_measure(image_folder):
    found = divided(image_folder)
    check_apart(found, calibrate=24, measure=8)
    assert all("/train/" in name for name in names(found.calibration))
    assert all("/val/" in name for name in names(found.measured))
    assert found.right[:, 0].tolist() == [0] * 4 + [1] * 4


def test_class_folders_that_are_not_split_are_divided_by_name(image_folder):
    found = divided(image_folder / "train", share=0.25)
    check_apart(found, calibrate=18, measure=6)
    assert len(found.right) == 6


def test_photos_without_classes_are_halved_and_have_no_right_answers(image_folder, tmp_path):
    flat, notes = tmp_path / "flat", []
    flat.mkdir()
    for number, path in enumerate(sorted((image_folder / "train").rglob("*.png"))):
        shutil.copy(path, flat / f"{number}.png")
    found = divided(flat, note=notes.append)
    check_apart(found, calibrate=12, measure=12)
    assert found.right is None
    assert "no accuracy, because the classes of the photos are unknown" in notes[0]


def test_classes_that_the_model_does_not_know_have_no_right_answers(image_folder):
    notes = []
    found = divided(image_folder, graph=graph_of(), note=notes.append)
    assert found.right is None
    assert "no accuracy, because the model does not know the classes of the photos" in notes[0]
    check_apart(found, calibrate=24, measure=8)


def test_numbers_of_classes_are_the_models(image_folder):
    graph = replace(GRAPH, class_names=("black", "light", "dark"))
    assert divided(image_folder, graph=graph).right[:, 0].tolist() == [2] * 4 + [1] * 4


def test_the_same_photos_calibrate_every_time(image_folder):
    first, again, more = (names(divided(image_folder, calibration=count).calibration) for count in (5, 5, 9))
    assert first == again
    assert {*first} < {*more}
    assert {name.split("/")[-2] for name in more} == {"dark", "light"}


def test_a_run_calibrates_on_training_images_alone():
    data = Data(data="digits")
    graph = replace(GRAPH, class_names=tuple(map(str, range(10))))
    found = photos.divided_run(data, graph, pytest.fail, seed=1, calibration=40)
    assert (len(found.calibration), len(found.measured)) == (40, 360)
    assert found.calibration.source is not found.measured.source
    pixels = [
        np.concatenate([each for _, each in sample.batches(64)]) for sample in (found.calibration, found.measured)
    ]
    calibrating, measured = ({image.tobytes() for image in each} for each in pixels)
    assert not calibrating & measured
    other = photos.divided_run(data, graph, pytest.fail, seed=2, calibration=40)
    assert found.calibration.chosen.tolist() != other.calibration.chosen.tolist()


def test_photos_that_cannot_be_read_are_left_out(image_folder):
    (image_folder / "val/dark/0.png").write_bytes(b"no photo")
    notes = []
    read = [numbers.tolist() for numbers, _ in divided(image_folder, note=notes.append).measured.batches(3)]
    assert read == [[1, 2], [3, 4, 5], [6, 7]]
    assert "val/dark/0.png: cannot be decoded" in notes[0]


@pytest.mark.parametrize("refused", ["train/dark", "."])
def test_a_folder_that_may_not_be_read_is_refused_and_no_part_of_it_measured(image_folder, monkeypatch, refused):
    plain, place = os.scandir, str(image_folder / refused)

    def scanned(path):
        if str(path) == place:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scanned)
    for listing in (divided, lambda folder: photos.photos_in(folder, GRAPH, pytest.fail)):
        with pytest.raises(DataError) as caught:
            listing(image_folder)
        assert str(caught.value) == f"{place}: cannot be read (Permission denied)"


def test_folder_without_photos_to_calibrate_with_is_one_line(image_folder):
    shutil.rmtree(image_folder / "train")
    with pytest.raises(
        DataError, match="no training images; expected some to calibrate with, and others to measure on"
    ):
        divided(image_folder)
