"""Crops: the part of an image that is read, by evaluation's centre or by torchvision's or TensorFlow's random draws."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from falconet.config.options import Augmentation
from falconet.data.keyed import FloatArray, IntArray, Purpose, uniform
from falconet.data.order import COPY_BITS
from falconet.data.preprocessing import Preprocessing
from falconet.data.storage import BoolArray, BoxArray, Objects
from falconet.errors import ConfigError

Augment = Literal["none", "shift", "shift-flip", "crop-flip"]
FLIPPING: tuple[Augment, ...] = ("shift-flip", "crop-flip")

RATIO = (3 / 4, 4 / 3)  # width over height
ATTEMPTS = 10
CROP_DRAWS = 2 * ATTEMPTS + 2  # area and ratio of each attempt, then the offsets down and right
OBJECT_ATTEMPTS = 100  # to find a crop that overlaps an object
OBJECT_COVERED = 0.1  # least share of the object's area
AUGMENTATION = Augmentation()
OBJECT_DRAWS = 4  # per attempt: area, ratio, offset down, offset right

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the original image


def evaluation_box(width: int, height: int, *, resize: int, crop: int) -> Box:
    """The part of the image that survives resizing its short side to `resize` and a centre crop of `crop`.

    Resizing this box to crop x crop equals torchvision's Resize and CenterCrop, including their rounding: the long side
    of the resized image is truncated to whole pixels, and the crop starts at a whole pixel.
    """
    short, long = min(width, height), max(width, height)
    long_resized = int(resize * long / short)
    resized_width, resized_height = (resize, long_resized) if width <= height else (long_resized, resize)
    left, top = round((resized_width - crop) / 2), round((resized_height - crop) / 2)
    x, y = width / resized_width, height / resized_height  # original pixels per resized one
    # Clipped: Pillow refuses a box that a rounding error carries over the border.
    return (left * x, top * y, min((left + crop) * x, width), min((top + crop) * y, height))


def crop_draws(indices: IntArray, *, seed: int, epoch: int) -> FloatArray:  # N x CROP_DRAWS
    return uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.CROP, draws=CROP_DRAWS)


def random_resized_crop(  # N x 4: x0, y0, x1, y1
    widths: IntArray, heights: IntArray, draws: FloatArray, *, least: float = AUGMENTATION.crop_area
) -> IntArray:
    """The first of ten random boxes that fits into the image, else the largest centred one with a permitted ratio."""
    images = np.arange(len(widths))
    area = (widths * heights)[:, None] * (least + draws[:, 0 : 2 * ATTEMPTS : 2] * (1 - least))
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


def object_crop(
    width: int, height: int, *, objects: BoxArray, draws: FloatArray, least: float = AUGMENTATION.crop_area
) -> Box | None:
    """The first drawn box that fits into the image and covers enough of an object; None if there is none.

    This is TensorFlow's sample_distorted_bounding_box, with the ratios of the plain random crop.
    """
    area, ratio, down, right = draws.T  # A each
    share = least + area * (1 - least)
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    across = np.exp(low + ratio * (high - low))
    widths = np.rint(np.sqrt(width * height * share * across)).astype(np.int64)
    heights = np.rint(np.sqrt(width * height * share / across)).astype(np.int64)
    x0 = (right * (width - widths + 1)).astype(np.int64)
    y0 = (down * (height - heights + 1)).astype(np.int64)
    boxes = np.stack((x0, y0, x0 + widths, y0 + heights), axis=1)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    fits &= covered(boxes, objects * np.array([width, height, width, height])).max(axis=1) >= OBJECT_COVERED
    if not fits.any():
        return None
    found: Box = tuple(boxes[np.argmax(fits)].tolist())
    return found


def covered(boxes: IntArray, objects: npt.NDArray[np.floating]) -> FloatArray:  # A x 4, M x 4 -> A x M
    """The share of each object's area that lies within each box."""
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], objects[None, :, 2:])
    within = np.clip(high - low, 0, None).prod(axis=-1)
    return np.asarray(within / (objects[:, 2:] - objects[:, :2]).prod(axis=-1), np.float64)


def shifts(  # N x 2: down, right
    indices: IntArray, *, side: int, seed: int, epoch: int, reach: int | None = None
) -> IntArray:
    """How far each image moves, at most `reach` pixels each way: padding and a crop of the same size.

    `reach`: None means an eighth of the side.
    """
    reach = max(1, side // 8) if reach is None else reach
    drawn = uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.CROP, draws=2)
    return (drawn * (2 * reach + 1)).astype(np.int64) - reach


def flips(augment: Augment, indices: IntArray, *, seed: int, epoch: int) -> BoolArray:  # N
    """Which images are mirrored left to right: half of them, or none if the augmentation does not flip."""
    if augment not in FLIPPING:
        return np.zeros(len(indices), dtype=np.bool_)
    return uniform(seed=seed, epoch=epoch, indices=indices, purpose=Purpose.FLIP, draws=1)[:, 0] < 0.5


