"""Decodes strangers' photos from memory to the same pixels that validation reads from files."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image

from falconet.data import native
from falconet.data.anatomy import FORMATS, PhotoFile, check_encoded, check_opened
from falconet.data.crops import evaluation_box
from falconet.data.image_files import UnreadableImageError, to_rgb, use_image
from falconet.data.native.binding import MOST_BYTES, MOST_PIXELS, Encoded, Filter, Status, Workspace
from falconet.data.preprocessing import Preprocessing
from falconet.data.readers import FILTERS, resized
from falconet.data.storage import PixelArray
from falconet.errors import printable

MOST_REASON = 200  # characters


class PhotoDecoder:
    """Decodes photos from any number of threads at once, within limits that hold whatever the photos are.

    JPEGs are decoded by the native library, which reads no more than the crop needs; Pillow takes what that refuses.
    Pillow needs up to 16 bytes per pixel, so the photos that it decodes at the same time have at most `most_pixels`
    pixels in total: threads wait for each other.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, most_pixels: int | None = None) -> None:
        """`most_bytes`: per photo; `most_pixels`: per picture, below Pillow's limit, or None for that limit."""
        limits = [each for each in (most_pixels, Image.MAX_IMAGE_PIXELS) if each is not None]
        self.most_bytes, self.most_pixels = most_bytes, min(limits, default=MOST_PIXELS)
        self._library = native.library()
        self._own = threading.local()
        self._at_once = _Share(self.most_pixels)

    def decode(self, photo: Encoded, preprocessing: Preprocessing) -> PixelArray:  # image size x image size x 3
        """The centre crop of the first frame, as in validation; UnreadableImageError if there is none."""
        size = memoryview(photo).nbytes
        if size == 0:
            raise UnreadableImageError("empty file")
        if size > self.most_bytes:
            raise UnreadableImageError(f"{size:,} bytes, more than the {self.most_bytes:,} allowed")
        pixels = self._by_library(photo, preprocessing)
        if pixels is not None:
            return pixels
        try:
            content = bytes(photo)  # no copy if it is bytes
            check_encoded(content)
            return use_image(
                PhotoFile(content),
                lambda image: self._by_pillow(image, preprocessing),
                formats=FORMATS,
                most_pixels=self.most_pixels,
            )
        except UnreadableImageError as error:
            raise UnreadableImageError(printable(str(error))[:MOST_REASON]) from None

    def _by_library(self, photo: Encoded, preprocessing: Preprocessing) -> PixelArray | None:
        """The pixels from the native library; None: a photo for Pillow."""
        if self._library is None:
            return None
        if not hasattr(self._own, "workspace"):
            self._own.workspace = Workspace(self._library, most_pixels=self.most_pixels)
        workspace: Workspace = self._own.workspace
        sizes, statuses = workspace.open_memory([photo])
        if statuses[0] != Status.OK:
            return None
        width, height = sizes[0].tolist()
        box = evaluation_box(width, height, resize=preprocessing.resize, crop=preprocessing.image_size)
        out = np.empty((1, preprocessing.image_size, preprocessing.image_size, 3), np.uint8)
        filter = FILTERS[preprocessing.interpolation] if preprocessing.antialias else Filter.SAMPLED
        done = workspace.decode(np.array([box]), np.zeros(1, np.bool_), out, filter=filter)
        return out[0] if done[0] == Status.OK else None

    def _by_pillow(self, image: Image.Image, preprocessing: Preprocessing) -> PixelArray:
        check_opened(image)
        with self._at_once.held(image.width * image.height):
            rgb = to_rgb(image)
            box = evaluation_box(rgb.width, rgb.height, resize=preprocessing.resize, crop=preprocessing.image_size)
            return resized(rgb, box, preprocessing, flip=False)


class _Share:
    """A number of pixels that threads share, in the order in which they ask."""

    def __init__(self, pixels: int) -> None:
        self._free = pixels
        self._first = threading.Lock()  # held while waiting: otherwise small photos would always overtake a large one
        self._changed = threading.Condition()

    @contextmanager
    def held(self, pixels: int) -> Iterator[None]:
        with self._first, self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify()
