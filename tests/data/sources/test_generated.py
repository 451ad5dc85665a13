"""Generated images: random, all different, the same ones always."""

import numpy as np
import pytest

from falconet.data.sources import builtin


def made(seed=1):
    return builtin.generate(images=2000, image_size=8, classes=7, seed=seed)


def everything(source):
    return source.images[np.arange(len(source))]


def test_images_have_the_asked_size_number_and_labels():
    splits = made()
    assert everything(splits.train).shape == splits.train.images.shape == (2000, 8, 8, 3)
    assert len(splits.validation) == 200
    assert splits.train.labels.tolist() == [number % 7 for number in range(2000)]
    assert splits.class_names == ("0", "1", "2", "3", "4", "5", "6")


def test_every_image_is_another_one_in_both_splits():
    splits = made()
    images = np.concatenate((everything(splits.train), everything(splits.validation)))
    assert len({image.tobytes() for image in images}) > 0.99 * len(images)


def test_pixels_are_uniform_and_the_constants_are_theirs():
    splits = made()
    pixels = everything(splits.train) / 255
    assert pixels.mean() == pytest.approx(splits.mean[0], abs=0.005)
    assert pixels.std() == pytest.approx(splits.std[0], abs=0.005)


def test_an_image_is_the_same_whoever_asks_and_another_with_another_seed():
    images = everything(made().train)
    np.testing.assert_array_equal(made().train.images[np.array([5, 1999])], images[[5, 1999]])
    assert not np.array_equal(everything(made(seed=2).train), images)


def test_many_large_images_cost_no_memory_until_they_are_asked_for():
    splits = builtin.generate(images=10_000_000, image_size=600, classes=1000, seed=1)
    assert splits.train.images[np.array([9_999_999])].shape == (1, 600, 600, 3)
