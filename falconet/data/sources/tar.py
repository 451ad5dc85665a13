"""Photos in plain tar archives, as WebDataset writes them: KEY.jpg beside KEY.cls (or .json, or .txt)."""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from falconet.data.image_files import open_regular
from falconet.data.index import Array, Found, check_class_names, indexed
from falconet.data.sources.folder import image_extensions
from falconet.data.sources.shard_index import (
    MOST_CLASSES,
    Gathered,
    check_split,
    class_names,
    label_file,
    source_of,
    splits_of,
)
from falconet.data.storage import Splits
from falconet.errors import DataError, did_you_mean
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

SPLIT = re.compile(r"(?:^|[^a-z])(train|training|val|valid|validation)(?:[^a-z]|$)")
LABELS = ("cls", "json", "txt")  # extensions of label files, in order of precedence
JSON_KEYS = ("label", "cls", "class", "class_id")
COLUMNS = ("shards", "begins", "sizes", "labels")
MOST_LABEL = 1 << 20  # bytes in a label file
MOST_IMAGE = 1 << 30  # bytes in an image
MOST_DIGITS = 18  # in a label that is a number
# What tarfile raises for damaged bytes, besides OSError.
DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)


def find(data_dir: Path) -> dict[str, list[Path]]:
    """Find each split's archives, by name, in the folder itself or in its train/ and val/."""
    found: dict[str, list[Path]] = {"train": [], "validation": []}
    for folder in (data_dir, *(data_dir / name for name in ("train", "val", "validation"))):
        for path in sorted(folder.glob("*.tar")) if folder.is_dir() else ():
            match = SPLIT.search(path.name.lower()) or SPLIT.search(folder.name.lower())
            if match and not path.name.startswith("."):
                found["train" if match[1].startswith("train") else "validation"].append(path)
    return found


def load(data_dir: Path, shards: dict[str, list[Path]]) -> Splits:
    """Read archives whose labels are numbers from 0, or class names, which are then sorted."""
    for split, paths in shards.items():
        if not paths:
            raise DataError(f"{data_dir}: tar archives, but none with {split} in its name")
    every = [path for paths in shards.values() for path in paths]
    names = label_file(data_dir)
    watched = every if names is None else [*every, names]

    def check(found: Found) -> None:
        known = check_class_names(found.facts["classes"], most=MOST_CLASSES)
        for split, paths in shards.items():
            check_split(found.arrays, split, columns=COLUMNS, paths=paths, classes=len(known))

    found = indexed(
        data_dir, kind="tar", search=lambda: _search(data_dir, shards, watched), check=check, watched=watched
    )
    classes = tuple(found.facts["classes"])
    arrays = dict(found.arrays)
    train, validation = (source_of(arrays, split, paths=paths, class_names=classes) for split, paths in shards.items())
    return splits_of(train, validation, layout="tar archives")


@dataclass
class Sample:
    """The members that share a key."""

    key: str
    image: tarfile.TarInfo | None = None
    labels: dict[str, str] = field(default_factory=dict)  # extension -> text


def _search(data_dir: Path, shards: dict[str, list[Path]], watched: list[Path]) -> Found:
    gathered = {split: Gathered(*COLUMNS) for split in shards}
    said: dict[str, int] = {}  # label as written -> its number, in the order found
    with Counting(f"indexing {data_dir}", quiet=not is_first(os.environ)) as counting:
        for split, paths in shards.items():
            for number, path in enumerate(paths):
                for sample in _samples(path):
                    member = sample.image
                    if member is None:
                        raise DataError(f"{path}: {sample.key}: a label without an image")
                    label = said.setdefault(_label(path, sample), len(said))
                    gathered[split].add(shards=number, begins=member.offset_data, sizes=member.size, labels=label)
                    gathered[split].add_name(member.name)
                    counting.add()
            if not len(gathered[split]):
                raise DataError(f"{paths[0]}: has no image, and neither do the other {split} archives")
    classes, numbers = _classes(data_dir, list(said))
    arrays: dict[str, Array] = {}
    for split, own in gathered.items():
        arrays |= own.arrays(split)
        arrays[f"{split}.labels"] = numbers[arrays[f"{split}.labels"]]
    return Found(arrays, {"classes": classes}, watched)


