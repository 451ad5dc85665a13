"""ImageNet as TFRecords, read without TensorFlow: train-00000-of-01024, validation-00000-of-00128.

A record is its length (8 bytes), the masked CRC-32C of these, the data, and the masked CRC-32C of the data. The index
is built from the heads alone; the checksum of the data is compared whenever its image is read.
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from falconet.data.checksum import crc32c, unmasked
from falconet.data.columns import Array, check_class_names
from falconet.data.index import Found, indexed
from falconet.data.shards import open_shard, pread
from falconet.data.source import Splits
from falconet.data.sources import example
from falconet.data.sources.example import Example, MalformedError
from falconet.data.sources.gather import COLUMNS, MOST_CLASSES, Gathered, check_split, class_names, source_of, splits_of
from falconet.errors import DataError
from falconet.parallel.environment import is_first
from falconet.report.counting import Counting

NAME = re.compile(r"(train|validation|val)-(\d{5})-of-(\d{5})")
HEAD, TAIL = 12, 4  # bytes before and after a record's data
LARGEST = 1 << 30  # bytes of a record; a length beyond is a damaged file


def find(data_dir: Path) -> dict[str, list[Path]]:
    """The shards of each split, in order, from the folder itself or from train/ and validation/ in it."""
    found: dict[str, list[Path]] = {"train": [], "validation": []}
    for folder in (data_dir, data_dir / "train", data_dir / "validation", data_dir / "val"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = NAME.fullmatch(path.name)
            if match:
                found["train" if match[1] == "train" else "validation"].append(path)
    return found


def load(data_dir: Path, shards: dict[str, list[Path]]) -> Splits:
    """Labels are stored from 1 on; here they begin at 0. Class names: synset, or text, or a file, or the number."""
    for split, paths in shards.items():
        _check_complete(data_dir, split, paths)
    every = [path for paths in shards.values() for path in paths]

    def check(found: Found) -> None:
        known, count = check_class_names(found.facts["names"], most=MOST_CLASSES), found.facts["count"]
        if count != len(known):
            raise ValueError("class names of another number")
        for split, paths in shards.items():
            check_split(found.arrays, split, columns=COLUMNS, paths=paths, classes=len(known))

    found = indexed(data_dir, kind="tfrecords", search=lambda: _search(shards), check=check, watched=every)
    names = class_names(data_dir, count=len(found.facts["names"]), known=found.facts["names"])
    arrays = dict(found.arrays)
    train, validation = (source_of(arrays, split, paths=paths, class_names=names) for split, paths in shards.items())
    return splits_of(train, validation, layout="TFRecords")


def _check_complete(data_dir: Path, split: str, paths: list[Path]) -> None:
    """`-of-01024` says how many there should be."""
    if not paths:
        raise DataError(f"{data_dir}: TFRecords, but none is named {split}-00000-of-...")
    numbers = [NAME.fullmatch(path.name) for path in paths]
    wanted = {match[3] for match in numbers if match}
    if len(wanted) > 1:
        raise DataError(f"{data_dir}: {split} shards of several sets: -of-{' and -of-'.join(sorted(wanted))}")
    have = {int(match[2]) for match in numbers if match}
    if len(have) < len(paths):
        raise DataError(f"{data_dir}: {split} shards twice, in {' and '.join(sorted({str(p.parent) for p in paths}))}")
    missing = next((number for number in range(int(min(wanted))) if number not in have), None)
    if missing is not None:
        raise DataError(
            f"{data_dir}: no {split}-{missing:05}-of-{min(wanted)}; {len(have)} of {int(min(wanted))} are there"
        )


@dataclass(frozen=True)
class Record:
    begin: int  # of its data
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
            "labels": found.label - 1,
        }


def _search(shards: dict[str, list[Path]]) -> Found:
    arrays: dict[str, Array] = {}
    names: dict[int, str] = {}
    highest = 0
    every = [path for paths in shards.values() for path in paths]
    with Counting(f"indexing {every[0].parent}", quiet=not is_first(os.environ)) as counting:
        for split, paths in shards.items():
            gathered = Gathered(*COLUMNS)
            for number, path in enumerate(paths):
                for record in _records(path):
                    gathered.add(shards=number, **record.columns())
                    gathered.add_boxes(record.example.boxes)
                    names.setdefault(record.example.label, record.example.name)
                    highest = max(highest, record.example.label)
                    counting.add()
            if not len(gathered):
                raise DataError(f"{paths[0]}: no record in it, nor in the other {split} shards")
            arrays |= gathered.arrays(split)
    known = [names.get(label, "") for label in range(1, highest + 1)]
    return Found(arrays, {"count": highest, "names": known}, every)


def _records(path: Path) -> Iterator[Record]:
    file = open_shard(path)
    try:
        total = os.fstat(file).st_size
        begin = 0
        while begin < total:
            record = _record(file, path, begin, total)
            yield record
            begin = record.begin + record.size + TAIL
    finally:
        os.close(file)


def _record(file: int, path: Path, at: int, total: int) -> Record:
    """One record, of which only what is not the image is read."""
    window = pread(file, at, HEAD + example.WINDOW)
    if len(window) < HEAD:
        raise DataError(f"{path}: ends within the record at byte {at}; cut short?")
    size, stored = struct.unpack("<QI", window[:HEAD])
    if crc32c(window[:8]) != unmasked(stored) or size > LARGEST:
        raise DataError(f"{path}: the record at byte {at} has a length that is not that of its checksum; damaged")
    begin = at + HEAD
    if begin + size + TAIL > total:
        raise DataError(f"{path}: ends within the record at byte {at}; cut short?")
    base = -HEAD  # where the window begins, from the record's data on

    def read(place: int, count: int) -> bytes:
        nonlocal window, base
        offset = place - base
        if offset < 0 or offset + count > len(window):
            window, base = pread(file, begin + place, max(count, example.WINDOW)), place
            offset = 0
        return window[offset : offset + count]

    try:
        parsed = example.parse(read, size)
    except MalformedError as error:
        raise DataError(f"{path}: the record at byte {at} cannot be used: {error}") from None
    if not 1 <= parsed.label <= MOST_CLASSES:
        wanted = f"1 to {MOST_CLASSES:,}"
        raise DataError(f"{path}: the record at byte {at} has the label {parsed.label}; wanted {wanted}")
    (checksum,) = struct.unpack("<I", read(size, TAIL))
    return Record(begin, size, unmasked(checksum), parsed)
