"""The inspection of photos: each is read and decoded whole, as in training, and what is unusual is noted."""

import hashlib
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from falconet.data import native
from falconet.data.fingerprints import SIDE, Fingerprints, fingerprints
from falconet.data.headers import MISSING, Looked, look
from falconet.data.image_files import DAMAGE, UnreadableImageError, open_regular, open_rgb, use_image
from falconet.data.keyed import IntArray
from falconet.data.native.binding import MOST_PIXELS, SizeArray, State, Status, Workspace
from falconet.data.readers import Opener, opener
from falconet.data.storage import FileSource, PhotoSource, PixelArray, ShardSource

PORTION = 32  # photos per call: about 100 ms of work, after which Ctrl-C is noticed
WINDOW = 4  # portions in progress per worker
DIGEST = 16  # bytes
CHUNK = 1 << 20  # bytes: a file may be larger than memory
EXIF = b"Exif\0\0"
EXIF_WITHIN = 1 << 16  # bytes from the beginning within which EXIF data starts
UPRIGHT = 1  # the orientation that needs no turning
# A phone's photo may hold a second picture (depth, a brighter exposure): it is no animation, and named as a JPEG.
SEVERAL_PICTURES = "MPO"


class Mark(IntFlag):
    """What is noted about a photo."""

    CHECKED = 1
    BROKEN = 2  # training cannot read it
    DAMAGED = 4  # a decoder complains, but training reads it
    CMYK = 8
    WIDE = 16  # more than 8 bits per channel
    ANIMATED = 32
    ROTATED = 64  # by an EXIF tag, which training ignores
    MISNAMED = 128  # its content has another format than its name says
    BLANK = 256  # one colour


@dataclass(frozen=True, eq=False)
class Inspection:
    """What is known about N photos: 81 bytes each."""

    marks: IntArray  # N, of Mark
    sizes: SizeArray  # N x (width, height); 0 for a broken photo
    bytes: IntArray  # N, of the encoded photo
    digests: npt.NDArray[np.uint8]  # N x 16, of the content
    prints: Fingerprints
    details: dict[tuple[int, Mark], str] = field(default_factory=dict)  # why, in a few words, by photo and mark

    @classmethod
    def of(cls, count: int) -> "Inspection":
        return cls(
            np.zeros(count, np.int64),
            np.zeros((count, 2), np.int32),
            np.zeros(count, np.int64),
            np.zeros((count, DIGEST), np.uint8),
            Fingerprints.none(count),
        )

    def __len__(self) -> int:
        return len(self.marks)

    def marked(self, mark: Mark) -> IntArray:
        return np.flatnonzero(self.marks & mark)

    @property
    def checked(self) -> int:
        return int(np.count_nonzero(self.marks & Mark.CHECKED))

    def add(self, begin: int, seen: "Seen") -> None:
        """Add what was seen of the photos from `begin` on."""
        rows = slice(begin, begin + len(seen.marks))
        self.marks[rows], self.sizes[rows], self.bytes[rows] = seen.marks | Mark.CHECKED, seen.sizes, seen.bytes
        self.digests[rows] = seen.digests
        self.prints.keys[rows], self.prints.prints[rows] = seen.prints.keys, seen.prints.prints
        self.prints.is_flat[rows] = seen.prints.is_flat
        # A few texts for a million photos.
        self.details.update({(begin + row, mark): sys.intern(text) for (row, mark), text in seen.details.items()})


@dataclass(eq=False)
class Seen:
    """What a thread saw of a portion."""

    marks: IntArray
    sizes: SizeArray
    bytes: IntArray
    digests: npt.NDArray[np.uint8]
    pixels: PixelArray  # N x 64 x 64 x 3; black for a broken photo
    prints: Fingerprints
    details: dict[tuple[int, Mark], str] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int) -> "Seen":
        return cls(
            np.zeros(count, np.int64),
            np.zeros((count, 2), np.int32),
            np.zeros(count, np.int64),
            np.zeros((count, DIGEST), np.uint8),
            np.zeros((count, SIDE, SIDE, 3), np.uint8),
            Fingerprints.none(count),
        )

    def mark(self, row: int, mark: Mark, detail: str = "") -> None:
        self.marks[row] |= mark
        if detail:
            self.details[row, mark] = detail


