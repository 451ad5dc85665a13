"""The check of every photo before training, which reads its header and its end, and names broken ones."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from falconet.data import native
from falconet.data.image_files import UnreadableImageError, open_regular, open_rgb, read_size
from falconet.data.index import RACY, Array, Found, alone, check_lengths, check_paths, check_types, keep, recalled
from falconet.data.keyed import IntArray
from falconet.data.native.binding import MOST_PIXELS, SizeArray, State, StatusArray
from falconet.data.storage import FileSource, Names, Splits
from falconet.errors import printable
from falconet.parallel.environment import is_first
from falconet.report.console import Counting

TYPES = {"names": np.uint8, "offsets": np.int64, "bytes": np.int64, "times": np.int64}
UNKNOWN = -1  # the time of a file that has to be read again
PORTION = 256  # files per call of a thread
TAIL = 1024  # last bytes, in which a file has to end like an image
MOST_REASON = 200  # characters
MISSING = "missing"  # the reason for a photo that a table names but that does not exist


class Bad(NamedTuple):
    """A photo that cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def what_is_wrong(bad: Sequence[Bad]) -> str:
    """`missing`, `broken`, or `missing or broken`."""
    missing = sum(each.reason == MISSING for each in bad)
    return " or ".join([*(["missing"] if missing else []), *(["broken"] if missing < len(bad) else [])])


@dataclass(frozen=True, eq=False)
class Headers:
    """What the headers of N photos say."""

    sizes: SizeArray  # N x (width, height); meaningless for a bad photo
    reasons: Mapping[int, str]  # why a photo cannot be used, by its number

    def bad(self, source: FileSource) -> tuple[Bad, ...]:
        return tuple(Bad(source.path(number), reason) for number, reason in sorted(self.reasons.items()))

    def good(self) -> IntArray:
        """The numbers of the photos that can be used."""
        kept = np.ones(len(self.sizes), np.bool_)
        kept[list(self.reasons)] = False
        return np.flatnonzero(kept)


@dataclass(frozen=True)
class Check:
    """What the check of a dataset's files found."""

    training: tuple[Bad, ...] = ()
    validation: tuple[Bad, ...] = ()
    smallest: tuple[int, int] | None = None  # width and height of the photo with the fewest pixels; None: unknown
    largest: tuple[int, int] | None = None

    def lines(self) -> list[str]:
        """A line for every bad photo."""
        parts = {"training": self.training, "validation": self.validation}
        return [printable(f"{bad} ({part})") for part, own in parts.items() for bad in own]


def without_bad(splits: Splits, *, home: Path, workers: int) -> tuple[Splits, Check]:
    """The splits without unusable files, and what was found; only files have headers of their own."""
    train, validation = splits.train, splits.validation
    if not isinstance(train, FileSource) or not isinstance(validation, FileSource):
        return splits, Check()
    headers = read_headers((train, validation), home=home, workers=workers)
    kept = [each.good() for each in headers]
    sizes = np.concatenate([each.sizes[good] for each, good in zip(headers, kept, strict=True)])
    check = Check(headers[0].bad(train), headers[1].bad(validation))
    if len(sizes):
        pixels = sizes.prod(axis=1, dtype=np.int64)
        ends = (sizes[pixels.argmin()].tolist(), sizes[pixels.argmax()].tolist())
        check = replace(check, smallest=tuple(ends[0]), largest=tuple(ends[1]))
    if check.training:
        train = train.subset(kept[0])
    if check.validation:
        validation = validation.subset(kept[1])
    return replace(splits, train=train, validation=validation), check


def read_headers(sources: Sequence[FileSource], *, home: Path, workers: int) -> list[Headers]:
    """The headers of every photo; for files that have not changed, from the index in `home`."""
    roots = dict.fromkeys(source.root for source in sources)
    found: dict[int, Headers] = {}
    for root in roots:
        own = [number for number, source in enumerate(sources) if source.root == root]
        names = _joined([sources[number].names for number in own])
        headers = _checked(root, names, home=home, workers=workers)
        ends = np.cumsum([0, *(len(sources[number]) for number in own)]).tolist()
        for number, begin, end in zip(own, ends[:-1], ends[1:], strict=True):
            reasons = {at - begin: reason for at, reason in headers.reasons.items() if begin <= at < end}
            found[number] = Headers(headers.sizes[begin:end], reasons)
    return [found[number] for number in range(len(sources))]


