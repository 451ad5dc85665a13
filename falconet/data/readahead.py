"""Shards drawn into the system's memory from front to back, while their images are read in random order."""

import os
import threading

from falconet.data.free_memory import available
from falconet.data.shards import Shards

STRIDE = 32 << 20  # bytes asked for with each part that is read: many times what the part itself takes
REQUEST = 128 << 10  # bytes; of a longer one Linux reads only a beginning, by default as much as this
SHARE = 0.5  # of the memory that is free: the rest is for everybody else


class Readahead:
    """A disk or a network reads one shard after the other at its full speed, and single photos at a tenth of it.

    The order of images is not changed for that. Where all shards fit into free memory, each call of `advance` asks the
    system for the next stretch of them, in order, until all were asked for once; nothing waits, no thread is needed.
    Where they do not fit, nothing is done: images are then read one by one from where they lie.
    """

    def __init__(self, shards: Shards, *, memory: int | None = None) -> None:
        self._shards = shards
        self._sizes = [path.stat().st_size if path.exists() else 0 for path in shards.paths]
        room = SHARE * (available() if memory is None else memory)
        self._next = 0 if sum(self._sizes) <= room else len(self._sizes)  # shard
        self._begin = 0  # byte in it
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._next >= len(self._sizes)

    def advance(self) -> None:
        if self.done or not self._lock.acquire(blocking=False):  # another thread is asking
            return
        try:
            left = STRIDE
            while left > 0 and not self.done:
                size = min(left, self._sizes[self._next] - self._begin)
                _expect(self._shards, self._next, self._begin, size)
                left, self._begin = left - size, self._begin + size
                if self._begin >= self._sizes[self._next]:
                    self._next, self._begin = self._next + 1, 0
        finally:
            self._lock.release()


def _expect(shards: Shards, shard: int, begin: int, size: int) -> None:
    if size > 0 and hasattr(os, "posix_fadvise"):
        with shards.files([shard]) as (file,):
            for at in range(begin, begin + size, REQUEST):
                os.posix_fadvise(file, at, min(REQUEST, begin + size - at), os.POSIX_FADV_WILLNEED)
