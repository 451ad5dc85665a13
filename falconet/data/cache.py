"""Images that read the same every time, kept in memory after the first."""

import threading

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import IntArray
from falconet.data.readers import Reader
from falconet.data.source import BoolArray, PixelArray

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
