"""Photos in whichever of four layouts they lie: packed shards, class folders, TFRecords, tar archives."""

import csv
import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from falconet.data.decode import open_regular, read_regular
from falconet.data.index import Array, Found, check_boxes, check_lengths, check_offsets, check_types, indexed
from falconet.data.source import BoxArray, Names, Objects, PhotoSource, Splits, key, match, names_of, proper
from falconet.data.sources import folder, packed, tar, tfrecord
from falconet.errors import DataError
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

INNER = "imagenet-data"  # where the TensorFlow program looked as well


def load_photos(data_dir: Path) -> Splits:
    """The splits of the first layout that is there, in the order above."""
    try:
        return _first(data_dir)
    except OSError as error:
        raise DataError(f"{error.filename or data_dir}: cannot be read ({error.strerror or error})") from None


def _first(data_dir: Path) -> Splits:
    for place in (data_dir, data_dir / INNER):
        splits = _from(place)
        if splits is not None:
            return splits
    if not data_dir.is_dir() or (data_dir / "train").is_dir() or any(_existing(data_dir)):
        return folder.load(data_dir)  # which names what is missing
    raise DataError(
        f"{data_dir}: none of these in it: train/<class>/, train-00000-of-01024 (TFRecords), tar archives with train in"
        f" their name, {packed.shard_name('train', 0)} (packed shards)"
    )


def _from(place: Path) -> Splits | None:
    if not place.is_dir():
        return None
    shards = packed.find(place)
    if any(shards.values()):
        return packed.load(place, shards)
    if _has_folders(place / "train"):
        return folder.load(place)
    records = tfrecord.find(place)
    if any(records.values()):
        return tfrecord.load(place, records)
    archives = tar.find(place)
    return tar.load(place, archives) if any(archives.values()) else None


def _has_folders(place: Path) -> bool:
    return place.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in place.iterdir())


def _existing(data_dir: Path) -> list[Path]:
    return [data_dir / name for name in folder.VALIDATION_NAMES if (data_dir / name).is_dir()]


CSV_NAMES = "*bounding_boxes.csv"  # imagenet_2012_bounding_boxes.csv
XML_FOLDERS = ("bounding_boxes", "Annotation", "Annotations", "bbox")
MOST_XML = 1 << 20  # bytes of one file


def with_objects(splits: Splits, data_dir: Path) -> Splits:
    """The same, with the objects that the training images' random crops must overlap."""
    train = splits.train
    assert isinstance(train, PhotoSource)
    own, where = train, "the TFRecords"
    if train.objects is None or train.objects.annotated == 0:
        own, where = _matched(train, data_dir)
    assert own.objects is not None
    if own.objects.annotated == 0:
        example = train.name(0) or "the TFRecords, which have no boxes"
        raise DataError(f"{where}: --use-bbox-info: no box in it is of a training image, such as {example}")
    return replace(splits, train=own)


def with_objects_if_there(splits: Splits, data_dir: Path) -> Splits:
    """The same, but where no training image has an object, crops are plain."""
    train = splits.train
    assert isinstance(train, PhotoSource)
    if train.objects is None or train.objects.annotated == 0:
        where = _find(data_dir)
        train = train if where is None else replace(train, objects=match(list(names_of(train)), _read(where)))
    found = train.objects is not None and train.objects.annotated > 0
    return replace(splits, train=train) if found else without_objects(splits)


def without_objects(splits: Splits) -> Splits:
    """The same, with crops as if nothing were annotated; TFRecords bring boxes along."""
    train = splits.train
    return replace(splits, train=replace(train, objects=None)) if isinstance(train, PhotoSource) else splits


def _matched(train: PhotoSource, data_dir: Path) -> tuple[PhotoSource, str]:
    table, where = read_boxes(data_dir)
    return replace(train, objects=match(list(names_of(train)), table)), str(where)


def read_boxes(data_dir: Path) -> tuple[dict[str, BoxArray], Path]:
    """Boxes by image name without its ending, and where they were found."""
    where = _find(data_dir)
    if where is None:
        wanted = f"{CSV_NAMES} or a folder {', '.join(XML_FOLDERS)} of XML files"
        raise DataError(f"{data_dir}: --use-bbox-info: no bounding boxes there; wanted {wanted}")
    return _read(where), where


def _find(data_dir: Path) -> Path | None:
    """The CSV file, or the folder of XML files."""
    for place in (data_dir, data_dir / INNER):
        folders = (place / name for name in XML_FOLDERS if (place / name).is_dir())
        found = next(iter((*sorted(place.glob(CSV_NAMES)), *folders)), None)
        if found is not None:
            return found
    return None


def _read(where: Path) -> dict[str, BoxArray]:
    return _read_folder(where.parent, where) if where.name in XML_FOLDERS else _read_csv(where)


def _read_csv(path: Path) -> dict[str, BoxArray]:
    """Rows of `file name, x0, y0, x1, y1`, shares of width and height, without a header; several rows an image."""
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
                    raise DataError(f"{path}, line {number}: got '{','.join(row)[:60]}', wanted name,x0,y0,x1,y1")
                rows.setdefault(key(name.strip()), []).append(box)
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{path}: is not a text file of name,x0,y0,x1,y1") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    return {name: proper(np.array(boxes)) for name, boxes in rows.items()}


def _read_folder(data_dir: Path, folder: Path) -> dict[str, BoxArray]:
    """Half a million small files take minutes, so what they say is kept as an index is."""
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
    """The objects of one PASCAL VOC annotation, as ImageNet has them: pixels of a stated width and height."""
    data = read_regular(path)
    if len(data) > MOST_XML or re.search(rb"<!(DOCTYPE|ENTITY)", data):  # entities can be made to fill the memory
        raise DataError(f"{path}: not an annotation: too large, or it has a document type")
    try:
        root = ElementTree.fromstring(data)
        width, height = (float(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes = [
            [float(place.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            for place in root.iterfind("object/bndbox")
        ]
    except (ElementTree.ParseError, ValueError, LookupError):  # the last one: of an encoding that does not exist
        raise DataError(f"{path}: not an annotation: wanted size/width, size/height and object/bndbox") from None
    if width <= 0 or height <= 0:
        raise DataError(f"{path}: says that the image is {width:g} x {height:g} pixels")
    return proper(np.array(boxes).reshape(-1, 4) / np.array([width, height, width, height]))
