"""An index of a data folder, so that it is searched only once; it is untrusted, so all of it is checked before use."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from falconet import writing
from falconet.data.image_files import open_regular
from falconet.data.storage import proper
from falconet.errors import DataError, LinkError
from falconet.parallel.environment import is_first
from falconet.parallel.host import available
from falconet.report.console import Lines, Screen

Array = npt.NDArray[Any]

FOLDER = ".falconet-index"
FORMAT = "falconet index 2"
# A change this soon before a search may have the same time stamp as one after it: such an index is not used.
RACY = 2_000_000_000  # nanoseconds; the coarsest file system clock
SHARE = 4  # an index larger than a quarter of the free memory is not ours
# What reading damaged bytes raises.
DAMAGE = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Found(NamedTuple):
    """The result of searching a folder."""

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]  # as JSON
    watched: Sequence[Path]  # files, and folders whose entries matter; once one changes, the index is stale


class _Place(NamedTuple):
    """A place for an index; writing it follows no link below the folder."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        return self.folder / self.name


Check = Callable[[Found], None]  # raises ValueError with the reason


def indexed(
    root: Path,
    *,
    kind: str,
    search: Callable[[], Found],
    check: Check,
    watched: Sequence[Path] | None = None,
) -> Found:
    """What `search` finds under `root`, from the index of an earlier search if nothing has changed since.

    The index is in the data folder, or in the user's cache folder if the former cannot be written; if neither can,
    every run searches again. Anyone who can write there can write an index, so `check` has to accept its contents;
    otherwise it is reported and made again. `watched`: the files that exist now, if they can be listed cheaply; by
    default, the index's own files are looked at.
    """
    places = _places(root, kind)
    reading = _Reading(root, check, watched)
    known = reading.newest(places, refused=say if is_first(os.environ) else _quietly)
    if known is not None:
        return known
    with alone(root):  # one process searches, and the others wait for its index
        known = reading.newest(places, refused=_quietly)
        if known is not None:
            return known
        began = time.time_ns()
        found = _searched(root, search)
        _write(places, _coded(found, root, began))
        return found


def recalled(root: Path, *, kind: str, check: Check) -> Found | None:
    """The index that was kept, however old: the caller compares it with the files."""
    return _Reading(root, check, None, is_dated=False).newest(_places(root, kind), refused=_quietly)


def keep(root: Path, found: Found, *, kind: str) -> None:
    """Write an index for `recalled`, if there is a place for it."""
    _write(_places(root, kind), _coded(found, root, time.time_ns()))


def _places(root: Path, kind: str) -> list[_Place]:
    file = f"{kind}.safetensors"
    return [_Place(root, f"{FOLDER}/{file}"), *(_Place(folder, file) for folder in _users_folders(root))]


def _write(places: Sequence[_Place], data: bytes) -> None:
    """Write to the first place that allows it."""
    any(_written(place, data) for place in places)


def _quietly(_: str) -> None:
    """Print nothing."""


def _searched(root: Path, search: Callable[[], Found]) -> Found:
    try:
        return search()
    except OSError as error:
        raise DataError(f"{error.filename or root}: cannot be read ({error.strerror or error})") from None


def _users_folders(root: Path) -> list[Path]:
    """The user's folder for indexes; none without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111, Path's raises
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return [cache / "falconet" / "index" / name] if cache.is_absolute() else []


def _stamps(paths: Sequence[Path], root: Path) -> list[list[Any]]:
    """Name, size and modification time of each path; a folder's size is meaningless."""
    stamps: list[list[Any]] = []
    for path in paths:
        name = os.fsencode(os.path.relpath(path, root)).hex()
        try:
            state = path.stat()
            is_folder = stat.S_ISDIR(state.st_mode)
            # Writing the first index changes the time of the root, so its entries are used instead.
            time_ns = _entries(root) if path == root else state.st_mtime_ns
        except OSError:
            return []
        stamps.append([name, -1 if is_folder else state.st_size, time_ns])
    return stamps


def _entries(folder: Path) -> int:
    """A checksum of the names in a folder, without the index; 32 bits, so it cannot pass for a recent time."""
    return zlib.crc32(b"\0".join(sorted(os.fsencode(name) for name in os.listdir(folder) if name != FOLDER)))  # noqa: PTH208


