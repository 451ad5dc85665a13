"""nvJPEG through ctypes, which lets other threads run during every call: JPEG files decoded on a CUDA device."""

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.data.gpu_jpeg import Size
from falconet.data.keyed import IntArray
from falconet.errors import DeviceError

Pointers = npt.NDArray[np.uint64]  # addresses, and sizes in bytes, as C has them
PLANES = 4  # of an image as nvJPEG describes it: so many addresses, then so many distances between rows
RGB = 3  # nvjpegOutputFormat_t: three planes
ALIGNED = 256  # bytes: where each picture begins
TOOLKIT = Path("/usr/local/cuda")


class Backend(IntEnum):
    """What decodes; nvjpegBackend_t has the same numbers."""

    GPU_HYBRID = 2  # kernels
    HARDWARE = 3  # engines of their own beside the multiprocessors, in A100, H100, L4 and later
    HARDWARE_DEVICE = 5  # the same for files in the device's memory


class Status(IntEnum):
    """The result of a call; nvjpegStatus_t has the same numbers."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INVALID_PARAMETER = 2
    BAD_JPEG = 3
    JPEG_NOT_SUPPORTED = 4
    ALLOCATOR_FAILURE = 5
    EXECUTION_FAILED = 6
    ARCH_MISMATCH = 7
    INTERNAL_ERROR = 8
    IMPLEMENTATION_NOT_SUPPORTED = 9
    INCOMPLETE_BITSTREAM = 10


# What a file may be the reason for.
REFUSED = frozenset({Status.BAD_JPEG, Status.JPEG_NOT_SUPPORTED, Status.EXECUTION_FAILED, Status.INCOMPLETE_BITSTREAM})


class Library:
    """The loaded library; Decoder calls its functions."""

    def __init__(self, path: Path) -> None:
        self.path, self.c = path, ctypes.CDLL(str(path))
        pointer, i32, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._declare("nvjpegGetProperty", i32, pointer)
        self._declare("nvjpegCreateEx", i32, pointer, pointer, ctypes.c_uint, pointer)
        self._declare("nvjpegDestroy", pointer)
        self._declare("nvjpegJpegStateCreate", pointer, pointer)
        self._declare("nvjpegJpegStateDestroy", pointer)
        self._declare("nvjpegJpegStreamCreate", pointer, pointer)
        self._declare("nvjpegJpegStreamDestroy", pointer)
        self._declare("nvjpegJpegStreamParseHeader", pointer, pointer, size, pointer)
        self._declare("nvjpegJpegStreamGetFrameDimensions", pointer, pointer, pointer)
        self._declare("nvjpegDecodeBatchedSupported", pointer, pointer, pointer)
        self._declare("nvjpegDecodeBatchedInitialize", pointer, pointer, i32, i32, i32)
        self._declare("nvjpegDecodeBatched", pointer, pointer, pointer, pointer, pointer, pointer)

    def _declare(self, name: str, *arguments: type) -> None:
        function = getattr(self.c, name)
        function.restype, function.argtypes = ctypes.c_int, arguments

    @property
    def version(self) -> str:
        numbers = [ctypes.c_int() for _ in range(3)]
        for which, number in enumerate(numbers):
            self.c.nvjpegGetProperty(which, ctypes.byref(number))
        return ".".join(str(number.value) for number in numbers)


class Decoder:
    """A handle and its state on the current device, for one thread at a time and on that thread's stream."""

    def __init__(self, library: Library, backend: Backend, *, output: int = RGB) -> None:
        self._c, self.backend, self._output = library.c, backend, output
        self._handle, self._state, self._stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._batch = 0  # images that the state is prepared for
        # nvJPEG allocates by itself, and again only for more or larger photos than before.
        self._call("nvjpegCreateEx", backend, None, None, 0, ctypes.byref(self._handle))
        self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
        self._call("nvjpegJpegStreamCreate", self._handle, ctypes.byref(self._stream))

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver may be gone
            return
        for name, made in [("JpegStream", "_stream"), ("JpegState", "_state"), ("", "_handle")]:
            if getattr(self, made, None):
                getattr(self._c, f"nvjpeg{name}Destroy")(getattr(self, made))

    def size(self, data: Tensor) -> Size | None:
        """Width and height of a file that this backend decodes; None for others."""
        status = self._c.nvjpegJpegStreamParseHeader(self._handle, data.data_ptr(), len(data), self._stream)
        if status != Status.SUCCESS:
            return None
        supported, width, height = ctypes.c_int(1), ctypes.c_uint(), ctypes.c_uint()
        self._call("nvjpegDecodeBatchedSupported", self._handle, self._stream, ctypes.byref(supported))
        if supported.value != 0:  # 0 means yes
            return None
        self._call("nvjpegJpegStreamGetFrameDimensions", self._stream, ctypes.byref(width), ctypes.byref(height))
        return Size(width.value, height.value)

    def decode(self, files: Sequence[Tensor], planes: Pointers, *, stream: int) -> list[bool]:
        """Write the pictures to where `planes` says; return which were decoded, once they are queued on the stream.

        The engines do not wait for the stream, so nothing may be queued there that still uses the memory.
        """
        data = np.array([file.data_ptr() for file in files], np.uint64)
        lengths = np.array([len(file) for file in files], np.uint64)
        return self._decode(data, lengths, planes, stream)

    def _decode(self, data: Pointers, lengths: Pointers, planes: Pointers, stream: int) -> list[bool]:
        if self._batch != len(data):
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, len(data), 1, self._output)
            self._batch = len(data)
        arrays = (data.ctypes.data, lengths.ctypes.data, planes.ctypes.data)
        status = self._c.nvjpegDecodeBatched(self._handle, self._state, *arrays, stream)
        if status == Status.SUCCESS:
            return [True] * len(data)
        self._batch = 0  # a batch that failed has to be prepared again
        if status not in REFUSED:
            raise DeviceError(_words("nvjpegDecodeBatched", status))
        if len(data) == 1:
            return [False]
        middle = len(data) // 2  # nvJPEG does not report which file it is
        halves = (slice(None, middle), slice(middle, None))
        return [each for half in halves for each in self._decode(data[half], lengths[half], planes[half], stream)]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._c, name)(*arguments)
        if status != Status.SUCCESS:
            raise DeviceError(_words(name, status))


