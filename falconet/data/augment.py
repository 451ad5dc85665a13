"""From keyed draws to crop boxes, shifts and flips; and evaluation's fixed box."""

import math
from typing import Literal

import numpy as np

from falconet.data.keyed import FloatArray, IntArray, Purpose, uniform
from falconet.data.source import BoolArray

Augment = Literal["none", "shift", "shift-flip", "crop-flip"]
AUGMENTS: tuple[Augment, ...] = ("none", "shift", "shift-flip", "crop-flip")
FLIPPING: tuple[Augment, ...] = ("shift-flip", "crop-flip")

AREA = (0.08, 1.0)  # share of the image a random crop covers
RATIO = (3 / 4, 4 / 3)  # its width over its height
ATTEMPTS = 10
CROP_DRAWS = 2 * ATTEMPTS + 2  # area and ratio of each attempt, then the place down and right

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the original image


def evaluation_box(width: int, height: int, *, resize: int, crop: int) -> Box:
    """The part of the image that resizing its short side to `resize` and a centre crop of `crop` keep.

    Resizing this box to crop x crop gives torchvision's Resize and CenterCrop, including their rounding: the long side
    of the resized image is cut to whole pixels, the crop begins at a whole pixel.
    """
    short, long = min(width, height), max(width, height)
    long_resized = int(resize * long / short)
    resized_width, resized_height = (resize, long_resized) if width <= height else (long_resized, resize)
    left, top = round((resized_width - crop) / 2), round((resized_height - crop) / 2)
    x, y = width / resized_width, height / resized_height  # original pixels per resized one
    # Clipped, because Pillow refuses a box that a rounding error carries over the border.
    return (left * x, top * y, min((left + crop) * x, width), min((top + crop) * y, height))


def crop_draws(indices: IntArray, *, seed: int, epoch: int) -> FloatArray:  # N x CROP_DRAWS
    return uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.CROP, draws=CROP_DRAWS)


def random_resized_crop(widths: IntArray, heights: IntArray, draws: FloatArray) -> IntArray:  # N x 4: x0, y0, x1, y1
    """The first of ten random boxes that fits into each image, else the largest centred one of a permitted ratio."""
    images = np.arange(len(widths))
    area = (widths * heights)[:, None] * (AREA[0] + draws[:, 0 : 2 * ATTEMPTS : 2] * (AREA[1] - AREA[0]))
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    ratio = np.exp(low + draws[:, 1 : 2 * ATTEMPTS : 2] * (high - low))
    tried_widths = np.rint(np.sqrt(area * ratio)).astype(np.int64)  # N x ATTEMPTS
    tried_heights = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (
        (tried_widths > 0)
        & (tried_widths <= widths[:, None])
        & (tried_heights > 0)
        & (tried_heights <= heights[:, None])
    )
    first = np.argmax(fits, axis=1)
    fitted = fits[images, first]

    most_width = np.minimum(widths, np.rint(heights * RATIO[1]).astype(np.int64))
    most_height = np.minimum(heights, np.rint(widths / RATIO[0]).astype(np.int64))
    box_widths = np.where(fitted, tried_widths[images, first], most_width)
    box_heights = np.where(fitted, tried_heights[images, first], most_height)
    free_y, free_x = heights - box_heights, widths - box_widths
    y = np.where(fitted, (draws[:, -2] * (free_y + 1)).astype(np.int64), free_y // 2)
    x = np.where(fitted, (draws[:, -1] * (free_x + 1)).astype(np.int64), free_x // 2)
    return np.stack((x, y, x + box_widths, y + box_heights), axis=1)


def shifts(indices: IntArray, *, side: int, seed: int, epoch: int) -> IntArray:  # N x 2: down, right
    """How far each image moves, up to an eighth of its side each way: padding with zeros and cropping back."""
    reach = max(1, side // 8)
    drawn = uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.CROP, draws=2)
    return (drawn * (2 * reach + 1)).astype(np.int64) - reach


def flips(augment: Augment, indices: IntArray, *, seed: int, epoch: int) -> BoolArray:  # N
    """Which images are mirrored left to right: half of them, or none where the kind does not flip."""
    if augment not in FLIPPING:
        return np.zeros(len(indices), dtype=np.bool_)
    return uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.FLIP, draws=1)[:, 0] < 0.5
