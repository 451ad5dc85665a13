"""Sources of images in memory, in files or in shards, with labels, names and annotated objects."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from falconet.data.image_files import UnreadableImageError, read_regular
from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Channels, Preprocessing, short_side
from falconet.data.shards import Readahead, Shards, crc32c

BoxArray = npt.NDArray[np.float32]  # M x 4: x0, y0, x1, y1 as shares of the image's width and height


@dataclass(frozen=True, eq=False)
class Objects:
    """Annotated objects of N images: those in image i, possibly none, are boxes[first[i] : first[i + 1]]."""

    boxes: BoxArray
    first: IntArray  # N + 1

    @classmethod
    def of(cls, boxes: Sequence[BoxArray]) -> "Objects":
        """Make it from the boxes in each image."""
        first = np.zeros(len(boxes) + 1, dtype=np.int64)
        np.cumsum([len(own) for own in boxes], out=first[1:])
        joined = np.concatenate([np.zeros((0, 4), np.float32), *boxes])
        return cls(joined.astype(np.float32), first)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, image: int) -> BoxArray:
        return self.boxes[self.first[image] : self.first[image + 1]]

    def subset(self, chosen: IntArray) -> "Objects":
        return Objects.of([self[index] for index in chosen.tolist()])

    @property
    def annotated(self) -> int:
        """The number of images that have an object."""
        return int(np.count_nonzero(np.diff(self.first)))


def proper(boxes: npt.NDArray[np.floating]) -> BoxArray:
    """Clip boxes to the image and drop those without an area: annotations have both mistakes."""
    clipped = np.clip(np.asarray(boxes, np.float32).reshape(-1, 4), 0.0, 1.0)
    kept = (clipped[:, 0] < clipped[:, 2]) & (clipped[:, 1] < clipped[:, 3])  # also false for nan
    return clipped[kept]


def match(names: Sequence[str], table: Mapping[str, BoxArray]) -> Objects:
    """Look up boxes by file name without its extension: `class/name` first, then the bare name."""
    none = np.zeros((0, 4), np.float32)
    found = []
    for name in names:
        stem = key(name)
        found.append(table.get(stem, table.get(stem.rsplit("/", 1)[-1], none)))
    return Objects.of(found)


def key(name: str) -> str:
    """A file name without its extension."""
    stem, dot, extension = name.rpartition(".")
    return stem if dot and "/" not in extension else name


PixelArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
ChecksumArray = npt.NDArray[np.uint32]


class ImageArray(Protocol):
    """What an ArraySource needs of its images: a numpy array, or images generated on request."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # N x H x W x 3

    def __getitem__(self, indices: IntArray, /) -> PixelArray: ...


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Decoded images of one size."""

    images: ImageArray  # N x H x W x 3, uint8
    labels: IntArray  # N
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: IntArray) -> "ArraySource":
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Names:
    """Many names in one block of bytes: a name of 20 bytes takes about 28 bytes, not 80."""

    block: bytes  # end to end
    offsets: IntArray  # N + 1: where each name starts

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        coded = [os.fsencode(name) for name in names]
        offsets = np.zeros(len(coded) + 1, dtype=np.int64)
        np.cumsum([len(name) for name in coded], out=offsets[1:])
        return cls(b"".join(coded), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def subset(self, chosen: IntArray) -> "Names":
        return Names.of([self[index] for index in chosen.tolist()])

    def coded(self, index: int) -> bytes:
        begin, end = self.offsets[index : index + 2].tolist()
        return self.block[begin:end]

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.coded(index))


@dataclass(frozen=True, eq=False)
class FileSource:
    """Image files under one folder."""

    root: Path
    names: Names  # relative to the root
    labels: IntArray  # N
    class_names: tuple[str, ...]
    objects: Objects | None = None  # random crops must overlap one

    @classmethod
    def of(
        cls, root: Path, *, names: Sequence[str], labels: Sequence[int], class_names: tuple[str, ...]
    ) -> "FileSource":
        """Make it of files under root/<class name>/; `names` are relative to the class folder."""
        paths = [f"{class_names[label]}/{name}" for name, label in zip(names, labels, strict=True)]
        return cls(root, Names.of(paths), np.asarray(labels, dtype=np.int64), class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: IntArray) -> "FileSource":
        objects = self.objects and self.objects.subset(chosen)
        return replace(self, names=self.names.subset(chosen), labels=self.labels[chosen], objects=objects)

    def renumbered(self, class_names: tuple[str, ...]) -> "FileSource":
        """The same files with the class numbers of a list that has all of this source's classes."""
        numbers = np.array([class_names.index(name) for name in self.class_names], np.int64)
        return replace(self, labels=numbers[self.labels], class_names=class_names)

    def path(self, index: int) -> Path:
        return self.root / self.name(index)

    def name(self, index: int) -> str:
        """An image's path, relative to the root."""
        return self.names[index]

    def where(self, index: int) -> str:
        """The image's name in messages."""
        return str(self.path(index))

    def opened(self, index: int) -> Path | BinaryIO:
        """The image as Pillow can open it."""
        return self.path(index)

    def encoded(self, index: int) -> bytes:
        """The file's bytes; OSError if it cannot be read."""
        return read_regular(self.path(index))


