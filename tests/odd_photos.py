"""A folder of photos in which everything is wrong that `falconet data check` knows, from photos of the repository."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

import layouts

SAMPLES = Path(__file__).parents[1] / "compat/pytorch/data/samples"
CUT = 256 << 10  # bytes, at which copying to a full disk or a broken download often ends


def sample(name: str) -> Image.Image:
    with Image.open(SAMPLES / f"{name}.jpg") as image:
        return image.convert("RGB")


def near_copies(image: Image.Image) -> dict[str, Image.Image]:
    """What people and programs do to copies of a photo."""
    width, height = image.size
    margin = (round(width * 0.02), round(height * 0.02))
    return {
        "half": image.resize((width // 2, height // 2), Image.Resampling.LANCZOS),
        "recompressed": Image.open(io.BytesIO(layouts.encoded(image, quality=25))).convert("RGB"),
        "cropped": image.crop((*margin, width - margin[0], height - margin[1])),
        "brighter": ImageEnhance.Brightness(image).enhance(1.2),
        "grey": image.convert("L").convert("RGB"),
    }


def turned(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return layouts.encoded(image, exif=exif)


def large_jpeg(seed: int) -> bytes:
    """A photo of more than 256 KiB."""
    noise = np.random.default_rng(seed).integers(0, 256, (640, 640, 3), dtype=np.uint8)
    data = layouts.encoded(Image.fromarray(noise), quality=90)
    assert len(data) > CUT
    return data


def png(width: int, height: int, *, bits: int = 8, rows: bytes = b"\0") -> bytes:
    """A PNG file whose header says so, whatever its rows are."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def garbled(data: bytes) -> bytes:
    """A JPEG with its end, whose scan is damaged in the middle: decoders go on with wrong pixels."""
    middle = len(data) // 2
    return data[:middle] + data[middle + 3000 :]


BROKEN = {  # path: kind
    "train/cat/cut.jpg": "truncated",
    "train/dog/empty.jpg": "empty",
    "train/dog/page.jpg": "not-an-image",
    "train/dog/bomb.png": "too-large",
    "train/dog/gone.jpg": "missing",
    "val/dog/cut.jpg": "truncated",
}
REMARKS = {
    "train/cat/garbled.jpg": "damaged-readable",
    "train/cat/really.png": "wrong-extension",
    "train/cat/cmyk.jpg": "cmyk",
    "train/cat/wide.png": "16-bit",
    "train/cat/moving.gif": "animated",
    "train/dog/turned.jpg": "exif-rotated",
    "train/dog/dot.png": "tiny",
    "train/dog/strip.jpg": "elongated",
    "train/dog/white.png": "blank",
}


def build(root: Path) -> Path:
    """Two classes in train/ and val/, a third in train/ alone, an empty one, and one of each of the above."""
    photo, encoded = layouts.photo, layouts.encoded
    for place in ("train/cat", "train/dog", "train/bird", "train/nothing", "val/cat", "val/dog"):
        (root / place).mkdir(parents=True)
    cat, dog = sample("chelsea"), sample("coffee")
    files = {
        "train/cat/a.jpg": encoded(cat, quality=92),
        "train/dog/a.jpg": encoded(dog, quality=92),
        "val/cat/z.jpg": encoded(sample("astronaut")),
        "val/dog/z.jpg": encoded(sample("rocket")),
        "train/bird/a.jpg": encoded(sample("galaxies")),
        "train/cat/cut.jpg": large_jpeg(1)[:CUT],
        "val/dog/cut.jpg": large_jpeg(2)[:CUT],
        "train/dog/empty.jpg": b"",
        "train/dog/page.jpg": b"<!doctype html><title>404 Not Found</title>",
        "train/dog/bomb.png": png(20_000, 20_000),
        "train/cat/garbled.jpg": garbled(encoded(photo(5, width=300, height=200), quality=95)),
        "train/cat/really.png": encoded(photo(6, width=200)),
        "train/cat/cmyk.jpg": encoded(photo(7, width=200).convert("CMYK")),
        "train/cat/wide.png": encoded(Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80) * 9), "PNG"),
        "train/cat/moving.gif": encoded(
            photo(8), "GIF", save_all=True, append_images=[photo(9), photo(10)], duration=50
        ),
        "train/dog/turned.jpg": turned(photo(11, width=200, height=120), 6),
        "train/dog/dot.png": encoded(photo(12, width=12, height=40), "PNG"),
        "train/dog/strip.jpg": encoded(photo(13, width=600, height=100)),
        "train/dog/white.png": encoded(Image.new("RGB", (90, 90), "white"), "PNG"),
        # Copies: of one file, across the parts, across the classes; and near ones.
        "train/cat/copy.jpg": encoded(cat, quality=92),
        "val/cat/same-as-train.jpg": encoded(dog, quality=92),
        "val/dog/near.jpg": encoded(near_copies(cat)["half"]),
        "train/bird/near.jpg": encoded(near_copies(sample("galaxies"))["cropped"]),
        "train/.hidden.jpg": encoded(photo(14)),
        "train/cat/notes.txt": b"taken in the garden",
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    (root / "train/dog/gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(root / "train/dog/pipe.jpg")
    return root
