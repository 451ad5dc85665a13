"""What a torch file claims to hold, checked before torch reads it: the file may come from anyone.

torch runs no code of the file (`weights_only`), but it trusts sizes: a few megabytes may unpack to gigabytes, and a few
bytes of pickle may ask for any amount of memory. Here the same pickle is read with objects that do nothing.
"""

import io
import pickle  # noqa: TID251, it is read below without calling anything of the file's choosing
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from falconet.errors import CheckpointError

ZIP = b"PK\x03\x04"  # what torch looks for
PICKLES = 5  # at the start of a file of torch 1.5 or older
RATIO = 4  # unpacked bytes per byte of the file; torch itself does not compress
MOST_DIRECTORY = 1 << 24  # bytes of a zip file's directory: 100,000 entries and more
MOST_PICKLE = 1 << 22  # bytes; the names of 1,000 tensors with optimizer state take 150,000
MOST_COPIED = 1 << 22  # items given to constructors, which may copy them

ITEM = {  # bytes of a value, by the name of its storage
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
DTYPES = frozenset(
    (
        *("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"),
        *("complex64", "complex128", "strided"),
    )
)
CALLED = frozenset(  # what the pickles of weights, optimizers and schedules call, and torch allows
    (
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("_codecs", "encode"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"),
        *(
            ("torch._utils", f"_rebuild_{what}")
            for what in ("tensor", "tensor_v2", "parameter", "parameter_with_state")
        ),
    )
)


def check(path: Path) -> None:
    """Refuse a file that holds more than its size promises, or calls anything that weights do not need."""
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP)) == ZIP
        file.seek(0)
        (_check_zip if is_zip else _check_pickles)(file, path)


def _check_zip(file: BinaryIO, path: Path) -> None:
    size = path.stat().st_size
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # ZipFile would first read a directory of any size
    if not end or end[5] > MOST_DIRECTORY:
        raise zipfile.BadZipFile
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        if unpacked > RATIO * size:
            raise CheckpointError(
                f"{path}: refused: its {size:,} bytes unpack to {unpacked:,}; expected at most {RATIO} times as many"
            )
        sizes = {entry.filename.partition("/data/")[2]: entry.file_size for entry in entries}
        for entry in entries:
            if entry.filename.rpartition("/")[2] == "data.pkl":
                if entry.file_size > MOST_PICKLE:
                    raise CheckpointError(_too_long(path))
                _Structure(io.BytesIO(archive.read(entry)), lambda key: sizes.get(key, 0)).load()


def _check_pickles(file: BinaryIO, path: Path) -> None:
    size = path.stat().st_size
    stream = io.BytesIO(file.read(MOST_PICKLE))
    for _ in range(PICKLES):
        try:
            _Structure(stream, lambda _: size).load()
        except EOFError:
            raise CheckpointError(_too_long(path)) if size > MOST_PICKLE else EOFError from None


def _too_long(path: Path) -> str:
    return f"{path}: refused: the list of its contents is longer than {MOST_PICKLE:,} bytes; expected only weights"


class _Inert(dict[Any, Any]):
    """The result of any call; takes items and a state, and keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...
    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...


class _Structure(pickle._Unpickler):
    """Reads a pickle in Python, without the C version's memo, which a few bytes make tens of gigabytes long."""

    def __init__(self, stream: io.BytesIO, size_of: Callable[[str], int]) -> None:
        """`size_of`: bytes that there are of a storage."""
        super().__init__(stream, encoding="utf-8")
        self._size_of, self._copied = size_of, 0

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in ITEM:
            return _Storage(name)
        if module == "torch" and name in DTYPES:
            return _Inert()
        if (module, name) not in CALLED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return self._called

    def persistent_load(self, pid: Any) -> _Inert:
        kind, storage, key, _, count, *_ = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(count, int):
            raise pickle.UnpicklingError("not a storage")
        if not 0 <= count * ITEM[storage.name] <= self._size_of(str(key)):
            raise pickle.UnpicklingError("a storage larger than its bytes")
        return _Inert()

    def _called(self, *given: object) -> _Inert:
        for value in given:
            self._copied += len(value) if isinstance(value, Mapping | list | tuple | set | str | bytes) else 0
        if self._copied > MOST_COPIED:
            raise pickle.UnpicklingError("calls that copy too much")
        return _Inert()


class _Storage:
    """The type of a storage; it cannot be called."""

    def __init__(self, name: str) -> None:
        self.name = name
