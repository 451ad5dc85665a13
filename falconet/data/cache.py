"""Images kept in memory between epochs, decoded or encoded."""

import os
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from falconet.data import native
from falconet.data.image_files import UnreadableImageError
from falconet.data.keyed import IntArray
from falconet.data.native.binding import SizeArray, StatusArray, Workspace
from falconet.data.storage import BoolArray, FileSource, PhotoSource, PixelArray, Ranges

if TYPE_CHECKING:
    from falconet.data.readers import Reader

UNKNOWN, BAD = -1, -2  # instead of a slot in the cache


class PixelCache:
    """Keeps the pixels of the first `most` images read, which must not depend on the epoch.

    The system provides pages as they are written, so that an unused cache costs nothing. If several threads read the
    same image at the same time, as in two epochs at once, the first one to finish stores it.
    """

    def __init__(self, reader: "Reader", *, images: int, most: int) -> None:
        self.size, self.rows = reader.size, reader.rows
        self._reader = reader
        self._pixels = np.empty((min(images, most), reader.size, reader.size, 3), np.uint8)
        self._places: npt.NDArray[np.int64] = np.full(images, UNKNOWN, np.int64)
        self._taken: BoolArray = np.zeros(images, np.bool_)  # images with a slot, which may not be written yet
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
        with self._lock:
            first = self._used
            kept = np.flatnonzero(read & ~self._taken[indices])[: len(self._pixels) - first]
            count = len(kept)
            self._used += count
            self._taken[indices[kept]] = True
        self._pixels[first : first + count] = pixels[kept]
        self._places[indices[kept]] = np.arange(first, first + count)  # last: other threads look here


SAMPLE = 256  # files whose sizes stand for all


def can_keep() -> bool:
    """Whether photos can be read from memory on this system."""
    return native.library() is not None and hasattr(os, "memfd_create")


def encoded_bytes(source: PhotoSource) -> int:
    """The bytes of all photos in a source, estimated for files: a million stat calls take minutes on a network."""
    if not isinstance(source, FileSource):
        return int(source.places.sizes.sum(dtype=np.int64))
    sample = np.linspace(0, len(source) - 1, min(SAMPLE, len(source))).astype(np.int64)
    sizes = [_size(source, index) for index in sample.tolist()]
    return round(sum(sizes) / len(sizes) * len(source))


def _size(source: FileSource, index: int) -> int:
    try:
        return source.path(index).stat().st_size
    except OSError:
        return 0  # the reader reports it


class EncodedCache:
    """Keeps the photos of a source, once read, in a file in memory (Linux's memfd)."""

    def __init__(self, source: PhotoSource, *, most: int) -> None:
        self._source, self._most = source, most
        self._file = os.memfd_create("falconet-photos")
        self._close = weakref.finalize(self, os.close, self._file)
        self._places = np.zeros((len(source), 2), np.int64)  # first byte and size of each photo; size 0: not kept
        self._used, self._lock = 0, threading.Lock()

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._used

    def opened(self, workspace: Workspace, indices: IntArray) -> tuple[SizeArray, StatusArray] | None:
        """Open photos from memory; None if one of them cannot be kept."""
        for index in indices[self._places[indices, 1] == 0].tolist():
            if not self._keep(index):
                return None
        begins, sizes = self._places[indices].T
        places = np.stack((begins, sizes, np.zeros_like(begins), sizes), axis=1)
        return workspace.open_ranges(Ranges([self._file] * len(indices), places, None))

    def _keep(self, index: int) -> bool:
        try:
            data = self._source.encoded(index)
        except (OSError, UnreadableImageError):
            return False
        with self._lock:
            begin = self._used
            if not data or begin + len(data) > self._most:
                return False
            self._used += len(data)
        if os.pwrite(self._file, data, begin) < len(data):
            return False
        self._places[index] = (begin, len(data))  # last: other threads look here
        return True
