"""CIFAR-10 and CIFAR-100: the official binary and python layouts, downloaded where they are missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Channels
from falconet.data.source import ArraySource, PixelArray, Splits
from falconet.data.sources import cifar_names
from falconet.data.sources.download import Archive, fetch
from falconet.data.sources.unpickle import read_arrays
from falconet.errors import DataError

Kind = Literal["cifar10", "cifar100"]
Records = tuple[PixelArray, IntArray]  # N x 3072 planes, N labels

SIDE = 32
PLANES = 3 * SIDE * SIDE  # bytes of an image: its red, green and blue planes
ADDRESS = "https://www.cs.toronto.edu/~kriz/"
DEFAULT_DIR = Path("data")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of one way to store one of the two."""

    folder: str
    train: tuple[str, ...]
    validation: str


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """What sets the two apart."""

    binary: Layout
    python: Layout
    label_bytes: int  # before the image in a binary record; the last one is the label
    labels_key: bytes  # in a python file
    archive: Archive
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels


CIFARS: dict[Kind, Cifar] = {
    "cifar10": Cifar(
        binary=Layout(
            folder="cifar-10-batches-bin",
            train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            validation="test_batch.bin",
        ),
        python=Layout(
            folder="cifar-10-batches-py",
            train=tuple(f"data_batch_{number}" for number in range(1, 6)),
            validation="test_batch",
        ),
        label_bytes=1,
        labels_key=b"labels",
        archive=Archive(address=f"{ADDRESS}cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530"),
        class_names=cifar_names.CIFAR10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        binary=Layout(folder="cifar-100-binary", train=("train.bin",), validation="test.bin"),
        python=Layout(folder="cifar-100-python", train=("train",), validation="test"),
        label_bytes=2,
        labels_key=b"fine_labels",
        archive=Archive(address=f"{ADDRESS}cifar-100-binary.tar.gz", md5="03b5dce01913d631647c71ecec9e9cb8"),
        class_names=cifar_names.CIFAR100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def load(data_dir: Path | None, *, kind: Kind) -> Splits:
    """From `data_dir` or the official folder in it, downloaded into it (./data when None) if neither has the files.

    Any whole number of records is accepted, so that a part of the data can be used; a cut record is refused.
    """
    cifar = CIFARS[kind]
    data_dir = DEFAULT_DIR if data_dir is None else data_dir
    if not _found(data_dir, cifar):
        fetch(cifar.archive, into=data_dir, folder=cifar.binary.folder, wanted=_wanted(kind, data_dir))
    found = _found(data_dir, cifar)
    if found is None:
        raise DataError(_wanted(kind, data_dir))
    layout, folder = found
    return Splits(
        train=_source([folder / name for name in layout.train], cifar),
        validation=_source([folder / layout.validation], cifar),
        native_size=SIDE,
        mean=cifar.mean,
        std=cifar.std,
    )


def is_there(data_dir: Path | None, *, kind: Kind) -> bool:
    """Whether `load` would read without a download."""
    return _found(data_dir or DEFAULT_DIR, CIFARS[kind]) is not None


def _wanted(kind: Kind, data_dir: Path) -> str:
    cifar = CIFARS[kind]
    return f"{kind}: not found under {data_dir} (looked for {cifar.binary.folder}/, {cifar.python.folder}/)"


def _found(data_dir: Path, cifar: Cifar) -> tuple[Layout, Path] | None:
    """The first layout of which the first training file is there, and where."""
    for layout in (cifar.binary, cifar.python):
        for folder in (data_dir / layout.folder, data_dir):
            if (folder / layout.train[0]).is_file():
                return layout, folder
    return None


def _source(paths: list[Path], cifar: Cifar) -> ArraySource:
    records = [_read(path, cifar) for path in paths]
    planes = np.concatenate([images for images, _ in records])
    images = np.ascontiguousarray(planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))  # N x 32 x 32 x 3
    return ArraySource(images, np.concatenate([labels for _, labels in records]), cifar.class_names)


def _read(path: Path, cifar: Cifar) -> Records:
    if not path.is_file():
        raise DataError(f"{path}: not found, though the other files of its set are there")
    planes, labels = _read_binary(path, cifar) if path.suffix == ".bin" else _read_python(path, cifar)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(cifar.class_names)))
    if len(wrong):
        raise DataError(
            f"{path}: record {wrong[0]} has the label {labels[wrong[0]]}, wanted 0 to {len(cifar.class_names) - 1}"
        )
    return planes, labels


def _read_binary(path: Path, cifar: Cifar) -> Records:
    stored = np.fromfile(path, dtype=np.uint8)
    size = cifar.label_bytes + PLANES
    if len(stored) == 0 or len(stored) % size:
        raise DataError(f"{path}: {len(stored)} bytes, wanted a whole number of records of {size}; cut short?")
    records = stored.reshape(-1, size)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, cifar: Cifar) -> Records:
    stored = read_arrays(path)
    planes, labels = stored.get(b"data"), stored.get(cifar.labels_key)
    if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PLANES or not len(planes):
        raise DataError(f"{path}: no 'data' of N x {PLANES} bytes in it")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels) or len(labels) != len(planes):
        raise DataError(f"{path}: '{cifar.labels_key.decode()}' is not a list of {len(planes)} whole numbers")
    return planes, np.array([min(max(label, -1), 1 << 31) for label in labels], dtype=np.int64)
