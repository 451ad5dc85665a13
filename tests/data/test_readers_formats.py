"""Files that folders of photos contain in practice are decoded correctly, or named and counted, from every source."""

import io

import numpy as np
import pytest
from PIL import Image

import layouts
from falconet.data import crops, layout, readers
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import reader_for

PREPROCESSING = Preprocessing(image_size=32, resize=36, mean=IMAGENET_MEAN, std=IMAGENET_STD)
PHOTO = layouts.photo(3)
JPEG = layouts.encoded(PHOTO, quality=90)


def marker(code, payload):
    return bytes((0xFF, code)) + (len(payload) + 2).to_bytes(2, "big") + payload


def with_markers(*segments):
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


def claimed(width, height):
    """The photo's bytes with another size in its header."""
    at = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + JPEG[at + 4 :]


def saved(image, kind, **options):
    return layouts.encoded(image, kind, **options)


def wide(width, height):
    return saved(layouts.photo(4, width=width, height=height), "JPEG", quality=80)


DECODED = {
    "plain": JPEG,
    "png under a jpeg's name": saved(PHOTO, "PNG"),
    "gif": saved(PHOTO.convert("P"), "GIF"),
    "webp": saved(PHOTO, "WEBP", lossless=True),
    "cmyk": saved(PHOTO.convert("CMYK"), "JPEG", quality=95),
    "grey": saved(PHOTO.convert("L"), "JPEG", quality=90),
    "progressive": saved(PHOTO, "JPEG", progressive=True),
    "transparent png": saved(PHOTO.convert("RGBA"), "PNG"),
    "palette png": saved(PHOTO.convert("P"), "PNG"),
    "16 bit grey png": saved(Image.fromarray(np.full((40, 50), 32_000, np.uint16)), "PNG"),
    "1 x 1": saved(Image.new("RGB", (1, 1), (200, 30, 60)), "JPEG", quality=95),
    "1 x 300": wide(1, 300),
    "20,000 pixels wide": wide(20_000, 12),
    "20,000 pixels high": wide(12, 20_000),
    "comments and odd segments": with_markers(marker(0xFE, b"hi" * 300), marker(0xED, bytes(900)), marker(0xEF, b"")),
    "fill bytes": with_markers(b"\xff\xff\xff" + marker(0xE5, b"x")),
    "bytes after the end": JPEG + b"\0\xff\xd8\xff\xd9 and more",
    "exif turned on its side": saved(
        PHOTO, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
    ),
}

REFUSED = {
    "no bytes": b"",
    "one byte": b"\xff",
    "truncated": JPEG[: len(JPEG) // 2],
    "header only": JPEG[:200],
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "text": b"hello, I am not a photo\n" * 50,
    "zeros": bytes(4000),
    "20,000 x 20,000 claimed": claimed(20_000, 20_000),
    "65,535 x 65,535 claimed": claimed(65_535, 65_535),
    "no width": claimed(0, 60),
    "truncated png": saved(PHOTO, "PNG")[:2000],
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>',
    "zip": b"PK\x03\x04" + bytes(500),
}

EVERY = DECODED | REFUSED


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """All files as the training photos of one class, in every layout."""
    home = tmp_path_factory.mktemp("real")
    folders = layouts.class_folders(home / "folders", train=1, validation=1)
    for number, data in enumerate(EVERY.values()):
        (folders / "train" / layouts.CLASSES[0] / f"x{number:03}.JPEG").write_bytes(data)
    return {name: make(folders, home / name) for name, make in layouts.LAYOUTS.items()}


def expected(data):
    """The pixels by Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        wide = image.mode.startswith("I")
        plain = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if wide else image
        rgb = plain.convert("RGBA").convert("RGB") if plain.mode == "P" else plain.convert("RGB")
        box = crops.evaluation_box(rgb.width, rgb.height, resize=36, crop=32)
        return np.asarray(rgb.resize((32, 32), Image.Resampling.BILINEAR, box=box)).astype(np.int64)


@pytest.fixture(params=["native", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(readers.native, "library", lambda: None)
    elif readers.native.library() is None:
        pytest.skip(readers.native.why_not())


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_each_file_is_decoded_correctly_or_named_and_counted(roots, decoder, name):
    train = layout.load_photos(roots[name]).train
    held = DECODED if name == "packed shards" else EVERY  # packing leaves the others out
    said = []
    bad = BadImages(len(REFUSED), note=said.append)
    reader = reader_for(train, crops=Crops(preprocessing=PREPROCESSING, augment="none", seed=0), bad=bad)
    count = len(held)
    assert len(train) == count + 3  # ordinary photos, one of each class
    indices = np.arange(1, count + 1)  # after that of the class
    out = np.full((count, 32, 32, 3), 255, np.uint8)
    read = np.concatenate(
        [reader.read(indices[at : at + 16], epoch=0, out=out[at : at + 16]) for at in range(0, count, 16)]
    )
    assert dict(zip(held, read.tolist(), strict=True)) == {what: what in DECODED for what in held}
    for row, (what, data) in enumerate(held.items()):
        if what in DECODED:
            assert np.abs(out[row] - expected(data)).mean() < 1.0, what
        else:
            assert not out[row].any(), what
            assert sum(f"{train.where(row + 1)}: cannot be decoded (" in line for line in said) == 1, what
    assert len(bad) == len(said) == len(held) - len(DECODED)
