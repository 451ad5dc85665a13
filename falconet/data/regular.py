"""Files to be read, and nothing else: a pipe would be waited for, and a device may do anything."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_descriptor(path: Path) -> int:
    """The file, links followed; OSError where there is none, or where it is of another kind."""
    _check(path, path.stat().st_mode)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have become a pipe since
    try:
        _check(path, os.fstat(file).st_mode)
    except OSError:
        os.close(file)
        raise
    return file


def open_regular(path: Path) -> BinaryIO:
    """The same as Python's object."""
    return os.fdopen(open_descriptor(path), "rb")


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def kind(mode: int) -> str:
    """What an entry is that is no file, in words."""
    return KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{kind(mode)}, not a file", str(path))
