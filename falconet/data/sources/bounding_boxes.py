"""Bounding boxes of annotated objects: from a CSV file, from XML files, or already in the TFRecords."""

import csv
import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from falconet.data.image_files import open_regular, read_regular
from falconet.data.index import Array, Found, check_boxes, check_lengths, check_offsets, check_types, indexed
from falconet.data.layout import INNER
from falconet.data.storage import BoxArray, Names, Objects, PhotoSource, Splits, key, match, names_of, proper
from falconet.errors import DataError
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

CSV_NAMES = "*bounding_boxes.csv"  # imagenet_2012_bounding_boxes.csv
XML_FOLDERS = ("bounding_boxes", "Annotation", "Annotations", "bbox")
MOST_XML = 1 << 20  # bytes of one file


def with_objects(splits: Splits, data_dir: Path) -> Splits:
    """The splits with objects that random crops of training images must overlap; DataError if there are none."""
    found = with_objects_if_there(splits, data_dir)
    assert isinstance(found.train, PhotoSource)
    assert isinstance(splits.train, PhotoSource)
    if found.train.objects is not None:
        return found
    where = _find(data_dir)
    if where is None and splits.train.objects is None:
        expected = f"{CSV_NAMES}, or XML files in a folder {' or '.join(XML_FOLDERS)}"
        raise DataError(f"{data_dir}: no bounding boxes there; expected {expected}")
    example = splits.train.name(0) or "those of the TFRecords"
    raise DataError(f"{where or data_dir}: has no bounding box of a training image, such as {example}")


def with_objects_if_there(splits: Splits, data_dir: Path) -> Splits:
    """The splits with objects, or without if no training image has one."""
    train = splits.train
    assert isinstance(train, PhotoSource)
    if train.objects is None or train.objects.annotated == 0:
        where = _find(data_dir)
        train = train if where is None else replace(train, objects=match(list(names_of(train)), read_boxes(where)))
    found = train.objects is not None and train.objects.annotated > 0
    return replace(splits, train=train) if found else without_objects(splits)


def without_objects(splits: Splits) -> Splits:
    """The splits with plain crops, even if the TFRecords have boxes."""
    train = splits.train
    return replace(splits, train=replace(train, objects=None)) if isinstance(train, PhotoSource) else splits


def _find(data_dir: Path) -> Path | None:
    """The CSV file, or the folder of XML files."""
    for place in (data_dir, data_dir / INNER):
        folders = (place / name for name in XML_FOLDERS if (place / name).is_dir())
        found = next(iter((*sorted(place.glob(CSV_NAMES)), *folders)), None)
        if found is not None:
            return found
    return None


def read_boxes(where: Path) -> dict[str, BoxArray]:
    """Boxes by image name without its extension, from a CSV file or a folder of XML files."""
    return _read_folder(where.parent, where) if where.name in XML_FOLDERS else _read_csv(where)


def _read_csv(path: Path) -> dict[str, BoxArray]:
    """Rows of `file name, x0, y0, x1, y1`, as shares of width and height, no header; several rows per image."""
    rows: dict[str, list[list[float]]] = {}
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            for number, row in enumerate(csv.reader(text), start=1):
                if not row:
                    continue
                try:
                    name, *sides = row
                    box = [float(side) for side in sides]
                except ValueError:
                    box = []
                if len(box) != 4:
                    raise DataError(f"{path}, line {number}: got '{','.join(row)[:60]}', expected name,x0,y0,x1,y1")
                rows.setdefault(key(name.strip()), []).append(box)
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{path}: not a text file of name,x0,y0,x1,y1") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    return {name: proper(np.array(boxes)) for name, boxes in rows.items()}


def _read_folder(data_dir: Path, folder: Path) -> dict[str, BoxArray]:
    """Boxes by image name from XML files, kept in an index: half a million small files take minutes to read."""
    found = indexed(data_dir, kind=f"boxes-{folder.name}", search=lambda: _search(folder), check=_check)
    arrays = found.arrays
    names, objects = Names(arrays["names"].tobytes(), arrays["offsets"]), Objects(arrays["boxes"], arrays["firsts"])
    return {names[number]: objects[number] for number in range(len(names))}


def _check(found: Found) -> None:
    arrays = found.arrays
    check_types(arrays, {"names": np.uint8, "offsets": np.int64, "firsts": np.int64})
    check_offsets(arrays["offsets"], end=len(arrays["names"]))
    check_boxes(arrays["boxes"], arrays["firsts"])
    check_lengths(arrays["offsets"], arrays["firsts"])


def _search(folder: Path) -> Found:
    names: list[str] = []
    boxes: list[BoxArray] = []
    folders: list[Path] = []
    with Counting(f"reading {folder}", quiet=not is_first(os.environ)) as counting:
        for path in _xml_files(folder, folders):
            names.append(path.stem)
            boxes.append(parse_xml(path))
            counting.add()
    objects, block = Objects.of(boxes), Names.of(names)
    arrays: dict[str, Array] = {
        "boxes": objects.boxes,
        "firsts": objects.first,
        "names": np.frombuffer(block.block, np.uint8),
        "offsets": block.offsets,
    }
    return Found(arrays, {}, folders)


def _xml_files(folder: Path, folders: list[Path]) -> Iterator[Path]:
    folders.append(folder)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _xml_files(Path(entry.path), folders)
            elif entry.name.endswith(".xml"):
                yield Path(entry.path)


def parse_xml(path: Path) -> BoxArray:
    """The objects of one PASCAL VOC annotation, as ImageNet uses them: pixels of a stated width and height."""
    data = read_regular(path)
    if len(data) > MOST_XML or re.search(rb"<!(DOCTYPE|ENTITY)", data):  # entities could fill memory
        raise DataError(f"{path}: not an annotation: too large, or with a document type")
    try:
        root = ElementTree.fromstring(data)
        width, height = (float(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes = [
            [float(place.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            for place in root.iterfind("object/bndbox")
        ]
    except (ElementTree.ParseError, ValueError, LookupError):  # LookupError: an unknown encoding
        raise DataError(f"{path}: not an annotation: expected size/width, size/height and object/bndbox") from None
    if width <= 0 or height <= 0:
        raise DataError(f"{path}: gives the image a size of {width:g} x {height:g} pixels")
    return proper(np.array(boxes).reshape(-1, 4) / np.array([width, height, width, height]))
