"""TensorFlow's random crops against a plain implementation of the operation's description."""

import math
import random

import numpy as np
import pytest

from falconet.config.options import Augmentation
from falconet.data.crops import CROP_DRAWS, Crops, random_resized_crop
from falconet.data.keyed import Purpose, uniform
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.storage import Objects

PREPROCESSING = Preprocessing(image_size=32, resize=36, mean=IMAGENET_MEAN, std=IMAGENET_STD)
TENSORFLOW = Augmentation(crop_draw="height", crop_area=0.05)
COUNT = 4000
OBJECTS = {
    "none": [],
    "one in the corner": [(0.0, 0.0, 0.2, 0.3)],
    "two": [(0.1, 0.1, 0.2, 0.2), (0.6, 0.2, 0.9, 0.95)],
    "less than a pixel": [(0.5, 0.5, 0.501, 0.501)],
}
SIZES = [(500, 375), (375, 500), (60, 400), (400, 60), (33, 31)]


def drawn_once(numbers, width, height, least):
    """The box of one attempt: a ratio, then a whole height that area and image allow; None if there is none."""
    ratio = 0.75 + next(numbers) * (1.33 - 0.75)
    where = [next(numbers) for _ in range(3)]
    smallest, whole = least * width * height, width * height
    low, high = round(math.sqrt(smallest / ratio)), round(math.sqrt(whole / ratio))
    while round(high * ratio) > width or high > height:
        high -= 1
    low = min(low, high)
    rows = low + int(where[0] * (high - low + 1))
    if rows * round(rows * ratio) < smallest:
        rows += 1
    if rows * round(rows * ratio) > whole:
        rows -= 1
    columns = round(rows * ratio)
    if not (0 < rows <= height and 0 < columns <= width and smallest <= rows * columns <= whole):
        return None
    y, x = int(where[1] * (height - rows)), int(where[2] * (width - columns))  # the last place is never drawn
    return x, y, x + columns, y + rows


def cropped(numbers, size, objects, least=0.05):
    """The first of a hundred attempts that covers a tenth of an object, by counting whole pixels, else the photo."""
    width, height = size
    sides = np.array([width, height, width, height], np.float32)  # products of 32 bits, cut to whole pixels
    boxes = [[int(side) for side in np.array(own, np.float32) * sides] for own in objects]
    boxes = boxes or [(0, 0, width, height)]
    for _ in range(100):
        box = drawn_once(numbers, width, height, least)
        if box is None:
            continue
        for own in boxes:
            across, down = (min(box[2 + i], own[2 + i]) - max(box[i], own[i]) for i in (0, 1))
            area = (own[2] - own[0]) * (own[3] - own[1])
            if area >= 1 and max(across, 0) * max(down, 0) / area >= 0.1:
                return box
    return 0, 0, width, height


def ours(size, objects, *, count=COUNT, seed=3, augmentation=TENSORFLOW):
    every = Objects.of([np.array(objects, np.float32).reshape(-1, 4)] * count)
    crops = Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=seed, objects=every, augmentation=augmentation)
    return crops.boxes(np.arange(count), np.tile(size, (count, 1)), epoch=0)


@pytest.mark.parametrize("objects", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_draws_give_the_same_crop(size, objects):
    count = 300
    draws = uniform(seed=3, epoch=0, indices=np.arange(count), purpose=Purpose.OBJECT_CROP, draws=400)
    expected = [cropped(iter(numbers), size, objects) for numbers in draws.tolist()]
    assert ours(size, objects, count=count).tolist() == [list(map(float, box)) for box in expected]


def apart(left, right):
    """The Kolmogorov-Smirnov distance of two samples, as a multiple of what one in 1,000 exceeds."""
    places = np.concatenate((left, right))
    shares = (np.searchsorted(np.sort(each), places, side="right") / len(each) for each in (left, right))
    return np.abs(np.subtract(*shares)).max() / (1.95 * math.sqrt(1 / len(left) + 1 / len(right)))


@pytest.mark.parametrize("objects", list(OBJECTS.values())[:3], ids=list(OBJECTS)[:3])
def test_independent_draws_give_the_same_distribution(objects):
    size, source = (200, 150), random.Random(1)
    numbers = iter(source.random, None)
    expected = np.array([cropped(numbers, size, objects) for _ in range(COUNT)])
    found = ours(size, objects)
    for made in (lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2] - b[:, 0], lambda b: b[:, 3] - b[:, 1]):
        assert apart(made(found), made(expected)) < 1.3  # four columns, three cases


def test_heights_are_uniform_and_areas_are_not():
    """This distinguishes them from crops by area, whose areas are uniform."""
    size = (1000, 1000)
    found, by_area = ours(size, []), ours(size, [], augmentation=Augmentation(crop_area=0.1))
    shares = [(b[:, 2:] - b[:, :2]).prod(axis=1) / np.prod(size) for b in (found, by_area)]
    assert np.median(shares[0]) == pytest.approx(0.38, abs=0.02)  # of heights from 0.32 to about 0.93: (0.62)^2
    assert np.median(shares[1]) > 0.45
    assert shares[0].min() == pytest.approx(0.1, abs=0.005)  # a photo without objects is one itself


def test_a_crop_does_not_depend_on_the_batch():
    order = np.random.default_rng(0).permutation(200)
    crops = Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=3, objects=None, augmentation=TENSORFLOW)
    sizes = np.random.default_rng(1).integers(20, 600, (200, 2))
    together = crops.boxes(np.arange(200), sizes, epoch=0)
    assert np.array_equal(together[order], crops.boxes(order, sizes[order], epoch=0))
    assert not np.array_equal(together, crops.boxes(np.arange(200), sizes, epoch=1))


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3)])
def test_tiny_images_are_cropped_within_their_bounds(size):
    found = ours(size, [], count=50)
    assert np.all((found[:, :2] >= 0) & (found[:, :2] < found[:, 2:]) & (found[:, 2:] <= size))


# The PyTorch program's rule: of ten plain crops the first of which an object fills a tenth, else the last.


@pytest.mark.parametrize("own", [(0.0, 0.0, 0.1, 0.1), (0.0, 0.0, 0.3, 0.5), (0.2, 0.1, 0.9, 0.9)])
def test_the_first_crop_that_an_object_fills_is_used_else_the_tenth(own):
    size, count = (200, 120), 200
    draws = uniform(seed=3, epoch=0, indices=np.arange(count), purpose=Purpose.OBJECT_CROP, draws=10 * CROP_DRAWS)
    taken = []
    for numbers in draws.reshape(count, 10, CROP_DRAWS):
        plain = random_resized_crop(np.full(10, size[0]), np.full(10, size[1]), numbers)  # see test_crops
        taken.append(next((box for box in plain if _filled(box, size, own) >= 0.1), plain[-1]))
    assert np.array_equal(ours(size, [own], count=count, augmentation=Augmentation(object_overlap="crop")), taken)


def _filled(box, size, own):
    """The share of a crop that is object, by counting pixels."""
    picture = np.zeros((size[1], size[0]), bool)
    x0, y0, x1, y1 = (np.array(own) * [*size, *size]).round().astype(int)
    picture[y0:y1, x0:x1] = True
    left, top, right, bottom = (int(side) for side in box)
    return picture[top:bottom, left:right].mean()
