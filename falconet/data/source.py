"""Boxes of annotated objects, image by image."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from falconet.data.decode import UnreadableImageError, read_regular
from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Channels, Preprocessing, short_side
from falconet.data.shards import Readahead, Shards, crc32c

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


PixelArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
ChecksumArray = npt.NDArray[np.uint32]


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
class Names:
    """Many names in one block of bytes: about 28 bytes a name of 20 instead of 80."""

    block: bytes  # end to end
    offsets: IntArray  # N + 1, where each name begins

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        coded = [os.fsencode(name) for name in names]
        offsets = np.zeros(len(coded) + 1, dtype=np.int64)
        np.cumsum([len(name) for name in coded], out=offsets[1:])
        return cls(b"".join(coded), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def coded(self, index: int) -> bytes:
        begin, end = self.offsets[index : index + 2].tolist()
        return self.block[begin:end]

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.coded(index))


@dataclass(frozen=True, eq=False)
class FileSource:
    """Image files under root/<class name>/."""

    root: Path
    names: Names  # relative to their class folder
    labels: IntArray  # N
    class_names: tuple[str, ...]
    objects: Objects | None = None  # what random crops must overlap

    @classmethod
    def of(
        cls, root: Path, *, names: Sequence[str], labels: Sequence[int], class_names: tuple[str, ...]
    ) -> "FileSource":
        return cls(root, Names.of(names), np.asarray(labels, dtype=np.int64), class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        return self.root / self.name(index)

    def name(self, index: int) -> str:
        """With its class folder."""
        return f"{self.class_names[int(self.labels[index])]}/{self.names[index]}"

    def where(self, index: int) -> str:
        """How a message names this image."""
        return str(self.path(index))

    def opened(self, index: int) -> Path | BinaryIO:
        """What Pillow opens."""
        return self.path(index)

    def encoded(self, index: int) -> bytes:
        """The file's bytes; OSError where it cannot be read."""
        return read_regular(self.path(index))


class Ranges(NamedTuple):
    """Images within open files."""

    files: Sequence[int]  # N descriptors
    places: (
        IntArray  # N x (begin, size, skip, length): `size` bytes are read, the image is `length` of them from `skip`
    )
    checksums: ChecksumArray | None  # N, CRC-32C of the bytes read


@dataclass(frozen=True, eq=False)
class Places:
    """Where in the shards the images lie."""

    shards: npt.NDArray[np.int32]  # N, numbers
    begins: IntArray  # N, where a shard is read from
    sizes: npt.NDArray[np.uint32]  # N, bytes that are read
    checksums: ChecksumArray | None = None  # N, of the bytes that are read
    skips: npt.NDArray[np.uint32] | None = None  # N, bytes before the image; none: the image is all that is read
    lengths: npt.NDArray[np.uint32] | None = None  # N, bytes of the image

    def ranges(self, indices: IntArray) -> IntArray:  # N x (begin, size, skip, length), as in Ranges
        found = np.zeros((len(indices), 4), np.int64)
        found[:, 0], found[:, 1] = self.begins[indices], self.sizes[indices]
        found[:, 3] = found[:, 1]
        if self.skips is not None and self.lengths is not None:
            found[:, 2], found[:, 3] = self.skips[indices], self.lengths[indices]
        return found


@dataclass(frozen=True, eq=False)
class ShardSource:
    """Images within larger files: TFRecords, tar archives, packed shards."""

    shards: Shards
    places: Places
    labels: IntArray  # N
    class_names: tuple[str, ...]
    names: Names | None = None  # as the archive has them, where it has them
    objects: Objects | None = None
    ahead: Readahead | None = None  # asked to go on with every reading

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return "" if self.names is None else self.names[index]

    def where(self, index: int) -> str:
        """How a message names this image."""
        begin, _, skip, _ = self._range(index)
        name = self.name(index) or f"image at byte {begin + skip}"
        return f"{self.shards.paths[int(self.places.shards[index])]}: {name}"

    def opened(self, index: int) -> Path | BinaryIO:
        return io.BytesIO(self.encoded(index))

    def encoded(self, index: int) -> bytes:
        """The image's bytes, once they were found to have their checksum; else UnreadableImageError."""
        begin, size, skip, length = self._range(index)
        self.advance()
        try:
            data = self.shards.read(int(self.places.shards[index]), begin=begin, size=size)
        except OSError as error:
            raise UnreadableImageError(error.strerror or "cannot be read") from None
        if len(data) < size:
            raise UnreadableImageError("the shard ends before it")
        if self.places.checksums is not None and crc32c(data) != int(self.places.checksums[index]):
            raise UnreadableImageError("its bytes do not have their checksum")
        return data[skip : skip + length]

    def advance(self) -> None:
        if self.ahead is not None:
            self.ahead.advance()

    def _range(self, index: int) -> list[int]:
        found: list[int] = self.places.ranges(np.array([index]))[0].tolist()
        return found


PhotoSource = FileSource | ShardSource  # encoded images of many sizes
Source = ArraySource | PhotoSource


def names_of(source: PhotoSource) -> Iterator[str]:
    return (source.name(index) for index in range(len(source)))


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Two sources with the same classes, and the constants that normalise their pixels."""

    train: Source
    validation: Source
    native_size: int | None  # side of an array source's images, pixels; files have any size
    mean: Channels
    std: Channels
    layout: str = ""  # how photos are stored: "class folders", "TFRecords", ...
    centred: bool | None = None  # whether evaluation sees the centre of an image alone; None: of photos

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def preprocessing(self, image_size: int) -> Preprocessing:
        """Arrays are resized whole; photographs are resized a little larger and cropped at their centre."""
        centred = self.native_size is None if self.centred is None else self.centred
        resize = short_side(image_size) if centred else image_size
        return Preprocessing(image_size=image_size, resize=resize, mean=self.mean, std=self.std)
