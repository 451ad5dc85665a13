"""Images that read the same every time, kept in memory after the first."""

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import IntArray
from falconet.data.readers import Reader
from falconet.data.source import BoolArray, PixelArray

UNKNOWN, READ, BAD = 0, 1, 2


class PixelCache:
    """A reader's own pixels, of the first `most` images; only for a reader whose pixels do not depend on the epoch.

    Pages are taken as they are written, so that an unused cache costs nothing. Threads that read the same image at once
    write the same bytes, and its mark only after them.
    """

    def __init__(self, reader: Reader, *, images: int, most: int) -> None:
        self.size, self.rows = reader.size, reader.rows
        self._reader = reader
        self._pixels = np.empty((min(images, most), reader.size, reader.size, 3), np.uint8)
        self._marks: npt.NDArray[np.int8] = np.zeros(images, np.int8)

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        marks = self._marks[indices]
        known: BoolArray = marks == READ
        out[known] = self._pixels[indices[known]]
        out[marks == BAD] = 0
        missing = np.flatnonzero(marks == UNKNOWN)
        if len(missing) > 0:
            all_of_them = len(missing) == len(indices)
            pixels = out if all_of_them else np.empty((len(missing), *out.shape[1:]), np.uint8)
            known[missing] = self._reader.read(indices[missing], epoch=epoch, out=pixels)
            self._keep(indices[missing], pixels, known[missing])
            if not all_of_them:
                out[missing] = pixels
        return known

    def _keep(self, indices: IntArray, pixels: PixelArray, read: BoolArray) -> None:
        fits = indices < len(self._pixels)
        kept = fits & read
        self._pixels[indices[kept]] = pixels[kept]
        self._marks[indices[fits]] = np.where(read[fits], READ, BAD)