def alternating_flips(augment: Augment, indices: IntArray, *, seed: int, epoch: int) -> BoolArray:  # N
    """Which images are mirrored: the same half in every second epoch, and the other half in the epochs between.

    In two epochs in a row every image comes once each way; random flips would show half of them the same way twice.
    """
    numbered, copies = epoch & ((1 << COPY_BITS) - 1), epoch >> COPY_BITS  # as the loader numbers them
    first = flips(augment, indices, seed=seed, epoch=copies << COPY_BITS)
    return first if numbered % 2 == 0 or augment not in FLIPPING else ~first


# TensorFlow's sample_distorted_bounding_box: a uniform ratio, then a uniform whole height.
TENSORFLOW_RATIO = (0.75, 1.33)  # width over height, as in TensorFlow's ImageNet programs
COVERED = 0.1  # least share of an object's area, or of a photo without objects


@dataclass(frozen=True, eq=False)
class Attempts:
    """Boxes drawn for each of N images, and which of them are within bounds."""

    boxes: IntArray  # N x A x 4: x0, y0, x1, y1
    fit: BoolArray  # N x A


def attempt(widths: IntArray, heights: IntArray, draws: FloatArray, *, least: float) -> Attempts:  # draws: N x A x 4
    """Draw boxes that cover at least `least` of their image.

    As in TensorFlow, the last offset down or right is never drawn unless it is the only one.
    """
    width, height = widths[:, None], heights[:, None]
    ratio = TENSORFLOW_RATIO[0] + draws[..., 0] * (TENSORFLOW_RATIO[1] - TENSORFLOW_RATIO[0])
    area = (widths * heights)[:, None].astype(np.float64)
    lowest, highest = _whole(np.sqrt(least * area / ratio)), _whole(np.sqrt(area / ratio))
    narrow = ((width + 0.5 - 1e-7) / ratio).astype(np.int64)  # the largest height whose width rounds to the image's
    highest = np.where(_whole(highest * ratio) > width, narrow, highest)
    highest = np.minimum(highest, height)
    lowest = np.minimum(lowest, highest)
    rows = lowest + (draws[..., 1] * (highest - lowest + 1)).astype(np.int64)
    rows = np.where(rows * _whole(rows * ratio) < least * area, rows + 1, rows)  # undo rounding
    rows = np.where(rows * _whole(rows * ratio) > area, rows - 1, rows)
    columns = _whole(rows * ratio)
    y = (draws[..., 2] * (height - rows)).astype(np.int64)
    x = (draws[..., 3] * (width - columns)).astype(np.int64)
    fit = (rows > 0) & (columns > 0) & (rows <= height) & (columns <= width) & (rows * columns >= least * area)
    return Attempts(np.stack((x, y, x + columns, y + rows), axis=-1), fit)


def covers_image(boxes: IntArray, widths: IntArray, heights: IntArray) -> BoolArray:  # N x A x 4 -> N x A
    """Whether each box covers enough of a photo without objects, which counts as one object itself."""
    x0, y0, x1, y1 = np.moveaxis(boxes, -1, 0)
    enough: BoolArray = (x1 - x0) * (y1 - y0) / (widths * heights)[:, None] >= COVERED
    return enough