class Ranges(NamedTuple):
    """Images in open files."""

    files: Sequence[int]  # N descriptors
    places: IntArray  # N x (begin, size, skip, length): read `size` bytes; the image is `length` of them from `skip`
    checksums: ChecksumArray | None  # N, CRC-32C of the bytes read


@dataclass(frozen=True, eq=False)
class Places:
    """Where images are in their shards."""

    shards: npt.NDArray[np.int32]  # N, shard numbers
    begins: IntArray  # N, first byte to read
    sizes: npt.NDArray[np.uint32]  # N, bytes to read
    checksums: ChecksumArray | None = None  # N, of the bytes read
    skips: npt.NDArray[np.uint32] | None = None  # N, bytes before the image; None: the image is all that is read
    lengths: npt.NDArray[np.uint32] | None = None  # N, bytes of the image

    def subset(self, chosen: IntArray) -> "Places":
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column[chosen] for name, column in columns.items() if column is not None})

    def ranges(self, indices: IntArray) -> IntArray:  # N x (begin, size, skip, length), as in Ranges
        found = np.zeros((len(indices), 4), np.int64)
        found[:, 0], found[:, 1] = self.begins[indices], self.sizes[indices]
        found[:, 3] = found[:, 1]
        if self.skips is not None and self.lengths is not None:
            found[:, 2], found[:, 3] = self.skips[indices], self.lengths[indices]
        return found


@dataclass(frozen=True, eq=False)
class ShardSource:
    """Images in larger files: TFRecords, tar archives, packed shards."""

    shards: Shards
    places: Places
    labels: IntArray  # N
    class_names: tuple[str, ...]
    names: Names | None = None  # from the archive, if it has names
    objects: Objects | None = None
    ahead: Readahead | None = None  # advanced with every read

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: IntArray) -> "ShardSource":
        return replace(
            self,
            places=self.places.subset(chosen),
            labels=self.labels[chosen],
            names=self.names and self.names.subset(chosen),
            objects=self.objects and self.objects.subset(chosen),
        )

    def name(self, index: int) -> str:
        return "" if self.names is None else self.names[index]

    def where(self, index: int) -> str:
        """The image's name in messages."""
        begin, _, skip, _ = self._range(index)
        name = self.name(index) or f"image at byte {begin + skip}"
        return f"{self.shards.paths[int(self.places.shards[index])]}: {name}"

    def opened(self, index: int) -> Path | BinaryIO:
        return io.BytesIO(self.encoded(index))

    def encoded(self, index: int) -> bytes:
        """The image's bytes; UnreadableImageError if they are cut short or their checksum differs."""
        begin, size, skip, length = self._range(index)
        self.advance()
        try:
            data = self.shards.read(int(self.places.shards[index]), begin=begin, size=size)
        except OSError as error:
            raise UnreadableImageError(error.strerror or "cannot be read") from None
        if len(data) < size:
            raise UnreadableImageError("cut short")
        if self.places.checksums is not None and crc32c(data) != int(self.places.checksums[index]):
            raise UnreadableImageError("checksum mismatch")
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
    """Training and validation images with the same classes, and the constants that normalise their pixels."""

    train: Source
    validation: Source
    native_size: int | None  # side of an array source's images, pixels; photos vary
    mean: Channels
    std: Channels
    layout: str = ""  # how photos are stored: "class folders", "TFRecords", ...
    held_out: float | None = None  # share of photos that validates, chosen by name; None: the data came divided
    label_sets: BoolArray | None = None  # sets x classes; a label is then the number of a set
    notes: tuple[str, ...] = ()  # what the user should know about the data
    centred: bool | None = None  # whether evaluation crops the centre of an image; None: only of photos
    crop_ratio: float = 7 / 8  # the part of the short side that such a crop keeps

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def preprocessing_at(self, image_size: int) -> Preprocessing:
        """Arrays are resized whole; photos are resized slightly larger and cropped at the centre."""
        centred = self.native_size is None if self.centred is None else self.centred
        resize = short_side(image_size, ratio=self.crop_ratio) if centred else image_size
        return Preprocessing(image_size=image_size, resize=resize, mean=self.mean, std=self.std)
