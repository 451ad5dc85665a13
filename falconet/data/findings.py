"""Findings about a dataset: broken photos, unusual ones, copies, and badly divided classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from falconet.data import fingerprints
from falconet.data.headers import MISSING
from falconet.data.image_files import UNREAD_HEIC
from falconet.data.inspection import Inspection, Mark
from falconet.data.keyed import IntArray
from falconet.data.sources import folder
from falconet.data.storage import FileSource, PhotoSource, Splits

TRAIN, VALIDATION = "train", "val"


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a photo is worth a remark."""

    least_side: int = 32  # pixels on the shorter side
    most_pixels: int = 50_000_000
    most_ratio: float = 4.0  # the longer side over the shorter
    most_bits: int = fingerprints.NEAR  # in which fingerprints of near copies may differ
    imbalance: float = 3.0  # the largest class over the smallest


class Photo(NamedTuple):
    """One photo, as reports name it."""

    number: int
    path: str
    side: str
    label: str
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """One kind of finding, and its photos."""

    kind: str  # its key in the JSON
    title: str
    meaning: str  # what it means for training
    is_broken: bool
    photos: Sequence[Photo]


@dataclass(frozen=True)
class Copies:
    """Copies of one photo."""

    is_exact: bool
    photos: tuple[Photo, ...]

    @property
    def crosses(self) -> bool:
        """Whether some copies train and others validate."""
        return len({photo.side for photo in self.photos}) > 1

    @property
    def conflicts(self) -> bool:
        """Whether the copies have different classes."""
        return len({photo.label for photo in self.photos}) > 1


class ClassSize(NamedTuple):
    """The usable photos of a class."""

    name: str
    train: int
    validation: int


@dataclass(frozen=True)
class Findings:
    """All findings."""

    broken: tuple[Finding, ...]
    remarks: tuple[Finding, ...]
    copies: tuple[Copies, ...]
    classes: tuple[ClassSize, ...]
    untrained: tuple[str, ...]  # classes without a training photo, which training refuses
    unvalidated: tuple[str, ...]
    empty: tuple[str, ...]  # folders that would be classes
    checked: int
    photos: int
    extremes: tuple[str, ...] = ()  # the smallest and the largest photo, in words
    notes: tuple[str, ...] = field(default=())

    @property
    def is_broken(self) -> bool:
        return bool(self.broken or self.untrained)

    @property
    def imbalance(self) -> float:
        """Training photos in the largest class over those in the smallest that has any."""
        sizes = [each.train for each in self.classes if each.train]
        return max(sizes) / min(sizes) if sizes else 1.0

    def broken_photos(self) -> Iterator[Photo]:
        return (photo for finding in self.broken for photo in finding.photos)


BROKEN = {  # kind: title, meaning
    "truncated": ("truncated", "The file ends too early."),
    "empty": ("empty file", "The file has no bytes."),
    "not-an-image": ("not an image", "No decoder knows the content, such as a web page saved under a photo's name."),
    "too-large": ("too many pixels", "More than Pillow's limit, which guards against files that fill memory."),
    "missing": ("missing", "A table names it or a link leads to it, but it is not there."),
    "unreadable": ("cannot be read", "The system refuses to open it."),
    "damaged": ("damaged", "No decoder can read it."),
}
REASONS = {
    "truncated": "truncated",
    "empty file": "empty",
    "not an image": "not-an-image",
    UNREAD_HEIC: "not-an-image",
    MISSING: "missing",
}
MARKS = {
    Mark.DAMAGED: ("damaged-readable", "damaged, but readable", "Training reads it, but parts may be grey or shifted."),
    Mark.MISNAMED: (
        "wrong-extension",
        "wrong extension",
        "Training goes by the content and reads it; other programs may not.",
    ),
    Mark.CMYK: ("cmyk", "CMYK", "Converted to RGB without a colour profile: colours differ from those in editors."),
    Mark.WIDE: ("16-bit", "16-bit", "Training sees the upper 8 bits."),
    Mark.ANIMATED: ("animated", "several frames", "Training sees the first frame."),
    Mark.ROTATED: (
        "exif-rotated",
        "rotated by EXIF",
        "Training ignores the tag and sees the photo as it is stored, unlike photo viewers.",
    ),
    Mark.BLANK: ("blank", "one colour", "There is nothing to learn from it."),
}


