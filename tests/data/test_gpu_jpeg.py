"""Which files the device may decode: complete baseline JPEGs in grey or YCbCr, and no others."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from falconet.data import gpu
from falconet.data.gpu import Photo, Size, plain_size, portions


def photo(width=37, height=21, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def jpeg(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


WHOLE = jpeg(photo())
PLAIN = {
    "4:4:4": jpeg(photo(), subsampling=0),
    "4:2:2": jpeg(photo(), subsampling=1),
    "4:2:0": jpeg(photo(), subsampling=2),
    "grey": jpeg(photo(mode="L")),
    "optimised tables": jpeg(photo(), optimize=True),
    "restart markers": jpeg(photo(), restart_marker_blocks=1),
    "a comment and exif": jpeg(photo(), comment=b"x" * 500, exif=b"Exif\0\0" + b"\0" * 300),
    "bytes after the end": WHOLE + b"\0" * 40,
    "many bytes after the end": WHOLE + b"\0" * 4000,
    "padding before a marker": WHOLE[:2] + b"\xff\xff" + WHOLE[2:],
}
OTHER = {
    "progressive": jpeg(photo(), progressive=True),
    "CMYK": jpeg(photo(mode="CMYK")),
    "RGB": jpeg(photo(), keep_rgb=True),
    "truncated": WHOLE[: len(WHOLE) // 2],
    "without its end": WHOLE[:-2],
    "header alone": WHOLE[:100],
    "empty": b"",
    "two bytes": b"\xff\xd8",
    "html": b"<html>",
    "png": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
    "12 bit": WHOLE.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "extended": WHOLE.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc1\x00\x11\x08"),
    "no height": WHOLE.replace(b"\xff\xc0\x00\x11\x08\x00\x15", b"\xff\xc0\x00\x11\x08\x00\x00"),
    "odd sampling": WHOLE.replace(b"\x03\x01\x22\x00", b"\x03\x01\x31\x00"),
    "a segment of no length": WHOLE[:2] + b"\xff\xe1\x00\x00" + WHOLE[2:],
}


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN.keys())
def test_plain_files_are_accepted_with_their_size(data):
    assert plain_size(data) == Size(37, 21)
    assert plain_size(bytearray(data)) == Size(37, 21)
    assert plain_size(memoryview(data)) == Size(37, 21)


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER.keys())
def test_other_files_are_left_to_the_host(data):
    assert data != WHOLE
    assert plain_size(data) is None
    assert plain_size(memoryview(data)) is None


def test_truncated_or_changed_files_raise_no_error():
    for end in range(len(WHOLE)):
        plain_size(WHOLE[:end])
    random = np.random.default_rng(0)
    for _ in range(2000):
        damaged = bytearray(WHOLE)
        for place in random.integers(0, min(700, len(WHOLE)), 3):
            damaged[place] = random.integers(256)
        plain_size(damaged)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([(20, 20)] * 2 + [(10, 20), (1, 1)], [[0, 1, 2], [3]]),  # 1,000 pixels fit
        ([(100, 100), (1, 1), (100, 100)], [[0], [1], [2]]),
        ([(1, 1)] * 128, [[*range(128)]]),
    ],
    ids=["none", "as many as fit", "each too large", "many small ones"],
)
def test_photos_decoded_at_once_are_limited_by_their_pixels(monkeypatch, sizes, expected):
    monkeypatch.setattr(gpu, "PORTION_PIXELS", 1000)
    photos = (Photo(row, torch.empty(0), Size(*size)) for row, size in enumerate(sizes))
    assert [[photo.row for photo in portion] for portion in portions(photos)] == expected
