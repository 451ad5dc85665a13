"""Files below a folder that may come from another person: opened without following links, no more than a limit of each
read, every value checked for its type.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from falconet.errors import printable

MOST_BYTES = 64 << 20  # read of one file
LARGEST = 1e100  # numbers beyond it overflow where they are drawn
TAIL = 64  # bytes of a file that are compared before the rest is assumed to be unchanged
T = TypeVar("T")
_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


Mark = tuple[int, int, int]  # of a file's content: inode, bytes, time of the last change in nanoseconds


@dataclass(kw_only=True)
class Known:
    """The content read from a file, and the file's mark at that time."""

    mark: Mark
    content: Any
    problems: Sequence[str] = ()
    until: int = 0  # bytes of whole lines
    tail: bytes = b""  # the last of them: a rewritten file may have the old one's inode


class ForeignFolder:
    """Opens files below a folder without following links, and collects what cannot be read.

    A known file is not read again unless it has changed; if it grew by lines, only the new ones are read.
    """

    def __init__(self, folder: Path, known: dict[str, Known] | None = None) -> None:
        """`known`: results of earlier reads, extended here."""
        self.folder, self.problems = folder, list[str]()
        self._known = {} if known is None else known
        self.root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> "ForeignFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.root)

    def has(self, name: str) -> bool:
        with contextlib.suppress(OSError), self._opened(name):
            return True
        return False

    def mark(self, name: str) -> Mark | None:
        """A value that changes with a file, or with the names in a folder; None: it does not exist."""
        try:
            with self._opened(name) as handle:
                return _mark(os.fstat(handle))
        except OSError:
            return None

    def names(self, subfolder: str) -> list[str]:
        """The folders in a subfolder."""
        try:
            with self._opened(subfolder, os.O_DIRECTORY) as handle, os.scandir(handle) as found:
                return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def text(self, name: str, *, needed: bool = False) -> str:
        """The beginning of a file; empty if there is none."""
        return self._read(name, lambda found: found.decode(errors="replace"), needed=needed) or ""

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; empty if there is none."""

        def parsed(data: bytes) -> dict[str, Any]:
            content = _loaded(data.decode(errors="replace"))
            if isinstance(content, dict):
                return content
            is_json = content is not None or data.strip() == b"null"
            self.note(f"{name}: {'empty' if not data else 'not a JSON object' if is_json else 'not JSON'}; left out")
            return {}

        return self._read(name, parsed) or {}

    def _read(self, name: str, parse: Callable[[bytes], T], *, needed: bool = False) -> T | None:
        """The beginning of a file, parsed; None: it cannot be read, or does not exist."""
        try:
            with self._opened(name) as handle:
                mark, known = _mark(_regular(handle, name)), self._known.get(name)
                if known is None or known.mark != mark:
                    before = len(self.problems)
                    content = parse(self._bytes(handle, name, since=0))
                    known = Known(mark=mark, content=content, problems=self.problems[before:])
                    self._known[name] = known
                else:
                    self.problems += known.problems
                found: T = known.content
                return found
        except FileNotFoundError:
            self._known.pop(name, None)
            if needed:
                self.note(f"{name} is missing")
        except OSError as error:
            self.note(f"{name}: cannot be read: {error.strerror or error}")
        return None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The objects of a file of JSON lines, without an unfinished last line."""
        try:
            with self._opened(name) as handle:
                mark, known = _mark(_regular(handle, name)), self._known.get(name)
                if known is None or not self._has_grown(handle, mark, known):
                    known = Known(mark=mark, content=([], [0]))
                lines, bad = known.content
                whole, end, rest = self._bytes(handle, name, since=known.until).rpartition(b"\n")
        except FileNotFoundError:
            self._known.pop(name, None)
            return []
        except OSError as error:
            self.note(f"{name}: cannot be read: {error.strerror or error}")
            return []
        for line in filter(None, whole.split(b"\n")):
            content = _loaded(line.decode(errors="replace"))
            if isinstance(content, dict):
                lines.append(content)
            else:
                bad[0] += 1
        until, tail = known.until + len(whole) + len(end), (known.tail + whole + end)[-TAIL:]
        self._known[name] = Known(mark=mark, content=known.content, until=until, tail=tail)
        if bad[0]:
            self.note(f"{name}: {bad[0]:,} {'line is' if bad[0] == 1 else 'lines are'} not JSON; left out")
        last = _loaded(rest.decode(errors="replace")) if rest else None
        if isinstance(last, dict):
            return [*lines, last]
        if rest and not self.is_locked():
            self.note(f"{name}: the last line is incomplete; left out")
        return list(lines)

    def _has_grown(self, handle: int, mark: Mark, known: Known) -> bool:
        """Whether a file of lines still starts with the known lines."""
        is_same = known.mark[0] == mark[0] and known.until <= mark[1]
        return is_same and os.pread(handle, len(known.tail), known.until - len(known.tail)) == known.tail

    def _bytes(self, handle: int, name: str, *, since: int) -> bytes:
        if os.fstat(handle).st_size > MOST_BYTES:
            self.note(f"{name}: only the first {MOST_BYTES >> 20} MiB are shown")
        with os.fdopen(os.dup(handle), "rb") as file:
            file.seek(since)
            return file.read(max(0, MOST_BYTES - since))

    def is_locked(self) -> bool | None:
        """Whether a run holds the folder; None: the file system has no locks."""
        try:
            fcntl.flock(self.root, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        fcntl.flock(self.root, fcntl.LOCK_UN)
        return False

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int]:
        """Open `name`, which may be in a subfolder, as a descriptor; ELOOP if any part of the path is a link."""
        *parents, last = name.split("/")
        handle, above = os.dup(self.root), -1
        try:
            for part in parents:
                above, handle = handle, os.open(part, _OPENED | os.O_DIRECTORY, dir_fd=handle)
                os.close(above)
            above, handle = handle, os.open(last, _OPENED | flags, dir_fd=handle)
            os.close(above)
            yield handle
        finally:
            os.close(handle)

    def note(self, problem: str) -> None:
        """Note that a part of a file cannot be read."""
        self.problems.append(printable(f"{self.folder.name}/{problem}"))


def _mark(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _regular(handle: int, name: str) -> os.stat_result:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{name} is not a file")
    return found


def _loaded(text: str) -> object:
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# From JSON to values.


def number(value: object) -> float | None:
    """The value if it is a number that can be drawn, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < LARGEST else None  # not for nan


def numbers(values: object) -> list[float]:
    found = map(number, values) if isinstance(values, list) else []
    return [each for each in found if each is not None]


def count(value: object) -> int:
    """The value if it is a whole number from 0 on, otherwise 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def text(value: object) -> str:
    return value[:1000] if isinstance(value, str) else ""


def objects(value: object, most: int) -> Iterator[dict[str, Any]]:
    return (each for each in value[:most] if isinstance(each, dict)) if isinstance(value, list) else iter(())
