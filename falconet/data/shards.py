"""Open files that hold many images each, read by place; any number of threads at once."""

import contextlib
import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from falconet.data.regular import open_descriptor
from falconet.errors import DataError


class Shards:
    """Files by number. Each stays open from its first reading on, as long as the process may have so many open."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: dict[int, int] = {}  # shard -> file descriptor
        self._lock = threading.Lock()
        # Half of what the process may open: the rest is for everybody else. Beyond it, a file is opened for a reading.
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._closer = weakref.finalize(self, _close, self._open)

    def close(self) -> None:
        self._closer()

    @contextlib.contextmanager
    def files(self, shards: Sequence[int]) -> Iterator[list[int]]:
        """A descriptor for each; DataError names a shard that cannot be opened."""
        passing: dict[int, int] = {}
        try:
            yield [self._file(shard, passing) for shard in shards]
        finally:
            _close(passing)

    def _file(self, shard: int, passing: dict[int, int]) -> int:
        found = self._open.get(shard, passing.get(shard))
        if found is not None:
            return found
        with self._lock:
            if shard not in self._open:
                kept = self._open if len(self._open) < self._most else passing
                kept[shard] = open_shard(self.paths[shard])
                return kept[shard]
            return self._open[shard]

    def read(self, shard: int, *, begin: int, size: int) -> bytes:
        """`size` bytes from `begin` on, fewer where the file ends."""
        with self.files([shard]) as (file,):
            return pread(file, begin, size)


def open_shard(path: Path) -> int:
    try:
        return open_descriptor(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from None


def pread(file: int, begin: int, size: int) -> bytes:
    """As the system's, but whole: Linux hands out 2 GiB at most, and network disks less."""
    parts = []
    while size > 0:
        part = os.pread(file, size, begin)
        if not part:
            break
        parts.append(part)
        begin, size = begin + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _close(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])
