"""Resizes boxes of many images into one batch on the device: Pillow's filters in one Triton launch."""
# Triton's language is not Python: its functions have no types for mypy, and its constants are parameters.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from falconet.data.keyed import FloatArray
from falconet.data.preprocessing import Preprocessing
from falconet.data.storage import BoolArray
from falconet.numerics.kernels import FUSED

PIXELS = 256  # in the result, per program


@triton.jit
def _first_tap(center, support):
    """The first pixel whose centre may be inside the filter, by Pillow's rounding."""
    return tl.maximum((center - support + 0.5).to(tl.int32), 0)


@triton.jit
def _weight(tap, center, inverse, begin, end, CUBIC: tl.constexpr):
    """The filter, bilinear or bicubic, at a pixel's centre; 0 outside begin to end."""
    away = tl.abs((tap.to(tl.float32) - center + 0.5) * inverse)
    if CUBIC:  # Catmull-Rom, as in Pillow
        near = (1.5 * away - 2.5) * away * away + 1.0
        far = ((-0.5 * away + 2.5) * away - 4.0) * away + 2.0
        weight = tl.where(away < 1.0, near, tl.where(away < 2.0, far, 0.0))
    else:
        weight = tl.maximum(1.0 - away, 0.0)
    return tl.where((tap >= begin) & (tap < end), weight, 0.0)


@triton.jit
def _level(value):
    """Round to a byte; bicubic may overshoot."""
    return tl.minimum(tl.maximum(value + 0.5, 0.0), 255.0).to(tl.uint8)


@triton.jit
def _resize(images, boxes, out, SIZE: tl.constexpr, PIXELS: tl.constexpr, ANTIALIAS: tl.constexpr, CUBIC: tl.constexpr):
    """images: N x (address, width, height, flipped); boxes: N x (x0, y0, x1, y1); out: N x SIZE x SIZE x 3."""
    number = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < SIZE * SIZE
    source = tl.load(images + number * 4).to(tl.pointer_type(tl.uint8))
    width = tl.load(images + number * 4 + 1).to(tl.int32)
    height = tl.load(images + number * 4 + 2).to(tl.int32)
    flipped = tl.load(images + number * 4 + 3)
    x0, y0 = tl.load(boxes + number * 4), tl.load(boxes + number * 4 + 1)
    x1, y1 = tl.load(boxes + number * 4 + 2), tl.load(boxes + number * 4 + 3)

    row, column = pixel // SIZE, pixel % SIZE
    column = tl.where(flipped != 0, SIZE - 1 - column, column)
    step_x, step_y = (x1 - x0) / SIZE, (y1 - y0) / SIZE
    # Arithmetic instead of branches: with antialiasing like Pillow, without it like readers.resized_aliased.
    mirrored = (flipped != 0).to(tl.float32)
    unit_x, unit_y = tl.maximum(step_x * ANTIALIAS, 1.0), tl.maximum(step_y * ANTIALIAS, 1.0)
    support_x, support_y = unit_x * (1 + CUBIC), unit_y * (1 + CUBIC)
    beyond_x, beyond_y = (0.5 + mirrored * (step_x - 1.0)) * (1 - ANTIALIAS), 0.5 * (1 - ANTIALIAS)
    begin_x, begin_y = x0.to(tl.int32) * (1 - ANTIALIAS), y0.to(tl.int32) * (1 - ANTIALIAS)
    end_x = tl.minimum(width, tl.ceil(x1).to(tl.int32) + width * ANTIALIAS)
    end_y = tl.minimum(height, tl.ceil(y1).to(tl.int32) + height * ANTIALIAS)
    center_x = x0 + (column.to(tl.float32) + 0.5 * ANTIALIAS) * step_x + beyond_x
    center_y = y0 + (row.to(tl.float32) + 0.5 * ANTIALIAS) * step_y + beyond_y
    first_x, first_y = _first_tap(center_x, support_x), _first_tap(center_y, support_y)
    taps_x, taps_y = (2.0 * support_x).to(tl.int32) + 2, (2.0 * support_y).to(tl.int32) + 2

    total = center_x * 0.0  # tl.zeros fails in Triton's interpreter once the compiler was imported
    red, green, blue = total, total, total
    plane = width.to(tl.int64) * height
    for down in range(taps_y):
        y = first_y + down
        weight_y = _weight(y, center_y, 1.0 / unit_y, begin_y, end_y, CUBIC)
        for across in range(taps_x):
            x = first_x + across
            weight = weight_y * _weight(x, center_x, 1.0 / unit_x, begin_x, end_x, CUBIC)
            place = source + y.to(tl.int64) * width + x
            counts = exists & (weight != 0.0)
            red += weight * tl.load(place, mask=counts, other=0).to(tl.float32)
            green += weight * tl.load(place + plane, mask=counts, other=0).to(tl.float32)
            blue += weight * tl.load(place + 2 * plane, mask=counts, other=0).to(tl.float32)
            total += weight
    total = tl.where(total > 0.0, total, 1.0)  # no pixel counts beyond the last one
    target = out + (number.to(tl.int64) * SIZE * SIZE + pixel) * 3
    tl.store(target, _level(red / total), mask=exists)
    tl.store(target + 1, _level(green / total), mask=exists)
    tl.store(target + 2, _level(blue / total), mask=exists)


def resize_boxes(
    images: Sequence[Tensor], boxes: FloatArray, flips: BoolArray, out: Tensor, *, preprocessing: Preprocessing
) -> None:
    """Resize the box (x0, y0, x1, y1) of each image (3 x H x W, uint8, contiguous) into its row of `out` (S x S x 3).

    With antialiasing, it is like Pillow's resize of a box: the filter reaches beyond the box into the image. It rounds
    once, at the end; Pillow rounds after each direction, so single levels differ, and more where bicubic overshoots.
    """
    assert all(image.is_contiguous() for image in images)
    assert out.is_contiguous()
    rows = [
        (image.data_ptr(), image.shape[2], image.shape[1], int(flip)) for image, flip in zip(images, flips, strict=True)
    ]
    table = torch.tensor(rows, dtype=torch.int64).to(out.device)
    places = torch.from_numpy(boxes).float().to(out.device)
    size = out.shape[1]
    grid = (len(rows), triton.cdiv(size * size, PIXELS))
    antialias, cubic = int(preprocessing.antialias), int(preprocessing.interpolation == "bicubic")
    _resize[grid](table, places, out, SIZE=size, PIXELS=PIXELS, ANTIALIAS=antialias, CUBIC=cubic, **FUSED)
