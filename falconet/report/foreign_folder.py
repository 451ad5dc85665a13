"""Files below a folder that may come from another person: opened without following links, no more than a limit of each
read, every value checked for its type.
"""

import contextlib
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from falconet.errors import printable

MOST_BYTES = 64 << 20  # read of one file
_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ForeignFolder:
    """Opens files below a folder without following links, and collects what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        self.root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> "ForeignFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.root)

    def has(self, name: str) -> bool:
        with contextlib.suppress(OSError), self._opened(name):
            return True
        return False

    def names(self, subfolder: str) -> list[str]:
        """The folders in a subfolder."""
        try:
            with self._opened(subfolder, os.O_DIRECTORY) as handle, os.scandir(handle) as found:
                return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def text(self, name: str, *, needed: bool = False) -> str:
        """The beginning of a file; empty if there is none."""
        try:
            with self._opened(name) as handle:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(f"{name} is not a file")
                if found.st_size > MOST_BYTES:
                    self._note(f"{name}: only the first {MOST_BYTES >> 20} MiB are shown")
                with os.fdopen(os.dup(handle), "rb") as file:
                    return file.read(MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            if needed:
                self._note(f"{name} is missing")
        except OSError as error:
            self._note(f"{name}: cannot be read: {error.strerror or error}")
        return ""

    def json(self, name: str) -> dict[str, Any]:
        """An object; empty if there is none."""
        text = self.text(name)
        if not text:
            return {}
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            self._note(f"{name}: not JSON")
            return {}
        return content

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects of a file of JSON lines, the last of which a killed run may have left torn."""
        whole, end, rest = self.text(name).rpartition("\n")
        bad = 0
        for line in (*whole.split("\n"), rest) if end else (rest,):
            try:
                content = json.loads(line) if line else None
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                yield content
            elif line is rest and line:
                self._note(f"{name}: the last line is torn, and left out")
            else:
                bad += bool(line)
        if bad:
            self._note(f"{name}: {bad:,} {'line is' if bad == 1 else 'lines are'} not JSON, and left out")

    def is_locked(self) -> bool:
        """Whether a run holds the folder."""
        try:
            fcntl.flock(self.root, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        fcntl.flock(self.root, fcntl.LOCK_UN)
        return False

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int]:
        """The descriptor of `name`, which may be in a subfolder; ELOOP if any part of it is a link."""
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

    def _note(self, problem: str) -> None:
        self.problems.append(printable(f"{self.folder.name}/{problem}"))


# From JSON to values.


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def numbers(values: object) -> list[float]:
    found = map(number, values) if isinstance(values, list) else []
    return [each for each in found if each is not None]


def count(value: object) -> int:
    """A whole number from 0 on; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def text(value: object) -> str:
    return value[:1000] if isinstance(value, str) else ""


def objects(value: object, most: int) -> Iterator[dict[str, Any]]:
    return (each for each in value[:most] if isinstance(each, dict)) if isinstance(value, list) else iter(())
