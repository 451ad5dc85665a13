"""CIFAR's python files are pickles: this reads their numbers and runs nothing.

A pickle names the functions that rebuild its objects. Here three names are known, those of a numpy array, and they lead
to plain records of what the file says; any other name is refused before anything is called. Numpy itself only sees the
bytes and the shape, both checked.
"""

import pickle  # noqa: TID251, the official files are pickles; the reader below can call nothing of the file's choosing
import struct
from pathlib import Path
from typing import Any

import numpy as np

from falconet.data.source import PixelArray
from falconet.errors import DataError

# What the unpickler raises on bytes that are no pickle, or not all of one, besides its own error.
DAMAGE = (EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, struct.error)
EXHAUSTION = (MemoryError, RecursionError)


class _Stored:
    """An array or a dtype as the pickle describes it: what it was made with, and its state."""

    def __init__(self, *made_with: object) -> None:
        self.made_with = made_with
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"): _Stored,
    ("numpy._core.multiarray", "_reconstruct"): _Stored,
    ("numpy", "ndarray"): _Stored,
    ("numpy", "dtype"): _Stored,
}


class _Reader(pickle._Unpickler):
    # The one in Python: the one in C gives a few hostile bytes tens of gigabytes for its memo.

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _HARMLESS[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"it asks for the object {pid!r:.40}")


def read_arrays(path: Path) -> dict[bytes, object]:
    """The mapping in a CIFAR python file, its keys as bytes, its arrays of uint8 as arrays."""
    try:
        with path.open("rb") as file:
            stored = _Reader(file, encoding="bytes").load()
        if not isinstance(stored, dict):
            raise DataError(f"{path}: holds a {type(stored).__name__}, wanted the mapping of a CIFAR python file")
        return {_key(key): _array(value) if isinstance(value, _Stored) else value for key, value in stored.items()}
    except (pickle.UnpicklingError, *DAMAGE, *EXHAUSTION) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: not a CIFAR python file ({reason})") from None


def _key(key: object) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key) if isinstance(key, bytes) else b""


def _array(stored: _Stored) -> PixelArray:
    state = stored.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("an array without its state")
    _, shape, dtype, columns_first, content = state
    if not isinstance(dtype, _Stored) or dtype.made_with[:1] not in ((b"u1",), ("u1",)) or columns_first:
        raise ValueError("an array that is not of plain bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
