"""CIFAR-10 and CIFAR-100: downloaded if needed, read from the binary or the python files, or from PNG files."""

import hashlib
import pickle  # noqa: TID251, the official files are pickles; the reader below can call nothing of the file's choosing
import struct
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from falconet.data.image_files import UnreadableImageError, open_rgb
from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Channels
from falconet.data.storage import ArraySource, PixelArray, Splits
from falconet.errors import DataError

_TEN = "airplane automobile bird cat deer dog frog horse ship truck"

_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
    bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = tuple(_TEN.split())
CIFAR100 = tuple(_HUNDRED.split())


TIMEOUT = 20  # seconds without a byte
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A gzipped tar file and its official checksum."""

    address: str
    md5: str

    @property
    def name(self) -> str:
        return self.address.rsplit("/", 1)[-1]


def download(archive: Archive, *, into: Path, folder: str, missing: str) -> None:
    """Put the archive's `folder` under `into`; `missing` starts the error message."""
    place = f"put {archive.name}, unpacked, there"
    try:
        response = urllib.request.urlopen(archive.address, timeout=TIMEOUT)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is an open response as well
        raise DataError(f"{missing} and {archive.address} cannot be reached ({_reason(error)}); {place}") from None
    try:
        with response:
            into.mkdir(parents=True, exist_ok=True)
            # Into a temporary folder, renamed when complete: a kill leaves a stray folder, never half a data set.
            with tempfile.TemporaryDirectory(prefix=f".{folder}-", dir=into) as temporary:
                packed = Path(temporary) / archive.name
                found = _save(response, packed)
                if found != archive.md5:
                    raise DataError(f"{missing}; {archive.address} has md5 {found}, expected {archive.md5}; {place}")
                with tarfile.open(packed) as tar:
                    tar.extractall(temporary, filter="data")
                if not (into / folder).exists():  # another process may have been faster
                    (Path(temporary) / folder).rename(into / folder)
    except (OSError, HTTPException, tarfile.TarError) as error:
        raise DataError(f"{missing}; {archive.address}: download failed ({_reason(error)}); {place}") from None


def _save(response: HTTPResponse, target: Path) -> str:
    """Write the response to the file; return its md5."""
    digest = hashlib.md5(usedforsecurity=False)
    size = response.headers.get("Content-Length")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown as progress, target.open("wb") as file:
        task = progress.add_task(target.name, total=int(size) if size else None)
        while chunk := response.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


# What the unpickler raises for bytes that are not a complete pickle, besides its own error.
DAMAGE = (EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, struct.error)
EXHAUSTION = (MemoryError, RecursionError)


class _Stored:
    """An array or a dtype as the pickle describes it: its arguments and its state."""

    def __init__(self, *made_with: object) -> None:
        self.made_with = made_with
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"): _Stored,
    ("numpy._core.multiarray", "_reconstruct"): _Stored,
    ("numpy", "ndarray"): _Stored,
    ("numpy", "dtype"): _Stored,
}


class _Reader(pickle._Unpickler):
    # The version in Python: a few hostile bytes make the one in C allocate tens of gigabytes for its memo.

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _HARMLESS[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"it asks for the object {pid!r:.40}")


def read_arrays(path: Path) -> dict[bytes, object]:
    """The mapping in a CIFAR python file, with keys as bytes and arrays as uint8."""
    try:
        with path.open("rb") as file:
            stored = _Reader(file, encoding="bytes").load()
        if not isinstance(stored, dict):
            raise DataError(f"{path}: holds a {type(stored).__name__}, expected the mapping of a CIFAR python file")
        return {_key(key): _array(value) if isinstance(value, _Stored) else value for key, value in stored.items()}
    except (pickle.UnpicklingError, *DAMAGE, *EXHAUSTION) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: not a CIFAR python file ({reason})") from None


def _key(key: object) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key) if isinstance(key, bytes) else b""


