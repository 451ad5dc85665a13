"""Bytes and folders that outlive a power cut, and names for what is not a checkpoint yet, or no longer."""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from falconet.errors import CheckpointError

ASIDE = re.compile(r"\..+\.(tmp|old)-\d+-[0-9a-f]+")  # being written, or being removed
ABANDONED = 3600.0  # seconds; no write takes an hour, so an aside folder that old belongs to a killed run
CHUNK = 1 << 22  # bytes written and hashed at a time


@dataclass(frozen=True)
class FileRecord:
    """What a file of the checkpoint must be."""

    bytes: int
    sha256: str


def write_bytes(path: Path, data: memoryview) -> FileRecord:
    """A new file, on the disk when this returns."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def token() -> str:
    """A part of a name that no other process uses, and that cannot be foreseen."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def aside(folder: Path, why: Literal["tmp", "old"], unique: str | None = None) -> Path:
    """A hidden name beside `folder`."""
    return folder.with_name(f".{folder.name}.{why}-{unique or token()}")


def move_into_place(temporary: Path, folder: Path) -> None:
    """Give a finished folder its name; a checkpoint that had it is removed then."""
    if folder.exists() or folder.is_symlink():
        old = aside(folder, "old")
        folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        sync_folder(folder.parent)
        discard(old)
    else:
        temporary.rename(folder)
        sync_folder(folder.parent)


def discard(old: Path) -> None:
    """What cannot be removed now is swept later; a link goes, not what it points to."""
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path, *, abandoned: float = ABANDONED, kinds: tuple[str, ...] = ("tmp", "old")) -> None:
    """Remove what killed runs left aside, `abandoned` seconds ago or more.

    With 0, not of the kind `old`: a run killed between two renames leaves its last whole checkpoint under such a name.
    """
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            found = ASIDE.fullmatch(path.name)
            if found and found[1] in kinds and time.time() - path.lstat().st_mtime >= abandoned:
                discard(path)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What the system says about `path`, as one line."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
