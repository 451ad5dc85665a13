"""Tables of photos and labels: finds them in a folder, and works out their columns and the photos they mean."""

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from falconet.data.sources import folder
from falconet.data.sources.shard_index import label_file, names_in
from falconet.data.sources.table_formats import ENDINGS, Cell, Table, read
from falconet.data.storage import BoolArray, FileSource, Names, key
from falconet.errors import DataError, did_you_mean
from falconet.report.console import are, counted
from falconet.writing import could_name_a_file

STEMS = ("labels", "label", "annotations", "metadata", "_annotations.coco", "_classes")  # for all photos of a folder
NOT_OURS = "bounding_boxes.csv"  # the end of the name of a table of boxes
PATHS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_name"),
    *("image_file", "image_id", "img", "img_path", "img_name", "photo", "name", "id"),
)
LABELS = (
    *("label_name", "class_name", "category_name", "label", "labels", "class", "classes", "category", "categories"),
    *("target", "targets", "tag", "tags", "species", "breed", "label_id", "class_id", "category_id", "y"),
)
SPLITS = ("split", "set", "subset", "partition", "is_valid", "is_validation")
SEVERAL = ("labels", "classes", "categories", "targets", "tags")  # columns in which a comma separates labels
MOST_SHOWN = 5  # names per message
MOST_DIGITS = 18  # in a label that is a number
MOST_TRIED = 20  # rows that may name a missing photo before the table counts as another kind


@dataclass(frozen=True, eq=False)
class Labelled:
    """Photos with labels, and which of them validate."""

    source: FileSource
    layout: str  # in words
    keys: Names  # N, by which photos are split: other photos do not change them
    validates: BoolArray | None = None  # None: not divided
    label_sets: BoolArray | None = None  # sets x classes, if photos can have several labels or none
    notes: tuple[str, ...] = ()


class Tables(NamedTuple):
    """A folder's tables by the part of the data that they list: train, validation or all."""

    paths: dict[str, Path]
    is_named_so: bool = True  # whether their names suggest labels


def find(place: Path) -> Tables:
    """Find train.csv and val.csv, one each in train/ and val/, labels.csv or the like, or the only table."""
    here = _tables(place)
    parts = {
        part: path
        for part, names in folder.PARTS.items()
        for path in here
        if path.stem.lower() in names
    }  # fmt: skip
    if "train" in parts:
        return Tables(_two(parts))
    within = {
        part: path
        for part, name in folder.split_folders(place).items()
        for path in _tables(place / name)
        if path.stem.lower() in STEMS
    }
    if "train" in within:
        return Tables(_two(within))
    for stem in STEMS:
        for path in here:
            if path.stem.lower() == stem:
                return Tables({"all": path})
    if within or parts:
        return Tables(_two(within or parts))
    return Tables({"all": here[0]} if len(here) == 1 else {}, is_named_so=False)


def _two(found: dict[str, Path]) -> dict[str, Path]:
    """The tables to train and to validate; a test table validates if there is no other."""
    if "test" in found and "validation" not in found:
        found = {**found, "validation": found["test"]}
    return {part: found[part] for part in ("train", "validation") if part in found}


def _tables(place: Path) -> list[Path]:
    with os.scandir(place) as entries:  # perhaps among a million photos
        names = sorted(
            entry.name for entry in entries if entry.name.lower().endswith(ENDINGS) and folder.is_file(entry)
        )
    return [place / name for name in names if not name.startswith(".") and not name.endswith(NOT_OURS)]


def names_photos(place: Path, paths: Mapping[str, Path]) -> bool:
    """Whether one of the first rows of the first table names a photo."""
    photos = Photos(place)
    try:
        columns = columns_of(read(next(iter(paths.values()))), photos)
        return any(map(photos.knows, columns.paths[:MOST_TRIED]))
    except DataError:
        return False


