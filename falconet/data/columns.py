"""Whether columns of numbers that come from a file can be used: a checksum says that they are whole, not by whom.

Each check raises ValueError, its text the reason in a few words.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from falconet.data.objects import proper

Array = npt.NDArray[Any]

LEADING_OUT = re.compile(rb"(?:^|/)\.\.(?:/|$)")


def check_types(arrays: Mapping[str, Array], wanted: Mapping[str, type]) -> None:
    """All columns that are wanted, each with one dimension."""
    for name, dtype in wanted.items():
        if name not in arrays:
            raise ValueError(f"no column {name}")
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise ValueError(f"column {name} of another type")


def check_lengths(*columns: Array) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of different lengths")


def check_offsets(offsets: Array, *, end: int) -> None:
    """From 0 to `end`, never back."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("offsets that are none")


def check_below(numbers: Array, limit: int | Array, *, what: str) -> None:
    """Each from 0 on and below the limit, which may be its own."""
    if np.any(numbers < 0) or np.any(numbers >= limit):
        raise ValueError(f"{what} out of range")


def check_ranges(begins: Array, sizes: Array, ends: Array | int) -> None:
    """Each stretch lies before its end."""
    begins, sizes = begins.astype(np.int64), sizes.astype(np.int64)
    if np.any(begins < 0) or np.any(sizes < 0) or np.any(sizes > ends) or np.any(begins > ends - sizes):
        raise ValueError("places that are not in their file")


def check_boxes(boxes: Array, firsts: Array) -> None:
    """Of objects: as they were when they were found, clipped and with an area."""
    if boxes.dtype != np.float32 or boxes.shape[1:] != (4,) or not np.array_equal(proper(boxes), boxes):
        raise ValueError("boxes that are none")
    check_offsets(firsts, end=len(boxes))


def check_paths(block: Array, offsets: Array) -> None:
    """Names in one block, none of which leads out of the folder they belong to."""
    check_offsets(offsets, end=len(block))
    begins, data = offsets[:-1], block.tobytes()
    if np.any(offsets[1:] == begins) or np.any(block[begins] == ord("/")) or b"\0" in data:
        raise ValueError("file names that are none")
    if b".." not in data:  # of a million names, mostly
        return
    for begin, end in zip(begins.tolist(), offsets[1:].tolist(), strict=True):
        if LEADING_OUT.search(data[begin:end]):
            raise ValueError("file names that lead out of the folder")


def check_class_names(names: object, *, most: int) -> Sequence[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > most:
        raise ValueError("class names that are none")
    return names
