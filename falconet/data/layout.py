"""The layout of a folder of photos: packed shards, TFRecords, archives, class folders, or a table of labels."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from falconet.config.fields import require_photos
from falconet.data.keyed import IntArray, Purpose, uniform
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.sources import folder, packed, photo_table, tar, tfrecord
from falconet.data.sources.photo_table import Labelled
from falconet.data.sources.table_formats import SPREADSHEETS
from falconet.data.storage import BoolArray, FileSource, Names, Splits
from falconet.errors import DataError, did_you_mean
from falconet.report.console import counted

INNER = "imagenet-data"  # a subfolder that the TensorFlow program also used
FOLDERS = "class folders"
MOST_SUSPECTED = 10  # classes to look into
MOST_ALIKE = 3  # groups of classes that are named
MOST_WRAPPERS = 3  # nested folders with only one folder in them: archives unpack to photos/photos/


@dataclass(frozen=True)
class Division:
    """How to split photos: each by its name, so that it stays on its side."""

    share: float = 0.2  # the part of each class that validates
    seed: int = 0


USUAL = Division()


def load_photos(path: Path, division: Division = USUAL, keys: tfrecord.Keys = tfrecord.USUAL) -> Splits:
    """Load the photos in a folder, or in a table of photos and labels.

    Without photos to train on, the training source is empty. The layouts are tried in the order of docs/using/data.md.
    """
    splits = survey(path, division, keys)
    _check_trained(splits)
    return splits


def survey(path: Path, division: Division = USUAL, keys: tfrecord.Keys = tfrecord.USUAL) -> Splits:
    """Load photos, even with classes in val/ that train/ does not have: they come last."""
    try:
        splits = _found(path, division, keys)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
    return replace(splits, notes=(*splits.notes, *_alike(path, splits.class_names)))


def _alike(path: Path, classes: Sequence[str]) -> list[str]:
    """A note on classes whose names hardly differ, such as Cat and cat: probably one class, trained as several."""
    groups: dict[str, list[str]] = {}
    for name in sorted({*classes}):
        plain = unicodedata.normalize("NFKC", name).casefold().replace("_", " ").replace("-", " ")
        groups.setdefault(" ".join(plain.split()), []).append(f"'{name}'")
    found = [f"{', '.join(names[:-1])} and {names[-1]}" for names in groups.values() if len(names) > 1]
    if not found:
        return []
    more = [f"{len(found) - MOST_ALIKE:,} more"] if len(found) > MOST_ALIKE else []
    shown = "; ".join([*found[:MOST_ALIKE], *more])
    return [f"{path}: classes with nearly the same name are trained as different ones: {shown}"]


def _check_trained(splits: Splits) -> None:
    """Require train/ to have the classes in val/."""
    train, validation = splits.train, splits.validation
    if not isinstance(train, FileSource) or not isinstance(validation, FileSource) or train.root == validation.root:
        return
    counts = np.bincount(train.labels, minlength=len(splits.class_names))
    missing = np.flatnonzero(counts == 0).tolist()
    if missing:
        name, known = splits.class_names[missing[0]], splits.class_names[: missing[0]]
        meant = did_you_mean(name, known) or "; expected the same classes in both"
        raise DataError(f"{validation.root / name}: {train.root} has no class '{name}'{meant}")


def _found(path: Path, division: Division, keys: tfrecord.Keys) -> Splits:
    require_photos(path)
    if folder.is_run(path):
        raise DataError(f"{path}: is a run folder; expected photos, or `falconet restore {path}`, which continues it")
    if path.is_file() and path.suffix.lower() in folder.image_extensions():
        raise DataError(f"{path}: is a photo; expected the folder with a folder per class, or a table")
    if path.is_file():
        return _from_tables(path.parent, {"all": path}, division)
    inner, notes = _unwrapped(path)
    for place in (path, path / INNER, inner):
        splits = _divided_already(place, division, keys) if place.is_dir() else None
        if splits is not None:
            return replace(splits, notes=(*notes, *splits.notes)) if place == inner else splits
    splits = _from_folders(inner, division)
    return replace(splits, notes=(*notes, *splits.notes))


def _divided_already(place: Path, division: Division, keys: tfrecord.Keys) -> Splits | None:
    """The splits of a layout with a training part of its own; None if it has none."""
    shards = packed.find(place)
    if any(shards.values()):
        return _hiding(packed.load(place, shards), place, what="packed shards")
    parts = folder.split_folders(place)
    if "train" in parts and folder.subfolders(place / parts["train"]):
        return _from_split_folders(place, parts, division)
    records = tfrecord.find(place)
    if any(records.values()):
        return _hiding(tfrecord.load(place, records, keys), place, what="TFRecords")
    archives = tar.find(place)
    return _hiding(tar.load(place, archives), place, what="tar archives") if any(archives.values()) else None


def _hiding(splits: Splits, place: Path, *, what: str) -> Splits:
    """The splits of shards, with a note if they lie beside class folders: photos added to these would not be read."""
    try:
        root = place / folder.split_folders(place).get("train", "")
        first = next((name for name in islice(folder.subfolders(root), MOST_SUSPECTED) if _holds(root / name)), None)
    except OSError:  # it is only a note
        return splits
    if first is None:
        return splits
    note = f"{root / first} and other class folders: unused, because the {what} in {place} are read instead"
    return replace(splits, notes=(*splits.notes, note))


def _holds(place: Path) -> bool:
    """Whether a folder holds photos, directly or in a folder of its own."""
    return folder.has_photos(place) or any(folder.has_photos(place / name) for name in folder.subfolders(place))


def _from_folders(place: Path, division: Division) -> Splits:
    """The splits from tables, a validation folder alone, or unsplit class folders; DataError if there are none."""
    tables, parts = photo_table.find(place), folder.split_folders(place)
    if tables.is_named_so and photo_table.names_photos(place, tables.paths):
        return _from_tables(place, tables.paths, division)
    if "train" not in parts and "validation" in parts and folder.subfolders(place / parts["validation"]):
        return _from_split_folders(place, parts, division)
    if {*folder.subfolders(place)} - {*parts.values()}:  # among others, a folder called test is a class
        found = folder.listed(place)
        source = found.classes()
        if len(source.class_names) > 1 or (len(source) and not tables.paths):
            notes = [
                *found.notes(),
                *(f"{path}: unused, because the photos are in class folders" for path in tables.paths.values()),
                *_beside(place),
                *_datasets(place, source.class_names),
            ]
            return _split(Labelled(source, FOLDERS, source.names, notes=tuple(notes)), division)
    if tables.paths:
        return _from_tables(place, tables.paths, division)
    raise DataError(_unknown(place))


def _beside(place: Path) -> list[str]:
    """A note if the folder is only the training part of the data."""
    parts = _seen_parts(place.absolute().parent)
    if parts.get("train") != place.absolute().name or "validation" not in parts:
        return []
    other = place.absolute().parent / parts["validation"]
    return [f"{other}: unused, because it is beside the folder given; {place.absolute().parent} would validate on it"]


def _datasets(place: Path, classes: Sequence[str]) -> list[str]:
    """A note on classes that look like datasets: the given folder may be one level too high."""
    found = [
        place / name for name in classes[:MOST_SUSPECTED] if {"train", "validation"} <= {*_seen_parts(place / name)}
    ]
    return [
        f"{path}: a class here, but it holds train/ and val/; did you mean `falconet train {path}`?" for path in found
    ]


def _seen_parts(place: Path) -> dict[str, str]:
    """The folders of the data's parts, for a note; none if the system does not let us look."""
    try:
        return folder.split_folders(place)
    except OSError:
        return {}


