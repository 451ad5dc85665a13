"""A check of a torch file's claims before torch reads it, because the file may come from anyone.

torch runs no code from the file (`weights_only`), but trusts sizes: a few megabytes may unpack to gigabytes, and a few
bytes of pickle may ask for any amount of memory. Here the same pickle is read with objects that do nothing.
"""

import io
import math
import pickle  # noqa: TID251, it is read below without calling anything of the file's choosing
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from falconet.errors import CheckpointError

ZIP = b"PK\x03\x04"  # what torch looks for
PICKLES = 5  # at the start of a file of torch 1.5 or older
RATIO = 4  # unpacked bytes per byte of the file; torch itself does not compress
MOST_DIRECTORY = 1 << 24  # bytes of a zip file's directory: 100,000 entries and more
MOST_PICKLE = 1 << 25  # bytes; the names of 1,000 tensors with optimizer state take 150,000, a million losses 9 million
MOST_OBJECTS = 1 << 20  # that take far more memory than their bytes of pickle: an empty set is one byte, and then 224
MOST_COPIED = 1 << 22  # items given to constructors, which may copy them
MOST_SCANNED = 1 << 28  # values of sparse tensors, which torch looks through

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
        *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "strided"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
)
CALLED = {  # what the pickles of weights, optimizers and schedules call, and torch allows: what is checked of each call
    **dict.fromkeys((("collections", "OrderedDict"), ("collections", "Counter"), ("builtins", "set")), "any"),
    **dict.fromkeys((("builtins", "complex"), ("torch", "Size"), ("torch", "device")), "any"),
    **dict.fromkeys((("torch.nn.parameter", "Parameter"), ("torch.serialization", "_get_layout")), "any"),
    **dict.fromkeys((("torch._utils", f"_rebuild_{what}") for what in ("parameter", "parameter_with_state")), "any"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): "any",
    **dict.fromkeys((("torch._utils", f"_rebuild_tensor{which}") for which in ("", "_v2", "_v3")), "tensor"),
    ("torch._utils", "_rebuild_sparse_tensor"): "sparse",
    ("torch._tensor", "_rebuild_from_type_v2"): "typed",
    ("_codecs", "encode"): "encoded",
    ("builtins", "bytearray"): "bytes",
}
NAMESPACE = ("argparse", "Namespace")  # a program's arguments, which many store beside their weights
LARGE = (  # operations that make such objects, or remember one
    *(pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.LIST, pickle.DICT, pickle.FROZENSET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE, pickle.BINPERSID),
    *(pickle.NEWOBJ, pickle.GLOBAL, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
)


def check(path: Path) -> None:
    """Refuse a file that claims more than its size allows, or calls anything that weights do not need."""
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
    """The result of any call; accepts items and a state, and keeps only their number."""

    __slots__ = ("count", "held", "item", "items_there", "text")

    def __init__(self, count: Callable[..., None], *, held: int = 0, item: int = 0, text: bool = False) -> None:
        """`held`: values of a tensor, or bytes of a storage; `item`: bytes per value; `text`: whether it is encoded."""
        self.count, self.held, self.item, self.text, self.items_there = count, held, item, text, 0

    def __len__(self) -> int:
        return self.items_there

    def __setitem__(self, key: object, value: object) -> None:
        self.items_there += 1

    def __setstate__(self, state: object) -> None:
        self.count(state)

    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...


class _InertNamespace(_Inert):
    """A namespace that accepts only the state that `argparse` gives one: a dictionary of names."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise pickle.UnpicklingError("a namespace of something else than names")
        self.count(state)


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def counting(structure: Any) -> None:
        structure.objects += 1
        if structure.objects > MOST_OBJECTS:
            raise pickle.UnpicklingError("too many objects")
        load(structure)

    return counting


def _limited(dispatch: dict[int, Callable[[Any], None]]) -> dict[int, Callable[[Any], None]]:
    return dispatch | {code[0]: _counted(dispatch[code[0]]) for code in LARGE}


class _Structure(pickle._Unpickler):
    """Reads a pickle in Python, without the C version's memo, which a few bytes make tens of gigabytes long.

    The worst 32 MiB found take 7 s (calls) and 0.83 GB (a million empty sets, then short texts).
    """

    def __init__(self, stream: io.BytesIO, size_of: Callable[[str], int]) -> None:
        """`size_of`: gives the bytes present of a storage."""
        super().__init__(stream, encoding="utf-8")
        self._size_of, self._copied, self._scanned, self.objects = size_of, 0, 0, 0

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in ITEM:
            return _Storage(name)
        if module == "torch" and (name in DTYPES or name == "Tensor"):
            return _Inert(self._count, item=getattr(getattr(torch, name), "itemsize", 0) if name in DTYPES else 0)
        if (module, name) == NAMESPACE:
            return NAMESPACE
        called = CALLED.get(("builtins" if module == "__builtin__" else module, name))
        if called is None:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return getattr(self, f"_{called}")

    def load_newobj(self) -> None:
        """Make a namespace without arguments; no other class is made this way."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        given, made = stack.pop(), stack.pop()
        if made != NAMESPACE or given != ():
            raise pickle.UnpicklingError("GLOBAL that cannot be made")
        stack.append(_InertNamespace(self._count))

    dispatch = _limited(pickle._Unpickler.dispatch | {pickle.NEWOBJ[0]: load_newobj})

    def persistent_load(self, pid: Any) -> _Inert:
        kind, storage, key, _, count, *_ = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(count, int):
            raise pickle.UnpicklingError("not a storage")
        held = count * ITEM[storage.name]
        if not 0 <= held <= self._size_of(str(key)):
            raise pickle.UnpicklingError("a storage larger than its bytes")
        return _Inert(self._count, held=held, item=ITEM[storage.name])

    def _count(self, *given: object) -> None:
        for value in given:
            self._copied += len(value) if isinstance(value, Mapping | list | tuple | set | str | bytes) else 0
        if self._copied > MOST_COPIED:
            raise pickle.UnpicklingError("calls that copy too much")

    def _any(self, *given: object) -> _Inert:
        self._count(*given)
        made = _Inert(self._count)
        made.items_there = sum(len(value) for value in given if isinstance(value, Mapping | list | set))
        return made

    def _tensor(self, storage: _Inert, offset: Any, size: Any, stride: Any, *rest: object) -> _Inert:
        """A tensor, which must fit into its storage, because torch enlarges storages in some formats."""
        self._count(size, stride, *rest)
        if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
            raise pickle.UnpicklingError("not a shape")
        values = math.prod(size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if values else -1
        item = next((each.item for each in rest if isinstance(each, _Inert) and each.item), storage.item)
        if (last + 1) * item > storage.held:
            raise pickle.UnpicklingError("a tensor larger than its storage")
        return _Inert(self._count, held=values)

    def _sparse(self, _layout: object, data: Any) -> _Inert:
        """A sparse tensor; torch reads all of its values, and a stride of 0 may claim any number of them."""
        self._count(data)
        self._scanned += sum(part.held for part in data if isinstance(part, _Inert))
        if self._scanned > MOST_SCANNED:
            raise pickle.UnpicklingError("sparse tensors that are too large")
        return _Inert(self._count)

    def _typed(self, function: Any, _kind: object, given: Any, state: object) -> _Inert:
        """A tensor with attributes: torch calls `function`, so it is checked like a call of the pickle."""
        self._count(given, state)
        if function not in (self._tensor, self._sparse, self._any):
            raise pickle.UnpicklingError("not a tensor")
        made: _Inert = function(*given)
        return made

    def _encoded(self, text: str, encoding: str) -> _Inert:
        """Bytes as in pickles of protocol 2; other encodings would lengthen them."""
        self._count(text)
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("GLOBAL _codecs.encode")
        return _Inert(self._count, text=True)

    def _bytes(self, *given: object) -> _Inert:
        """Bytes made from bytes or text; a number would be a length."""
        self._count(*given)
        if not all(isinstance(value, str | bytes) or (isinstance(value, _Inert) and value.text) for value in given):
            raise pickle.UnpicklingError("GLOBAL builtins.bytearray")
        return _Inert(self._count)


class _Storage:
    """The type of a storage; it cannot be called."""

    def __init__(self, name: str) -> None:
        self.name = name
