"""Folders of image files: which are listed, in which order, and what is passed over."""

import errno
import hashlib
import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from falconet.data.image_files import kind
from falconet.data.index import Array, Found, check_below, check_lengths, check_paths, check_types, indexed, say
from falconet.data.keyed import IntArray
from falconet.data.sources.table_formats import ENDINGS
from falconet.data.storage import FileSource, Names
from falconet.errors import DataError
from falconet.parallel.environment import is_first
from falconet.report.console import Counting, are

# Usual names for the parts of a dataset, in lower case.
PARTS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
TYPES = {"names": np.uint8, "offsets": np.int64, "labels": np.int32}
LOOSE = -1  # the label of a photo directly in the root
NOWHERE = (errno.ENOENT, errno.ELOOP)  # the system's answer for a broken link, and for one to itself
MOST_REPORTED = 5  # skipped entries that are named
# Left beside photos by operating systems and network disks; "@eaDir" holds thumbnails.
CLUTTER = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})
RUN = ("config.yaml", "plan.txt")  # files in a run folder, whose images are no photos
RUNS = "runs"  # where run folders are, by default
# Formats that Pillow recognises but cannot decode itself, and a page description.
UNDECODABLE = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})
HEIC = frozenset({".heic", ".heif", ".hif"})  # photos of phones
# Files that look like photos to a person, but that Pillow cannot read.
UNREAD = frozenset(
    {
        *HEIC,
        *(".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf", ".svg", ".pdf"),
        *(".ai", ".xcf", ".mov", ".mp4", ".avi", ".webm", ".mkv", ".mpg", ".mpeg"),
    }
)


@dataclass(frozen=True, eq=False)
class Listed:
    """The photos below a folder, by name."""

    root: Path
    names: Names  # N, relative to the root
    labels: IntArray  # N, the number of the folder below the root that a photo is in, or LOOSE
    folders: tuple[str, ...]  # directly below the root, sorted, including those without a photo
    unread: Mapping[str, int]  # files of formats that cannot be read, by extension

    @property
    def loose(self) -> int:
        return int(np.count_nonzero(self.labels == LOOSE))

    def classes(self) -> FileSource:
        """The photos in class folders: a folder without a photo is no class, and loose photos have no class."""
        counts = np.bincount(self.labels[self.labels != LOOSE], minlength=len(self.folders))
        numbers = np.cumsum(counts > 0) - 1
        source = FileSource(
            self.root,
            self.names,
            np.where(self.labels == LOOSE, LOOSE, numbers[self.labels] if len(numbers) else LOOSE),
            tuple(name for name, count in zip(self.folders, counts.tolist(), strict=True) if count),
        )
        return source.subset(np.flatnonzero(self.labels != LOOSE)) if self.loose else source

    def notes(self) -> tuple[str, ...]:
        """Notes on folders that are no class, and on photos that are skipped."""
        empty = sorted({*self.folders} - {*self.classes().class_names})
        notes = [f"{self.root / name}: no photo in it, so it is not a class" for name in empty[:MOST_REPORTED]]
        if len(empty) > MOST_REPORTED:
            notes.append(f"{self.root}: {are(len(empty) - MOST_REPORTED, 'more folder')} without a photo")
        notes += [f"{path}: left out, because it holds runs" for path in run_folders(self.root)[:MOST_REPORTED]]
        if self.loose and self.folders:
            notes.append(f"{self.root}: {are(self.loose, 'photo')} in no class folder, and skipped")
        return (*notes, *unread_notes(self))


def unread_notes(found: Listed) -> tuple[str, ...]:
    """A note on files that look like photos to a person, but cannot be read."""
    if not found.unread:
        return ()
    kinds = ", ".join(f"{count:,} {ending}" for ending, count in sorted(found.unread.items()))
    return (f"{found.root}: skipped {kinds}, which Pillow cannot read; convert photos among them to JPEG",)


