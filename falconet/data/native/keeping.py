"""Encoded photos kept in memory after they were first read: for slow disks, and networks."""

import os
import threading
import weakref

import numpy as np

from falconet.data import native
from falconet.data.decode import UnreadableImageError
from falconet.data.keyed import IntArray
from falconet.data.native.binding import SizeArray, StatusArray, Workspace
from falconet.data.source import FileSource, PhotoSource, Ranges

SAMPLE = 256  # files whose sizes stand for all


def can_keep() -> bool:
    """Whether photos can be read from memory here."""
    return native.library() is not None and hasattr(os, "memfd_create")


def encoded_bytes(source: PhotoSource) -> int:
    """Of all photos of a source; of files, guessed from some of them: a million questions take minutes on a network."""
    if not isinstance(source, FileSource):
        return int(source.places.sizes.sum(dtype=np.int64))
    asked = np.linspace(0, len(source) - 1, min(SAMPLE, len(source))).astype(np.int64)
    sizes = [_size(source, index) for index in asked.tolist()]
    return round(sum(sizes) / len(sizes) * len(source))


def _size(source: FileSource, index: int) -> int:
    try:
        return source.path(index).stat().st_size
    except OSError:
        return 0  # the reader will say so


class EncodedCache:
    """The photos of a source in a file that has no disk (Linux's memfd), each since it was first read."""

    def __init__(self, source: PhotoSource, *, most: int) -> None:
        self._source, self._most = source, most
        self._file = os.memfd_create("falconet-photos")
        self._close = weakref.finalize(self, os.close, self._file)
        self._places = np.zeros((len(source), 2), np.int64)  # where each begins, and its bytes; none: not here
        self._used, self._lock = 0, threading.Lock()

    @property
    def used(self) -> int:
        """Bytes."""
        return self._used

    def opened(self, workspace: Workspace, indices: IntArray) -> tuple[SizeArray, StatusArray] | None:
        """As the reader's own opener does, from memory; None if one of them cannot be kept."""
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
        self._places[index] = (begin, len(data))  # last: another thread may look for it
        return True
