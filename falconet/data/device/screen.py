"""Which JPEG files the device decodes to the same picture as Pillow: told from their headers alone."""

from typing import NamedTuple

START, END = b"\xff\xd8", b"\xff\xd9"
BASELINE, SCAN, ADOBE, JFIF = 0xC0, 0xDA, 0xEE, 0xE0
OTHER_FRAMES = frozenset({*range(0xC1, 0xD0)} - {0xC4, 0xC8, 0xCC})  # extended, progressive, lossless, arithmetic
# Horizontal and vertical factors of the luminance over the colours: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = frozenset({0x11, 0x21, 0x22, 0x12, 0x41})


class Size(NamedTuple):
    width: int
    height: int


def plain_size(data: bytes | bytearray) -> Size | None:
    """Width and height of a whole baseline JPEG, 8 bits, grey or YCbCr; None for what is left to the CPU's reader."""
    if not data.startswith(START):
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
            # What ends too early may still give pixels on the device: wrong ones.
            whole = data.rfind(END, at) != -1
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


def _frame(frame: bytes | bytearray) -> tuple[Size, bool] | None:
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
