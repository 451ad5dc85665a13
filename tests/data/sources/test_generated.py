"""Generated images: random, all different, the same ones always."""

import numpy as np
import pytest

from falconet.data.sources import builtin


def made(seed=1):
    return builtin.generate(images=2000, image_size=8, classes=7, seed=seed)


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
    splits = builtin.generate(images=10_000_000, image_size=600, classes=1000, seed=1)
    assert splits.train.images[np.array([9_999_999])].shape == (1, 600, 600, 3)