def covers_object(boxes: IntArray, objects: BoxArray, *, width: int, height: int) -> BoolArray:  # A x 4; M x 4 -> A
    """Whether each box covers enough of an object of one photo; objects truncated to whole pixels may vanish."""
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Crops:
    """Which box of each image is read, and whether it is mirrored; the same for every decoder."""

    preprocessing: Preprocessing  # the size to read, and evaluation's centre crop
    augment: Augment = "none"
    augmentation: Augmentation = AUGMENTATION  # how random crops are drawn
    seed: int = 0
    objects: Objects | None = None  # random crops must overlap one

    @property
    def size(self) -> int:
        """The side of the images read, in pixels."""
        return self.preprocessing.image_size

    @property
    def _least_of_object(self) -> float:
        asked = self.augmentation.object_crop_area
        return self.augmentation.crop_area if asked == "auto" else asked

    def flips(self, indices: IntArray, *, epoch: int) -> BoolArray:
        draw = alternating_flips if self.augmentation.flip == "alternating" else flips
        return draw(self.augment, indices, seed=self.seed, epoch=epoch)

    def shifts(self, indices: IntArray, *, side: int, epoch: int) -> IntArray | None:  # N x 2: down, right
        """How far images with this side move; None if they do not."""
        if self.augment not in ("shift", "shift-flip"):
            return None
        asked = self.augmentation.shift_reach
        if asked != "auto" and asked >= side:
            raise ConfigError(f"--shift-reach: got {asked}, expected less than the image's side of {side} pixels")
        return shifts(indices, side=side, seed=self.seed, epoch=epoch, reach=None if asked == "auto" else asked)

    def boxes(self, indices: IntArray, sizes: IntArray, *, epoch: int) -> FloatArray:  # N; N x (width, height); N x 4
        if self.augment == "none":
            fixed = [evaluation_box(*size, resize=self.preprocessing.resize, crop=self.size) for size in sizes.tolist()]
            return np.array(fixed, np.float64).reshape(-1, 4)
        sizes = sizes.astype(np.int64)
        if self.augmentation.crop_draw == "height":
            return self._distorted(indices, sizes, epoch=epoch).astype(np.float64)
        draws = crop_draws(indices, seed=self.seed, epoch=epoch)
        widths, heights = sizes.T
        boxes = random_resized_crop(widths, heights, draws, least=self.augmentation.crop_area).astype(np.float64)
        object_box = self._object_box if self.augmentation.object_overlap == "object" else self._filled_box
        for row in self._annotated(indices):
            boxes[row] = object_box(int(indices[row]), sizes[row].tolist(), epoch)
        return boxes

    def _annotated(self, indices: IntArray) -> list[int]:
        """Rows of the images that have objects."""
        objects = self.objects
        if objects is None:
            return []
        return [row for row, index in enumerate(indices.tolist()) if len(objects[index]) > 0]

    def _object_box(self, index: int, size: list[int], epoch: int) -> Box:
        """A crop that overlaps an object: ten attempts nearly always suffice; the whole image if all fail."""
        assert self.objects is not None
        width, height = size
        for first, last in ((0, ATTEMPTS), (ATTEMPTS, OBJECT_ATTEMPTS)):
            draws = self._attempts(np.array([index]), epoch, first=first, last=last)[0]
            own, least = self.objects[index], self._least_of_object
            box = object_crop(width, height, objects=own, draws=draws, least=least)
            if box is not None:
                return box
        return (0.0, 0.0, float(width), float(height))

    def _filled_box(self, index: int, size: list[int], epoch: int) -> Box:
        """The first of ten plain crops that an object fills enough, else the last."""
        assert self.objects is not None
        width, height = np.full((2, ATTEMPTS), np.array(size)[:, None])
        draws = uniform(
            seed=self.seed,
            epoch=epoch,
            indices=np.array([index]),
            purpose=Purpose.OBJECT_CROP,
            draws=CROP_DRAWS * ATTEMPTS,
        ).reshape(ATTEMPTS, CROP_DRAWS)
        boxes = random_resized_crop(width, height, draws, least=self._least_of_object)
        pixels = self.objects[index] * np.array([*size, *size])
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        shares = covered(boxes, pixels) * (pixels[:, 2:] - pixels[:, :2]).prod(axis=1) / areas[:, None]
        enough = shares.max(axis=1) >= OBJECT_COVERED
        box: Box = tuple(boxes[np.argmax(enough) if enough.any() else -1].tolist())
        return box

    def _distorted(self, indices: IntArray, sizes: IntArray, *, epoch: int) -> IntArray:  # N; N x 2; N x 4
        """TensorFlow's crops: the first of up to 100 boxes that covers enough of an object, else the whole image.

        An image without annotated objects counts as one object. Ten attempts nearly always suffice.
        """
        found = np.concatenate((np.zeros_like(sizes), sizes), axis=1)
        left = np.arange(len(indices))
        for first, last in ((0, ATTEMPTS), (ATTEMPTS, OBJECT_ATTEMPTS)):
            widths, heights = sizes[left].T
            draws = self._attempts(indices[left], epoch, first=first, last=last)
            drawn = attempt(widths, heights, draws, least=self.augmentation.crop_area)
            enough = covers_image(drawn.boxes, widths, heights)
            for row in self._annotated(indices[left]):
                assert self.objects is not None
                own, (width, height) = self.objects[int(indices[left[row]])], sizes[left[row]].tolist()
                enough[row] = covers_object(drawn.boxes[row], own, width=width, height=height)
            enough &= drawn.fit
            rows = np.flatnonzero(enough.any(axis=1))
            found[left[rows]] = drawn.boxes[rows, np.argmax(enough[rows], axis=1)]
            left = np.delete(left, rows)
        return found

    def _attempts(self, indices: IntArray, epoch: int, *, first: int, last: int) -> FloatArray:  # N x A x OBJECT_DRAWS
        draws = uniform(
            seed=self.seed,
            epoch=epoch,
            indices=indices,
            purpose=Purpose.OBJECT_CROP,
            draws=OBJECT_DRAWS * (last - first),
            first=OBJECT_DRAWS * first,
        )
        return draws.reshape(len(indices), last - first, OBJECT_DRAWS)
