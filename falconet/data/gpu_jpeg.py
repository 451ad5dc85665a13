"""Which JPEG files the device may decode: those of which it gives the same picture as Pillow."""

from typing import NamedTuple

START, END = b"\xff\xd8", b"\xff\xd9"
LAST = 256  # bytes in which a file's end is looked for first
BASELINE, SCAN, ADOBE, JFIF = 0xC0, 0xDA, 0xEE, 0xE0
OTHER_FRAMES = frozenset({*range(0xC1, 0xD0)} - {0xC4, 0xC8, 0xCC})  # extended, progressive, lossless, arithmetic
# Horizontal and vertical sampling factors of the luminance: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = frozenset({0x11, 0x21, 0x22, 0x12, 0x41})

Bytes = bytes | bytearray | memoryview


class Size(NamedTuple):
    width: int
    height: int


def plain_size(data: Bytes) -> Size | None:
    """Width and height of a whole 8-bit baseline JPEG, grey or YCbCr; None for what the host has to decode."""
    if data[:2] != START:
        return None
    at, size, adobe, jfif = 2, None, None, False
    named_rgb = False
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2 or at + 2 + length > len(data) or marker in OTHER_FRAMES:
            return None
        if marker == SCAN:
            # The device may give pixels for a truncated file as well: wrong ones.
            whole = END in bytes(data[max(at, len(data) - LAST) :]) or END in bytes(data[at:])
            colours = adobe == 0 or (adobe is None and not jfif and named_rgb)
            return size if whole and not colours else None
        if marker == BASELINE:
            frame = _frame(data[at + 4 : at + 2 + length])
            if frame is None or size is not None:
                return None
            size, named_rgb = frame
        elif marker == JFIF:
            jfif = jfif or data[at + 4 : at + 9] == b"JFIF\0"
        elif marker == ADOBE and data[at + 4 : at + 9] == b"Adobe" and length >= 14:
            adobe = data[at + 15]
        at += 2 + length
    return None


def _frame(frame: Bytes) -> tuple[Size, bool] | None:
    """The size, and whether the components are named R, G and B."""
    if len(frame) < 6 or frame[0] != 8:
        return None
    height, width, components = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0 or components not in (1, 3) or len(frame) != 6 + 3 * components:
        return None
    if components == 1:
        return Size(width, height), False
    luminance, blue, red = frame[7], frame[10], frame[13]
    if luminance not in SAMPLINGS or (blue, red) != (0x11, 0x11):
        return None
    return Size(width, height), (frame[6], frame[9], frame[12]) == tuple(b"RGB")
