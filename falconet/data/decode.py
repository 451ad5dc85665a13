"""Files to be read, and nothing else: a pipe would be waited for, and a device may do anything."""

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
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from falconet.errors import DataError

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


# Pillow warns of odd metadata, which changes no pixel, and of sizes that are refused below.
warnings.filterwarnings("ignore", module=r"PIL\.")

BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
# What Pillow's plugins raise on damaged bytes, besides OSError.
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
    RuntimeError,  # of which NotImplementedError is one
)


class UnreadableImageError(Exception):
    """An image that cannot be decoded; its text is the reason, in a few words."""


def open_rgb(file: Path | BinaryIO) -> Image.Image:
    """The decoded image in mode RGB, or UnreadableImageError.

    As torchvision's and timm's loaders do: the first frame, alpha dropped, palettes and CMYK converted by Pillow, EXIF
    orientation ignored. Unlike theirs, 16-bit grey keeps its range (divided by 256) instead of being clipped.
    """
    if isinstance(file, Path):
        try:
            with open_regular(file) as opened:
                return open_rgb(opened)
        except OSError as error:
            raise UnreadableImageError(_os_reason(error)) from None
    try:
        with Image.open(file, formats=_formats()) as image:
            _check_size(image)
            return _rgb(image)
    except BOMBS:
        raise UnreadableImageError(f"more than {Image.MAX_IMAGE_PIXELS} pixels") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(_why_unidentified(file)) from None
    except OSError as error:
        raise UnreadableImageError(_os_reason(error)) from None
    except DAMAGE as error:
        raise UnreadableImageError(f"damaged: {_one_line(error)}") from None


@cache
def _formats() -> tuple[str, ...]:
    """All that Pillow reads by itself; for PostScript, under whatever name, it would start Ghostscript."""
    Image.init()
    return tuple(sorted(Image.OPEN.keys() - {"EPS"}))


def _check_size(image: Image.Image) -> None:
    """Pillow refuses what is twice as large as its limit and only warns of what is beyond it."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Image.DecompressionBombError


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip(wide >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB gives the same colours and a warning
    return image.convert("RGB")


def _why_unidentified(file: BinaryIO) -> str:
    return "empty file" if file.seek(0, os.SEEK_END) == 0 else "not an image"


def _os_reason(error: OSError) -> str:
    if error.strerror:  # of the system, not of the decoder
        return error.strerror
    return "truncated" if "truncated" in str(error).lower() else f"damaged: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class BadImages:
    """The images that could not be read: each is noted once, and one too many ends the run.

    `count`: the number of different ones that all processes of a run found, a new one included; without it, our own.
    """

    def __init__(self, allowed: int, *, note: Callable[[str], None], count: Callable[[str], int] | None = None) -> None:
        self.allowed = allowed
        self._note = note
        self._count = count or (lambda _: len(self._seen))
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, where: str, reason: str) -> None:
        with self._lock:
            if where in self._seen:
                return
            self._seen.add(where)
            count = self._count(where)
            what = f"{where}: cannot be decoded ({reason})"
            if count > self.allowed:
                images = "1 bad image" if count == 1 else f"{count} bad images"
                raise DataError(f"{what}; {images}, --bad-images-allowed {self.allowed}")
            self._note(f"{what}; skipped, bad image {count} of {self.allowed} allowed")
