"""`make get-data`: draw a few sample photos for inference; nothing is downloaded or copyrighted."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image

SIDE = 256  # pixels
PHOTOS = 4  # per class and split
Pixel = tuple[int, int, int]


def stripes(x: float, y: float, turn: float) -> Pixel:
    wave = math.sin(24 * (x * math.cos(turn) + y * math.sin(turn)))
    return (int(128 + 120 * wave), 90, int(128 - 120 * wave))


def rings(x: float, y: float, turn: float) -> Pixel:
    wave = math.cos(30 * math.hypot(x, y) + turn)
    return (60, int(128 + 120 * wave), 180)


def squares(x: float, y: float, turn: float) -> Pixel:
    across = x * math.cos(turn) - y * math.sin(turn)
    along = x * math.sin(turn) + y * math.cos(turn)
    return (230, 200, 40) if (math.floor(6 * across) + math.floor(6 * along)) % 2 else (40, 60, 120)


def hills(x: float, y: float, turn: float) -> Pixel:
    crest = 0.25 * math.sin(5 * x + turn)
    return (40, int(120 + 80 * y), 50) if y > crest else (int(140 + 60 * y), 180, 240)


CLASSES: tuple[Callable[[float, float, float], Pixel], ...] = (stripes, rings, squares, hills)


def main(folder: Path) -> None:
    """Write `folder`/train and `folder`/val, one folder per class."""
    for split, start in (("train", 0.0), ("val", 0.4)):
        for draw in CLASSES:
            place = folder / split / draw.__name__
            place.mkdir(parents=True, exist_ok=True)
            for number in range(PHOTOS):
                turn = start + number
                pixels = [
                    draw(2 * column / SIDE - 1, 2 * row / SIDE - 1, turn)
                    for row in range(SIDE)
                    for column in range(SIDE)
                ]
                photo = Image.new("RGB", (SIDE, SIDE))
                photo.putdata(pixels)
                photo.save(place / f"{number}.jpg", quality=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
