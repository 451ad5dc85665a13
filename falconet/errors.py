"""Errors, each one a line that the user can act on."""

import difflib
import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_SHORTAGE = re.compile(r"out of memory|not enough memory|an(?:'t|not) allocate memory|_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+ \w+)")


# A file may have any name: what moves the cursor, starts a new line, or turns the direction of writing around.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text on one line, with characters that would act on a terminal escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """Something that the user can fix: `cli` prints it as one line and exits with `code`."""

    code = 2

    def __str__(self) -> str:
        """One line, even if a typed value has several."""
        return printable(super().__str__())


class ConfigError(UserError):
    """An option, a named config or a combination of them."""


class DataError(UserError):
    """A data folder, an image or a label."""


class CheckpointError(UserError):
    """A checkpoint that is torn, foreign, too new, or of another model."""


class DeviceError(UserError):
    """A device that is missing, or cannot do what was asked."""


class ShortageError(DeviceError):
    """Memory that ran out in an update or a validation."""

    def __init__(self, short: str, *, helps: str, after: str, phase: int) -> None:
        """`short`: what ran out; `helps`: what needs less of it; `after`: what is left of the run."""
        self.short, self.helps, self.after, self.phase = short, helps, after, phase
        super().__init__(f"{short}; {helps}; {after}")


class DiskError(UserError):
    """A disk that is full."""


class UnsavedError(UserError):
    """A run that ended before its newest updates could be saved: no mistake of the command line."""

    code = 1


class LinkError(UserError):
    """A symbolic link where a file should be written: it may lead to any of the user's files."""

    def __init__(self, path: Path, option: str = "--run-dir") -> None:
        """`option`: the one that selects another folder."""
        self.path = path
        super().__init__(
            f"{path}: is a symbolic link; refusing to write through it; remove it or choose another {option}"
        )


class NoRoom(NamedTuple):
    """Why a file could not be written, and what helps."""

    why: str
    helps: str


NO_ROOM = {
    errno.ENOSPC: NoRoom("the disk is full", "make room"),
    errno.EDQUOT: NoRoom("the disk quota is exceeded", "make room"),
    errno.EFBIG: NoRoom("a file would exceed the size limit", "raise the limit, which `ulimit -f` shows"),
}


class DivergedError(UserError):
    """The loss is no longer a number."""


class SaidElsewhereError(UserError):
    """A mistake that another process of the run reports."""


class WorldError(Exception):
    """A process that died or did not answer: `cli` prints it as one line and exits with code 1."""


class Interrupted(Exception):  # noqa: N818, an interruption is not an error
    """The user (or the scheduler) asked the run to stop; `cli` exits with code 130."""


@contextmanager
def named_option(field: str) -> Iterator[None]:
    """Put an option, given by its field's name, before the message of a mistake that is found within."""
    try:
        yield
    except UserError as error:
        error.args = (f"--{field.replace('_', '-')}: {error}",)
        raise


# What may say that memory ran out: torch's and CUDA's, Python's and numpy's, the system's, and that of a library that
# could not be loaded into it.
SHORTAGES = (RuntimeError, MemoryError, OSError, ImportError)


def memory_shortage(error: BaseException) -> str | None:
    """What ran out of memory, in a few words; None: another error. Of its ways to say so, torch has a class for one."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (isinstance(error, SHORTAGES) and _SHORTAGE.search(text)):
        return None
    asked = _ASKED.search(text)
    where = "the device" if "CUDA" in text or "CUBLAS" in text or "CUDNN" in text else "the host"
    return f"out of memory on {where}" + (f" (tried to allocate {asked[1]})" if asked else "")


NEAR = 0.6  # twice the letters in common over those of both words; below it, other words are as near as the one meant


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or nothing if none is close."""
    if word.isdigit():  # a similar number is no more likely to be meant
        return ""
    spellings = {each.lstrip("-"): each for each in known}  # dashes, which all options have, make none alike
    near = difflib.get_close_matches(word.lstrip("-"), list(spellings), n=1, cutoff=NEAR)
    return f"; did you mean '{spellings[near[0]]}'?" if near else ""


def path_near(
    missing: Path, *further: Path, holds: Callable[[Path], bool] = Path.is_dir, files: Collection[str] = ()
) -> str:
    """`; did you mean 'x'?` for a path of nearly the same name, beside the missing one or in further folders.

    `holds`: whether a folder is of the expected kind. `files`: endings of files that are expected beside folders; a
    file may be named without its ending.
    """
    places: dict[str, Path] = {}
    for parent in (missing.parent, *further):
        with suppress(OSError):
            for each in sorted(parent.iterdir()):
                is_file = each.suffix.lower() in files
                if not each.name.startswith(".") and (is_file or each.is_dir()):
                    for name in (each.name, each.stem) if is_file else (each.name,):
                        places.setdefault(name, each)
    for name in difflib.get_close_matches(missing.name, places, n=3, cutoff=NEAR):
        with suppress(OSError):  # a folder that may not be looked into is not suggested
            if not places[name].is_dir() or holds(places[name]):
                return f"; did you mean '{places[name]}'?"
    return ""


def first_line(error: BaseException) -> str:
    """The first line with any words in another library's error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
