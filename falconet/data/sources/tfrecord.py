"""TFRecords of tf.train.Examples, indexed without reading the images.

Example { Features features = 1; }   Features { map<string, Feature> feature = 1; }
Feature { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }   each list: { repeated value = 1; }
"""

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from falconet.data.index import Array, Found, check_class_names, indexed
from falconet.data.shards import crc32c, open_shard, pread, unmasked
from falconet.data.sources import folder
from falconet.data.sources.shard_index import (
    COLUMNS,
    MOST_CLASSES,
    Gathered,
    check_split,
    class_names,
    source_of,
    splits_of,
)
from falconet.data.storage import BoxArray, Splits, proper
from falconet.errors import DataError
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

SYNSET, TEXT = b"image/class/synset", b"image/class/text"
SIDES = tuple(b"image/object/bbox/" + side for side in (b"xmin", b"ymin", b"xmax", b"ymax"))
READ_FEATURES = frozenset((SYNSET, TEXT, *SIDES))
MOST_KEY = 64  # bytes
MOST_SHOWN = 12  # keys per message

MOST_SMALL = 1 << 20  # bytes in a feature other than the image
MOST_FIELDS = 100_000  # per record; ImageNet's have about 60, and five per object
WINDOW = 4096  # bytes read at once; usually enough for a record without its image
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
Read = Callable[[int, int], bytes]  # offset, count


class MalformedError(Exception):
    """Bytes that are not an Example; the text gives the reason in a few words."""


class KeyAbsentError(MalformedError):
    """An Example that lacks one of the expected keys."""


class MissingKeyError(DataError):
    """Records with other keys than the expected ones."""


class Keys(NamedTuple):
    """The keys of the features, as the maker of the records called them."""

    image: str = "image/encoded"
    label: str = "image/class/label"


USUAL = Keys()


class Example(NamedTuple):
    skip: int  # bytes of the record before the image
    length: int  # bytes of the image
    label: int  # as stored
    name: str  # of the class; empty if the record has none
    boxes: BoxArray


def parse_example(read: Read, size: int, keys: Keys = USUAL) -> Example:
    """Parse the Example in a record of `size` bytes."""
    image_key, label_key = keys.image.encode(), keys.label.encode()
    image: list[tuple[int, int]] | None = None
    small: dict[bytes, bytes] = {}  # all features except the image
    others: list[bytes] = []
    fields = Fields(read)
    for number, begin, end in fields.of(0, size):
        for inner, entry, entry_end in fields.of(begin, end) if number == 1 else ():
            key, place, place_end = _entry(fields, entry, entry_end) if inner == 1 else (b"", 0, 0)
            if key == image_key:
                image = list(islice(_values(fields, place, place_end, kind=1), 2))  # a second value is too many
            elif key == label_key or key in READ_FEATURES:
                small[key] = read(place, min(place_end - place, MOST_SMALL))
            if inner == 1 and len(others) < MOST_SHOWN:
                others.append(key)
    if image is None or label_key not in small:
        missing, found = keys.label if image else keys.image, sorted({key.decode("utf-8", "replace") for key in others})
        raise KeyAbsentError(f"no '{missing}'" + (f", only {', '.join(found)}" if found else ""))
    labels = _integers(small[label_key])
    if len(image) != 1 or len(labels) != 1:
        raise MalformedError(f"{len(image)} images and {len(labels)} labels, expected one of each")
    return Example(image[0][0], image[0][1] - image[0][0], labels[0], _name(small), _boxes(small))


def _name(small: dict[bytes, bytes]) -> str:
    for key in (SYNSET, TEXT):
        values = _lists(small.get(key, b""), kind=1)
        if values:
            return values[0].decode("utf-8", "replace")
    return ""


def _boxes(small: dict[bytes, bytes]) -> BoxArray:
    if not all(side in small for side in SIDES):
        return np.zeros((0, 4), np.float32)
    sides = [_floats(small[side]) for side in SIDES]
    if len({len(side) for side in sides}) != 1:
        raise MalformedError("its object boxes have different numbers of sides")
    return proper(np.array(sides, np.float32).T)


def _entry(fields: "Fields", begin: int, end: int) -> tuple[bytes, int, int]:
    """The key of a map entry, and the range of its value."""
    key, place = b"", (end, end)
    for number, inner, inner_end in fields.of(begin, end):
        if number == 1:
            key = fields.read(inner, min(inner_end - inner, MOST_KEY))  # a longer key is none of ours
        elif number == 2:
            place = (inner, inner_end)
    return (key, *place)