def load(place: Path, paths: Mapping[str, Path]) -> Labelled:
    """Load the photos that the tables list; names are relative to the folder, or absolute."""
    photos, rows, notes, used = Photos(place), list[Row](), list[str](), list[Path]()
    for part, path in paths.items():
        columns = columns_of(read(path), photos)
        if columns.labels is None and columns.marks is None:
            if "train" not in paths or part == "train":
                raise DataError(f"{path}: one column, expected photo and label, separated by a comma")
            notes.append(f"{path}: unused, because it has no labels")
            continue
        rows += _rows(columns, photos, None if part == "all" else part)
        used.append(path)
    tested = sum(row.part == "test" for row in rows)
    if tested and any(row.part == "validation" for row in rows):
        notes.append(f"{are(tested, 'photo')} marked as test, and unused")
    where = " and ".join(str(path) for path in used)
    if not rows:
        raise DataError(f"{where}: no rows, expected one for each photo")
    _check_repeated(rows)
    left = len(photos.names - {row.photo for row in rows})
    if left:
        notes.append(f"{are(left, 'photo')} not in {where}, and left out")
    if any(row.part == "validation" for row in rows):
        rows = [row for row in rows if row.part != "test"]
    notes += folder.unread_notes(photos.listed)
    classes, sets, numbers = _numbered(place, rows)
    found = [row.photo for row in rows]
    root, names = _rooted(place, found)
    source = FileSource(root, Names.of(names), numbers, classes)
    parts = [row.part for row in rows]
    validates = None if {*parts} <= {None, "train"} else np.array([part != "train" for part in parts])
    layout = "photos listed in " + " and ".join(path.name for path in used)
    return Labelled(source, layout, _keys(place, found), validates=validates, label_sets=sets, notes=tuple(notes))


class Row(NamedTuple):
    where: str  # file and line
    photo: str  # relative to the folder of the table, or absolute
    labels: tuple[str, ...]
    part: str | None  # train, validation or test; None: not divided


def _rows(columns: "Columns", photos: "Photos", part: str | None) -> Iterator[Row]:
    missing = 0
    for number, (line, asked) in enumerate(zip(columns.table.lines, columns.paths, strict=True)):
        where = f"{columns.table.path}, line {line}"
        if not asked:
            raise DataError(f"{where}: no photo named")
        if not could_name_a_file(asked):
            raise DataError(f"{where}: a photo is called {asked!a:.80}; expected text that a file name may have")
        found = photos.find(asked, part)
        missing += found is None
        if missing > number and number in (MOST_TRIED, len(columns.paths) - 1):
            raise DataError(
                f"{where}: none of the first {counted(missing, 'photo')} is in {photos.place}, such as '{asked}'"
            )
        own = part if columns.parts is None else _part(columns.parts[number], columns, where)
        yield Row(where, found or _missing(asked, photos.place), columns.labels_of(number), own)


def _missing(asked: str, place: Path) -> str:
    """The path of a missing photo, which the check of all files reports with the other bad ones."""
    path = os.path.normpath(asked)
    return os.path.normpath(place.absolute() / path) if path.startswith("..") else path


def _part(text: str, columns: "Columns", where: str) -> str:
    """The part of the data that a cell names: train, val or test, or true or false in a column such as is_valid."""
    word = text.lower()
    if columns.part_name.startswith("is_"):
        spellings: dict[str, tuple[str, ...]] = {
            "validation": ("true", "1", "1.0", "yes"),
            "train": ("false", "0", "0.0", "no"),
        }
        expected = "true or false"
    else:
        spellings = {**folder.PARTS, "validation": (*folder.PARTS["validation"], "dev")}
        expected = "train, val or test"
    for part, words in spellings.items():
        if word in words:
            return part
    raise DataError(f"{where}: got '{text}' in the column {columns.part_name}, expected {expected}")


def _check_repeated(rows: Sequence[Row]) -> None:
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row.photo, row)
        if first is row:
            continue
        other = "" if first.labels == row.labels else f", with the labels '{'|'.join(first.labels)}'"
        raise DataError(
            f"{row.where}: '{row.photo}' is already listed in {first.where}{other}; expected one row for each photo,"
            " with several labels in one cell as in cat|outdoor"
        )


def _numbered(place: Path, rows: Sequence[Row]) -> tuple[tuple[str, ...], BoolArray | None, Any]:
    """The classes, the label sets if photos can have several labels or none, and each photo's class or set."""
    said = {label for row in rows for label in row.labels}
    are_numbers = all(label.isdecimal() and len(label) <= MOST_DIGITS for label in said)
    # By number alone, 1 and 01 would stay in the set's order, which differs between processes.
    classes = sorted(said, key=lambda label: (int(label), label)) if are_numbers else sorted(said)
    numbers = {label: number for number, label in enumerate(classes)}
    names = _class_names(place, classes)
    if all(len(row.labels) == 1 for row in rows):
        return names, None, np.array([numbers[row.labels[0]] for row in rows], np.int64)
    combined = [tuple(sorted({numbers[label] for label in row.labels})) for row in rows]
    distinct = sorted({*combined})
    places = {labels: number for number, labels in enumerate(distinct)}
    sets = np.zeros((len(distinct), len(classes)), np.bool_)
    for number, labels in enumerate(distinct):
        sets[number, list(labels)] = True
    return names, sets, np.array([places[labels] for labels in combined], np.int64)


