"""Class folders of image files: train/<class>/ and val/<class>/ (or validation/<class>/)."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.source import FileSource, Splits
from falconet.errors import DataError, did_you_mean

VALIDATION_NAMES = ("val", "validation")


def load(data_dir: Path) -> Splits:
    """The classes are the sorted names of train/'s folders; validation may have fewer of them."""
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder, wanted one with train/ and val/")
    train = _existing(data_dir, ("train",))
    validation = _existing(data_dir, VALIDATION_NAMES)
    names = _class_names(train)
    validation_names = _class_names(validation)
    for name in validation_names:
        if name not in names:
            raise DataError(f"{validation / name}: no such class in {train}{did_you_mean(name, names)}")
    return Splits(
        train=_source(train, folders=names, class_names=names),
        validation=_source(validation, folders=validation_names, class_names=names),
        native_size=None,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _existing(data_dir: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    raise DataError(f"{data_dir}: no folder {' or '.join(f'{name}/' for name in names)} in it")


def _class_names(root: Path) -> tuple[str, ...]:
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{root}: empty, wanted one folder a class")
    return tuple(names)


def _source(root: Path, *, folders: tuple[str, ...], class_names: tuple[str, ...]) -> FileSource:
    numbers = {name: number for number, name in enumerate(class_names)}
    names: list[str] = []
    labels: list[int] = []
    for folder in folders:
        found = list(_image_names(str(root / folder), ""))
        if not found:
            raise DataError(f"{root / folder}: no image in this class folder")
        names += found
        labels += [numbers[folder]] * len(found)
    return FileSource.of(root, names=names, labels=labels, class_names=class_names)


def _image_names(folder: str, prefix: str) -> Iterator[str]:
    """Names relative to the class folder, sorted, folders within it included; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _image_names(entry.path, f"{prefix}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() in _extensions():  # noqa: PTH122, a million names
                yield prefix + entry.name


@cache
def _extensions() -> frozenset[str]:
    """The endings of formats that Pillow can read, not only write."""
    known = Image.registered_extensions()  # also loads Pillow's plugins
    return frozenset(ending for ending, kind in known.items() if kind in Image.OPEN)
