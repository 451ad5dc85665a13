"""Boxes of annotated objects, image by image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import IntArray

BoxArray = npt.NDArray[np.float32]  # M x 4: x0, y0, x1, y1 as shares of the image's width and height


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of N images; those of image i are boxes[first[i] : first[i + 1]], possibly none."""

    boxes: BoxArray
    first: IntArray  # N + 1

    @classmethod
    def of(cls, boxes: Sequence[BoxArray]) -> "Objects":
        """From a list of boxes for each image."""
        first = np.zeros(len(boxes) + 1, dtype=np.int64)
        np.cumsum([len(own) for own in boxes], out=first[1:])
        joined = np.concatenate([np.zeros((0, 4), np.float32), *boxes])
        return cls(joined.astype(np.float32), first)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, image: int) -> BoxArray:
        return self.boxes[self.first[image] : self.first[image + 1]]

    @property
    def annotated(self) -> int:
        """Images with an object."""
        return int(np.count_nonzero(np.diff(self.first)))


def proper(boxes: npt.NDArray[np.floating]) -> BoxArray:
    """The boxes clipped to the image, without those that have no area; annotations have both mistakes."""
    clipped = np.clip(np.asarray(boxes, np.float32).reshape(-1, 4), 0.0, 1.0)
    held = (clipped[:, 0] < clipped[:, 2]) & (clipped[:, 1] < clipped[:, 3])  # false for nan too
    return clipped[held]


def match(names: Sequence[str], table: Mapping[str, BoxArray]) -> Objects:
    """Boxes by file name: `class/name` if the table has it, else the bare name, both without their ending."""
    none = np.zeros((0, 4), np.float32)
    found = []
    for name in names:
        stem = key(name)
        found.append(table.get(stem, table.get(stem.rsplit("/", 1)[-1], none)))
    return Objects.of(found)


def key(name: str) -> str:
    """A name without its ending."""
    stem, dot, ending = name.rpartition(".")
    return stem if dot and "/" not in ending else name
