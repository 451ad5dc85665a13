"""Encoded photos kept in memory after they were first read: for slow disks, and networks."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from falconet.data import native
from falconet.data.crops import Crops
from falconet.data.decode import UnreadableImageError
from falconet.data.keyed import IntArray
from falconet.data.native.binding import MOST_PIXELS, Library, SizeArray, Status, StatusArray, Workspace
from falconet.data.source import BoolArray, FileSource, PhotoSource, PixelArray, Ranges, ShardSource

if TYPE_CHECKING:
    from falconet.data.readers import Reader


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


Opener = Callable[[Workspace, IntArray], tuple[SizeArray, StatusArray]]


class NativeReader:
    """One call reads a part's files, one draws their boxes, one decodes them; the loader's threads do the rest."""

    # About 20 ms, of which Python takes 0.35, mostly by the call, with the interpreter's lock held: at 16 rows it would
    # hold it for a seventh of the time at 6,000 images a second. As many files lie in each thread's memory at once.
    rows = 32

    def __init__(self, source: PhotoSource, *, library: Library, crops: Crops, pillow: "Reader") -> None:
        self.size, self._crops = crops.size, crops
        self._open = file_opener(source) if isinstance(source, FileSource) else shard_opener(source)
        self._library, self._pillow = library, pillow
        self._own = threading.local()

    def keep(self, cache: "EncodedCache") -> None:
        """Read what the cache can hold from there, from now on."""
        plain = self._open
        self._open = lambda workspace, indices: cache.opened(workspace, indices) or plain(workspace, indices)

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        workspace = self._workspace()
        sizes, statuses = self._open(workspace, indices)
        # What was not opened gets any size: its row is decoded below.
        boxes = self._crops.boxes(indices, np.where((statuses == Status.OK)[:, None], sizes, 1), epoch=epoch)
        flips = self._crops.flips(indices, epoch=epoch)
        left = np.flatnonzero(workspace.decode(boxes, flips, out, sampled=not self._crops.antialias) != Status.OK)
        read = np.ones(len(indices), dtype=np.bool_)
        if len(left) > 0:
            pixels = np.empty((len(left), *out.shape[1:]), np.uint8)
            read[left] = self._pillow.read(indices[left], epoch=epoch, out=pixels)
            out[left] = pixels
        return read

    def _workspace(self) -> Workspace:
        """This thread's own; it goes when the thread does."""
        if not hasattr(self._own, "workspace"):
            # Pillow's own limit, which refuses the image there, so that both agree on what is too large.
            self._own.workspace = Workspace(self._library, most_pixels=Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
        workspace: Workspace = self._own.workspace
        return workspace


def file_opener(source: FileSource) -> Opener:
    folders = [os.fsencode(source.root / name) + b"/" for name in source.class_names]

    def path(index: int) -> bytes:  # FileSource.path without making a Path of it: a third of a microsecond, not four
        return folders[int(source.labels[index])] + source.names.coded(index)

    return lambda workspace, indices: workspace.open([path(index) for index in indices.tolist()])


def shard_opener(source: ShardSource) -> Opener:
    places = source.places

    def opened(workspace: Workspace, indices: IntArray) -> tuple[SizeArray, StatusArray]:
        source.advance()
        checksums = None if places.checksums is None else places.checksums[indices]
        with source.shards.files(places.shards[indices].tolist()) as files:
            return workspace.open_ranges(Ranges(files, places.ranges(indices), checksums))

    return opened
