"""Checks what a stranger's photo is made of: small files that would cost Pillow minutes or gigabytes are refused.

Pillow limits the pixels in a picture, but not the parts in a file. Measured with Pillow 13: 1 MB of a progressive
JPEG's scans takes minutes, 16 MB of a TIFF's strips take 1.2 GB, and a TIFF's tile may be larger than any picture.
"""

import io
import re
from typing import Literal

from PIL import BmpImagePlugin, Image, TiffImagePlugin, TiffTags

from falconet.data.image_files import UnreadableImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # the formats that are read, as Pillow calls them
MOST_PARTS = 100_000  # segments of a JPEG, values of a TIFF's field; a strip takes Pillow 300 bytes and 5 microseconds
MOST_READS = 4 * MOST_PARTS  # by Pillow in one file: two or three per segment, chunk or block
MOST_SCANS = 64  # in a JPEG: encoders write about ten, and each covers the whole picture
MOST_TILE = 1 << 24  # pixels in a TIFF's tile that is larger than the picture


class PhotoFile(io.BytesIO):
    """A photo in memory as a file for Pillow; it refuses too many reads, because Pillow's parsers read small parts."""

    def __init__(self, photo: bytes) -> None:
        super().__init__(photo)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MOST_READS:
            raise UnreadableImageError("made of too many parts")
        return super().read(size)


def check_encoded(photo: bytes) -> None:
    """Raise UnreadableImageError unless the file starts like a photo and has as many parts as photos have."""
    if photo.startswith(b"\xff\xd8\xff"):
        _check_jpeg(photo)
    elif photo.startswith((b"II*\0", b"MM\0*")):
        _check_tiff(photo)
    elif not photo.startswith((b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF")):
        raise UnreadableImageError("not a JPEG, PNG, WebP, GIF, BMP or TIFF file" if photo else "empty file")


def check_opened(image: Image.Image) -> None:
    """Raise UnreadableImageError if decoding an opened image would cost more than its pixels do."""
    if isinstance(image, BmpImagePlugin.BmpImageFile) and image.info.get("compression") in (1, 2):
        raise UnreadableImageError("a BMP file compressed by run lengths, which Pillow decodes pixel by pixel")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sides = [image.tag_v2.get(tag, 1) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH)]
        if not all(isinstance(side, int) for side in sides):
            raise UnreadableImageError("damaged: tiles without a size")
        if sides[0] * sides[1] > max(image.width * image.height, MOST_TILE):
            raise UnreadableImageError(f"tiles of {sides[0]} x {sides[1]} pixels, more than the picture has")


_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)
_AFTER_SCAN = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # restarts are part of a scan
_END, _SCAN = 0xD9, 0xDA
_ALONE = {0x01, *range(0xD0, 0xD9)}
# The others are reserved: libjpeg refuses them, and Pillow would read their content as further segments.
_WITH_LENGTH = {*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDA, 0xF0), 0xFE}


def _check_jpeg(photo: bytes) -> None:
    at, scans = 2, 0
    for _ in range(MOST_PARTS):
        found = (_AFTER_SCAN if scans else _MARKER).search(photo, at)
        if found is None or found[1][0] == _END:
            return
        code, at = found[1][0], found.end()
        if code in _WITH_LENGTH:
            at += max(2, int.from_bytes(photo[at : at + 2], "big"))
        elif code not in _ALONE:
            raise UnreadableImageError(f"damaged: unknown marker {code:02X}")
        scans += code == _SCAN
        if scans > MOST_SCANS:
            raise UnreadableImageError(f"more than {MOST_SCANS} scans")
    raise UnreadableImageError(f"more than {MOST_PARTS:,} segments")


def _check_tiff(photo: bytes) -> None:
    """Limit the values in a field: Pillow makes a Python object of each one that is not text or bytes."""
    order: Literal["little", "big"] = "little" if photo.startswith(b"II") else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(photo[at : at + size], order)

    first = number(4, 4)
    for entry in range(number(first, 2)):
        at = first + 2 + 12 * entry
        is_text = number(at + 2, 2) in (TiffTags.BYTE, TiffTags.ASCII, TiffTags.UNDEFINED)
        is_list = number(at, 2) in (TiffImagePlugin.STRIPOFFSETS, TiffImagePlugin.TILEOFFSETS)  # even if of bytes
        if (is_list or not is_text) and number(at + 4, 4) > MOST_PARTS:
            raise UnreadableImageError(f"a field of more than {MOST_PARTS:,} values")
