"""Measure the difference between the native decoder and Pillow, in dB of PSNR, by kind of photo.

    python bench/psnr.py FOLDER            FOLDER/<class>/*.jpg; needs opencv-python-headless for the odd samplings

Photos unchanged, by their subsampling, and the first 250 encoded again by OpenCV at qualities 75 to 96 with each
subsampling that it writes. Each reader reads every photo once, with the same random crop or with the centre crop.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from loader import Photos, readers

QUALITIES = (75, 80, 85, 90, 93, 96)
SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:1:1": 0x411111, "4:4:0": 0x121111}
NAMES = {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (4, 1): "4:1:1", (1, 2): "4:4:0"}


def sampling_of(path: Path) -> str:
    with Image.open(path) as image:
        layers = getattr(image, "layer", [])
        if len(layers) != 3 or {layer[1:3] for layer in layers[1:]} != {(1, 1)}:
            return "grey" if len(layers) == 1 else "other"
        return NAMES.get(layers[0][1:3], "other")


def decibels(photos: Photos) -> np.ndarray:  # one per photo; 99 where nothing differs
    pillow, fast = readers(photos)
    assert fast is not None, "the native decoder is not built"
    found = []
    for begin in range(0, photos.images, 16):
        indices = np.arange(begin, min(begin + 16, photos.images))
        pixels = np.zeros((2, len(indices), 224, 224, 3), np.uint8)
        for reader, out in zip((pillow, fast), pixels, strict=True):
            reader.read(indices, epoch=0, out=out)
        errors = np.square(pixels[0].astype(np.float64) - pixels[1]).mean(axis=(1, 2, 3))
        found.append(np.minimum(10 * np.log10(255**2 / np.maximum(errors, 1e-9)), 99))
    return np.concatenate(found)


def encoded_again(source: Photos, folder: Path, factor: int) -> Photos:
    import cv2

    files = source.source()
    for index in range(source.images):
        pixels = np.asarray(Image.open(files.path(index)).convert("RGB"))[..., ::-1]
        options = [cv2.IMWRITE_JPEG_QUALITY, QUALITIES[index % len(QUALITIES)]]
        to = folder / "all" / f"{index:05}.jpg"
        to.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(to), pixels, [*options, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor])
    return Photos(folder, source.images, 1, source.training)


def say(name: str, values: np.ndarray) -> None:
    middle, low = np.median(values), np.percentile(values, 5)
    print(
        f"{name:40} {len(values):5}  median {middle:.1f}  5th percentile {low:.1f}  worst {values.min():.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    photos = Photos(args.folder, args.images, 1, training=True)
    files, values = photos.source(), decibels(photos)
    say("unchanged", values)
    kinds = defaultdict(list)
    for index, value in enumerate(values):
        kinds[sampling_of(files.path(index))].append(value)
    for kind, own in sorted(kinds.items()):
        say(f"  of these {kind}", np.array(own))
    say("validation", decibels(Photos(args.folder, args.images, 1, training=False)))
    few = Photos(args.folder, min(250, args.images), 1, training=True)
    for kind, factor in SAMPLINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            again = encoded_again(few, Path(folder), factor)
            written = {sampling_of(again.source().path(index)) for index in range(few.images)}
            assert written == {kind}, written
            say(f"encoded again {kind}", decibels(again))


if __name__ == "__main__":
    main()
