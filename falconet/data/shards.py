"""Shards, which are files with many images: kept open, read ahead, and checked by CRC-32C."""

import contextlib
import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from falconet.data import native
from falconet.data.image_files import open_descriptor
from falconet.errors import DataError
from falconet.parallel.host import available

Words = npt.NDArray[np.uint32]

POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli's, bit-reversed
MASK_DELTA = 0xA282EAD8  # TFRecords mask checksums, because these may be part of checksummed bytes
STRETCH = 128  # bytes; numpy processes all stretches at once


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes; 110 kB take 12 us in the native library, about 1 ms in numpy."""
    library = native.library()
    return crc32c_numpy(data) if library is None else library.crc32c(data)


def unmasked(stored: int) -> int:
    """Unmask the checksum that a TFRecord stores."""
    turned = (stored - MASK_DELTA) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF


def crc32c_numpy(data: bytes) -> int:
    """The CRC-32C by numpy: of equal stretches in parallel, then neighbours are joined.

    Moving a checksum over n zero bytes is linear in its bits. Leading zero bytes change nothing while the register is
    0, so the data is padded at the front to 2**k stretches; the register's initial ones are xored into the first four
    bytes instead.
    """
    if len(data) < 4:
        return _plain(data)
    lanes = 1 << (-(-len(data) // STRETCH) - 1).bit_length()
    padded = np.zeros(lanes * STRETCH, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[len(padded) - len(data) :][:4] ^= 0xFF
    words: Words = np.zeros(lanes, np.uint32)
    for column in padded.reshape(lanes, STRETCH).T:
        words = _table()[(words ^ column) & 0xFF] ^ (words >> 8)
    zeros = STRETCH
    while len(words) > 1:
        words = _moved(words[::2], zeros) ^ words[1::2]
        zeros *= 2
    return int(~words[0])


def _plain(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = int(_table()[(crc ^ byte) & 0xFF]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> Words:
    """The register after each possible byte."""
    words: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = (words >> np.uint32(1)) ^ np.where(words & np.uint32(1), POLYNOMIAL, np.uint32(0))
    return words


def _moved(words: Words, zeros: int) -> Words:
    """Registers after `zeros` zero bytes, a power of two."""
    tables = _operator(zeros)
    moved: Words = tables[0][words & 0xFF]
    for place in (1, 2, 3):
        moved = moved ^ tables[place][words >> np.uint32(8 * place) & 0xFF]
    return moved


@cache
def _operator(zeros: int) -> Words:  # 4 x 256: what each byte at each position of a register becomes
    bytes_at = np.arange(256, dtype=np.uint32)[None, :] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if zeros == 1:
        after: Words = _table()[bytes_at & 0xFF] ^ (bytes_at >> 8)
        return after
    return _moved(_moved(bytes_at, zeros // 2), zeros // 2)


class Shards:
    """Files by number. Each stays open once it has been read, within the process's limit on open files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: dict[int, int] = {}  # shard -> file descriptor
        self._lock = threading.Lock()
        # Half of the limit: the rest of the process needs files too. Beyond it, a file is opened for each read.
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._closer = weakref.finalize(self, _close, self._open)

    def close(self) -> None:
        self._closer()

    @contextlib.contextmanager
    def files(self, shards: Sequence[int]) -> Iterator[list[int]]:
        """Descriptors of the shards; DataError if one cannot be opened."""
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
        """Read `size` bytes from `begin` on, fewer if the file ends."""
        with self.files([shard]) as (file,):
            return pread(file, begin, size)


def open_shard(path: Path) -> int:
    try:
        return open_descriptor(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from None


def pread(file: int, begin: int, size: int) -> bytes:
    """Like os.pread, but complete: Linux returns at most 2 GiB, and network disks return less."""
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


STRIDE = 32 << 20  # bytes requested with each part that is read: many times its size
REQUEST = 128 << 10  # bytes; by default Linux reads only this much of a longer request
SHARE = 0.5  # of the free memory


class Readahead:
    """Reads shards ahead in order, which disks and networks do at full speed; single photos are a tenth as fast.

    The order of images does not change. If all shards fit into free memory, each call of `advance` requests the next
    stretch from the system, until all have been requested once; nothing waits, and no thread is needed. If they do not
    fit, nothing is requested, and images are read one by one.
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
        if self.done or not self._lock.acquire(blocking=False):  # another thread is requesting
            return
        try:
            left = STRIDE
            while left > 0 and not self.done:
                size = min(left, self._sizes[self._next] - self._begin)
                _request(self._shards, self._next, self._begin, size)
                left, self._begin = left - size, self._begin + size
                if self._begin >= self._sizes[self._next]:
                    self._next, self._begin = self._next + 1, 0
        finally:
            self._lock.release()


def _request(shards: Shards, shard: int, begin: int, size: int) -> None:
    if size > 0 and hasattr(os, "posix_fadvise"):
        with shards.files([shard]) as (file,):
            for at in range(begin, begin + size, REQUEST):
                os.posix_fadvise(file, at, min(REQUEST, begin + size - at), os.POSIX_FADV_WILLNEED)