def kind_of_broken(reason: str) -> str:
    """The kind of breakage, by the reason that training gives."""
    if reason.startswith("more than"):
        return "too-large"
    if reason.startswith("damaged") or reason in ("checksum mismatch", "cut short"):
        return "damaged"
    return REASONS.get(reason, "unreadable")


@dataclass(frozen=True, eq=False)
class Photos:
    """The photos of both parts, numbered consecutively, training photos first."""

    splits: Splits
    train: PhotoSource
    validation: PhotoSource

    def __len__(self) -> int:
        return len(self.train) + len(self.validation)

    def place(self, number: int) -> tuple[PhotoSource, int]:
        """The source of a photo, and its number there."""
        is_trained = number < len(self.train)
        return (self.train, number) if is_trained else (self.validation, number - len(self.train))

    def photo(self, number: int, detail: str = "") -> Photo:
        source, own = self.place(number)
        side = TRAIN if source is self.train and number < len(self.train) else VALIDATION
        return Photo(number, source.where(own), side, self.label(int(source.labels[own])), detail)

    def label(self, number: int) -> str:
        """The class of a photo, or the classes of its set."""
        names, sets = self.splits.class_names, self.splits.label_sets
        return names[number] if sets is None else " | ".join(names[at] for at in np.flatnonzero(sets[number]).tolist())

    def class_sizes(self, seen: Inspection) -> tuple[ClassSize, ...]:
        """The number of usable photos in each class, without the broken ones, which training leaves out."""
        usable, border = seen.marks & Mark.BROKEN == 0, len(self.train)
        parts = (self.train.labels[usable[:border]], self.validation.labels[usable[border:]])
        return tuple(map(ClassSize, self.splits.class_names, *(self._counts(part).tolist() for part in parts)))

    def _counts(self, labels: IntArray) -> IntArray:
        names, sets = self.splits.class_names, self.splits.label_sets
        if sets is None:
            return np.bincount(labels, minlength=len(names))
        return np.asarray(sets[labels].sum(axis=0), np.int64)


def find(photos: Photos, seen: Inspection, limits: Limits) -> Findings:
    """Everything found by an inspection, which may be of a part of the photos."""
    sizes = photos.class_sizes(seen)
    empty = _empty_folders(photos)
    has_both = len(photos.train) > 0 and len(photos.validation) > 0
    return Findings(
        broken=tuple(_broken(photos, seen)),
        remarks=tuple(_remarks(photos, seen, limits)),
        copies=tuple(_copies(photos, seen, limits.most_bits)),
        classes=sizes,
        untrained=tuple(each.name for each in sizes if has_both and not each.train and each.validation),
        unvalidated=tuple(each.name for each in sizes if has_both and each.train and not each.validation),
        empty=empty,
        checked=seen.checked,
        photos=len(photos),
        extremes=_extremes(seen),
        notes=tuple(note for note in photos.splits.notes if not _is_repeated(note, empty)),
    )


def _broken(photos: Photos, seen: Inspection) -> Iterator[Finding]:
    by_kind: dict[str, list[Photo]] = {}
    for number in seen.marked(Mark.BROKEN).tolist():
        reason = seen.details.get((number, Mark.BROKEN), "")
        by_kind.setdefault(kind_of_broken(reason), []).append(photos.photo(number, reason))
    for kind, (title, meaning) in BROKEN.items():
        if kind in by_kind:
            yield Finding(kind, title, meaning, True, by_kind[kind])


