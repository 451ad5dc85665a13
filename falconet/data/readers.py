"""Readers of pixels, cropped, resized and mirrored: from memory, by Pillow or by the native decoder."""

import math
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from falconet.data import crops as drawn
from falconet.data import native
from falconet.data.cache import EncodedCache
from falconet.data.crops import Box, Crops
from falconet.data.image_files import BadImages, UnreadableImageError, open_rgb
from falconet.data.keyed import FloatArray, IntArray
from falconet.data.native.binding import MOST_PIXELS, Filter, Library, SizeArray, Status, StatusArray, Workspace
from falconet.data.preprocessing import Interpolation, Preprocessing
from falconet.data.storage import (
    ArraySource,
    BoolArray,
    FileSource,
    PhotoSource,
    PixelArray,
    Ranges,
    ShardSource,
    Source,
)
from falconet.errors import ConfigError

ValueArray = npt.NDArray[Any]  # pixels or floating-point values
Span = tuple[float, float]  # begin and end of a box in one direction, pixels
PILLOWS: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
FILTERS: dict[Interpolation, Filter] = {"bilinear": Filter.BILINEAR, "bicubic": Filter.BICUBIC}


class Reader(Protocol):
    """Reads images. Several threads call `read` at once, so it must not change the reader's state."""

    @property
    def size(self) -> int: ...  # side of the images read, pixels

    @property
    def rows(self) -> int: ...  # images per call: the loader divides a batch among threads in such parts

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        """Write the images into `out` (N x size x size x 3); return which could be read. The others are black."""


def reader_for(source: Source, *, crops: Crops, bad: BadImages) -> Reader:
    """Choose the reader for a kind of source.

    Photos are decoded by the native library if it was built (`native.why_not` gives the reason), else by Pillow.
    """
    if isinstance(source, ArraySource):
        return ArrayReader(source, crops=crops)
    if crops.augment not in ("none", "crop-flip"):
        raise ConfigError(f"augmentation of photos: got '{crops.augment}', expected 'crop-flip' or 'none'")
    pillow = PillowReader(source, crops=crops, bad=bad)
    library = native.library()
    return pillow if library is None else NativeReader(source, library=library, crops=crops, pillow=pillow)


class ArrayReader:
    """Reads images in memory, all of one size; this cannot fail."""

    rows = 512  # a part takes milliseconds, so handing it to a thread costs little

    def __init__(self, source: ArraySource, *, crops: Crops) -> None:
        self.size = crops.size
        self._images, self._crops = source.images, crops
        self._height, self._width = source.images.shape[1:3]

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        images = self.stored(indices)
        if self.only_moves:
            self.move(images, indices, epoch=epoch, out=out)
        else:
            self._resize(images, indices, epoch=epoch, out=out)
        return np.ones(len(indices), dtype=np.bool_)

    @property
    def only_moves(self) -> bool:
        """Whether images already have the right size, and are only shifted or mirrored, if anything."""
        whole = (self._height, self._width, self._crops.preprocessing.resize) == (self.size, self.size, self.size)
        return whole and self._crops.augment != "crop-flip"

    def stored(self, indices: IntArray) -> PixelArray:  # N x H x W x 3, a copy: fancy indexing
        return self._images[indices]

    def move(self, images: ValueArray, indices: IntArray, *, epoch: int, out: ValueArray) -> None:
        """Shift and mirror images, of pixels or of values, into `out`; zeros move in."""
        out[:] = images = self._shifted(images, indices, epoch)
        flips = self._crops.flips(indices, epoch=epoch)
        out[flips] = images[flips, :, ::-1]

    def _resize(self, images: PixelArray, indices: IntArray, *, epoch: int, out: PixelArray) -> None:
        crops = self._crops
        if crops.augment == "crop-flip":
            sizes = np.tile([self._width, self._height], (len(indices), 1))
            boxes: list[Box] = crops.boxes(indices, sizes, epoch=epoch).tolist()
        else:
            resize = crops.preprocessing.resize
            boxes = [drawn.evaluation_box(self._width, self._height, resize=resize, crop=self.size)] * len(indices)
            images = self._shifted(images, indices, epoch)
        flips = crops.flips(indices, epoch=epoch)
        for row, (image, box, flip) in enumerate(zip(images, boxes, flips, strict=True)):
            out[row] = resized(Image.fromarray(image), box, crops.preprocessing, flip=bool(flip))

    def _shifted(self, images: ValueArray, indices: IntArray, epoch: int) -> ValueArray:
        shifts = self._crops.shifts(indices, side=min(self._height, self._width), epoch=epoch)
        if shifts is None:
            return images
        return shifted(images, shifts, reflects=self._crops.augmentation.shift_padding == "reflect")


class PillowReader:
    """Reads photos with Pillow, which releases Python's lock while it decodes."""

    rows = 8  # about 20 ms of decoding: small enough to keep every thread busy to the end of a batch

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
            out[row] = resized(image, box, self._crops.preprocessing, flip=bool(flips[row]))
        return read


Opener = Callable[[Workspace, IntArray], tuple[SizeArray, StatusArray]]


