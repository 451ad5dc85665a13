"""Resizing as TensorFlow 1's resize_images did: between the four nearest pixels, however far the outputs lie apart."""

import math
import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from falconet.data import crops, native
from falconet.data.crops import CROP_RULE, Augment, Box, CropRule, Crops
from falconet.data.decode import BadImages, UnreadableImageError, open_rgb
from falconet.data.keyed import FloatArray, IntArray
from falconet.data.native.decoder import NativeReader
from falconet.data.preprocessing import Preprocessing
from falconet.data.source import ArraySource, BoolArray, PhotoSource, PixelArray, Source

Span = tuple[float, float]  # begin and end of a box one way, pixels


def resized_by_nearest(
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


ValueArray = npt.NDArray[Any]  # of pixels, or of numbers


class Reader(Protocol):
    """Fills rows of a batch. Several threads call `read` at once, so it changes nothing of its own."""

    @property
    def size(self) -> int: ...  # side of what it reads, pixels

    @property
    def rows(self) -> int: ...  # rows worth one call: the loader divides a batch among threads in such parts

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        """Write the images into `out` (N x size x size x 3); which of them could be read. The others are black."""


def reader_for(
    source: Source,
    *,
    preprocessing: Preprocessing,
    augment: Augment,
    seed: int,
    bad: BadImages,
    rule: CropRule = CROP_RULE,
) -> Reader:
    """The reader of this kind of source; augment "none" is what evaluation and prediction use.

    Files are decoded by the native library where it was built (`native.why_not` says why not), else by Pillow.
    """
    if isinstance(source, ArraySource):
        return ArrayReader(source, preprocessing=preprocessing, augment=augment, seed=seed, rule=rule)
    crops = Crops.of(preprocessing, augment=augment, seed=seed, objects=source.objects, rule=rule)
    pillow = FileReader(source, crops=crops, bad=bad)
    library = native.library()
    if library is None:
        return pillow
    return NativeReader(source, library=library, crops=crops, pillow=pillow)


class ArrayReader:
    """Images in memory, all of one size; nothing here can fail to be read."""

    rows = 512  # a part takes milliseconds, so that handing it to a thread costs little beside it

    def __init__(
        self,
        source: ArraySource,
        *,
        preprocessing: Preprocessing,
        augment: Augment,
        seed: int,
        rule: CropRule = CROP_RULE,
    ) -> None:
        self.size = preprocessing.image_size
        self._images = source.images
        self._height, self._width = source.images.shape[1:3]
        self._resize, self._antialias = preprocessing.resize, preprocessing.antialias
        self._augment, self._seed, self._rule = augment, seed, rule

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        if self.only_moves:
            self.move(self.stored(indices), indices, epoch=epoch, out=out)
        elif self._augment == "crop-flip":
            self._read_boxes(self.stored(indices), self._random_boxes(indices, epoch), indices, epoch, out)
        else:
            box = crops.evaluation_box(self._width, self._height, resize=self._resize, crop=self.size)
            images = self._shifted(self.stored(indices), indices, epoch)
            self._read_boxes(images, [box] * len(images), indices, epoch, out)
        return np.ones(len(indices), dtype=np.bool_)

    @property
    def only_moves(self) -> bool:
        """Whether the images have their size already, and are shifted and mirrored at the most."""
        whole = (self._height, self._width, self._resize) == (self.size, self.size, self.size)
        return whole and self._augment != "crop-flip"

    def stored(self, indices: IntArray) -> PixelArray:  # N x H x W x 3, a copy: fancy indexing
        return self._images[indices]

    def move(self, images: ValueArray, indices: IntArray, *, epoch: int, out: ValueArray) -> None:
        """Shift and mirror the images, of pixels or of values, into `out`; zeros move in."""
        out[:] = images = self._shifted(images, indices, epoch)
        flips = self._flips(indices, epoch)
        out[flips] = images[flips, :, ::-1]

    def _flips(self, indices: IntArray, epoch: int) -> BoolArray:
        return crops.flips(self._augment, indices, seed=self._seed, epoch=epoch)

    def _shifted(self, images: ValueArray, indices: IntArray, epoch: int) -> ValueArray:
        if self._augment not in ("shift", "shift-flip"):
            return images
        side = min(self._height, self._width)
        return shifted(images, crops.shifts(indices, side=side, seed=self._seed, epoch=epoch))

    def _random_boxes(self, indices: IntArray, epoch: int) -> list[Box]:
        crops = Crops(augment="crop-flip", resize=self._resize, size=self.size, seed=self._seed, rule=self._rule)
        sizes = np.tile([self._width, self._height], (len(indices), 1))
        boxes: list[Box] = crops.boxes(indices, sizes, epoch=epoch).tolist()
        return boxes

    def _read_boxes(self, images: PixelArray, boxes: list[Box], indices: IntArray, epoch: int, out: PixelArray) -> None:
        for row, (image, box, flip) in enumerate(zip(images, boxes, self._flips(indices, epoch), strict=True)):
            picture = Image.fromarray(image)
            out[row] = resized(picture, box, size=self.size, flip=bool(flip), antialias=self._antialias)


class FileReader:
    """Encoded images, in files or shards, decoded by Pillow, which lets other threads run meanwhile."""

    rows = 8  # about 20 ms of decoding: fine enough to keep every thread busy to the end of a batch

    def __init__(self, source: PhotoSource, *, crops: Crops, bad: BadImages) -> None:
        self.size = crops.size
        self._source, self._crops, self._bad = source, crops, bad

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        flips = self._crops.flips(indices, epoch=epoch)
        read = np.ones(len(indices), dtype=np.bool_)
        for row, index in enumerate(indices.tolist()):
            try:
                image = open_rgb(self._source.opened(index))
            except UnreadableImageError as error:
                self._bad.add(self._source.where(index), str(error))
                out[row] = 0
                read[row] = False
                continue
            size = np.array([[image.width, image.height]])
            box: Box = tuple(self._crops.boxes(indices[row : row + 1], size, epoch=epoch)[0].tolist())
            antialias = self._crops.antialias
            out[row] = resized(image, box, size=self.size, flip=bool(flips[row]), antialias=antialias)
        return read


def resized(
    image: Image.Image, box: Box, *, size: int, flip: bool, antialias: bool = True
) -> PixelArray:  # size x size x 3
    """The box of an RGB image at size x size, bilinear, with antialiasing as Pillow has it or without."""
    if not antialias:
        return resized_by_nearest(np.asarray(image), box, size=size, flip=flip)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels[:, ::-1] if flip else pixels


def shifted(images: ValueArray, shifts: IntArray) -> ValueArray:  # N x H x W x 3; N x 2: down, right
    """Each image moved by its own shift, zeros where nothing comes from."""
    height, width = images.shape[1:3]
    moved = np.zeros_like(images)
    # A loop: about 2 us an image, and numpy's gathers of overlapping windows copy byte by byte.
    for image, target, (down, right) in zip(images, moved, shifts.tolist(), strict=True):
        target[max(down, 0) : height + down, max(right, 0) : width + right] = image[
            max(-down, 0) : height - down, max(-right, 0) : width - right
        ]
    return moved


UNKNOWN, BAD = -1, -2  # instead of a place in the cache


class PixelCache:
    """A reader's own pixels, of the first `most` images that are read; its pixels must not depend on the epoch.

    Pages are taken as they are written, so that an unused cache costs nothing. Threads that read the same image at once
    keep it twice, which is no harm.
    """

    def __init__(self, reader: Reader, *, images: int, most: int) -> None:
        self.size, self.rows = reader.size, reader.rows
        self._reader = reader
        self._pixels = np.empty((min(images, most), reader.size, reader.size, 3), np.uint8)
        self._places: npt.NDArray[np.int64] = np.full(images, UNKNOWN, np.int64)
        self._used, self._lock = 0, threading.Lock()

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        places = self._places[indices]
        known: BoolArray = places >= 0
        out[known] = self._pixels[places[known]]
        out[places == BAD] = 0
        missing = np.flatnonzero(places == UNKNOWN)
        if len(missing) > 0:
            all_of_them = len(missing) == len(indices)
            pixels = out if all_of_them else np.empty((len(missing), *out.shape[1:]), np.uint8)
            known[missing] = self._reader.read(indices[missing], epoch=epoch, out=pixels)
            self._keep(indices[missing], pixels, known[missing])
            if not all_of_them:
                out[missing] = pixels
        return known

    def _keep(self, indices: IntArray, pixels: PixelArray, read: BoolArray) -> None:
        self._places[indices[~read]] = BAD
        good = np.flatnonzero(read)
        with self._lock:
            first = self._used
            count = min(len(good), len(self._pixels) - first)
            self._used += count
        kept = good[:count]
        self._pixels[first : first + count] = pixels[kept]
        self._places[indices[kept]] = np.arange(first, first + count)  # last: another thread may look for them
