"""Calls the shared library through ctypes, which lets other threads run meanwhile."""

import ctypes
import functools
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import FloatArray, IntArray
from falconet.data.native import compiler
from falconet.data.storage import BoolArray, PixelArray, Ranges

SizeArray = npt.NDArray[np.int32]
StatusArray = npt.NDArray[np.int8]
Encoded = bytes | bytearray | memoryview  # a whole photo, as in its file

MOST_PIXELS = 2**27  # per image, if the caller sets no limit
MOST_BYTES = 2**29  # working memory per image, and size of its file
KEPT_BYTES = 2**25  # of memory for encoded files that a workspace keeps: 128 photos of 260 kB


class Status(IntEnum):
    """The result for one image; src/status.hpp has the same numbers."""

    OK = 0
    NOT_JPEG = 1
    UNSUPPORTED = 2  # progressive, CMYK, 12-bit and other JPEGs, which Pillow has to decode
    DAMAGED = 3
    TOO_LARGE = 4
    UNREADABLE = 5
    NO_MEMORY = 6
    BAD_REQUEST = 7
    CHANGED = 8  # checksum mismatch


class State(IntEnum):
    """What the first and last bytes of a file say; src/look.hpp has the same numbers."""

    WHOLE = 0
    OTHER = 1  # a format that is not recognised there
    DOUBTFUL = 2  # only decoding it can tell
    EMPTY = 3
    UNREADABLE = 4


class Filter(IntEnum):
    """How boxes are resized; src/axis.hpp has the same numbers."""

    BILINEAR = 0
    SAMPLED = 1  # without antialiasing, like readers.resized_aliased
    BICUBIC = 2


class Library:
    """The loaded library; its functions are called through Workspace and restart_marked."""

    def __init__(self, path: Path) -> None:
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.c = ctypes.CDLL(str(path))
        self._declare("falconet_processor", ctypes.c_char_p)
        self._declare("falconet_workspace", pointer, i64, i64, i32)
        self._declare("falconet_workspace_free", None, pointer)
        self._declare("falconet_open", None, pointer, i32, pointer, pointer, pointer)
        self._declare("falconet_decode", None, pointer, i32, pointer, pointer, i32, i32, i32, pointer, pointer)
        self._declare("falconet_encoded_sizes", None, pointer, i32, pointer)
        self._declare("falconet_encoded", None, pointer, i32, pointer)
        self._declare("falconet_restart_marked", ctypes.c_int8, ctypes.c_char_p, i64, i32, i64, pointer, pointer)
        self._declare("falconet_free", None, pointer)
        self._declare("falconet_open_ranges", None, pointer, i32, pointer, pointer, pointer, pointer, pointer)
        self._declare("falconet_open_memory", None, pointer, i32, pointer, pointer, pointer, pointer)
        self._declare("falconet_crc32c", ctypes.c_uint32, ctypes.c_char_p, i64, i32)
        self._declare("falconet_stamps", None, i32, pointer, pointer)
        self._declare("falconet_look", None, i32, pointer, pointer, pointer)

    def _declare(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self.c, name)
        function.restype, function.argtypes = result, arguments

    @property
    def processor(self) -> str:
        """The inner loops that run on this processor: 'avx2' or 'portable'."""
        return str(self.c.falconet_processor().decode())

    def crc32c(self, data: bytes, *, portable: bool = False) -> int:
        """The checksum that TFRecords and packed shards use."""
        return int(self.c.falconet_crc32c(data, len(data), portable))

    def stamps(self, paths: list[bytes]) -> IntArray:  # N x (bytes, nanoseconds); -1: not a file
        """The size of each file and the time when it last changed."""
        found = np.zeros((len(paths), 2), np.int64)
        self.c.falconet_stamps(len(paths), (ctypes.c_char_p * len(paths))(*paths), found.ctypes.data)
        return found

    def look(self, paths: list[bytes]) -> tuple[SizeArray, StatusArray]:  # N x (width, height); N states
        """What the headers and ends of files say, without reading the rest."""
        sizes, states = np.zeros((len(paths), 2), np.int32), np.zeros(len(paths), np.int8)
        pointers = (ctypes.c_char_p * len(paths))(*paths)
        self.c.falconet_look(len(paths), pointers, sizes.ctypes.data, states.ctypes.data)
        return sizes, states

    def restart_marked(self, data: bytes, *, interval: int = 8, most_pixels: int = MOST_PIXELS) -> bytes | Status:
        """Encode the same pixels with a restart marker after every `interval` MCUs; a Status says why that fails."""
        result, size = ctypes.c_void_p(), ctypes.c_int64()
        status = self.c.falconet_restart_marked(
            data, len(data), interval, most_pixels, ctypes.byref(result), ctypes.byref(size)
        )
        if status != Status.OK:
            return Status(status)
        try:
            return ctypes.string_at(result, size.value)
        finally:
            self.c.falconet_free(result)