class NativeReader:
    """Reads photos with the native library; Pillow takes what that refuses.

    Three calls for all rows: read the files, draw their boxes, decode.
    """

    # About 20 ms, 0.35 of them with Python's lock, mostly per call: with 16 rows it would be held for a seventh of
    # the time at 6,000 images per second. Each thread keeps this many files in memory.
    rows = 32

    def __init__(self, source: PhotoSource, *, library: Library, crops: Crops, pillow: "PillowReader") -> None:
        self.size, self._crops = crops.size, crops
        self._open = opener(source)
        self._library, self._pillow = library, pillow
        made = crops.preprocessing
        self._filter = FILTERS[made.interpolation] if made.antialias else Filter.SAMPLED
        self._own = threading.local()

    def keep(self, cache: "EncodedCache") -> None:
        """Read photos from the cache from now on, if it can hold them."""
        plain = self._open
        self._open = lambda workspace, indices: cache.opened(workspace, indices) or plain(workspace, indices)

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        workspace = self._workspace()
        sizes, statuses = self._open(workspace, indices)
        # What was not opened gets an arbitrary size; Pillow decodes its row below.
        boxes = self._crops.boxes(indices, np.where((statuses == Status.OK)[:, None], sizes, 1), epoch=epoch)
        flips = self._crops.flips(indices, epoch=epoch)
        left = np.flatnonzero(workspace.decode(boxes, flips, out, filter=self._filter) != Status.OK)
        read = np.ones(len(indices), dtype=np.bool_)
        if len(left) > 0:
            pixels = np.empty((len(left), *out.shape[1:]), np.uint8)
            read[left] = self._pillow.read(indices[left], epoch=epoch, out=pixels)
            out[left] = pixels
        return read

    def _workspace(self) -> Workspace:
        """This thread's workspace, freed with the thread."""
        if not hasattr(self._own, "workspace"):
            # Pillow's limit, so that both agree on what is too large.
            self._own.workspace = Workspace(self._library, most_pixels=Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
        workspace: Workspace = self._own.workspace
        return workspace


def opener(source: PhotoSource) -> Opener:
    """A function that reads a source's encoded images into a workspace."""
    return _file_opener(source) if isinstance(source, FileSource) else _shard_opener(source)


def _file_opener(source: FileSource) -> Opener:
    root = os.fsencode(source.root) + b"/"

    def path(index: int) -> bytes:  # FileSource.path as bytes: in a third of a microsecond, not four
        return root + source.names.coded(index)

    return lambda workspace, indices: workspace.open([path(index) for index in indices.tolist()])


def _shard_opener(source: ShardSource) -> Opener:
    places = source.places

    def opened(workspace: Workspace, indices: IntArray) -> tuple[SizeArray, StatusArray]:
        source.advance()
        checksums = None if places.checksums is None else places.checksums[indices]
        with source.shards.files(places.shards[indices].tolist()) as files:
            return workspace.open_ranges(Ranges(files, places.ranges(indices), checksums))

    return opened


def resized(
    image: Image.Image, box: Box, preprocessing: Preprocessing, *, flip: bool
) -> PixelArray:  # image size x image size x 3
    """Resize a box of an RGB image to the model's size, by a Pillow filter, or without antialiasing."""
    size = preprocessing.image_size
    if not preprocessing.antialias:
        return resized_aliased(np.asarray(image), box, size=size, flip=flip)
    pixels = np.asarray(image.resize((size, size), PILLOWS[preprocessing.interpolation], box=box))
    return pixels[:, ::-1] if flip else pixels


def resized_aliased(
    pixels: PixelArray, box: tuple[float, float, float, float], *, size: int, flip: bool
) -> PixelArray:  # H x W x 3 -> size x size x 3
    """Resize a box to size x size, bilinear between the four nearest pixels, as in TensorFlow 1's resize_images.

    Output i starts at i times the pixels per output, however far apart the outputs are.
    """
    rows, next_rows, down = _neighbours((box[1], box[3]), pixels.shape[0], size=size, flip=False)
    columns, next_columns, right = _neighbours((box[0], box[2]), pixels.shape[1], size=size, flip=flip)
    upper = _between(pixels[rows][:, columns], pixels[rows][:, next_columns], right[None, :, None])
    lower = _between(pixels[next_rows][:, columns], pixels[next_rows][:, next_columns], right[None, :, None])
    out = (_between(upper, lower, down[:, None, None]) + 0.5).astype(np.uint8)
    return out[:, ::-1] if flip else out


def _neighbours(span: Span, pixels: int, *, size: int, flip: bool) -> tuple[IntArray, IntArray, FloatArray]:
    """The two pixels in the box for each output, and the weight of the second.

    TensorFlow's programs mirrored an image before resizing it: an output then starts at the other end of its pixels.
    """
    begin, end = span
    step = (end - begin) / size
    place = begin + np.arange(size) * step + (step - 1 if flip else 0)
    first = np.floor(place).astype(np.int64)
    low, high = int(begin), min(math.ceil(end), pixels) - 1
    return np.clip(first, low, high), np.clip(first + 1, low, high), place - first


def _between(first: npt.NDArray[Any], second: npt.NDArray[Any], weight: FloatArray) -> FloatArray:
    return np.asarray(first * (1 - weight) + second * weight, np.float64)


def shifted(  # N x H x W x 3; N x 2: down, right
    images: ValueArray, shifts: IntArray, *, reflects: bool = False
) -> ValueArray:
    """Move each image by its shift; zeros move in, or its own reflection at the border."""
    height, width = images.shape[1:3]
    if reflects and len(images):
        reach = int(np.abs(shifts).max())
        padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
        places = zip(padded, (reach - shifts).tolist(), strict=True)
        return np.stack([image[top : top + height, left : left + width] for image, (top, left) in places])
    moved = np.zeros_like(images)
    # A loop takes about 2 us per image; numpy's gathers of overlapping windows copy byte by byte.
    for image, target, (down, right) in zip(images, moved, shifts.tolist(), strict=True):
        target[max(down, 0) : height + down, max(right, 0) : width + right] = image[
            max(-down, 0) : height - down, max(-right, 0) : width - right
        ]
    return moved