def _remarks(photos: Photos, seen: Inspection, limits: Limits) -> Iterator[Finding]:
    for mark, (kind, title, meaning) in MARKS.items():
        numbers = seen.marked(mark).tolist()
        own = [photos.photo(number, seen.details.get((number, mark), "")) for number in numbers]
        if own:
            yield Finding(kind, title, meaning, False, own)
    short, long = seen.sizes.min(axis=1), seen.sizes.max(axis=1)
    pixels = seen.sizes.prod(axis=1, dtype=np.int64)
    readable = (seen.marks & Mark.CHECKED != 0) & (seen.marks & Mark.BROKEN == 0)
    beyond = (
        (
            "tiny",
            f"a side below {limits.least_side} pixels",
            "Enlarged to the model's input.",
            short < limits.least_side,
        ),
        (
            "huge",
            f"more than {limits.most_pixels / 1e6:g} megapixels",
            "Each epoch decodes all of it; `falconet data pack --resize` shrinks it once.",
            pixels > limits.most_pixels,
        ),
        (
            "elongated",
            f"one side over {limits.most_ratio:g} times the other",
            "Validation sees its middle, training random parts.",
            long > limits.most_ratio * short,
        ),
    )
    for kind, title, meaning, is_so in beyond:
        numbers = np.flatnonzero(readable & is_so).tolist()
        own = [photos.photo(number, "{} x {} pixels".format(*seen.sizes[number])) for number in numbers]
        if own:
            yield Finding(kind, title, meaning, False, own)


def _copies(photos: Photos, seen: Inspection, most_bits: int) -> Iterator[Copies]:
    """Groups of equal files, then of photos that look the same; broken photos are in none."""
    usable = np.flatnonzero((seen.marks & Mark.CHECKED != 0) & (seen.marks & Mark.BROKEN == 0))
    words = seen.digests[usable].view([("", np.uint64)] * 2).ravel()
    order = np.argsort(words, kind="stable")
    starts = np.flatnonzero(np.r_[True, words[order][1:] != words[order][:-1]][: len(order)])
    lengths = np.diff(np.r_[starts, len(order)])
    several = lengths > 1  # few, as a rule: a million photos are not looked at one by one
    spans = zip(starts[several].tolist(), lengths[several].tolist(), strict=True)
    equal = {int(usable[order[at]]): usable[order[at : at + length]] for at, length in spans}
    for first in sorted(equal):
        yield Copies(True, tuple(photos.photo(number) for number in equal[first].tolist()))
    others = np.concatenate([np.zeros(0, np.int64), *(same[1:] for same in equal.values())])
    firsts = fingerprints.Fingerprints(seen.prints.keys, seen.prints.prints, seen.prints.is_flat.copy())
    firsts.is_flat[others] = True  # equal files are compared once
    for near in fingerprints.groups(fingerprints.near_pairs(firsts, most=most_bits)):
        members = sorted({each for number in near for each in equal.get(number, np.array([number])).tolist()})
        yield Copies(False, tuple(photos.photo(number) for number in members))


def _empty_folders(photos: Photos) -> tuple[str, ...]:
    """Folders beside the classes that have no photo."""
    roots = {source.root for source in (photos.train, photos.validation) if isinstance(source, FileSource)}
    if photos.splits.layout != "class folders":
        return ()
    known = {*photos.splits.class_names}
    return tuple(str(root / name) for root in sorted(roots) for name in folder.subfolders(root) if name not in known)


def _is_repeated(note: str, empty: Sequence[str]) -> bool:
    """Whether a note on the layout repeats what the findings say about classes."""
    return ": no photo of " in note or note.startswith(tuple(f"{path}: " for path in empty))


def _extremes(seen: Inspection) -> tuple[str, ...]:
    sizes = seen.sizes[seen.sizes[:, 0] > 0]
    if not len(sizes):
        return ()
    pixels = sizes.prod(axis=1, dtype=np.int64)
    ends = (sizes[pixels.argmin()], sizes[pixels.argmax()])
    return tuple(dict.fromkeys("{} x {}".format(*end) for end in ends))


def superfluous(found: Findings, *, near: bool) -> list[Photo]:
    """Training photos to leave out, so that none of the others is a copy of another or of a validation photo.

    Copies under several classes are all left out, because it is not known which label is right.
    """
    left: dict[int, Photo] = {}
    for copies in found.copies:
        if copies.is_exact or near:
            trained = [photo for photo in copies.photos if photo.side == TRAIN]
            kept = 0 if copies.crosses or copies.conflicts else 1
            left |= {photo.number: photo for photo in trained[kept:]}
    return [left[number] for number in sorted(left)]
