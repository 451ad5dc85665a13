"""The embedded digits: what was shipped, and a split that never changes."""

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
