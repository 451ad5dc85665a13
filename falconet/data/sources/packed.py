"""Packed shards: files with many images, checksums and an index.

    train-00000.falconet, ..., validation-00000.falconet, ...

A shard is a magic line, the images' bytes end to end, an index in the safetensors format, and a tail of 72 bytes: where
the index starts and how long it is (8 bytes each, little-endian), the index's CRC-32C (4 bytes, then 4 zeros), the
SHA-256 of everything before the tail, and the magic line again. docs/using/data.md describes the format.
"""

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save

from falconet.data.index import Array, check_below, check_class_names, check_lengths, check_offsets, check_types
from falconet.data.shards import crc32c, open_shard, pread
from falconet.data.sources.shard_index import MOST_CLASSES, source_of, splits_of
from falconet.data.storage import Names, Splits
from falconet.errors import DataError
from falconet.parallel.host import available

ENDING = ".falconet"
MAGIC = b"falconet shard 1"
PLACE = struct.Struct("<QQII")
TAIL = PLACE.size + 32 + len(MAGIC)  # bytes
SPLITS = ("train", "validation")
MOST_SHARDS = 100_000  # their names have five digits
SHARE = 4  # an index larger than a quarter of the free memory is damaged
DAMAGE = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
COLUMNS = {
    "begins": np.int64,
    "sizes": np.uint32,
    "checksums": np.uint32,
    "labels": np.int32,
    "names": np.uint8,
    "offsets": np.int64,
}


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05}{ENDING}"


def find(data_dir: Path) -> dict[str, list[Path]]:
    return {split: sorted(data_dir.glob(f"{split}-*{ENDING}")) for split in SPLITS}


@dataclass(frozen=True)
class Head:
    """The index of a shard."""

    arrays: dict[str, Array]
    facts: dict[str, Any]  # split, number, shards, classes, made
    sha256: str  # of everything before the tail, from when the shard was written


class Writer:
    """Writes a shard and computes its digest on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha = file, hashlib.sha256()
        self._at = 0
        self._rows: list[tuple[int, int, int, int]] = []  # begin, size, checksum, label
        self._names: list[str] = []
        self._write(MAGIC)

    def add(self, data: bytes, *, label: int, name: str) -> None:
        self._rows.append((self._at, len(data), crc32c(data), label))
        self._names.append(name)
        self._write(data)

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the index and the tail."""
        rows, names = np.array(self._rows, np.int64).reshape(-1, 4), Names.of(self._names)
        arrays: dict[str, Array] = {
            "begins": np.ascontiguousarray(rows[:, 0]),
            "sizes": rows[:, 1].astype(np.uint32),
            "checksums": rows[:, 2].astype(np.uint32),
            "labels": rows[:, 3].astype(np.int32),
            "names": np.frombuffer(names.block, np.uint8),
            "offsets": names.offsets,
        }
        begin, index = self._at, bytes(save(arrays, {"facts": json.dumps(facts, sort_keys=True)}))
        self._write(index)
        self._file.write(PLACE.pack(begin, len(index), crc32c(index), 0) + self._sha.digest() + MAGIC)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha.update(data)
        self._at += len(data)


def read_head(path: Path) -> Head:
    """Read the index of a shard; DataError if it is cut short, damaged or of another version."""
    file = open_shard(path)
    try:
        total = os.fstat(file).st_size
        tail = pread(file, max(0, total - TAIL), TAIL)
        if len(tail) < TAIL or tail[-len(MAGIC) :] != MAGIC or pread(file, 0, len(MAGIC)) != MAGIC:
            raise DataError(
                f"{path}: not a complete packed shard of this version; recreate it with `falconet data pack`"
            )
        begin, size, checksum, _ = PLACE.unpack(tail[: PLACE.size])
        fits = begin + size + TAIL == total and size <= available() // SHARE
        index = pread(file, begin, size) if fits else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    finally:
        os.close(file)
    try:
        if crc32c(index) != checksum:
            raise ValueError
        arrays = load_arrays(index)
        facts = json.loads(json.loads(index[8 : 8 + int.from_bytes(index[:8], "little")])["__metadata__"]["facts"])
        _check(arrays, begin)
        _check_facts(facts, arrays["labels"])
    except DAMAGE:
        raise DataError(f"{path}: its index is damaged; recreate it with `falconet data pack`") from None
    return Head(arrays, facts, tail[PLACE.size : PLACE.size + 32].hex())


