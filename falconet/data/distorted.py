"""Random crops as TensorFlow's sample_distorted_bounding_box draws them: an even ratio, then an even whole height."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import FloatArray, IntArray
from falconet.data.objects import BoxArray
from falconet.data.source import BoolArray

RATIO = (0.75, 1.33)  # width over height, as TensorFlow's programs for ImageNet have it
COVERED = 0.1  # of an object's area, or of the photo's where it has none


@dataclass(frozen=True, eq=False)
class Attempts:
    """Boxes that were drawn for each of N images, and which of them are within the bounds."""

    boxes: IntArray  # N x A x 4: x0, y0, x1, y1
    fit: BoolArray  # N x A


def attempt(widths: IntArray, heights: IntArray, draws: FloatArray, *, least: float) -> Attempts:  # draws: N x A x 4
    """Boxes of at least that share of their image.

    The last place down and right is never drawn unless it is the only one: so it is there.
    """
    width, height = widths[:, None], heights[:, None]
    ratio = RATIO[0] + draws[..., 0] * (RATIO[1] - RATIO[0])
    area = (widths * heights)[:, None].astype(np.float64)
    lowest, highest = _whole(np.sqrt(least * area / ratio)), _whole(np.sqrt(area / ratio))
    narrow = ((width + 0.5 - 1e-7) / ratio).astype(np.int64)  # the greatest height whose width rounds to the image's
    highest = np.where(_whole(highest * ratio) > width, narrow, highest)
    highest = np.minimum(highest, height)
    lowest = np.minimum(lowest, highest)
    rows = lowest + (draws[..., 1] * (highest - lowest + 1)).astype(np.int64)
    rows = np.where(rows * _whole(rows * ratio) < least * area, rows + 1, rows)  # what rounding took away
    rows = np.where(rows * _whole(rows * ratio) > area, rows - 1, rows)
    columns = _whole(rows * ratio)
    y = (draws[..., 2] * (height - rows)).astype(np.int64)
    x = (draws[..., 3] * (width - columns)).astype(np.int64)
    fit = (rows > 0) & (columns > 0) & (rows <= height) & (columns <= width) & (rows * columns >= least * area)
    return Attempts(np.stack((x, y, x + columns, y + rows), axis=-1), fit)


def covers_image(boxes: IntArray, widths: IntArray, heights: IntArray) -> BoolArray:  # N x A x 4 -> N x A
    """Whether a box has its share of a photo that has no objects, and so is one itself."""
    x0, y0, x1, y1 = np.moveaxis(boxes, -1, 0)
    enough: BoolArray = (x1 - x0) * (y1 - y0) / (widths * heights)[:, None] >= COVERED
    return enough


def covers_object(boxes: IntArray, objects: BoxArray, *, width: int, height: int) -> BoolArray:  # A x 4; M x 4 -> A
    """Whether a box has its share of an object of one photo; objects are cut to whole pixels, and may vanish so."""
    sizes = np.array([width, height, width, height], np.float32)
    pixels = (objects * sizes).astype(np.int64)
    there = pixels[(pixels[:, 2:] - pixels[:, :2]).prod(axis=1) > 0]
    if len(there) == 0:
        return np.zeros(len(boxes), np.bool_)
    low = np.maximum(boxes[:, None, :2], there[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], there[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(axis=-1)
    found: BoolArray = (common / (there[:, 2:] - there[:, :2]).prod(axis=1) >= COVERED).any(axis=1)
    return found


def _whole(values: npt.NDArray[np.float64]) -> IntArray:
    return np.rint(values).astype(np.int64)
