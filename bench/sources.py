"""Measure sources for docs/using/data.md: listing empty files, and reading the same photos from several layouts.

python bench/sources.py list 310000
python bench/sources.py read photos photos-packed      folders of the same photos; the first is the reference
python bench/sources.py cold photos photos-packed
"""

import argparse
import hashlib
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from falconet.data import layout
from falconet.data.crops import Augment, Crops
from falconet.data.image_files import BadImages
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import Reader, reader_for
from falconet.data.sources.bounding_boxes import without_objects

PREPROCESSING = Preprocessing(image_size=224, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
CLASSES, ROUNDS, MOST = 1000, 8, 2000
AUGMENT: Augment = "crop-flip"


def memory() -> int:
    """The resident bytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def measure_listing(count: int) -> None:
    """List for the first time, and from the index."""
    with tempfile.TemporaryDirectory() as folder:
        for split, share in (("train", 0.97), ("val", 0.03)):
            for label in range(CLASSES):
                place = Path(folder, split, f"n{label:08}")
                place.mkdir(parents=True)
                for number in range(round(count * share / CLASSES)):
                    (place / f"n{label:08}_{number}.JPEG").touch()
        for path in Path(folder).glob("*/*"):
            os.utime(path, (0, 0))  # old, so that the index is trusted
            os.utime(path.parent, (0, 0))
        for when in ("listed", "from the index"):
            before, began = memory(), time.perf_counter()
            splits = layout.load_photos(Path(folder))
            took, images = time.perf_counter() - began, len(splits.train) + len(splits.validation)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(
                f"{images:,} images {when}: {took:.2f} s; {(memory() - before) / images:.0f} bytes kept per image,"
                f" at most {max(0, peak - before) / images:.0f}",
                flush=True,
            )
            del splits


def reader_of(root: Path) -> tuple[Reader, int]:
    source = without_objects(layout.load_photos(root)).train
    bad = BadImages(0, note=print)
    return reader_for(source, crops=Crops(preprocessing=PREPROCESSING, augment=AUGMENT, seed=1), bad=bad), len(source)


def read_all(reader: Reader, order: np.ndarray) -> tuple[float, float, str]:
    """The images per second of this thread's processor time and of the clock, and a digest of the pixels."""
    out = np.zeros((reader.rows, 224, 224, 3), np.uint8)
    digest, own, clock = hashlib.sha256(), 0.0, 0.0
    begins = range(0, len(order) - reader.rows + 1, reader.rows)
    if not begins:
        raise SystemExit(f"got {len(order)} photos, expected {reader.rows} or more")
    for begin in begins:
        began, began_own = time.perf_counter(), time.thread_time()
        reader.read(order[begin : begin + reader.rows], epoch=0, out=out)
        own, clock = own + time.thread_time() - began_own, clock + time.perf_counter() - began
        digest.update(out.tobytes())
    count = len(begins) * reader.rows
    return count / own, count / clock, digest.hexdigest()[:12]


def measure_reading(roots: list[Path], *, cold: bool) -> None:
    """Read the folders in turn with one thread; cold: dropped from the page cache before each round, wall time."""
    least = min(reader_of(root)[1] for root in roots)
    order = np.random.default_rng(0).permutation(least)[:MOST]
    rates: dict[Path, list[float]] = {root: [] for root in roots}
    for _ in range(ROUNDS):
        for root in roots:
            if cold:
                drop(root)
            own, clock, digest = read_all(reader_of(root)[0], order)
            rates[root].append(clock if cold else own)
            print(f"{root}: {rates[root][-1]:.0f} images per second, pixels {digest}", file=sys.stderr)
    for root, own_rates in rates.items():
        ratios = [rate / first for rate, first in zip(own_rates, rates[roots[0]], strict=True)]
        print(
            f"{root}: {statistics.median(own_rates):.0f} images per second, {statistics.median(ratios):.2f}x the first"
            f" ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def drop(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "read", "cold"))
    parser.add_argument("rest", nargs="+")
    given = parser.parse_args()
    if given.what == "list":
        measure_listing(int(given.rest[0]))
    else:
        measure_reading([Path(name) for name in given.rest], cold=given.what == "cold")


if __name__ == "__main__":
    main()
