"""Crop boxes, shifts and flips against torchvision."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop, transforms

from falconet.data import crops
from falconet.data.crops import CROP_DRAWS

INDICES = np.arange(20_000, dtype=np.int64)


class NumbersFor:
    """Stands in for torch in torchvision's get_params, so that this draws our numbers."""

    log, exp, tensor, float64 = torch.log, torch.exp, torch.tensor, torch.float64

    def __init__(self, draws):
        self._attempts = iter(draws[:-2].tolist())
        self._places = iter(draws[-2:].tolist())

    def empty(self, _):
        def uniform(low, high):
            number = float(low) + next(self._attempts) * (float(high) - float(low))
            return torch.tensor([number], dtype=torch.float64)

        return SimpleNamespace(uniform_=uniform)

    def randint(self, low, high, size):
        return torch.tensor([low + int(next(self._places) * (high - low))])


@pytest.mark.parametrize("least", [0.08, 0.05, 0.1, 1.0])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (32, 32), (1, 1), (3, 400), (400, 3), (2, 5)])
def test_a_random_crop_equals_torchvisions_for_the_same_draws(size, least, monkeypatch):
    width, height = size
    image = torch.empty(3, height, width)
    draws = crops.crop_draws(np.arange(50, dtype=np.int64), seed=9, epoch=0)
    boxes = crops.random_resized_crop(np.full(50, width), np.full(50, height), draws, least=least)
    for box, numbers in zip(boxes.tolist(), draws, strict=True):
        monkeypatch.setattr(transforms, "torch", NumbersFor(numbers))
        top, left, rows, columns = RandomResizedCrop.get_params(image, [least, 1.0], [3 / 4, 4 / 3])
        assert box == [left, top, left + columns, top + rows]


def test_random_crops_stay_inside_images_of_any_size():
    generator = np.random.default_rng(0)
    widths, heights = generator.integers(1, 700, (2, len(INDICES)))
    boxes = crops.random_resized_crop(widths, heights, crops.crop_draws(INDICES, seed=1, epoch=0))
    x0, y0, x1, y1 = boxes.T
    assert (x0 >= 0).all()
    assert (y0 >= 0).all()
    assert ((x0 < x1) & (x1 <= widths)).all()
    assert ((y0 < y1) & (y1 <= heights)).all()


def test_the_area_of_random_crops_is_uniform_if_every_box_fits():
    # A ratio of 1 and a square image: each first attempt fits, so the area is the drawn one.
    draws = crops.crop_draws(INDICES, seed=1, epoch=0)
    draws[:, 1:20:2] = 0.5
    sides = np.full(len(INDICES), 10_000)
    x0, _, x1, _ = crops.random_resized_crop(sides, sides, draws).T
    area = np.sort(((x1 - x0) / 10_000) ** 2)
    uniform = np.linspace(0.08, 1, len(area))
    assert np.abs(area - uniform).max() < 0.92 * 1.95 / math.sqrt(len(area))  # Kolmogorov-Smirnov, 0.1 %


def test_each_image_has_as_many_draws_as_a_crop_uses():
    assert crops.crop_draws(INDICES[:3], seed=1, epoch=0).shape == (3, CROP_DRAWS)


@pytest.mark.parametrize(("side", "reach"), [(8, 1), (4, 1), (32, 4), (64, 8)])
def test_shifts_take_every_value_within_an_eighth_equally_often(side, reach):
    shifts = crops.shifts(INDICES, side=side, seed=1, epoch=0)
    for column in shifts.T:
        values, counts = np.unique(column, return_counts=True)
        assert values.tolist() == list(range(-reach, reach + 1))
        expected = len(INDICES) / len(values)
        assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize(("kind", "share"), [("none", 0), ("shift", 0), ("shift-flip", 0.5), ("crop-flip", 0.5)])
def test_half_the_images_are_flipped_if_the_augmentation_flips(kind, share):
    flipped = crops.flips(kind, INDICES, seed=1, epoch=0).mean()
    assert flipped == pytest.approx(share, abs=5 * 0.5 / math.sqrt(len(INDICES)) if share else 0)


def test_each_epoch_draws_different_crops():
    first, second = (crops.shifts(INDICES, side=32, seed=1, epoch=epoch) for epoch in (0, 1))
    assert (first == second).all(axis=1).mean() < 0.05


@pytest.mark.parametrize("size", [(1, 1), (333, 500), (500, 333), (7, 5000), (256, 256), (227, 226)])
def test_the_evaluation_box_is_inside_the_image(size):
    x0, y0, x1, y1 = crops.evaluation_box(*size, resize=256, crop=224)
    assert 0 <= x0 < x1 <= size[0]
    assert 0 <= y0 < y1 <= size[1]


def test_a_rounding_error_does_not_push_the_box_over_the_border():
    assert 224 * (29 / 224) > 29  # the case at hand, in floating point
    assert crops.evaluation_box(29, 29, resize=224, crop=224) == (0, 0, 29, 29)