def _values(fields: "Fields", begin: int, end: int, *, kind: int) -> Iterator[tuple[int, int]]:
    """The ranges of the values in a Feature with a list of this kind."""
    for number, values, values_end in fields.of(begin, end):
        for inner_number, inner, inner_end in fields.of(values, values_end) if number == kind else ():
            if inner_number == 1:
                yield inner, inner_end


def _lists(data: bytes, *, kind: int) -> list[bytes]:
    """The values in a Feature that has been read already."""
    places = _values(Fields(lambda at, count: data[at : at + count]), 0, len(data), kind=kind)
    return [data[begin:end] for begin, end in places]


def _integers(data: bytes) -> list[int]:
    numbers = []
    for packed in _lists(data, kind=3):
        at = 0
        while at < len(packed):
            value, at = _varint(packed, at)
            numbers.append(value - (1 << 64) if value >> 63 else value)
    return numbers


def _floats(data: bytes) -> list[float]:
    numbers: list[float] = []
    for packed in _lists(data, kind=2):
        if len(packed) % 4:
            raise MalformedError("a list of numbers is cut short")
        numbers += struct.unpack(f"<{len(packed) // 4}f", packed)
    return numbers


class Fields:
    """Finds the fields of messages, one after the other, within a limit for each record."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self._left = MOST_FIELDS

    def of(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The number, begin and end of each field in a message; for a plain number, those of its encoding."""
        while begin < end:
            self._left -= 1
            if self._left < 0:
                raise MalformedError(f"more than {MOST_FIELDS:,} fields")
            head = self.read(begin, min(20, end - begin))  # two varints at most
            tag, at = _varint(head, 0)
            wire = tag & 7
            if wire == DELIMITED:
                length, at = _varint(head, at)
            elif wire == VARINT:
                length = _varint(head, at)[1] - at
            elif wire in (FIXED64, FIXED32):
                length = 8 if wire == FIXED64 else 4
            else:
                raise MalformedError("not a tf.train.Example")
            begin += at
            if length > end - begin:
                raise MalformedError("not a tf.train.Example")
            yield tag >> 3, begin, begin + length
            begin += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint's value, and the offset after it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise MalformedError("not a tf.train.Example")


NAME = re.compile(r"(train|validation|val)-\d{5}-of-\d{5}")  # as TensorFlow's scripts name ImageNet's
OTHER_NAME = re.compile(r".*(?:\.tfrecords?(?:-\d{5}-of-\d{5})?|-\d{5}-of-\d{5}\.tfrecords?)")
PART = re.compile(r"(?:^|[^a-z])(train|training|val|valid|validation|test|testing)(?=[^a-z]|$)")
SHARD = re.compile(r"(\d{5})-of-(\d{5})")
HEAD, TAIL = 12, 4  # bytes before and after a record's data
LARGEST = 1 << 30  # bytes in a record; a greater length means that the file is damaged


def find(data_dir: Path) -> dict[str, list[Path]]:
    """Find each split's shards, in order, in the folder itself or in its train/ and validation/."""
    found: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for place in (data_dir, *(data_dir / name for name in folder.split_folders(data_dir).values())):
        for path in sorted(place.iterdir()):
            name = path.name.lower()
            if name.startswith(".") or not (NAME.fullmatch(path.name) or OTHER_NAME.fullmatch(name)):
                continue
            words = PART.findall(name) or PART.findall(place.name.lower() if place != data_dir else "")
            part = next((part for part, spellings in folder.PARTS.items() if words and words[-1] in spellings), None)
            if part:
                found[part].append(path)
    tested = found.pop("test")
    return found if found["validation"] or not found["train"] else found | {"validation": tested}


def load(data_dir: Path, shards: dict[str, list[Path]], keys: Keys = USUAL) -> Splits:
    """Read records. Labels start at 0, or at 1 if none is 0. Class names: a file, else synset or text, else numbers."""
    for split, paths in shards.items():
        _check_complete(data_dir, split, paths)
    every = [path for paths in shards.values() for path in paths]

    def check(found: Found) -> None:
        known, count = check_class_names(found.facts["names"], most=MOST_CLASSES), found.facts["count"]
        if count != len(known):
            raise ValueError("a different number of class names")
        for split, paths in shards.items():
            check_split(found.arrays, split, columns=COLUMNS, paths=paths, classes=len(known))

    kind = "tfrecords" if keys == USUAL else f"tfrecords-{hashlib.sha256(repr(keys).encode()).hexdigest()[:16]}"
    found = indexed(data_dir, kind=kind, search=lambda: _search(shards, keys), check=check, watched=every)
    names = class_names(data_dir, count=len(found.facts["names"]), known=found.facts["names"])
    arrays = dict(found.arrays)
    train, validation = (source_of(arrays, split, paths=paths, class_names=names) for split, paths in shards.items())
    return splits_of(train, validation, layout="TFRecords")


