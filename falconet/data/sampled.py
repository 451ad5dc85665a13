"""Resizing as TensorFlow 1's resize_images did: between the four nearest pixels, however far the outputs lie apart."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import FloatArray, IntArray
from falconet.data.source import PixelArray

Span = tuple[float, float]  # begin and end of a box one way, pixels


def resized(
    pixels: PixelArray, box: tuple[float, float, float, float], *, size: int, flip: bool
) -> PixelArray:  # H x W x 3 -> size x size x 3
    """The box at size x size, mirrored if asked for; output i begins at i times the pixels that it stands for."""
    rows, next_rows, down = _neighbours((box[1], box[3]), pixels.shape[0], size=size, flip=False)
    columns, next_columns, right = _neighbours((box[0], box[2]), pixels.shape[1], size=size, flip=flip)
    upper = _between(pixels[rows][:, columns], pixels[rows][:, next_columns], right[None, :, None])
    lower = _between(pixels[next_rows][:, columns], pixels[next_rows][:, next_columns], right[None, :, None])
    out = (_between(upper, lower, down[:, None, None]) + 0.5).astype(np.uint8)
    return out[:, ::-1] if flip else out


def _neighbours(span: Span, pixels: int, *, size: int, flip: bool) -> tuple[IntArray, IntArray, FloatArray]:
    """The two pixels of each output, within the box, and the share of the second.

    A mirrored image was mirrored before it was resized there: an output begins at the other end of its pixels.
    """
    begin, end = span
    step = (end - begin) / size
    place = begin + np.arange(size) * step + (step - 1 if flip else 0)
    first = np.floor(place).astype(np.int64)
    low, high = int(begin), min(math.ceil(end), pixels) - 1
    return np.clip(first, low, high), np.clip(first + 1, low, high), place - first


def _between(first: npt.NDArray[Any], second: npt.NDArray[Any], share: FloatArray) -> FloatArray:
    return np.asarray(first * (1 - share) + second * share, np.float64)