def _unwrapped(path: Path) -> tuple[Path, list[str]]:
    """The folder inside folders with nothing but one folder in them, and a note about it."""
    place = path
    for _ in range(MOST_WRAPPERS):
        inner = folder.subfolders(place)
        if len(inner) != 1 or folder.split_folders(place) or photo_table.find(place).paths or folder.has_photos(place):
            break
        if not folder.has_folders(place / inner[0]) or folder.has_photos(place / inner[0]):
            break  # a class, or one level too few, which `_unknown` explains
        place = place / inner[0]
    return place, ([] if place == path else [f"the photos are in {place}, the only folder in {path}"])


def _from_split_folders(place: Path, parts: dict[str, str], division: Division) -> Splits:
    """Class folders in train/ and val/; one of the two may be missing."""
    listed = {part: folder.listed(place, below=parts[part]) for part in ("train", "validation") if part in parts}
    notes = [note for each in listed.values() for note in each.notes()]
    if "test" in parts:
        notes.append(f"{place / parts['test']}: unused; {parts['validation']}/ validates")
    sources = {part: each.classes() for part, each in listed.items()}
    for part, source in sources.items():
        if not len(source):
            raise DataError(f"{place / parts[part]}: no photo in its folders, expected one folder per class")
    if "train" not in sources:
        return splits_of(None, sources["validation"], layout=FOLDERS, notes=tuple(notes))
    if "validation" not in sources:
        return _split(Labelled(sources["train"], FOLDERS, sources["train"].names, notes=tuple(notes)), division)
    own = sources["train"].class_names
    names = (*own, *(name for name in sources["validation"].class_names if name not in own))
    train, validation = sources["train"].renumbered(names), sources["validation"].renumbered(names)
    absent = sorted({*own} - {*sources["validation"].class_names})
    if absent:
        shown = f"'{absent[0]}'" + (f" and {len(absent) - 1:,} more" if len(absent) > 1 else "")
        notes.append(f"{validation.root}: no photo of {counted(len(absent), 'class')}: {shown}")
    return splits_of(train, validation, layout=FOLDERS, notes=tuple(notes))