def _check_complete(data_dir: Path, split: str, paths: list[Path]) -> None:
    """Require every shard of a split: `-of-01024` gives their number."""
    if not paths:
        raise DataError(f"{data_dir}: TFRecords, but none named {split}-00000-of-...")
    numbers = [match for match in (SHARD.search(path.name) for path in paths) if match]
    counts = {match[2] for match in numbers}
    if not counts:
        return
    if len(counts) > 1:
        raise DataError(f"{data_dir}: {split} shards of several sets: -of-{' and -of-'.join(sorted(counts))}")
    have = {int(match[1]) for match in numbers}
    if len(have) < len(numbers):
        raise DataError(f"{data_dir}: {split} shards twice, in {' and '.join(sorted({str(p.parent) for p in paths}))}")
    missing = next((number for number in range(int(min(counts))) if number not in have), None)
    if missing is not None:
        name = SHARD.sub(f"{missing:05}-of-{min(counts)}", next(path.name for path in paths if SHARD.search(path.name)))
        raise DataError(f"{data_dir}: no {name}; {len(have)} of {int(min(counts))} are there")


@dataclass(frozen=True)
class Record:
    begin: int  # where its data begins
    size: int
    checksum: int
    example: Example

    def columns(self) -> dict[str, int]:
        found = self.example
        return {
            "begins": self.begin,
            "sizes": self.size,
            "checksums": self.checksum,
            "skips": found.skip,
            "lengths": found.length,
            "labels": found.label,
        }


def _search(shards: dict[str, list[Path]], keys: Keys) -> Found:
    arrays: dict[str, Array] = {}
    names: dict[int, str] = {}
    every = [path for paths in shards.values() for path in paths]
    with Counting(f"indexing {every[0].parent}", quiet=not is_first(os.environ)) as counting:
        for split, paths in shards.items():
            gathered = Gathered(*COLUMNS)
            for number, path in enumerate(paths):
                for record in _records(path, keys):
                    gathered.add(shards=number, **record.columns())
                    gathered.add_boxes(record.example.boxes)
                    names.setdefault(record.example.label, record.example.name)
                    counting.add()
            if not len(gathered):
                raise DataError(f"{paths[0]}: has no record, and neither do the other {split} shards")
            arrays |= gathered.arrays(split)
    first = min(1, *names)  # the scripts for ImageNet count from 1; others from 0
    for split in shards:
        arrays[f"{split}.labels"] -= first
    known = [names.get(label, "") for label in range(first, max(names) + 1)]
    return Found(arrays, {"count": len(known), "names": known}, every)


def _records(path: Path, keys: Keys) -> Iterator[Record]:
    file = open_shard(path)
    try:
        total = os.fstat(file).st_size
        begin = 0
        while begin < total:
            record = _record(file, path, begin, total, keys)
            yield record
            begin = record.begin + record.size + TAIL
    finally:
        os.close(file)


def _record(file: int, path: Path, at: int, total: int, keys: Keys) -> Record:
    """Read one record, without its image."""
    window = pread(file, at, HEAD + WINDOW)
    if len(window) < HEAD:
        raise DataError(f"{path}: ends within the record at byte {at}; cut short?")
    size, stored = struct.unpack("<QI", window[:HEAD])
    if crc32c(window[:8]) != unmasked(stored) or size > LARGEST:
        raise DataError(f"{path}: the record at byte {at} has a length that does not match its checksum")
    begin = at + HEAD
    if begin + size + TAIL > total:
        raise DataError(f"{path}: ends within the record at byte {at}; cut short?")
    base = -HEAD  # offset of the window in the record's data

    def read(place: int, count: int) -> bytes:
        nonlocal window, base
        offset = place - base
        if offset < 0 or offset + count > len(window):
            window, base = pread(file, begin + place, max(count, WINDOW)), place
            offset = 0
        return window[offset : offset + count]

    try:
        parsed = parse_example(read, size, keys)
    except KeyAbsentError as error:
        raise MissingKeyError(f"{path}: the record at byte {at} has {error}") from None
    except MalformedError as error:
        raise DataError(f"{path}: the record at byte {at} cannot be used: {error}") from None
    if not 0 <= parsed.label <= MOST_CLASSES:
        expected = f"0 to {MOST_CLASSES:,}"
        raise DataError(f"{path}: the record at byte {at} has the label {parsed.label}; expected {expected}")
    (checksum,) = struct.unpack("<I", read(size, TAIL))
    return Record(begin, size, unmasked(checksum), parsed)