def _array(stored: _Stored) -> PixelArray:
    state = stored.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("an array without its state")
    _, shape, dtype, columns_first, content = state
    if not isinstance(dtype, _Stored) or dtype.made_with[:1] not in ((b"u1",), ("u1",)) or columns_first:
        raise ValueError("an array that is not of plain bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


Kind = Literal["cifar10", "cifar100"]
Records = tuple[PixelArray, IntArray]  # N x 3072 planes, N labels

SIDE = 32
PLANES = 3 * SIDE * SIDE  # bytes of an image: its red, green and blue planes
ADDRESS = "https://www.cs.toronto.edu/~kriz/"
DEFAULT_DIR = Path("data")
PNG_SPLITS = ("train", "test")  # folders with a folder for each class


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of one format."""

    folder: str
    train: tuple[str, ...]
    validation: str


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """The ways in which CIFAR-10 and CIFAR-100 differ."""

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
        class_names=CIFAR10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        binary=Layout(folder="cifar-100-binary", train=("train.bin",), validation="test.bin"),
        python=Layout(folder="cifar-100-python", train=("train",), validation="test"),
        label_bytes=2,
        labels_key=b"fine_labels",
        archive=Archive(address=f"{ADDRESS}cifar-100-binary.tar.gz", md5="03b5dce01913d631647c71ecec9e9cb8"),
        class_names=CIFAR100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def load(data_dir: Path | None, *, kind: Kind) -> Splits:
    """Read from `data_dir` (./data if None) or the official folder in it; download if neither has the files.

    Any whole number of records is accepted, so that part of the data can be used; an incomplete record is refused.
    """
    cifar = CIFARS[kind]
    data_dir = DEFAULT_DIR if data_dir is None else data_dir
    if not is_there(data_dir, kind=kind):
        download(cifar.archive, into=data_dir, folder=cifar.binary.folder, missing=_missing(kind, data_dir))
    found = _found(data_dir, cifar)
    if found is not None:
        layout, folder = found
        train = _source([folder / name for name in layout.train], cifar)
        validation = _source([folder / layout.validation], cifar)
    elif _has_png_files(data_dir, cifar):
        train, validation = (_png_source(data_dir / split, cifar) for split in PNG_SPLITS)
    else:
        raise DataError(_missing(kind, data_dir))
    return Splits(train=train, validation=validation, native_size=SIDE, mean=cifar.mean, std=cifar.std)


def is_there(data_dir: Path | None, *, kind: Kind) -> bool:
    """Whether `load` would need no download."""
    data_dir, cifar = data_dir or DEFAULT_DIR, CIFARS[kind]
    return _found(data_dir, cifar) is not None or _has_png_files(data_dir, cifar)


def _missing(kind: Kind, data_dir: Path) -> str:
    cifar = CIFARS[kind]
    looked = f"looked for {cifar.binary.folder}/, {cifar.python.folder}/, train/{cifar.class_names[0]}/ and so on"
    return f"{kind}: not found under {data_dir} ({looked})"


def _found(data_dir: Path, cifar: Cifar) -> tuple[Layout, Path] | None:
    """The first format whose first training file exists, and its folder."""
    for layout in (cifar.binary, cifar.python):
        for folder in (data_dir / layout.folder, data_dir):
            if (folder / layout.train[0]).is_file():
                return layout, folder
    return None


def _has_png_files(data_dir: Path, cifar: Cifar) -> bool:
    """Whether there is a folder of PNG files for each class."""
    folders = [data_dir / split / name for split in PNG_SPLITS for name in cifar.class_names]
    return all(folder.is_dir() for folder in folders)


def _png_source(folder: Path, cifar: Cifar) -> ArraySource:
    """Read the images in order of class and name, which is not the official order."""
    found = [sorted((folder / name).glob("*.png")) for name in cifar.class_names]
    paths = [path for each in found for path in each]
    if not paths:
        raise DataError(f"{folder}: no PNG files in the folders of its classes")
    images = np.empty((len(paths), SIDE, SIDE, 3), dtype=np.uint8)
    for place, path in enumerate(paths):
        images[place] = _pixels(path)
    return ArraySource(images, np.repeat(np.arange(len(found)), [len(each) for each in found]), cifar.class_names)


def _pixels(path: Path) -> PixelArray:
    try:
        image = open_rgb(path)
    except UnreadableImageError as error:
        raise DataError(f"{path}: {error}") from None
    if image.size != (SIDE, SIDE):
        raise DataError(f"{path}: {image.width} x {image.height} pixels, expected {SIDE} x {SIDE}")
    return np.asarray(image)


def _source(paths: list[Path], cifar: Cifar) -> ArraySource:
    records = [_read(path, cifar) for path in paths]
    planes = np.concatenate([images for images, _ in records])
    images = np.ascontiguousarray(planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))  # N x 32 x 32 x 3
    return ArraySource(images, np.concatenate([labels for _, labels in records]), cifar.class_names)


def _read(path: Path, cifar: Cifar) -> Records:
    if not path.is_file():
        raise DataError(f"{path}: not found, although other files of the data set exist")
    planes, labels = _read_binary(path, cifar) if path.suffix == ".bin" else _read_python(path, cifar)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(cifar.class_names)))
    if len(wrong):
        raise DataError(
            f"{path}: record {wrong[0]} has the label {labels[wrong[0]]}, expected 0 to {len(cifar.class_names) - 1}"
        )
    return planes, labels


def _read_binary(path: Path, cifar: Cifar) -> Records:
    stored = np.fromfile(path, dtype=np.uint8)
    size = cifar.label_bytes + PLANES
    if len(stored) == 0 or len(stored) % size:
        raise DataError(f"{path}: {len(stored)} bytes, expected a whole number of records of {size}; cut short?")
    records = stored.reshape(-1, size)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, cifar: Cifar) -> Records:
    stored = read_arrays(path)
    planes, labels = stored.get(b"data"), stored.get(cifar.labels_key)
    if not isinstance(planes, np.ndarray) or planes.ndim != 2 or planes.shape[1] != PLANES or not len(planes):
        raise DataError(f"{path}: has no 'data' of N x {PLANES} bytes")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels) or len(labels) != len(planes):
        raise DataError(f"{path}: '{cifar.labels_key.decode()}' is not a list of {len(planes)} whole numbers")
    return planes, np.array([min(max(label, -1), 1 << 31) for label in labels], dtype=np.int64)
