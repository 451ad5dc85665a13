"""Files and folders that survive a power cut; hidden names for checkpoints that are half written or half removed."""

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from falconet.errors import CheckpointError

ASIDE = re.compile(r"\..+\.(tmp|old)-\d+-[0-9a-f]+")  # being written, or being removed
ABANDONED = 3600.0  # seconds; no write takes an hour, so a hidden folder that old was left by a killed run
CHUNK = 1 << 22  # bytes written and hashed at a time


@dataclass(frozen=True)
class FileRecord:
    """The size and digest that a file must have."""

    bytes: int
    sha256: str


def write_bytes(path: Path, data: memoryview) -> FileRecord:
    """Write a new file and flush it to the disk."""
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
    """Flush the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(folder: Path, sizes: Sequence[int]) -> None:
    """Raise the error that writing files of these sizes into a folder would raise; no file is left there."""
    state = os.statvfs(folder)
    if sum(sizes) > state.f_bavail * state.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    # Free blocks are not enough: there may be quotas and limits on the size of a file.
    with contextlib.ExitStack() as held:
        for size in sizes:
            place = aside(folder / "room", "tmp")
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            held.callback(os.close, handle)  # which frees its room
            place.unlink()  # at once, so that a killed process leaves nothing
            _allocate(handle, max(1, size))


def _allocate(handle: int, size: int) -> None:
    """Allocate blocks, if the file system can.

    Uses fallocate(2), because os.posix_fallocate writes to every block if the file system cannot: over a network,
    that is as many bytes as the checkpoint has.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate and fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))


def token() -> str:
    """A unique, unpredictable part of a name."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def aside(folder: Path, why: Literal["tmp", "old"], unique: str | None = None) -> Path:
    """A hidden name beside `folder`."""
    return folder.with_name(f".{folder.name}.{why}-{unique or token()}")


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename a finished folder, replacing the checkpoint that had its name."""
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
    """Remove a folder, or a link but not its target; anything that cannot be removed now is swept later."""
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path, *, abandoned: float = ABANDONED, kinds: tuple[str, ...] = ("tmp", "old")) -> None:
    """Remove hidden folders that killed runs left at least `abandoned` seconds ago.

    With 0, leave the kind `old` alone: a run killed between two renames has its last whole checkpoint there.
    """
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may be sweeping as well
            found = ASIDE.fullmatch(path.name)
            if found and found[1] in kinds and time.time() - path.lstat().st_mtime >= abandoned:
                discard(path)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Report an error of the system about `path` as one line."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