@dataclass(frozen=True)
class _Reading:
    """Reads an untrusted index."""

    root: Path
    check: Check
    watched: Sequence[Path] | None
    is_dated: bool = True  # whether the index is stale once a file has changed

    def newest(self, places: Sequence[_Place], *, refused: Callable[[str], None]) -> Found | None:
        for place in (each.path for each in places):
            try:
                found = self._read(place)
            except OSError:  # does not exist
                continue
            except DAMAGE as error:
                reason = " ".join(str(error).split())[:80] or type(error).__name__
                refused(f"{place}: damaged or not made by falconet ({reason}); searching {self.root} again")
                continue
            if found is not None:
                return found
        return None

    def _read(self, place: Path) -> Found | None:
        """Read the index; None if it has another version, or something has changed since."""
        with open_regular(place) as file:
            total = os.fstat(file.fileno()).st_size
            if total > available() // SHARE:
                raise ValueError(f"{total:,} bytes")
            data = file.read()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])["__metadata__"]
        if header["format"] != FORMAT:
            return None
        stamps, began = json.loads(header["stamps"]), int(header["began"])
        names = [_name(stamp) for stamp in stamps]
        if len(set(names)) != len(names):
            raise ValueError("files named twice")
        paths = [self.root / name for name in names] if self.watched is None else self.watched
        recent = any(time_ns > began - RACY for _, _, time_ns in stamps)
        is_fresh = stamps and not recent and _are(paths, self.root, stamps)  # no stamps: a file vanished meanwhile
        if self.is_dated and not is_fresh:
            return None
        arrays = load(data)
        if _checksum(arrays, header["facts"]) != int(header["checksum"]):
            raise ValueError("checksum mismatch")
        found = Found(arrays, json.loads(header["facts"]), paths)
        self.check(found)
        return found


def _name(stamp: list[Any]) -> str:
    """The name in a stamp: a file or folder below the root, or the root; anything else is refused."""
    coded, _, _ = stamp
    name = os.fsdecode(bytes.fromhex(coded))
    if Path(name).is_absolute() or os.path.normpath(name) != name or name.split("/", 1)[0] == "..":
        raise ValueError("a file name outside the folder")
    return name


def _are(paths: Sequence[Path], root: Path, stamps: Sequence[list[Any]]) -> bool:
    """Whether the stamps are unchanged; stops at the first that differs."""
    return len(paths) == len(stamps) and all(
        _stamps([path], root) == [stamp] for path, stamp in zip(paths, stamps, strict=True)
    )


def _coded(found: Found, root: Path, began: int) -> bytes:
    facts = json.dumps(found.facts)
    metadata = {
        "format": FORMAT,
        "began": str(began),
        "stamps": json.dumps(_stamps(found.watched, root)),
        "facts": facts,
        "checksum": str(_checksum(found.arrays, facts)),
    }
    return bytes(save({name: np.ascontiguousarray(array) for name, array in found.arrays.items()}, metadata))


def _checksum(arrays: Mapping[str, Array], facts: str) -> int:
    total = zlib.crc32(facts.encode())
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, zlib.crc32(name.encode(), total))
    return total


def _written(place: _Place, data: bytes) -> bool:
    """Write under a temporary name, then rename, so that no half-written index is read."""
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        writing.replace(place.folder, place.name, data)
    except (OSError, LinkError):  # another user's folder, a link, or a full disk: the next place is tried
        return False
    return True


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Let one process at a time in, if the file system has locks; a process that dies releases its lock."""
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


def say(text: str) -> None:
    """Print a line about the data on stderr, as progress does."""
    Screen(Lines(stderr=True, highlight=False, soft_wrap=True)).line(text)


LEADING_OUT = re.compile(rb"(?:^|/)\.\.(?:/|$)")


def check_types(arrays: Mapping[str, Array], expected: Mapping[str, type]) -> None:
    """Require these columns, each with its type and one dimension."""
    for name, dtype in expected.items():
        if name not in arrays:
            raise ValueError(f"no column {name}")
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise ValueError(f"column {name} has another type")


def check_lengths(*columns: Array) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of different lengths")


def check_offsets(offsets: Array, *, end: int) -> None:
    """Require offsets from 0 to `end` that never decrease."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("invalid offsets")


def check_below(numbers: Array, limit: int | Array, *, what: str) -> None:
    """Require numbers from 0 to below the limit, which may differ for each."""
    if np.any(numbers < 0) or np.any(numbers >= limit):
        raise ValueError(f"{what} out of range")


def check_ranges(begins: Array, sizes: Array, ends: Array | int) -> None:
    """Require ranges that end within their file."""
    begins, sizes = begins.astype(np.int64), sizes.astype(np.int64)
    if np.any(begins < 0) or np.any(sizes < 0) or np.any(sizes > ends) or np.any(begins > ends - sizes):
        raise ValueError("ranges outside their file")


def check_boxes(boxes: Array, firsts: Array) -> None:
    """Require boxes of objects that are clipped to the image and have an area."""
    if boxes.dtype != np.float32 or boxes.shape[1:] != (4,) or not np.array_equal(proper(boxes), boxes):
        raise ValueError("invalid boxes")
    check_offsets(firsts, end=len(boxes))


def check_paths(block: Array, offsets: Array) -> None:
    """Require names that stay within their folder."""
    check_offsets(offsets, end=len(block))
    begins, data = offsets[:-1], block.tobytes()
    if np.any(offsets[1:] == begins) or np.any(block[begins] == ord("/")) or b"\0" in data:
        raise ValueError("invalid file names")
    if b".." not in data:  # the usual case of a million names
        return
    for begin, end in zip(begins.tolist(), offsets[1:].tolist(), strict=True):
        if LEADING_OUT.search(data[begin:end]):
            raise ValueError("file names outside the folder")


def check_class_names(names: object, *, most: int) -> Sequence[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > most:
        raise ValueError("invalid class names")
    return names
