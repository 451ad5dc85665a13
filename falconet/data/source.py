"""Where images come from, as values: arrays in memory or files in class folders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Channels, Preprocessing, short_side

PixelArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]


class ImageArray(Protocol):
    """What an ArraySource needs of its images: a numpy array has it, and so have images made when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # N x H x W x 3

    def __getitem__(self, indices: IntArray, /) -> PixelArray: ...


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Images of one size, all at hand."""

    images: ImageArray  # N x H x W x 3, uint8
    labels: IntArray  # N
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class FileSource:
    """Image files under root/<class name>/; the names lie in one block of bytes, about 20 bytes an image."""

    root: Path
    names: bytes  # file names relative to their class folder, end to end
    offsets: IntArray  # N + 1, where each name begins
    labels: IntArray  # N
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, root: Path, *, names: Sequence[str], labels: Sequence[int], class_names: tuple[str, ...]
    ) -> "FileSource":
        coded = [os.fsencode(name) for name in names]
        offsets = np.zeros(len(coded) + 1, dtype=np.int64)
        np.cumsum([len(name) for name in coded], out=offsets[1:])
        return cls(root, b"".join(coded), offsets, np.asarray(labels, dtype=np.int64), class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        name = os.fsdecode(self.names[self.offsets[index] : self.offsets[index + 1]])
        return self.root / self.class_names[int(self.labels[index])] / name


Source = ArraySource | FileSource


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Two sources with the same classes, and the constants that normalise their pixels."""

    train: Source
    validation: Source
    native_size: int | None  # side of an array source's images, pixels; files have any size
    mean: Channels
    std: Channels

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def preprocessing(self, image_size: int) -> Preprocessing:
        """Arrays are resized whole; photographs are resized a little larger and cropped at their centre."""
        resize = short_side(image_size) if self.native_size is None else image_size
        return Preprocessing(image_size=image_size, resize=resize, mean=self.mean, std=self.std)