def _from_tables(place: Path, paths: dict[str, Path], division: Division) -> Splits:
    found = photo_table.load(place, paths)
    return _split(found, division) if found.validates is None else _divided(found, found.validates)


def _split(found: Labelled, division: Division) -> Splits:
    """Split photos by their names."""
    labels = found.source.labels if found.label_sets is None else None
    validates = held_out(found.keys, labels, division)
    return replace(_divided(found, validates), held_out=division.share)


def _divided(found: Labelled, validates: BoolArray) -> Splits:
    train, validation = (found.source.subset(np.flatnonzero(side)) for side in (~validates, validates))
    return splits_of(train, validation, layout=found.layout, notes=found.notes, label_sets=found.label_sets)


def held_out(names: Names, labels: IntArray | None, division: Division) -> BoolArray:
    """Which photos validate. A photo's name and the seed decide, whatever other photos there are.

    The exception is a class whose photos, two or more, would all be on one side: one of them moves to the other side,
    until more photos are added.
    """
    digests = [hashlib.blake2b(names.coded(index), digest_size=8).digest() for index in range(len(names))]
    numbers = np.frombuffer(b"".join(digests), "<i8").astype(np.int64)
    drawn = uniform(seed=division.seed, epoch=0, indices=numbers, purpose=Purpose.SPLIT, draws=1)[:, 0]
    validates: BoolArray = drawn < division.share
    if labels is None or division.share == 1:
        return validates
    order = np.argsort(labels, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(own) > 1 and not validates[own].any():
            validates[own[np.argmin(drawn[own])]] = True
        elif len(own) and validates[own].all():
            validates[own[np.argmax(drawn[own])]] = False
    return validates


def splits_of(
    train: FileSource | None,
    validation: FileSource,
    *,
    layout: str,
    notes: Sequence[str] = (),
    label_sets: BoolArray | None = None,
) -> Splits:
    """Splits of files; `train`: None if there is nothing to train on."""
    return Splits(
        train=validation.subset(np.zeros(0, np.int64)) if train is None else train,
        validation=validation,
        native_size=None,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        layout=layout,
        label_sets=label_sets,
        notes=tuple(notes),
    )


def is_flat(place: Path) -> bool:
    """Whether photos lie directly in a folder, with neither class folders nor a table."""
    is_plain = place.is_dir() and not folder.subfolders(place) and not photo_table.find(place).paths
    return is_plain and folder.has_photos(place)


def unlabelled(place: Path, *, classes: int) -> Splits:
    """Photos of a flat folder, to train and to validate; which of the classes they have is unknown."""
    found = folder.listed(place)
    source = FileSource(found.root, found.names, found.labels, tuple(str(number) for number in range(classes)))
    return splits_of(source, source, layout="photos without classes", notes=found.notes())


def _unknown(place: Path) -> str:
    """Why a folder has no photos with classes, and what was expected."""
    found = folder.listed(place)
    if not len(found.names) and found.unread:
        return folder.unread_notes(found)[0]
    if not len(found.names):
        return (
            f"{place}: found no photos; expected a folder per class, such as {place}/cat/ and {place}/dog/, or such"
            " folders in train/ and val/, a table of photos and labels, TFRecords, tar archives or packed shards"
        )
    example = place / Path(found.names[0]).parent
    sheet = next((path.name for path in sorted(place.iterdir()) if path.suffix.lower() in SPREADSHEETS), None)
    return (
        f"{example}: {counted(len(found.names), 'photo')}, but no classes; expected a folder per class, such as"
        f" {example}/cat/ and {example}/dog/, or a table of photos and labels beside them, such as labels.csv"
        + (f"; {sheet} is a spreadsheet, save it as CSV" if sheet else "")
    )
