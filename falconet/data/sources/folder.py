"""Class folders of image files: train/<class>/ and val/<class>/ (or validation/<class>/)."""

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from falconet.config.fields import require_photos
from falconet.data.image_files import kind
from falconet.data.index import Array, Found, check_below, check_lengths, check_paths, check_types, indexed, say
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.storage import FileSource, Names, Splits
from falconet.errors import DataError, did_you_mean
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

VALIDATION_NAMES = ("val", "validation")
SPLITS = ("train", "validation")
TYPES = {"names": np.uint8, "offsets": np.int64, "labels": np.int32}
MOST_REPORTED = 5  # skipped entries, by name


def load(data_dir: Path) -> Splits:
    """The classes are the sorted names of train/'s folders; validation may have fewer of them."""
    require_photos(data_dir)
    roots = {"train": _existing(data_dir, ("train",)), "validation": _existing(data_dir, VALIDATION_NAMES)}
    found = indexed(data_dir, kind=f"folders-{roots['validation'].name}", search=lambda: _search(roots), check=_check)
    class_names = tuple(os.fsdecode(bytes.fromhex(name)) for name in found.facts["classes"])
    train, validation = (_source(found, split, root=roots[split], class_names=class_names) for split in SPLITS)
    return Splits(
        train=train,
        validation=validation,
        native_size=None,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        layout="class folders",
    )


def _check(found: Found) -> None:
    classes = [os.fsdecode(bytes.fromhex(name)) for name in found.facts["classes"]]
    if len(set(classes)) != len(classes) or any(name in ("", ".", "..") or {"/", "\0"} & {*name} for name in classes):
        raise ValueError("invalid class names")
    for split in SPLITS:
        names, offsets, labels = (found.arrays[f"{split}.{name}"] for name in TYPES)
        check_types(dict(zip(TYPES, (names, offsets, labels), strict=True)), TYPES)
        check_paths(names, offsets)
        check_lengths(offsets[1:], labels)
        check_below(labels, len(classes), what="labels")
        if not len(labels):
            raise ValueError("no image")


def _source(found: Found, split: str, *, root: Path, class_names: tuple[str, ...]) -> FileSource:
    arrays = found.arrays
    names = Names(arrays[f"{split}.names"].tobytes(), arrays[f"{split}.offsets"])
    return FileSource(root, names, arrays[f"{split}.labels"].astype(np.int64), class_names)


@dataclass
class Listing:
    """Files found so far, as bytes and numbers instead of one Python object each."""

    names: bytearray = field(default_factory=bytearray)
    ends: "array[int]" = field(default_factory=lambda: array("q", [0]))
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    folders: list[Path] = field(default_factory=list)  # all that were listed
    skipped: list[str] = field(default_factory=list)  # with the reason

    def add(self, name: str, label: int) -> None:
        self.names += os.fsencode(name)
        self.ends.append(len(self.names))
        self.labels.append(label)

    def arrays(self, split: str) -> dict[str, Array]:
        return {
            f"{split}.names": np.frombuffer(bytes(self.names), np.uint8),
            f"{split}.offsets": np.array(self.ends, np.int64),
            f"{split}.labels": np.array(self.labels, np.int32),
        }


def _search(roots: dict[str, Path]) -> Found:
    train, validation = roots["train"], roots["validation"]
    class_names = _class_names(train)
    validation_names = _class_names(validation)
    for name in validation_names:
        if name not in class_names:
            raise DataError(f"{validation / name}: no such class in {train}{did_you_mean(name, class_names)}")
    numbers = {name: number for number, name in enumerate(class_names)}
    arrays: dict[str, Array] = {}
    folders: list[Path] = []
    skipped: list[str] = []
    with Counting(f"listing {train.parent}", quiet=not is_first(os.environ)) as counting:
        for split, names in zip(SPLITS, (class_names, validation_names), strict=True):
            listing = Listing(folders=[roots[split]])
            for name in names:
                before = len(listing.labels)
                _list(roots[split] / name, numbers[name], listing)
                counting.add(len(listing.labels) - before)
            folders += listing.folders
            skipped += listing.skipped
            arrays |= listing.arrays(split)
    for line in skipped[:MOST_REPORTED]:
        say(line)
    if len(skipped) > MOST_REPORTED:
        say(f"{train.parent}: {len(skipped) - MOST_REPORTED:,} more were skipped, because they are not files")
    return Found(arrays, {"classes": [os.fsencode(name).hex() for name in class_names]}, folders)


def _existing(data_dir: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    raise DataError(f"{data_dir}: no folder {' or '.join(f'{name}/' for name in names)} in it")


def _class_names(root: Path) -> tuple[str, ...]:
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{root}: empty, expected one folder per class")
    return tuple(names)


def _list(folder: Path, label: int, listing: Listing) -> None:
    before = len(listing.labels)
    for name in image_names(str(folder), "", listing):
        listing.add(name, label)
    if len(listing.labels) == before:
        raise DataError(f"{folder}: no image in this class folder")


def image_names(folder: str, prefix: str, listing: Listing, *, linked: bool = False) -> Iterator[str]:
    """Sorted names with the prefix, also of subfolders; links to folders are followed only at the top, if `linked`."""
    listing.folders.append(Path(folder))
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=linked):
                yield from image_names(entry.path, f"{prefix}{entry.name}/", listing)
                continue
            ending = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122, a million names
            why = _why_not(entry) if ending in image_extensions() or entry.is_symlink() else ""
            if why:
                listing.skipped.append(f"{entry.path}: skipped, {why}")
            elif ending in image_extensions():
                yield prefix + entry.name


def _why_not(entry: "os.DirEntry[str]") -> str:
    """Opening a pipe would wait, and a link to a folder could lead in circles; readers report broken links."""
    if entry.is_file(follow_symlinks=False):
        return ""
    try:
        mode = entry.stat().st_mode  # of a link's target
    except OSError:
        return ""
    link = "a link to " if entry.is_symlink() else ""
    return "" if stat.S_ISREG(mode) else f"{link}{kind(mode)}"


@cache
def image_extensions() -> frozenset[str]:
    """File extensions of the formats that Pillow can read, not only write."""
    known = Image.registered_extensions()  # also loads Pillow's plugins
    return frozenset(ending for ending, kind in known.items() if kind in Image.OPEN)


DIGEST_CHUNK = 1 << 20  # bytes

# Digests of the original's ImageNet folders start and end like this; the middle is not known to us.
IMAGENET = {"train": ("17aed950", "aa95"), "validation": ("8d6a57a7", "d5bd")}


def folder_md5(folder: Path, *, workers: int) -> str:
    """The md5 of the sorted md5s of all files, whatever their names, in hexadecimal: as the package checksumdir."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            digests = sorted(pool.map(_file_md5, _files(folder)))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return hashlib.md5("".join(digests).encode(), usedforsecurity=False).hexdigest()


def is_imagenet(digest: str, split: str) -> bool:
    """Whether it is the digest of the original's folder, as far as it is known: 48 of 128 bits."""
    begin, end = IMAGENET[split]
    return digest.startswith(begin) and digest.endswith(end)


def _files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        yield from (f"{root}/{name}" for name in names)


def _file_md5(path: str) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123, a million of them
        while chunk := file.read(DIGEST_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
