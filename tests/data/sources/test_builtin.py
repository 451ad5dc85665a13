"""Data without files: the digits, and random images."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from falconet.data.sources import builtin

FROZEN = "372a4c70578975c0690e4a8d036169012ff3524dce040fbc11cb8ecc6c3efa9e"  # of the validation images and labels


@pytest.fixture(scope="module")
def splits():
    return builtin.load_digits()


def test_the_file_is_the_one_its_provenance_describes():
    described = builtin.FILE.with_suffix(".md").read_text()
    assert hashlib.sha256(Path(builtin.FILE).read_bytes()).hexdigest() in described


def test_there_are_1797_grey_digits_of_8_by_8(splits):
    assert (len(splits.train), len(splits.validation)) == (1437, 360)
    assert splits.train.images.shape == (1437, 8, 8, 3)
    assert splits.class_names == tuple("0123456789")
    images = np.concatenate((splits.train.images, splits.validation.images))
    assert (images == images[..., :1]).all()
    assert np.unique(images).tolist() == [round(level * 255 / 16) for level in range(17)]


def test_the_classes_have_their_published_counts(splits):
    labels = np.concatenate((splits.train.labels, splits.validation.labels))
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_split_is_frozen(splits):
    content = splits.validation.images.tobytes() + splits.validation.labels.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == FROZEN


def test_the_constants_are_those_of_the_training_part(splits):
    pixels = splits.train.images / 255
    assert splits.mean == pytest.approx([pixels.mean()] * 3, abs=5e-5)
    assert splits.std == pytest.approx([pixels.std()] * 3, abs=5e-5)


def made(seed=1):
    return builtin.generate(images=2000, validated=200, image_size=8, classes=7, seed=seed)


def everything(source):
    return source.images[np.arange(len(source))]


def test_images_have_the_requested_size_number_and_labels():
    splits = made()
    assert everything(splits.train).shape == splits.train.images.shape == (2000, 8, 8, 3)
    assert len(splits.validation) == 200
    assert splits.train.labels.tolist() == [number % 7 for number in range(2000)]
    assert splits.class_names == ("0", "1", "2", "3", "4", "5", "6")


def test_all_images_of_both_splits_differ():
    splits = made()
    images = np.concatenate((everything(splits.train), everything(splits.validation)))
    assert len({image.tobytes() for image in images}) > 0.99 * len(images)


def test_pixels_are_uniform_and_match_the_constants():
    splits = made()
    pixels = everything(splits.train) / 255
    assert pixels.mean() == pytest.approx(splits.mean[0], abs=0.005)
    assert pixels.std() == pytest.approx(splits.std[0], abs=0.005)


def test_an_image_depends_only_on_its_number_and_the_seed():
    images = everything(made().train)
    np.testing.assert_array_equal(made().train.images[np.array([5, 1999])], images[[5, 1999]])
    assert not np.array_equal(everything(made(seed=2).train), images)


def test_images_take_no_memory_until_they_are_read():
    splits = builtin.generate(images=10_000_000, validated=1_000_000, image_size=600, classes=1000, seed=1)
    assert splits.train.images[np.array([9_999_999])].shape == (1, 600, 600, 3)