def listed(data_dir: Path, *, below: str = "") -> Listed:
    """List the photos in `data_dir`, or in a folder `below` it, from its index if nothing has changed."""
    root = data_dir / below
    found = indexed(data_dir, kind=f"photos-{below}" if below else "photos", search=lambda: _search(root), check=_check)
    arrays, facts = found.arrays, found.facts
    return Listed(
        root,
        Names(arrays["names"].tobytes(), arrays["offsets"]),
        arrays["labels"].astype(np.int64),
        tuple(os.fsdecode(bytes.fromhex(name)) for name in facts["folders"]),
        facts["unread"],
    )


def _check(found: Found) -> None:
    folders = [os.fsdecode(bytes.fromhex(name)) for name in found.facts["folders"]]
    if len(set(folders)) != len(folders) or any(name in ("", ".", "..") or {"/", "\0"} & {*name} for name in folders):
        raise ValueError("invalid folder names")
    unread = found.facts["unread"]
    if not unread.keys() <= UNREAD or any(type(count) is not int for count in unread.values()):
        raise ValueError("invalid file extensions")
    check_types(found.arrays, TYPES)
    names, offsets, labels = (found.arrays[name] for name in TYPES)
    check_paths(names, offsets)
    check_lengths(offsets[1:], labels)
    check_below(labels - LOOSE, len(folders) - LOOSE, what="labels")


@dataclass
class Listing:
    """Files found so far, as bytes and numbers instead of one Python object each."""

    names: bytearray = field(default_factory=bytearray)
    ends: "array[int]" = field(default_factory=lambda: array("q", [0]))
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    folders: list[Path] = field(default_factory=list)  # all folders that were listed
    skipped: list[str] = field(default_factory=list)  # with the reason
    refused: list[OSError] = field(default_factory=list)  # folders and links that the system does not let us look at
    unread: Counter[str] = field(default_factory=Counter)  # extensions
    also: frozenset[str] = frozenset()  # extensions of UNREAD whose files are listed nevertheless

    def add(self, name: str, label: int) -> None:
        self.names += os.fsencode(name)
        self.ends.append(len(self.names))
        self.labels.append(label)

    def arrays(self) -> dict[str, Array]:
        return {
            "names": np.frombuffer(bytes(self.names), np.uint8),
            "offsets": np.array(self.ends, np.int64),
            "labels": np.array(self.labels, np.int32),
        }


def _search(root: Path) -> Found:
    listing, folders = Listing(folders=[root]), []
    with Counting(f"listing {root}", quiet=not is_first(os.environ)) as counting, os.scandir(root) as entries:
        for entry in _visible(entries):
            before = len(listing.labels)
            if _is_folder(entry):  # here, links to folders are followed
                folders.append(entry.name)
                for name in image_names(entry.path, f"{entry.name}/", listing):
                    listing.add(name, len(folders) - 1)
                if listing.refused:  # an index without these photos would hide them from later runs too
                    raise listing.refused[0]
            elif _is_photo(entry, listing):
                listing.add(entry.name, LOOSE)
            counting.add(len(listing.labels) - before)
    for line in listing.skipped[:MOST_REPORTED]:
        say(line)
    if len(listing.skipped) > MOST_REPORTED:
        say(f"{root}: {len(listing.skipped) - MOST_REPORTED:,} more were skipped, because they are not files")
    facts = {"folders": [os.fsencode(name).hex() for name in folders], "unread": dict(listing.unread)}
    return Found(listing.arrays(), facts, listing.folders)


def subfolders(root: Path) -> list[str]:
    """The folders, and links to folders, that may hold photos."""
    with os.scandir(root) as entries:
        return [entry.name for entry in _visible(entries) if _is_folder(entry)]


def has_folders(root: Path) -> bool:
    """Whether a folder directly holds folders, or links to folders that can be followed."""
    with os.scandir(root) as entries:
        return any(map(_seems_folder, _visible(entries)))


def has_photos(root: Path) -> bool:
    """Whether a folder directly holds photos, by their names."""
    with os.scandir(root) as entries:
        return any(
            _ending(entry.name) in image_extensions() and not _seems_folder(entry) for entry in _visible(entries)
        )


def split_folders(place: Path) -> dict[str, str]:
    """The folders named after parts of the data, by part: train, validation, and test beside a validation folder."""
    found: dict[str, str] = {}
    for name in subfolders(place):
        for part, spellings in PARTS.items():
            if name.lower() in spellings:
                found.setdefault(part, name)
    if "test" in found and "validation" not in found:
        found["validation"] = found.pop("test")
    return found


