"""The list of photos to leave out: written by `falconet data check` or by hand, and read by training.

It has one path per line, relative to the folder of the data, or absolute. Lines that start with # are remarks. A path
that does not fit in a line, because of a line break or bytes that are not text, is a JSON string in quotes.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from falconet.data.image_files import read_regular
from falconet.data.storage import BoolArray, FileSource, Source, Splits
from falconet.errors import DataError, printable
from falconet.report.console import counted

MOST_BYTES = 1 << 30  # a million long paths take a tenth of it
MOST_NAMED = 3  # entries that match nothing, per message


@dataclass(frozen=True)
class Exclusion:
    """What a list leaves out."""

    where: Path
    entries: frozenset[str]  # as written
    home: Path  # the folder that they are relative to

    @property
    def paths(self) -> dict[bytes, str]:
        """Each entry's path from the home, as bytes; it may also be relative to the current folder."""
        home = self.home.absolute()
        found: dict[bytes, str] = {}
        for entry in sorted(self.entries):
            for path in (home / entry, Path.cwd() / entry):
                found.setdefault(os.fsencode(os.path.relpath(path, home)), entry)
        return found


def line_of(path: str) -> str:
    """The line that names a path."""
    is_plain = path == printable(path).strip() and path.isprintable() and not path.startswith(("#", '"'))
    return path if is_plain else json.dumps(path)


def text_of(paths: Iterable[Path], *, home: Path, remarks: Sequence[str]) -> str:
    """The text of a list, with remarks at the top."""
    lines = [f"# {printable(remark)}" for remark in remarks]
    lines += [line_of(os.path.relpath(path.absolute(), home.absolute())) for path in paths]
    return "\n".join(lines) + "\n"


def read(path: Path, *, home: Path) -> Exclusion:
    """Read a list from a file; `home`: the folder of the data."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: larger than any list of photos; expected one path per line")
        text = read_regular(path).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; expected a list that `falconet data check {home} --exclude-list FILE` writes, or"
            " None, which leaves nothing out"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if "\0" in text:
        raise DataError(f"{path}: not a text file; expected one path per line")
    entries = set()
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if line and not line.startswith("#"):
            entries.add(_unquoted(line, where=f"{path}, line {number}"))
    return Exclusion(path, frozenset(entries), home)


def _unquoted(line: str, *, where: str) -> str:
    if not line.startswith('"'):
        return line
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, str):
        raise DataError(f"{where}: got {line:.60}; expected a path, in quotes only as JSON has them")
    return found


def applied(splits: Splits, exclusion: Exclusion) -> Splits:
    """The splits without the photos of a list; notes say how many there were, and which entries matched none."""
    if not isinstance(splits.train, FileSource) or not isinstance(splits.validation, FileSource):
        note = f"{exclusion.where}: has no effect, because {splits.layout} have no files of their own to leave out"
        return replace(splits, notes=(*splits.notes, note))
    paths = exclusion.paths
    train, validation = (_listed(source, paths, exclusion.home) for source in (splits.train, splits.validation))
    matched = {paths[path] for found in (train, validation) for path in found.values()}
    notes = [f"left out {counted(len(train) + len(validation), 'photo')} that {exclusion.where} lists"]
    absent = sorted(exclusion.entries - matched)
    if absent:
        shown = ", ".join(f"'{entry}'" for entry in absent[:MOST_NAMED])
        more = f" and {len(absent) - MOST_NAMED:,} more" if len(absent) > MOST_NAMED else ""
        entries = "1 entry matches" if len(absent) == 1 else f"{len(absent):,} entries match"
        notes.append(f"{exclusion.where}: {entries} no photo of {exclusion.home}: {shown}{more}")
    left = replace(
        splits,
        train=_without(splits.train, train),
        validation=_without(splits.validation, validation),
        notes=(*splits.notes, *notes),
    )
    _require_classes(splits, left, exclusion)
    return left


def _listed(source: FileSource, paths: dict[bytes, str], home: Path) -> dict[int, bytes]:
    """Photos of a source that a list names, by number."""
    prefix = os.fsencode(os.path.relpath(source.root.absolute(), home.absolute()))
    before = b"" if prefix == b"." else prefix + b"/"
    names = (os.path.normpath(before + source.names.coded(number)) for number in range(len(source)))
    return {number: name for number, name in enumerate(names) if name in paths}


def _without(source: FileSource, left_out: dict[int, bytes]) -> FileSource:
    kept = np.ones(len(source), np.bool_)
    kept[list(left_out)] = False
    return source.subset(np.flatnonzero(kept)) if left_out else source


def _require_classes(before: Splits, after: Splits, exclusion: Exclusion) -> None:
    """Refuse to lose a class: training would never see it."""
    had, has = (_present(splits, splits.train) for splits in (before, after))
    lost = np.flatnonzero(had & ~has).tolist()
    if lost:
        name = before.class_names[lost[0]]
        raise DataError(f"{exclusion.where}: lists every training photo of '{name}'; expected some to be left")


def _present(splits: Splits, source: Source) -> BoolArray:
    if splits.label_sets is not None:
        return np.asarray(splits.label_sets[np.unique(source.labels)].any(axis=0))
    return np.bincount(source.labels, minlength=len(splits.class_names)) > 0