def _check(arrays: dict[str, Array], end: int) -> None:
    """Require columns with the right types and equal lengths, and images end to end before the index."""
    check_types(arrays, COLUMNS)
    offsets = arrays["offsets"]
    check_offsets(offsets, end=len(arrays["names"]))
    check_lengths(offsets[1:], *(arrays[name] for name in ("begins", "sizes", "checksums", "labels")))
    ends = np.cumsum([len(MAGIC), *arrays["sizes"].tolist()], dtype=np.int64)
    if not np.array_equal(arrays["begins"], ends[:-1]) or ends[-1] != end:
        raise ValueError


def _check_facts(facts: dict[str, Any], labels: Array) -> None:
    """Check the facts in an index, which may come from anyone even if its checksum matches."""
    number, shards = facts["number"], facts["shards"]
    if type(number) is not int or type(shards) is not int or not 0 <= number < shards <= MOST_SHARDS:
        raise ValueError
    check_below(labels, len(check_class_names(facts["classes"], most=MOST_CLASSES)), what="labels")
    if facts["split"] not in SPLITS:
        raise ValueError


def load(data_dir: Path, shards: dict[str, list[Path]]) -> Splits:
    """Read the index of each shard; together they must be one complete set."""
    heads = {split: [read_head(path) for path in paths] for split, paths in shards.items()}
    classes: tuple[str, ...] | None = None
    for split, paths in shards.items():
        if not paths:
            raise DataError(f"{data_dir}: packed shards, but none named {shard_name(split, 0)}")
        expected = heads[split][0].facts["shards"]
        for number in range(expected):
            if data_dir / shard_name(split, number) not in paths:
                raise DataError(f"{data_dir}: no {shard_name(split, number)}; {len(paths)} of {expected} are there")
        for path, head in zip(paths, heads[split], strict=True):
            classes = classes or tuple(head.facts["classes"])
            if tuple(head.facts["classes"]) != classes or head.facts["shards"] != expected:
                raise DataError(f"{path}: belongs to a different set from the other shards")
            own_name = shard_name(head.facts["split"], head.facts["number"])
            if path.name != own_name:
                raise DataError(f"{path}: its index names it {own_name}; was it renamed or copied?")
    assert classes is not None
    train, validation = (
        source_of(_joined(heads[split], split), split, paths=paths, class_names=classes)
        for split, paths in shards.items()
    )
    return splits_of(train, validation, layout="packed shards")


def _joined(heads: list[Head], split: str) -> dict[str, Array]:
    columns = {name: np.concatenate([head.arrays[name] for head in heads]) for name in COLUMNS if name != "offsets"}
    starts = np.cumsum([0, *(len(head.arrays["names"]) for head in heads[:-1])])
    ends = [head.arrays["offsets"][1:] + start for head, start in zip(heads, starts, strict=True)]
    columns["offsets"] = np.concatenate([np.zeros(1, np.int64), *ends])
    counts = [len(head.arrays["labels"]) for head in heads]
    columns["shards"] = np.repeat(np.arange(len(heads), dtype=np.int32), counts)
    return {f"{split}.{name}": column for name, column in columns.items()}


def verify(path: Path) -> list[str]:
    """The problems in a shard, one line each: bad images by name, else the shard as a whole."""
    head = read_head(path)
    names = Names(head.arrays["names"].tobytes(), head.arrays["offsets"])
    columns = (head.arrays[name].tolist() for name in ("begins", "sizes", "checksums"))
    problems = []
    with path.open("rb", buffering=1 << 20) as file:
        sha = hashlib.sha256(file.read(len(MAGIC)))
        for number, (begin, size, stored) in enumerate(zip(*columns, strict=True)):
            assert begin == file.tell(), f"{path}: images lie end to end"
            data = file.read(size)
            sha.update(data)
            if crc32c(data) != stored:
                problems.append(f"{path}: {names[number]}: checksum mismatch")
        sha.update(file.read()[:-TAIL])
    if sha.hexdigest() != head.sha256 and not problems:
        problems.append(f"{path}: SHA-256 mismatch, although every image matches its checksum")
    return problems