def _joined(names: Sequence[Names]) -> Names:
    starts = np.cumsum([0, *(len(each.block) for each in names)])
    ends = [each.offsets[1:] + start for each, start in zip(names, starts, strict=False)]
    return Names(b"".join(each.block for each in names), np.concatenate([np.zeros(1, np.int64), *ends]))


def _checked(root: Path, names: Names, *, home: Path, workers: int) -> Headers:
    kind, paths = _kind(root, home), _Paths(root, names)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="falconet-headers")
    try:
        with alone(home):  # one process reads the headers, and the others wait for its index
            began, every = time.time_ns(), _portions(np.arange(len(names)))
            stamped = pool.map(lambda portion: _stamps(paths.of(portion)), every)
            stamps = np.concatenate([np.zeros((0, 2), np.int64), *stamped])
            known = _known(names, stamps, recalled(home, kind=kind, check=_check))
            left = _portions(np.flatnonzero(known.times == UNKNOWN))
            with Counting(f"checking {root}", total=sum(map(len, left)), quiet=not is_first(os.environ)) as counting:
                for portion, looked in zip(left, pool.map(lambda own: look(paths.of(own)), left), strict=True):
                    known.sizes[portion] = looked.sizes
                    known.reasons.update({int(portion[at]): reason for at, reason in looked.reasons.items()})
                    # Files that were missing, refused by the system or changed a moment ago are read again next time.
                    settled = (looked.states != State.UNREADABLE) & (stamps[portion, 1] < began - RACY)
                    known.times[portion] = np.where(settled, stamps[portion, 1], UNKNOWN)
                    counting.add(len(portion))
            if left:
                keep(home, _found(names, stamps[:, 0], known), kind=kind)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, at once
    return Headers(known.sizes, known.reasons)


def _kind(root: Path, home: Path) -> str:
    """The index's name, which differs for `home` itself, a folder in it, and one elsewhere."""
    if root == home:
        return "headers"
    inside = root.name if root.parent == home else hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
    return f"headers-{inside}"


class Looked(NamedTuple):
    """What the first and last bytes of some files say."""

    sizes: SizeArray
    reasons: dict[int, str]  # why a photo cannot be used
    states: StatusArray


@dataclass(frozen=True)
class _Paths:
    root: Path
    names: Names

    def of(self, numbers: IntArray) -> list[bytes]:
        root = os.fsencode(self.root) + b"/"
        return [root + self.names.coded(number) for number in numbers.tolist()]


def _portions(numbers: IntArray) -> list[IntArray]:
    return [numbers[begin : begin + PORTION] for begin in range(0, len(numbers), PORTION)]


@dataclass
class _Known:
    """Headers that are known, and when their files last changed."""

    sizes: SizeArray
    times: IntArray
    reasons: dict[int, str]


def _known(names: Names, stamps: IntArray, kept: Found | None) -> _Known:
    """What an index knows about these files; a file whose size or time differs is unknown."""
    count = len(names)
    known = _Known(np.zeros((count, 2), np.int32), np.full(count, UNKNOWN, np.int64), {})
    if kept is None:
        return known
    places = _places(names, kept)
    there = np.flatnonzero(places >= 0)
    rows, arrays = places[there], kept.arrays
    same = (arrays["bytes"][rows] == stamps[there, 0]) & (arrays["times"][rows] == stamps[there, 1])
    there, rows = there[same & (stamps[there, 0] >= 0)], rows[same & (stamps[there, 0] >= 0)]
    known.sizes[there], known.times[there] = arrays["sizes"][rows], arrays["times"][rows]
    if kept.facts["reasons"]:
        numbers = dict(zip(rows.tolist(), there.tolist(), strict=True))
        known.reasons = {
            numbers[int(row)]: reason for row, reason in kept.facts["reasons"].items() if int(row) in numbers
        }
    return known


