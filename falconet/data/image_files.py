"""Image files: opened only if they are regular files, decoded by Pillow, and counted if they are bad."""

import errno
import os
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from falconet.errors import DataError, printable

T = TypeVar("T")
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}

NO_NAME = "no file can have this name"


def open_descriptor(path: Path) -> int:
    """Open a file, following links; OSError if it cannot or does not exist, or is a pipe, a device or a folder.

    Opening a pipe would wait, and opening a device may have any effect.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:  # a NUL, or half a character
        raise OSError(errno.EINVAL, NO_NAME, str(path)) from None
    _check(path, mode)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have become a pipe since
    try:
        _check(path, os.fstat(file).st_mode)
    except OSError:
        os.close(file)
        raise
    return file


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file as a file object."""
    return os.fdopen(open_descriptor(path), "rb")


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def kind(mode: int) -> str:
    """Name the kind of a directory entry that is not a file."""
    return KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{kind(mode)}, not a file", str(path))


# Pillow warns about odd metadata, which changes no pixel, and about sizes that are refused below.
warnings.filterwarnings("ignore", module=r"PIL\.")

BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
# What Pillow's plugins raise for damaged bytes, besides OSError.
DAMAGE = (
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # includes NotImplementedError
)
UNREAD_HEIC = "HEIC, which Pillow cannot read; convert it to JPEG"  # of a file that begins with one of these brands
HEIC_BRANDS = frozenset(b"ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"))


class UnreadableImageError(Exception):
    """An image that cannot be decoded; the text is the reason in a few words."""


def open_rgb(file: Path | BinaryIO) -> Image.Image:
    """The decoded image in mode RGB, or UnreadableImageError.

    Like torchvision's and timm's loaders: the first frame, alpha dropped, palettes and CMYK converted by Pillow, EXIF
    orientation ignored. Unlike them, 16-bit grey keeps its range (divided by 256) instead of being clipped.
    """
    return use_image(file, to_rgb)


def read_size(file: Path | BinaryIO) -> tuple[int, int]:
    """Width and height by the header alone, or UnreadableImageError."""
    return use_image(file, lambda image: image.size)


def use_image(
    file: Path | BinaryIO,
    use: Callable[[Image.Image], T],
    *,
    formats: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> T:
    """Call `use` on an image whose header has been read; UnreadableImageError for anything wrong with it.

    `formats`: Pillow's names of the formats to read; None: all. `most_pixels`: below Pillow's limit, or None for that.
    """
    if isinstance(file, Path):
        try:
            with open_regular(file) as opened:
                return use_image(opened, use, formats=formats, most_pixels=most_pixels)
        except OSError as error:
            raise UnreadableImageError(_os_reason(error)) from None
    limit = min((each for each in (most_pixels, Image.MAX_IMAGE_PIXELS) if each is not None), default=None)
    try:
        if limit is not None and _webp_pixels(file) > limit:
            raise Image.DecompressionBombError
        with Image.open(file, formats=_formats() if formats is None else formats) as image:
            if limit is not None and image.width * image.height > limit:  # Pillow only warns, up to twice as many
                raise Image.DecompressionBombError
            return use(image)
    except BOMBS:
        raise UnreadableImageError(f"more than {limit:,} pixels") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(_why_unidentified(file)) from None
    except OSError as error:
        reason = _os_reason(error)
        is_cut = reason.startswith("damaged") and _is_cut_webp(file)
        raise UnreadableImageError("truncated" if is_cut else reason) from None
    except DAMAGE as error:
        raise UnreadableImageError(f"damaged: {_one_line(error)}") from None


@cache
def _formats() -> tuple[str, ...]:
    """All formats that Pillow itself reads; for PostScript, whatever the file's name, it would start Ghostscript."""
    Image.init()
    return tuple(sorted(Image.OPEN.keys() - {"EPS"}))


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB, as `open_rgb` converts it."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I"):
        high = np.asarray(image) >> 8  # in its own type: 64-bit integers would take 24 bytes per pixel
        return Image.fromarray(np.clip(high, 0, 255, out=high).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # directly to RGB gives the same colours and a warning
    return image.convert("RGB")


def _why_unidentified(file: BinaryIO) -> str:
    if file.seek(0, os.SEEK_END) == 0:
        return "empty file"
    file.seek(4)
    return UNREAD_HEIC if file.read(8) in HEIC_BRANDS else "not an image"


def _is_cut_webp(file: BinaryIO) -> bool:
    """Whether a WebP file is shorter than it states, which its decoder does not report."""
    file.seek(0)
    head = file.read(12)
    is_webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
    return is_webp and file.seek(0, os.SEEK_END) < 8 + int.from_bytes(head[4:8], "little")


def _webp_pixels(file: BinaryIO) -> int:
    """Pixels of a WebP file by its header; 0: another format. Pillow before 13 allocates them all when it opens one."""
    file.seek(0)
    head = file.read(30)
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return 0
    match head[12:16]:
        case b"VP8X":
            return (int.from_bytes(head[24:27], "little") + 1) * (int.from_bytes(head[27:30], "little") + 1)
        case b"VP8L":
            sides = int.from_bytes(head[21:25], "little")
            return ((sides & 0x3FFF) + 1) * ((sides >> 14 & 0x3FFF) + 1)
        case _:
            width, height = (int.from_bytes(head[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            return width * height


def _os_reason(error: OSError) -> str:
    if error.strerror:  # from the system, not from the decoder
        return error.strerror
    return "truncated" if "truncated" in str(error).lower() else f"damaged: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class BadImages:
    """Images that could not be read: each is reported once, and one too many ends the run.

    `allowed`: None means any number. `count` gives the number of bad images found by all processes, with a new one; by
    default, by this process alone.
    """

    def __init__(
        self, allowed: int | None, *, note: Callable[[str], None], count: Callable[[str], int] | None = None
    ) -> None:
        self.allowed = allowed
        self._note = note
        self._count = count or (lambda _: len(self._seen))
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the images that this process could not read."""
        with self._lock:
            return tuple(sorted(self._seen))

    def add(self, where: str, reason: str) -> None:
        with self._lock:
            if where in self._seen:
                return
            self._seen.add(where)
            count = self._count(where)
            what = printable(f"{where}: cannot be decoded ({reason})")
            if self.allowed is None:
                self._note(f"{what}; left out")
                return
            if count > self.allowed:
                images = "1 bad image" if count == 1 else f"{count} bad images"
                raise DataError(f"{what}; {images}, at most {self.allowed} allowed")
            self._note(f"{what}; skipped, bad image {count} of {self.allowed} allowed")
