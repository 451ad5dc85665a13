"""The index of images in shards: its columns, its checks, and the source made from it."""

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from falconet.data.index import Array, check_below, check_boxes, check_lengths, check_offsets, check_ranges, check_types
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.shards import Readahead, Shards
from falconet.data.storage import BoxArray, Names, Objects, Places, ShardSource, Splits
from falconet.errors import DataError
from falconet.report.console import counted

LABEL_FILES = (
    *("class_names.txt", "classnames.txt", "classes.txt", "labels.txt", "synsets.txt"),
    "imagenet_lsvrc_2015_synsets.txt",
)


MOST_CLASSES = 1_000_000  # a larger label means that a file is damaged
COLUMNS = {  # type code while growing, and final type
    "shards": ("i", np.int32),
    "begins": ("q", np.int64),
    "sizes": ("I", np.uint32),
    "checksums": ("I", np.uint32),
    "skips": ("I", np.uint32),
    "lengths": ("I", np.uint32),
    "labels": ("i", np.int32),
}
BLOCKS = {"names": np.uint8, "offsets": np.int64, "boxes": np.float32, "firsts": np.int64}  # optional


class Gathered:
    """Images found so far, in columns of numbers and blocks of names and boxes rather than one Python object each."""

    def __init__(self, *columns: str) -> None:
        self._columns = {name: array(COLUMNS[name][0]) for name in columns}
        self._names, self._ends = bytearray(), array("q", [0])
        self._boxes, self._firsts = array("f"), array("q", [0])

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def add(self, **values: int) -> None:
        """Add an image: one number for each column."""
        for name, column in self._columns.items():
            column.append(values[name])

    def add_name(self, name: str) -> None:
        self._names += os.fsencode(name)
        self._ends.append(len(self._names))

    def add_boxes(self, boxes: BoxArray) -> None:
        self._boxes.extend(boxes.ravel().tolist())
        self._firsts.append(len(self._boxes) // 4)

    def arrays(self, split: str) -> dict[str, Array]:
        found: dict[str, Array] = {name: np.array(own, COLUMNS[name][1]) for name, own in self._columns.items()}
        if len(self._ends) > 1:
            found |= {"names": np.frombuffer(bytes(self._names), np.uint8), "offsets": np.array(self._ends, np.int64)}
        if len(self._firsts) > 1:
            boxes = np.array(self._boxes, np.float32).reshape(-1, 4)
            found |= {"boxes": boxes, "firsts": np.array(self._firsts, np.int64)}
        return {f"{split}.{name}": own for name, own in found.items()}


def source_of(
    arrays: dict[str, Array], split: str, *, paths: Sequence[Path], class_names: tuple[str, ...]
) -> ShardSource:
    """Make the source of one split; names, checksums, skips, lengths and boxes are optional columns."""

    def part(name: str) -> Array | None:
        return arrays.get(f"{split}.{name}")

    names, boxes = part("names"), part("boxes")
    shards = Shards(paths)
    return ShardSource(
        shards,
        Places(
            shards=arrays[f"{split}.shards"],
            begins=arrays[f"{split}.begins"],
            sizes=arrays[f"{split}.sizes"],
            checksums=part("checksums"),
            skips=part("skips"),
            lengths=part("lengths"),
        ),
        arrays[f"{split}.labels"].astype(np.int64),
        class_names,
        names=None if names is None else Names(names.tobytes(), arrays[f"{split}.offsets"]),
        objects=None if boxes is None else Objects(boxes, arrays[f"{split}.firsts"]),
        ahead=Readahead(shards),
    )


def check_split(
    arrays: Mapping[str, Array], split: str, *, columns: Iterable[str], paths: Sequence[Path], classes: int
) -> None:
    """Require arrays that make a source which reads only within its files; else ValueError."""
    own = {name.removeprefix(f"{split}."): array for name, array in arrays.items() if name.startswith(f"{split}.")}
    expected: dict[str, type] = {name: COLUMNS[name][1] for name in columns}
    if not expected.keys() <= own.keys() <= {*expected, *BLOCKS}:
        raise ValueError("unexpected columns")
    check_types(own, expected | {name: BLOCKS[name] for name in ("names", "offsets", "firsts") if name in own})
    check_lengths(*(own[name] for name in expected))
    if not len(own["labels"]):
        raise ValueError("no image")
    check_below(own["shards"], len(paths), what="shard numbers")
    check_below(own["labels"], classes, what="labels")
    totals = np.array([path.stat().st_size for path in paths], np.int64)
    check_ranges(own["begins"], own["sizes"], totals[own["shards"]])
    if "skips" in own:
        check_ranges(own["skips"], own["lengths"], own["sizes"].astype(np.int64))
    if own.keys() & {"names", "offsets"}:
        check_offsets(own["offsets"], end=len(own["names"]))
        check_lengths(own["labels"], own["offsets"][1:])
    if own.keys() & {"boxes", "firsts"}:
        check_boxes(own["boxes"], own["firsts"])
        check_lengths(own["labels"], own["firsts"][1:])


def splits_of(train: ShardSource, validation: ShardSource, *, layout: str) -> Splits:
    return Splits(
        train=train, validation=validation, native_size=None, mean=IMAGENET_MEAN, std=IMAGENET_STD, layout=layout
    )


def label_file(data_dir: Path) -> Path | None:
    """The file beside the shards that has the class names, one per line, in the order of the labels."""
    return next((data_dir / name for name in LABEL_FILES if (data_dir / name).is_file()), None)


def names_in(text: str) -> tuple[str, ...]:
    """The class names in the text of a label file."""
    # Not splitlines: it also ends lines at U+2028 and the like, which a name may have, and so would shift later labels.
    return tuple(line.strip() for line in text.split("\n") if line.strip())


def class_names(data_dir: Path, *, count: int, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The class names from a file beside the shards, else from the shards, else the numbers."""
    path = label_file(data_dir)
    if path is not None:
        try:
            lines = names_in(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise DataError(f"{path}: not a text file; expected one class name per line") from None
        if len(lines) < count:
            raise DataError(f"{path}: names {counted(len(lines), 'class')}, but labels go from 0 to {count - 1}")
        return lines
    if len(known) == count and len(set(known)) == count and all(known):
        return tuple(known)
    return tuple(str(number) for number in range(count))
