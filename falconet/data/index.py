"""What was found in a data folder, kept in a file beside it until the folder changes."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from falconet.errors import DataError

Array = npt.NDArray[Any]

FOLDER = ".falconet-index"
FORMAT = "falconet index 1"
# A change this soon before the search may have the time stamp of one after it: such an index is not believed.
RACY = 2_000_000_000  # nanoseconds; the coarsest clock of a file system


class Found(NamedTuple):
    """What a search of a folder gave."""

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]  # what JSON can hold
    watched: Sequence[Path]  # files, and folders whose entries count: a change of one makes this worthless


def indexed(root: Path, *, kind: str, search: Callable[[], Found], watched: Sequence[Path] | None = None) -> Found:
    """What `search` finds under `root`: from an index of an earlier search where nothing has changed since.

    The index lies in the data folder, or in the user's cache folder where that cannot be written; where neither can,
    every run searches anew. `watched` are the files there are now, where they can be listed cheaply; without it, those
    of the index are looked at.
    """
    places = [folder / f"{kind}.safetensors" for folder in (root / FOLDER, *_users_folders(root))]
    known = _newest(places, root, watched)
    if known is not None:
        return known
    with _alone(root):  # several processes of one run come here at once: one searches, the others wait for its index
        known = _newest(places, root, watched)
        if known is not None:
            return known
        began = time.time_ns()
        found = _searched(root, search)
        data = _coded(found, root, began)
        for place in places:
            if _written(place, data):
                break
        return found


def _searched(root: Path, search: Callable[[], Found]) -> Found:
    try:
        return search()
    except OSError as error:
        raise DataError(f"{error.filename or root}: cannot be read ({error.strerror or error})") from None


def _users_folders(root: Path) -> list[Path]:
    """One, or none for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111, Path's raises
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return [cache / "falconet" / "index" / name] if cache.is_absolute() else []


def _stamps(paths: Sequence[Path], root: Path) -> list[list[Any]]:
    """Name, size and time of change; the size of a folder says nothing."""
    stamps: list[list[Any]] = []
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            return []
        is_folder = state.st_mode & 0o170000 == 0o040000
        name = os.fsencode(os.path.relpath(path, root)).hex()
        stamps.append([name, -1 if is_folder else state.st_size, state.st_mtime_ns])
    return stamps


def _newest(places: Sequence[Path], root: Path, watched: Sequence[Path] | None) -> Found | None:
    for place in places:
        found = _read(place, root, watched)
        if found is not None:
            return found
    return None


def _read(place: Path, root: Path, watched: Sequence[Path] | None) -> Found | None:
    """The index, if it is whole and nothing has changed since."""
    try:
        data = place.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])["__metadata__"]
        stamps, began = json.loads(header["stamps"]), int(header["began"])
        paths = [root / os.fsdecode(bytes.fromhex(name)) for name, _, _ in stamps] if watched is None else watched
        changed = any(time_ns > began - RACY for _, _, time_ns in stamps)
        if header["format"] != FORMAT or changed or _stamps(paths, root) != stamps:
            return None
        arrays = load(data)
        if _checksum(arrays) != int(header["checksum"]):
            return None
        return Found(arrays, json.loads(header["facts"]), paths)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # not there, torn, another version
        return None


def _coded(found: Found, root: Path, began: int) -> bytes:
    metadata = {
        "format": FORMAT,
        "began": str(began),
        "stamps": json.dumps(_stamps(found.watched, root)),
        "facts": json.dumps(found.facts),
        "checksum": str(_checksum(found.arrays)),
    }
    return bytes(save({name: np.ascontiguousarray(array) for name, array in found.arrays.items()}, metadata))


def _checksum(arrays: Mapping[str, Array]) -> int:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, zlib.crc32(name.encode(), total))
    return total


def _written(place: Path, data: bytes) -> bool:
    """Written aside and renamed, so that no one ever reads half of it."""
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(place)
    except OSError:  # a folder of somebody else, or a full disk: the next place, or none
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        return False
    return True


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time, as far as the file system can say; a dead one holds nobody up."""
    folder = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(folder)
