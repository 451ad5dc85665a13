"""Embeddings, the inputs of a model's classifier layer, and the .npz file that holds them for any number of photos."""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from torch import Tensor, nn

from falconet import writing
from falconet.errors import ConfigError

CHARACTER = 4  # bytes in numpy's text


def classifier_layer(model: nn.Module, classes: int) -> nn.Module:
    """The last layer with one output per class: linear, or a convolution as in SqueezeNet."""
    found = None
    for layer in model.modules():
        outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if isinstance(layer, nn.Linear | nn.Conv2d) and outputs == classes:
            found = layer
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} has no layer with one output per class, and so no features before it"
        )
    return found


@contextmanager
def tapped(model: nn.Module, classes: int) -> Iterator[Callable[[], Tensor | None]]:
    """Provide a function that returns the classifier layer's input since its last call, N x features.

    With several views of the images, that is for the first view, the images themselves. A convolution's input is
    averaged over its positions.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, values: tuple[Tensor, ...]) -> None:
        (features,) = values
        if not seen:
            seen.append(features.float().flatten(2).mean(2) if features.dim() > 2 else features.float())

    hook = classifier_layer(model, classes).register_forward_pre_hook(keep)
    try:
        yield lambda: seen.pop() if seen else None
    finally:
        hook.remove()


class EmbeddingFile:
    """`embeddings` (N x features, float32) and `paths` (N), collected on disk because N is known only at the end."""

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, ExitStack()
        with writing.explained(path):
            self._rows: BinaryIO = self._held.enter_context(tempfile.TemporaryFile(dir=path.parent))  # noqa: SIM115
            self._names: BinaryIO = self._held.enter_context(tempfile.TemporaryFile(dir=path.parent))  # noqa: SIM115
        self._count = self._features = self._longest = 0

    def add(self, name: str, features: Tensor) -> None:
        self._rows.write(features.numpy().astype("<f4").tobytes())
        self._names.write(os.fsencode(name) + b"\0")
        self._count, self._features = self._count + 1, len(features)
        self._longest = max(self._longest, len(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._held:
            if kind is None and self._count:  # an earlier file is not replaced by an empty one
                self._write()

    def _write(self) -> None:
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with writing.explained(self._path):
                self._write_arrays(aside)
                aside.replace(self._path)
        finally:
            aside.unlink(missing_ok=True)

    def _write_arrays(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            with file.open("embeddings.npy", "w", force_zip64=True) as rows:
                _start(rows, "<f4", (self._count, self._features))
                self._rows.seek(0)
                shutil.copyfileobj(self._rows, rows, 1 << 20)
            with file.open("paths.npy", "w", force_zip64=True) as names:
                _start(names, f"<U{max(self._longest, 1)}", (self._count,))
                self._names.seek(0)
                for name in _split(self._names):
                    coded = os.fsdecode(name).encode("utf-32-le", "surrogatepass")
                    names.write(coded.ljust(max(self._longest, 1) * CHARACTER, b"\0"))


def _start(file: object, kind: str, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})  # type: ignore[arg-type]


def _split(file: BinaryIO) -> Iterator[bytes]:
    """Split a file at its zero bytes."""
    rest = b""
    while block := file.read(1 << 20):
        *whole, rest = (rest + block).split(b"\0")
        yield from whole