def _classes(data_dir: Path, said: list[str]) -> tuple[list[str], Array]:
    """The classes, and the class number of each label in the order found."""
    if all(label.isdecimal() for label in said):
        numbers = [int(label) for label in said]
        if max(numbers) >= MOST_CLASSES:
            raise DataError(f"{data_dir}: the label {max(numbers)} in an archive; expected less than {MOST_CLASSES:,}")
        values = np.array(numbers, np.int32)
        return list(class_names(data_dir, count=int(values.max()) + 1)), values
    mixed = next((label for label in said if label.isdecimal()), None)
    if mixed is not None:
        other = next(label for label in said if not label.isdecimal())
        raise DataError(f"{data_dir}: some labels are numbers, such as {mixed}, and others are not, such as '{other}'")
    named = class_names(data_dir, count=0) if label_file(data_dir) else tuple(sorted(set(said)))
    unknown = next((label for label in said if label not in named), None)
    if unknown is not None:
        raise DataError(f"{label_file(data_dir)}: has no class '{unknown}'{did_you_mean(unknown, named)}")
    return list(named), np.array([named.index(label) for label in said], np.int32)


def _label(path: Path, sample: Sample) -> str:
    """A sample's label: a number in decimal digits, or the name of a class."""
    for ending in LABELS:
        text = sample.labels.get(ending)
        if text is None:
            continue
        label = _from_json(text) if ending == "json" else text.strip()
        if label.isdecimal() and len(label) > MOST_DIGITS:
            raise DataError(f"{path}: {sample.key}: a label of {len(label)} digits")
        if label:
            return str(int(label)) if label.isdecimal() else label
    expected = ", ".join(f".{ending}" for ending in LABELS)
    raise DataError(f"{path}: {sample.key}: an image without a label; expected one in {expected}")


def _from_json(text: str) -> str:
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    values = [stored[key] for key in JSON_KEYS if key in stored] if isinstance(stored, dict) else [stored]
    return str(values[0]).strip() if values and isinstance(values[0], int | str) else ""


def _samples(path: Path) -> Iterator[Sample]:
    """Samples: adjacent members with the same key, which is the name up to its first dot."""
    sample: Sample | None = None
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # which would otherwise grow by a kilobyte per member
                if member.size < 0 or archive.offset <= member.offset:  # would loop forever
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not member.isreg() or not stem or folder.startswith("__MACOSX"):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if sample is None or sample.key != key:
                    if sample is not None and (sample.image or sample.labels):
                        yield sample
                    sample = Sample(key)
                ending = ending.lower().rpartition(".")[2]
                if f".{ending}" in image_extensions() and sample.image is None:
                    _check_plain(path, member)
                    sample.image = member
                elif ending in LABELS and member.size <= MOST_LABEL:
                    opened = archive.extractfile(member)
                    assert opened is not None  # a regular member
                    sample.labels[ending] = opened.read().decode("utf-8", "replace")
            _check_end(archive)
    except DAMAGE as error:
        raise DataError(f"{path}: not a complete, uncompressed tar archive ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if sample is not None and (sample.image or sample.labels):
        yield sample


def _check_end(archive: tarfile.TarFile) -> None:
    """Require zeros or nothing after the last member, because tarfile also ends silently at a damaged header."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if any(archive.fileobj.read(tarfile.BLOCKSIZE)):
        raise tarfile.ReadError(f"a damaged header at byte {archive.offset}")


def _check_plain(path: Path, member: tarfile.TarInfo) -> None:
    """Require a member in one stretch of the file, no longer than an image may be."""
    end = member.offset_data + member.size
    if member.issparse() or member.size > MOST_IMAGE or end > path.stat().st_size:
        raise DataError(f"{path}: {member.name}: sparse or too large, or the archive is cut short")
