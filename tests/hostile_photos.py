"""Small files that would cost a careless decoder gigabytes or minutes, each with the reason of its refusal."""

import io
import struct
import zlib
from collections.abc import Callable, Iterable

from PIL import Image

import layouts


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, before: bytes = b"", kind: int = 2, depth: int = 8, zeros: int = 1 << 20) -> bytes:
    """An all-black PNG of this size whose data decompress to so many bytes."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    data = _deflated(zeros)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _deflated(zeros: int) -> bytes:
    press = zlib.compressobj(9)
    pieces = [press.compress(bytes(min(1 << 20, zeros - at))) for at in range(0, zeros, 1 << 20)]
    return b"".join([*pieces, press.flush()])


def tiff(fields: Iterable[tuple[int, int, int, int]], data: bytes) -> bytes:
    """Fields are (tag, type, count, value); the data start at 256."""
    every = list(fields)
    entries = b"".join(struct.pack("<HHII", *field) for field in every)
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", len(every)) + entries + bytes(4)).ljust(256, b"\0") + data


def grey_tiff(width: int, height: int, *places: tuple[int, int, int, int], packed: int = 8) -> list[tuple[int, ...]]:
    return [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, packed), (262, 3, 1, 1), *places]


def jpeg(**options: object) -> bytes:
    return layouts.encoded(layouts.photo(3), "JPEG", progressive=True, **options)


def claimed(photo: bytes, marker: bytes, width: int, height: int) -> bytes:
    at = photo.index(marker) + 5
    return photo[:at] + struct.pack(">HH", height, width) + photo[at + 4 :]


def _scans() -> bytes:
    photo = layouts.encoded(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    last, end = photo.rindex(b"\xff\xc4"), photo.rindex(b"\xff\xd9")
    return photo[:end] + photo[last:end] * 3000 + photo[end:]


def _webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    whole = layouts.encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True)
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + whole[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _gif_frame(width: int, height: int) -> bytes:
    """A small canvas with a first frame that is larger."""
    whole = layouts.encoded(Image.new("L", (8, 8)), "GIF")
    at = whole.index(b",", 13 + (3 << (whole[10] % 8 + 1))) + 5
    return whole[:at] + struct.pack("<HH", width, height) + whole[at + 4 :]


def _gif_comments(blocks: int) -> bytes:
    whole = layouts.encoded(Image.new("L", (8, 8)), "GIF")
    at = 13 + (3 << (whole[10] % 8 + 1))
    return whole[:at] + b"!\xfe" + b"\x01a" * blocks + b"\0" + whole[at:]


def _bmp_run_lengths() -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 9000, 9000, 1, 8, 1, 0, 0, 0, 2, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 8) + head + bytes(8) + b"\0\0" * 9000 + b"\0\1"


def _tile() -> bytes:
    data = _deflated(20_000 * 20_000)
    places = [(277, 3, 1, 1), (322, 4, 1, 20_000), (323, 4, 1, 20_000), (324, 4, 1, 256), (325, 4, 1, len(data))]
    return tiff(grey_tiff(64, 64, *places), data)


TEXT = b"k\0\0" + zlib.compress(bytes(1 << 19))
PIXELS = "more than 89,478,485 pixels"
# Functions, so that the process that makes the files is not the one whose memory is measured.
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "png of 50,000 x 50,000": (lambda: png(50_000, 50_000, zeros=30 << 20), PIXELS),
    "apng of 50,000 x 50,000": (lambda: png(50_000, 50_000, before=chunk(b"acTL", bytes(8))), PIXELS),
    "jpeg of 65,500 x 65,500": (lambda: claimed(jpeg(), b"\xff\xc2", 65_500, 65_500), PIXELS),
    "baseline jpeg of 65,500 x 65,500": (
        lambda: claimed(layouts.encoded(layouts.photo(3)), b"\xff\xc0", 65_500, 65_500),
        PIXELS,
    ),
    "webp of 16,000 x 16,000": (lambda: _webp(16_000, 16_000), PIXELS),
    "webp of 60,000 x 60,000": (lambda: _webp(60_000, 60_000), PIXELS),
    "gif with a canvas of 65,000 x 65,000": (
        lambda: layouts.encoded(Image.new("L", (8, 8)), "GIF").replace(b"\x08\0\x08\0", b"\xe8\xfd\xe8\xfd", 1),
        PIXELS,
    ),
    "gif with a frame of 60,000 x 60,000": (lambda: _gif_frame(60_000, 60_000), PIXELS),
    "bmp of 50,000 x 50,000": (
        lambda: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 54, 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0),
        PIXELS,
    ),
    "tiff of 50,000 x 50,000": (
        lambda: tiff(grey_tiff(50_000, 50_000, (273, 4, 1, 256), (278, 4, 1, 50_000), (279, 4, 1, 99)), bytes(99)),
        PIXELS,
    ),
    "tiff with a tile of 20,000 x 20,000": (_tile, "tiles of 20000 x 20000 pixels, more than the picture has"),
    "tiff of 4,000,000 strips": (
        lambda: tiff(
            grey_tiff(8, 8, (273, 4, 4_000_000, 256), (278, 4, 1, 1), (279, 4, 1, 8), packed=1), bytes(16_000_000)
        ),
        "a field of more than 100,000 values",
    ),
    "tiff of strips whose places are bytes": (
        lambda: tiff(grey_tiff(8, 8, (273, 1, 8_000_000, 256), (278, 4, 1, 1), packed=1), bytes(8_000_000)),
        "a field of more than 100,000 values",
    ),
    "jpeg of 3,000 scans": (_scans, "more than 64 scans"),
    "jpeg of 2,000,000 comments": (
        lambda: jpeg()[:2] + b"\xff\xfe\0\x02" * 2_000_000 + jpeg()[2:],
        "more than 100,000 segments",
    ),
    "jpeg with a hidden segment": (lambda: jpeg()[:2] + b"\xff\xf0\0\x02" + jpeg()[2:], "damaged: unknown marker F0"),
    "jpeg with 4,000,000 bytes between its segments": (
        lambda: jpeg()[:20] + bytes(4_000_000) + jpeg()[20:],
        "made of too many parts",
    ),
    "png of 1,000,000 chunks": (
        lambda: png(8, 8, before=chunk(b"prVt", b"") * 1_000_000),
        "made of too many parts",
    ),
    "png of 100 MB of text": (
        lambda: png(8, 8, before=chunk(b"zTXt", TEXT) * 200),
        "damaged: Too much memory used in text chunks: 67633152>MAX_TEXT_MEMORY",
    ),
    "png with a profile of 1 GB": (
        lambda: png(8, 8, before=chunk(b"iCCP", b"k\0\0" + _deflated(1 << 30))),
        "damaged: Decompressed data too large for PngImagePlugin.MAX_TEXT_CHUNK",
    ),
    "gif of 4,000,000 comments": (lambda: _gif_comments(4_000_000), "made of too many parts"),
    "bmp of run lengths": (
        _bmp_run_lengths,
        "a BMP file compressed by run lengths, which Pillow decodes pixel by pixel",
    ),
}


def just_allowed() -> dict[str, bytes]:
    """Pictures of nearly as many pixels as are allowed, in little space."""
    side, grey16 = 9_400, io.BytesIO()
    Image.new("L", (side, side)).save(grey16, "WEBP", lossless=True)
    return {
        "16-bit grey png": png(side, side, kind=0, depth=16, zeros=side * (2 * side + 1)),
        "transparent png": png(side, side, kind=6, zeros=side * (4 * side + 1)),
        "webp": grey16.getvalue(),
    }