class Workspace:
    """Memory to decode with, for one thread at a time: files are opened, then decoded by boxes that fit their sizes."""

    def __init__(
        self,
        library: Library,
        *,
        most_pixels: int = MOST_PIXELS,
        most_bytes: int = MOST_BYTES,
        portable: bool = False,
    ) -> None:
        self._c = library.c
        self._block = np.empty(0, np.uint8)
        self._handle: int | None = self._c.falconet_workspace(most_pixels, most_bytes, portable)
        if self._handle is None:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._c.falconet_workspace_free(self._handle)
            self._handle = None

    def open(self, paths: list[bytes]) -> tuple[SizeArray, StatusArray]:  # N x (width, height); N
        """Read the files and their headers; they stay in memory until they are decoded."""
        sizes, statuses = np.zeros((len(paths), 2), np.int32), np.zeros(len(paths), np.int8)
        pointers = (ctypes.c_char_p * len(paths))(*paths)
        self._c.falconet_open(self._handle, len(paths), pointers, sizes.ctypes.data, statuses.ctypes.data)
        return sizes, statuses

    def open_ranges(self, ranges: Ranges) -> tuple[SizeArray, StatusArray]:  # N x (width, height); N
        """Open images in ranges of open files, and read their headers."""
        count = len(ranges.files)
        sizes, statuses = np.zeros((count, 2), np.int32), np.zeros(count, np.int8)
        files = np.ascontiguousarray(ranges.files, np.int32)
        places = np.ascontiguousarray(ranges.places, np.int64)
        assert places.shape == (count, 4)
        checksums = None if ranges.checksums is None else np.ascontiguousarray(ranges.checksums, np.uint32)
        self._c.falconet_open_ranges(
            self._handle,
            count,
            files.ctypes.data,
            places.ctypes.data,
            None if checksums is None else checksums.ctypes.data,
            sizes.ctypes.data,
            statuses.ctypes.data,
        )
        return sizes, statuses

    def open_memory(self, photos: Sequence[Encoded]) -> tuple[SizeArray, StatusArray]:  # N x (width, height); N
        """Open images in memory, which may be freed or changed afterwards, and read their headers."""
        count = len(photos)
        sizes, statuses = np.zeros((count, 2), np.int32), np.zeros(count, np.int8)
        held = [np.frombuffer(photo, np.uint8) for photo in photos]  # no copies; bytes, contiguous, or ValueError
        pointers = np.array([each.ctypes.data for each in held], np.uintp)
        lengths = np.array([len(each) for each in held], np.int64)
        self._c.falconet_open_memory(
            self._handle, count, pointers.ctypes.data, lengths.ctypes.data, sizes.ctypes.data, statuses.ctypes.data
        )
        return sizes, statuses

    def encoded(self, count: int) -> tuple[PixelArray, IntArray]:  # bytes of all; N sizes, 0: not opened
        """The bytes of the opened files, end to end, in memory that the next call may reuse."""
        sizes = np.zeros(count, np.int64)
        self._c.falconet_encoded_sizes(self._handle, count, sizes.ctypes.data)
        total = int(sizes.sum())
        block = self._block
        if len(block) < total:
            block = np.empty(total + total // 4, np.uint8)
            if len(block) <= KEPT_BYTES:
                self._block = block
        self._c.falconet_encoded(self._handle, count, block.ctypes.data)
        return block[:total], sizes

    def decode(
        self,
        boxes: FloatArray,
        flips: BoolArray,
        out: PixelArray,
        *,
        planar: bool = False,
        filter: Filter = Filter.BILINEAR,
    ) -> StatusArray:  # boxes: N x (x0, y0, x1, y1), pixels of the file
        """Resize the boxes of the opened files into `out`: N x S x S x 3, or N x 3 x S x S if planar."""
        size, count = out.shape[2], len(out)
        shape = (count, 3, size, size) if planar else (count, size, size, 3)
        assert out.shape == shape
        assert out.dtype == np.uint8
        assert out.flags.carray  # contiguous, aligned, writeable
        assert (boxes.shape, flips.shape) == ((count, 4), (count,))
        boxes = np.ascontiguousarray(boxes, np.float64)
        flips = np.ascontiguousarray(flips, np.bool_)
        statuses = np.zeros(count, np.int8)
        self._c.falconet_decode(
            self._handle,
            count,
            boxes.ctypes.data,
            flips.ctypes.data,
            size,
            planar,
            filter,
            out.ctypes.data,
            statuses.ctypes.data,
        )
        return statuses


def built_from(path: Path) -> str:
    """The digest of a library's sources, which it has even if it is older than some functions."""
    sources = ctypes.CDLL(str(path)).falconet_sources
    sources.restype = ctypes.c_char_p
    return str(sources().decode())


@functools.cache
def load() -> tuple[Library | None, str]:
    """The library, or the reason why there is none."""
    if os.environ.get("FALCONET_NATIVE", "") == "0":
        return None, "turned off by FALCONET_NATIVE=0"
    path = compiler.HERE / compiler.LIBRARY
    if not path.exists():
        return None, "not built; `python -m falconet.data.native.compiler` builds it with a C++ compiler"
    try:
        if compiler.SOURCES.is_dir() and built_from(path) != compiler.digest():
            return None, "built from other sources; run `python -m falconet.data.native.compiler`"
        return Library(path), ""
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded ({str(error).splitlines()[0]})"