def _words(name: str, status: int) -> str:
    known = status in Status.__members__.values()
    return f"photos cannot be decoded on the device: {name} failed ({Status(status).name if known else status})"


def laid_out(sizes: Sequence[Size]) -> IntArray:  # N + 1
    """Where each picture of three planes begins in one block of memory, and the length of all."""
    lengths = [-(-3 * size.width * size.height // ALIGNED) * ALIGNED for size in sizes]
    return np.cumsum([0, *lengths], dtype=np.int64)


def planes(address: int, sizes: Sequence[Size]) -> Pointers:  # N x 8, an nvjpegImage_t each
    """Where nvJPEG writes the planes of each picture, in a block at this address."""
    made = np.zeros((len(sizes), 2 * PLANES), np.uint64)
    widths, heights = np.array(sizes, np.uint64).reshape(-1, 2).T
    begins = laid_out(sizes)[:-1].astype(np.uint64) + np.uint64(address)
    for plane in range(3):
        made[:, plane] = begins + np.uint64(plane) * widths * heights
        made[:, PLANES + plane] = widths
    return made


# Where the library is.


def _found() -> Iterator[Path]:
    """Files that may be nvJPEG, the likeliest first: torchvision's own, NVIDIA's packages, the CUDA toolkit."""
    folders = []
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is not None and torchvision.origin is not None:
        folders.append(Path(torchvision.origin).parents[1] / "torchvision.libs")
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or ()) if nvidia is not None else ():
        folders += sorted(Path(place).glob("*/lib"))
    folders += [Path(toolkit) / "lib64" for toolkit in (os.environ.get("CUDA_HOME"), TOOLKIT) if toolkit]
    for folder in folders:
        yield from sorted(folder.glob("libnvjpeg*.so*"))


def _of_this_cuda(path: Path) -> bool:
    """Whether it was made for the CUDA that torch was made for."""
    number = re.search(r"\.so\.(\d+)", path.name)
    return number is None or torch.version.cuda is None or number[1] == torch.version.cuda.partition(".")[0]


@functools.cache
def load() -> tuple[Library | None, str]:
    """The library, or the reason why there is none."""
    if os.environ.get("FALCONET_NVJPEG", "") == "0":
        return None, "turned off by FALCONET_NVJPEG=0"
    why = "libnvjpeg was not found beside torchvision, in NVIDIA's packages or in the CUDA toolkit"
    for path in filter(_of_this_cuda, _found()):
        try:
            return Library(path), ""
        except (OSError, AttributeError) as error:
            why = f"{path} cannot be loaded ({str(error).splitlines()[0]})"
    return None, why


def decoder(library: Library) -> Decoder:
    """On the current device, by its engines if it has any."""
    try:
        return Decoder(library, Backend.HARDWARE)
    except DeviceError:
        return Decoder(library, Backend.GPU_HYBRID)