def validates_by_name(place: Path) -> bool:
    """Whether a folder's name says that it validates: val, test or the like."""
    return place.absolute().name.lower() in (*PARTS["validation"], *PARTS["test"])


def _visible(entries: "Iterator[os.DirEntry[str]]") -> "list[os.DirEntry[str]]":
    """Entries by name, without hidden ones, what systems leave behind, and run folders."""
    return sorted(
        (
            entry
            for entry in entries
            if not entry.name.startswith(".") and entry.name not in CLUTTER and not _is_run(entry)
        ),
        key=lambda entry: entry.name,
    )


def run_folders(root: Path) -> list[Path]:
    """The folders that hold a run of Falconet's, or several."""
    with os.scandir(root) as entries:
        return sorted(Path(entry.path) for entry in entries if _is_run(entry))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder or a link to one; OSError for a link that may be one but cannot be followed."""
    try:
        return entry.is_dir()
    except OSError as error:
        is_named_as_file = _ending(entry.name) in image_extensions() or entry.name.lower().endswith(ENDINGS)
        if error.errno != errno.ELOOP and not is_named_as_file:  # the former: a link to itself
            raise
        return False


def _seems_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder, or a link to one that can be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a file, or a link to one that can be followed."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_run(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry holds a run of Falconet's, or several; what cannot be looked into does not."""
    try:
        if not entry.is_dir(follow_symlinks=False):
            return False
        found = [Path(entry.path)]
        if entry.name == RUNS:
            found += found[0].iterdir()
        return any(map(is_run, found))
    except OSError:  # listing it tells why
        return False


def is_run(path: Path) -> bool:
    """Whether a path is a run folder; what cannot be looked into is none, and listing it tells why."""
    try:
        return all((path / name).is_file() for name in RUN)
    except OSError:
        return False


def image_names(folder: str, prefix: str, listing: Listing, *, linked: bool = False) -> Iterator[str]:
    """Sorted names with the prefix, subfolders included; links to folders are followed only at the top, if `linked`.

    OSError if the folder itself cannot be listed; what is refused below it is noted, and the rest is listed.
    """
    listing.folders.append(Path(folder))
    with os.scandir(folder) as entries:
        for entry in _visible(entries):
            try:
                if entry.is_dir(follow_symlinks=linked):
                    yield from image_names(entry.path, f"{prefix}{entry.name}/", listing)
                elif _is_photo(entry, listing):
                    yield prefix + entry.name
            except OSError as error:
                listing.refused.append(error)


def _is_photo(entry: "os.DirEntry[str]", listing: Listing) -> bool:
    """Whether an entry is a photo by its name; an entry that cannot be one is noted."""
    ending = _ending(entry.name)
    is_named = ending in image_extensions() or ending in listing.also
    why = _why_not(entry, is_named=is_named) if is_named or entry.is_symlink() else ""
    if why:
        listing.skipped.append(f"{entry.path}: skipped, {why}")
    elif ending in UNREAD and not is_named:
        listing.unread[ending] += 1
    return is_named and not why


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122, a million names


def _why_not(entry: "os.DirEntry[str]", *, is_named: bool) -> str:
    """Why an entry is not a photo: opening a pipe would wait, and links to folders may lead in circles."""
    if entry.is_file(follow_symlinks=False):
        return ""
    try:
        mode = entry.stat().st_mode  # the target's, for a link
    except OSError as error:
        leads = "leads nowhere" if error.errno in NOWHERE else f"cannot be followed ({error.strerror})"
        return "" if is_named else f"a link that {leads}"
    link = "a link to " if entry.is_symlink() else ""
    return "" if stat.S_ISREG(mode) else f"{link}{kind(mode)}"


@cache
def image_extensions() -> frozenset[str]:
    """File extensions of formats that Pillow can read, not only write."""
    known = Image.registered_extensions()  # also loads Pillow's plugins
    return frozenset(ending for ending, name in known.items() if name in Image.OPEN and name not in UNDECODABLE)


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
    """Whether a digest is that of the original's folder, as far as it is known: 48 of 128 bits."""
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
