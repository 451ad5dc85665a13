"""Crops that overlap an annotated object, checked by counting the pixels of a mask."""

import numpy as np
import pytest

from falconet.config.options import Augmentation
from falconet.data import crops as augment
from falconet.data.crops import OBJECT_COVERED, Crops, covered
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.storage import Objects

PREPROCESSING = Preprocessing(image_size=32, resize=36, mean=IMAGENET_MEAN, std=IMAGENET_STD)
WIDTH, HEIGHT = 200, 120
COUNT = 400
CORNER = (0.0, 0.0, 0.1, 0.1)


def crops(objects, seed=5):
    return Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=seed, objects=objects)


def boxes(objects, *, epoch=0, count=COUNT, indices=None):
    indices = np.arange(count) if indices is None else np.asarray(indices)
    return crops(objects).boxes(indices, np.tile([WIDTH, HEIGHT], (len(indices), 1)), epoch=epoch)


def every(*own):
    return Objects.of([np.array(own, np.float32).reshape(-1, 4)] * COUNT)


def share_of_mask(box, own):
    """The share, by counting the pixels of a picture drawn ten times as large."""
    picture = np.zeros((HEIGHT * 10, WIDTH * 10), bool)
    x0, y0, x1, y1 = (np.array(own) * np.array([WIDTH, HEIGHT, WIDTH, HEIGHT]) * 10).round().astype(int)
    picture[y0:y1, x0:x1] = True
    left, top, right, bottom = (np.array(box) * 10).astype(int)
    return picture[top:bottom, left:right].sum() / picture.sum()


def test_every_crop_covers_a_tenth_of_the_object_and_plain_ones_do_not():
    shares = [share_of_mask(box, CORNER) for box in boxes(every(CORNER))[:100]]
    plain = [share_of_mask(box, CORNER) for box in boxes(None)[:100]]
    assert min(shares) >= OBJECT_COVERED
    assert np.mean(np.array(plain) < OBJECT_COVERED) > 0.4


def test_one_of_several_objects_is_enough():
    found = boxes(every(CORNER, (0.9, 0.9, 1.0, 1.0)))
    first = np.array([share_of_mask(box, CORNER) for box in found[:60]]) >= OBJECT_COVERED
    second = np.array([share_of_mask(box, (0.9, 0.9, 1.0, 1.0)) for box in found[:60]]) >= OBJECT_COVERED
    assert np.all(first | second)
    assert not np.all(first)
    assert not np.all(second)


def test_crops_have_the_areas_and_ratios_of_plain_ones():
    found = boxes(every((0.0, 0.0, 1.0, 1.0)))  # every crop of a tenth of the area is good
    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    assert np.all((found[:, :2] >= 0) & (found[:, 2:] <= [WIDTH, HEIGHT]))
    assert np.all(width * height >= 0.078 * WIDTH * HEIGHT)
    assert np.all((width / height > 0.73) & (width / height < 1.37))
    assert len(np.unique(found, axis=0)) > 0.95 * COUNT


@pytest.mark.parametrize("whose", ["an object", "no object"])
def test_crops_are_as_small_as_allowed_and_no_smaller(whose):
    """The least is 5 % for crops that must overlap an object and 10 % for others, as in the TensorFlow program."""
    large, count = (4000, 4000), 3000
    own = [(0.0, 0.0, 0.001, 0.001), (0.999, 0.999, 1.0, 1.0), (0.5, 0.5, 0.501, 0.501)] if whose == "an object" else []
    objects = Objects.of([np.array(own, np.float32).reshape(-1, 4)] * count)
    areas = Augmentation(crop_area=0.1, object_crop_area=0.05)
    drawn = Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=1, objects=objects, augmentation=areas)
    found = drawn.boxes(np.arange(count), np.tile(large, (count, 1)), epoch=0)
    shares = (found[:, 2:] - found[:, :2]).prod(axis=1) / np.prod(large)
    least = 0.05 if whose == "an object" else 0.1
    assert least - 1e-3 < shares.min() < least + 0.01
    assert shares.max() > 0.95


def test_an_image_without_an_object_has_the_plain_crop():
    mixed = Objects.of([np.zeros((0, 4), np.float32), np.array([CORNER], np.float32)] * (COUNT // 2))
    found, plain = boxes(mixed), boxes(None)
    assert np.array_equal(found[0::2], plain[0::2])
    assert not np.array_equal(found[1::2], plain[1::2])


def test_a_crop_does_not_depend_on_the_batch():
    objects, order = every(CORNER), np.random.default_rng(0).permutation(COUNT)
    assert np.array_equal(boxes(objects)[order], boxes(objects, indices=order))
    assert not np.array_equal(boxes(objects), boxes(objects, epoch=1))


def test_the_whole_image_is_used_if_no_attempt_covers_an_object(monkeypatch):
    monkeypatch.setattr(augment, "OBJECT_COVERED", 1.1)
    far = every((0.0, 0.0, 1.0, 1.0))  # nothing covers more of it than all
    assert np.array_equal(boxes(far, count=20), np.tile([0.0, 0.0, WIDTH, HEIGHT], (20, 1)))


def test_evaluation_ignores_objects():
    sizes = np.tile([WIDTH, HEIGHT], (4, 1))
    own = Crops(preprocessing=PREPROCESSING, augment="none", seed=0, objects=every(CORNER))
    none = Crops(preprocessing=PREPROCESSING, augment="none", seed=0, objects=None)
    assert np.array_equal(own.boxes(np.arange(4), sizes, epoch=0), none.boxes(np.arange(4), sizes, epoch=0))


@pytest.mark.parametrize(
    ("box", "share"), [((0, 0, 10, 10), 1.0), ((0, 0, 5, 10), 0.5), ((5, 5, 10, 10), 0.25), ((20, 20, 30, 30), 0.0)]
)
def test_the_share_of_an_object_within_a_box_is_that_of_its_area(box, share):
    assert covered(np.array([box]), np.array([[0.0, 0.0, 10.0, 10.0]]))[0, 0] == pytest.approx(share)