def _places(names: Names, kept: Found) -> IntArray:
    """The row of each name in an index, or -1."""
    block, offsets = kept.arrays["names"].tobytes(), kept.arrays["offsets"]
    if block == names.block and np.array_equal(offsets, names.offsets):
        return np.arange(len(names))
    old = Names(block, offsets)
    rows = {old.coded(row): row for row in range(len(old))}
    return np.array([rows.get(names.coded(number), -1) for number in range(len(names))], np.int64)


def _found(names: Names, sizes: IntArray, known: _Known) -> Found:
    arrays: dict[str, Array] = {
        "names": np.frombuffer(names.block, np.uint8),
        "offsets": names.offsets,
        "bytes": sizes,
        "times": known.times,
        "sizes": known.sizes,
    }
    reasons = {str(number): reason for number, reason in known.reasons.items() if known.times[number] != UNKNOWN}
    return Found(arrays, {"reasons": reasons}, [])


def _check(found: Found) -> None:
    """Check an index that anyone may have written: it can make photos be skipped, but no other file be read."""
    arrays = found.arrays
    check_types(arrays, TYPES)
    check_paths(arrays["names"], arrays["offsets"])
    check_lengths(arrays["offsets"][1:], arrays["bytes"], arrays["times"], arrays["sizes"])
    if arrays["sizes"].dtype != np.int32 or arrays["sizes"].shape[1:] != (2,) or np.any(arrays["sizes"] < 0):
        raise ValueError("invalid sizes")
    for number, reason in found.facts["reasons"].items():
        if not 0 <= int(number) < len(arrays["sizes"]) or not isinstance(reason, str) or len(reason) > MOST_REASON:
            raise ValueError("invalid reasons")


def _stamps(paths: list[bytes]) -> IntArray:  # N x (bytes, nanoseconds); -1: not a file
    library = native.library()
    if library is not None:
        return library.stamps(paths)
    stamps = np.full((len(paths), 2), -1, np.int64)
    for number, path in enumerate(paths):
        try:
            state = os.stat(path)  # noqa: PTH116, a million of them
        except OSError:
            continue
        stamps[number] = state.st_size, state.st_mtime_ns
    return stamps


def look(paths: list[bytes]) -> Looked:
    """Read the headers of files, by the native library if it knows the format, else by Pillow."""
    library = native.library()
    sizes, states = _look_by_python(paths) if library is None else library.look(paths)
    limit, reasons = Image.MAX_IMAGE_PIXELS or MOST_PIXELS, dict[int, str]()
    reasons |= dict.fromkeys(
        np.flatnonzero(sizes.prod(axis=1, dtype=np.int64) > limit).tolist(), f"more than {limit:,} pixels"
    )
    for number in np.flatnonzero(states != State.WHOLE).tolist():
        path = Path(os.fsdecode(paths[number]))
        try:
            sizes[number] = open_rgb(path).size if states[number] == State.DOUBTFUL else read_size(path)
        except UnreadableImageError as error:
            reasons[number] = str(error)[:MOST_REASON] if path.exists() else MISSING
    return Looked(sizes, reasons, states)


def _look_by_python(paths: list[bytes]) -> tuple[SizeArray, StatusArray]:
    """Look at files as the library does, but leave their sizes to Pillow."""
    states = np.array([_state(path) for path in paths], np.int8)
    return np.zeros((len(paths), 2), np.int32), states


def _state(path: bytes) -> State:
    try:
        with open_regular(Path(os.fsdecode(path))) as file:
            head = file.read(8)
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            tail = file.read(TAIL)
    except OSError:
        return State.UNREADABLE
    ends = {b"\xff\xd8\xff": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND"}
    lacks_end = any(head.startswith(begin) and end not in tail for begin, end in ends.items())
    return State.DOUBTFUL if lacks_end else State.OTHER if head else State.EMPTY