def _class_names(place: Path, classes: list[str]) -> tuple[str, ...]:
    """The class names: those in a file such as classes.txt if labels are numbers from 0, else the labels."""
    path = label_file(place) if classes == [str(number) for number in range(len(classes))] else None
    if path is None:
        return tuple(classes)
    names = names_in(path.read_text(encoding="utf-8", errors="replace"))
    return names if len(names) == len(classes) else tuple(classes)


def _rooted(place: Path, photos: list[str]) -> tuple[Path, list[str]]:
    """The table's folder and names in it; if some photos are elsewhere, a folder that holds them all."""
    if not any(os.path.isabs(photo) for photo in photos):  # noqa: PTH117, a million names
        return place, photos
    paths = [os.path.join(place.absolute(), photo) for photo in photos]  # noqa: PTH118, likewise
    root = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
    return Path(root), [os.path.relpath(path, root) for path in paths]


def _keys(place: Path, photos: list[str]) -> Names:
    """Paths from the table's folder, by which photos are split: one photo elsewhere would change all names."""
    folder_of_table = place.absolute()
    return Names.of([os.path.relpath(each, folder_of_table) if os.path.isabs(each) else each for each in photos])  # noqa: PTH117


class Photos:
    """Finds a folder's photos by what a table calls them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.listed = folder.listed(place)
        self.parts = folder.split_folders(place)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.listed.names[index] for index in range(len(self.listed.names)))

    @cached_property
    def by_stem(self) -> dict[str, list[str]]:
        """Photos by whole name without the extension, and by the last part of the name, with and without it."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.names):
            last = name.rsplit("/", 1)[-1]
            for spelling in {key(name), last, key(last)} - {name}:
                found.setdefault(spelling, []).append(name)
        return found

    def knows(self, asked: str) -> bool:
        """Whether a text names a photo, or more than one."""
        return bool(asked.strip()) and bool(self._meant(asked, ""))

    def find(self, asked: str, part: str | None = None) -> str | None:
        """The name of a photo, relative to the folder or absolute; None if there is no such photo."""
        found = self._meant(asked, self.parts.get(part or "", ""))
        if len(found) > 1:
            raise DataError(f"{self.place}: '{asked}' may be {found[0]} or {found[1]}; expected paths that differ")
        return found[0] if found else None

    def _meant(self, asked: str, own: str) -> list[str]:
        """The photos that a text may mean. `own`: the folder of the table's part, which is searched first."""
        path = asked.strip().replace("\\", "/")
        if os.path.isabs(path) and os.path.isfile(path):  # noqa: PTH113, PTH117, a million names
            return [self._relative(path)]
        name = os.path.normpath(path).lstrip("/")
        for candidate in (f"{own}/{name}" if own else name, name):
            if candidate in self.names:
                return [candidate]
        if ".." in name.split("/") and os.path.isfile(self.place / name):  # noqa: PTH113
            return [self._relative(os.path.normpath(self.place.absolute() / name))]
        parts = name.split("/")
        for begin in range(1, len(parts)):  # the table may be deeper than in its author's folder
            if "/".join(parts[begin:]) in self.names:
                return ["/".join(parts[begin:])]
        for spelling in (name, parts[-1]):
            found = self.by_stem.get(spelling, [])
            if found:
                return [each for each in found if own and each.startswith(f"{own}/")] or found
        return []

    def _relative(self, path: str) -> str:
        name = os.path.relpath(path, self.place.absolute())
        return name if name in self.names else path


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a table that matter."""

    table: Table
    paths: list[str]
    labels: list[Cell] | None  # None: see marks
    label_name: str  # the column's name; empty without a header
    marks: dict[str, list[Cell]] | None = None  # class name -> its column of 0 and 1
    parts: list[str] | None = None  # train, val or test of each photo
    part_name: str = ""

    def labels_of(self, row: int) -> tuple[str, ...]:
        if self.marks is not None:
            return tuple(name for name, column in self.marks.items() if _is_set(column[row]))
        assert self.labels is not None
        cell = self.labels[row]
        found = cell if isinstance(cell, list) else _separated(cell, self.label_name)
        if not found and not isinstance(cell, list) and self.label_name not in SEVERAL:
            raise DataError(f"{self.table.path}, line {self.table.lines[row]}: no label")
        return tuple(dict.fromkeys(found))


def _separated(cell: str, column: str) -> list[str]:
    """The labels in a cell: `cat|outdoor`, `cat;outdoor`, a list; commas and spaces separate only in some columns."""
    text = cell.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            return [str(label).strip() for label in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    separators = "|;" + ("," if column in SEVERAL else "")
    for separator in separators:
        if separator in text:
            return [part.strip() for part in text.split(separator) if part.strip()]
    return text.split() if column == "tags" else [text] if text else []


def _is_set(cell: Cell) -> bool:
    return isinstance(cell, str) and cell.strip() in ("1", "1.0", "True", "true")


def _is_mark(cell: Cell) -> bool:
    return isinstance(cell, str) and cell.strip() in ("0", "1", "0.0", "1.0", "True", "False", "true", "false", "")


def columns_of(table: Table, photos: Photos) -> Columns:
    """Work out which column is which, from the header or the cells."""
    if not table.rows:
        raise DataError(f"{table.path}: empty, expected rows of photo and label")
    header = table.names
    if header is None:
        header, table = _headed(table, photos)
    if header is None:
        return _unnamed(table, photos)
    words = [name.strip().lower().replace(" ", "_") for name in header]
    named = [words.index(name) for name in PATHS if name in words]
    at = _column_of_photos(table, photos, named or range(len(header)))
    if at is None and named:
        at = named[0]  # the photos are missing, which a later message says
    if at is None:
        expected = "a header with a column called path, file_name or image, and one called label"
        raise DataError(f"{table.path}: got the columns {_shown(header)}, expected {expected}")
    part = next((words.index(name) for name in SPLITS if name in words and words.index(name) != at), None)
    rest = [column for column in range(len(header)) if column not in (at, part)]
    label = next((words.index(name) for name in LABELS if name in words and words.index(name) in rest), None)
    if label is None and len(rest) == 1:
        (label,) = rest
    marked = label is None and len(rest) > 1 and all(_is_mark(row[column]) for row in table.rows for column in rest)
    if label is None and not marked and rest:
        raise DataError(
            f"{table.path}: which column is the label? got {_shown(header)}; expected one called label"
            f"{did_you_mean(words[rest[-1]], LABELS)}"
        )
    return Columns(
        table,
        [_text(row[at]) for row in table.rows],
        None if label is None else [row[label] for row in table.rows],
        "" if label is None else words[label],
        marks={header[column].strip(): [row[column] for row in table.rows] for column in rest} if marked else None,
        parts=None if part is None else [_text(row[part]) for row in table.rows],
        part_name="" if part is None else words[part],
    )


def _headed(table: Table, photos: Photos) -> tuple[tuple[str, ...] | None, Table]:
    """The header and the rest of a table; its first row is a header if it names no photo."""
    first = [_text(cell) for cell in table.rows[0]]
    if any(map(photos.knows, first)):
        return None, table
    return tuple(first), table._replace(rows=table.rows[1:], lines=table.lines[1:])


def _unnamed(table: Table, photos: Photos) -> Columns:
    """The columns of a table without a header: photo and label, then perhaps train or val."""
    at = _column_of_photos(table, photos, range(len(table.rows[0])))
    assert at is not None, "a table without a header starts with a photo"
    rest = [column for column in range(len(table.rows[0])) if column != at]
    if len(rest) > 2:
        raise DataError(
            f"{table.path}, line {table.lines[0]}: {counted(len(table.rows[0]), 'column')} and no header; expected"
            " photo and label, or a header that names the columns"
        )
    return Columns(
        table,
        [_text(row[at]) for row in table.rows],
        [row[rest[0]] for row in table.rows] if rest else None,
        "",
        parts=[_text(row[rest[1]]) for row in table.rows] if len(rest) == 2 else None,
        part_name="3",
    )


def _column_of_photos(table: Table, photos: Photos, among: Sequence[int]) -> int | None:
    """The first column with a photo's name in one of its first cells."""
    for column in among:
        cells = (row[column] for row in table.rows[:MOST_TRIED])
        if any(isinstance(cell, str) and photos.knows(cell) for cell in cells):
            return column
    return None


def _text(cell: Cell) -> str:
    return cell.strip() if isinstance(cell, str) else ""


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_SHOWN]) + more