def inspect(sources: Sequence[PhotoSource], *, workers: int) -> Iterator[tuple[Inspection, int]]:
    """Yield the inspection of all photos, source after source, as it grows, with the number of photos just added.

    It can be stopped at any time: what was inspected so far is complete.
    """
    found = Inspection.of(sum(map(len, sources)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="falconet-check")
    begun: deque[tuple[int, Future[Seen]]] = deque()

    def ended() -> int:
        begin, future = begun.popleft()
        seen = future.result()
        found.add(begin, seen)
        return len(seen.marks)

    try:
        start = 0
        for source in sources:
            own = _Inspector(source)
            for begin in range(0, len(source), PORTION):
                numbers = np.arange(begin, min(begin + PORTION, len(source)))
                begun.append((start + begin, pool.submit(own.look, numbers)))
                if len(begun) >= WINDOW * workers:
                    yield found, ended()
            start += len(source)
        while begun:
            yield found, ended()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, at once
    if not len(found):
        yield found, 0


class _Inspector:
    """Decodes a source's photos, in several threads."""

    def __init__(self, source: PhotoSource) -> None:
        self._source = source
        self._library = native.library()
        self._open: Opener = opener(source)
        self._own = threading.local()

    def look(self, numbers: IntArray) -> Seen:
        seen = Seen.of(len(numbers))
        looked = self._headers(numbers)
        left = range(len(numbers)) if self._library is None else self._look_natively(numbers, seen)
        for row in left:
            self._look_by_pillow(int(numbers[row]), row, seen)
        if looked is not None:
            _apply(looked, seen)
        seen.prints = fingerprints(seen.pixels)
        for row in np.flatnonzero(seen.prints.is_flat & (seen.marks & Mark.BROKEN == 0)).tolist():
            seen.mark(row, Mark.BLANK)
        seen.prints.is_flat[seen.marks & Mark.BROKEN != 0] = True
        return seen

    def _headers(self, numbers: IntArray) -> Looked | None:
        """What training's own check says about photos; only files have headers of their own."""
        if not isinstance(self._source, FileSource):
            return None
        root = os.fsencode(self._source.root) + b"/"
        return look([root + self._source.names.coded(number) for number in numbers.tolist()])

    def _look_natively(self, numbers: IntArray, seen: Seen) -> list[int]:
        """Look at photos that the native library decodes; return the other rows."""
        workspace = self._workspace()
        sizes, opened = self._open(workspace, numbers)
        encoded, lengths = workspace.encoded(len(numbers))
        ends = np.cumsum(lengths)
        for row in np.flatnonzero(opened == Status.OK).tolist():
            data = encoded[ends[row] - lengths[row] : ends[row]]
            seen.bytes[row] = lengths[row]
            seen.digests[row] = np.frombuffer(_digest(data), np.uint8)
            if EXIF in data[:EXIF_WITHIN].tobytes():
                _note_facts(io.BytesIO(data.tobytes()), self._name(int(numbers[row])), row, seen)
            elif not _is_named(self._name(int(numbers[row])), "JPEG"):
                seen.mark(row, Mark.MISNAMED, "JPEG")
        boxes = np.zeros((len(numbers), 4))
        boxes[:, 2:] = np.where((opened == Status.OK)[:, None], sizes, 1)
        flips = np.zeros(len(numbers), np.bool_)
        # A box of the whole photo uses every coefficient in the file, however small the result.
        decoded = workspace.decode(boxes, flips, seen.pixels)
        fine = decoded == Status.OK
        seen.sizes[fine] = sizes[fine]
        for row in np.flatnonzero(decoded == Status.DAMAGED).tolist():
            seen.mark(row, Mark.DAMAGED, "its compressed data is damaged")
        return np.flatnonzero(~fine).tolist()

    def _look_by_pillow(self, number: int, row: int, seen: Seen) -> None:
        try:
            with _opened(self._source, number) as file:
                seen.bytes[row] = file.seek(0, os.SEEK_END)
                file.seek(0)
                seen.digests[row] = np.frombuffer(_digest_of(file), np.uint8)
                file.seek(0)
                image = open_rgb(file)
                seen.sizes[row] = image.size
                reduced = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0)
                seen.pixels[row] = np.asarray(reduced)
                file.seek(0)
                _note_facts(file, self._name(number), row, seen)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            seen.mark(row, Mark.BROKEN, MISSING if missing else error.strerror or "cannot be read")
        except UnreadableImageError as error:
            seen.marks[row] &= ~int(Mark.DAMAGED)
            seen.mark(row, Mark.BROKEN, str(error))

    def _name(self, number: int) -> str:
        return self._source.name(number)

    def _workspace(self) -> Workspace:
        """This thread's workspace, freed with the thread."""
        if not hasattr(self._own, "workspace"):
            assert self._library is not None
            self._own.workspace = Workspace(self._library, most_pixels=Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
        workspace: Workspace = self._own.workspace
        return workspace


def _apply(looked: Looked, seen: Seen) -> None:
    """Mark as broken what training's check of the headers leaves out, even if a decoder takes it."""
    for row, reason in looked.reasons.items():
        seen.marks[row] &= ~int(Mark.DAMAGED)
        seen.mark(row, Mark.BROKEN, reason)
    for row in np.flatnonzero(looked.states == State.DOUBTFUL).tolist():
        if not seen.marks[row] & (Mark.BROKEN | Mark.DAMAGED):
            seen.mark(row, Mark.DAMAGED, "its end is missing, or its header is odd")


def _digest(data: PixelArray) -> bytes:
    return hashlib.blake2b(data.data, digest_size=DIGEST).digest()


def _digest_of(file: BinaryIO) -> bytes:
    total = hashlib.blake2b(digest_size=DIGEST)
    while chunk := file.read(CHUNK):
        total.update(chunk)
    return total.digest()


@contextmanager
def _opened(source: PhotoSource, number: int) -> Iterator[BinaryIO]:
    if isinstance(source, ShardSource):
        yield io.BytesIO(source.encoded(number))
    else:
        with open_regular(source.path(number)) as file:
            yield file


class _Facts(NamedTuple):
    format: str
    is_cmyk: bool
    bits: int  # per channel
    is_animated: bool
    orientation: int


def _note_facts(file: BinaryIO, name: str, row: int, seen: Seen) -> None:
    """Note what a decodable photo's header says, as far as Pillow can tell."""
    try:
        facts = use_image(file, lambda image: _facts(image, file))
    except UnreadableImageError:
        return
    if not _is_named(name, facts.format):
        seen.mark(row, Mark.MISNAMED, facts.format)
    if facts.is_cmyk:
        seen.mark(row, Mark.CMYK, facts.format)
    if facts.bits > 8:
        seen.mark(row, Mark.WIDE, f"{facts.bits} bits per channel")
    if facts.is_animated:
        seen.mark(row, Mark.ANIMATED, f"{facts.format}, of which training sees the first frame")
    if facts.orientation != UPRIGHT:
        seen.mark(row, Mark.ROTATED, f"orientation {facts.orientation}: {TURNS[facts.orientation]}")


# How the picture lies as training sees it, by EXIF orientation.
TURNS = {
    2: "mirrored",
    3: "upside down",
    4: "mirrored, upside down",
    5: "mirrored, on its side",
    6: "on its side",
    7: "mirrored, on its side",
    8: "on its side",
}


def _facts(image: Image.Image, file: BinaryIO) -> _Facts:
    kind = image.format or ""
    return _Facts(kind, image.mode == "CMYK", _bits(image, file), _is_animated(image, kind), _orientation(image))


def _bits(image: Image.Image, file: BinaryIO) -> int:
    """Bits per channel; Pillow reduces some formats to 8 without a trace in the mode."""
    if image.format == "PNG":
        file.seek(24)  # after the signature, the chunk's length and name, width and height
        return file.read(1)[0]
    if image.format == "TIFF":
        found = image.tag_v2.get(258, 8)  # type: ignore[attr-defined]  # of TIFF's plugin
        return max(found) if isinstance(found, tuple) else int(found)
    return 16 if image.mode.startswith("I") else 32 if image.mode == "F" else 8


def _is_animated(image: Image.Image, kind: str) -> bool:
    if kind == SEVERAL_PICTURES:
        return False
    try:
        return bool(getattr(image, "is_animated", False))
    except (OSError, *DAMAGE):  # in the second frame, which training does not read
        return True


def _orientation(image: Image.Image) -> int:
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except (OSError, *DAMAGE):  # a damaged tag changes nothing
        return UPRIGHT
    return found if found in TURNS else UPRIGHT


def _is_named(name: str, kind: str) -> bool:
    """Whether a file's name fits its format; no name, or an ending that says nothing, fits any."""
    said = Image.registered_extensions().get(Path(name).suffix.lower())
    return said is None or said == kind or {said, kind} <= {"JPEG", SEVERAL_PICTURES}
