"""Compare `falconet doctor`'s predictions with actual training, in images per second.

    python bench/doctor.py OPTIONS                 one training
    python bench/doctor.py --photos FOLDER N SIDE  make N photos of SIDE x SIDE pixels first, in ten classes

The first updates of the training are not counted: its files come from the disk, and torch warms up.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image


def made(folder: Path, count: int, side: int) -> None:
    """Make photos of clouds and grain, with about as many bits per pixel as real ones."""
    random = np.random.default_rng(0)
    for number in range(count):
        clouds = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(clouds.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        pixels = (smooth + random.normal(0, 9, (side, side, 1))).clip(0, 255).astype(np.uint8)
        place = folder / ("val" if number % 20 == 19 else "train") / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:06}.jpg", quality=93, subsampling=0)


def predicted(options: list[str]) -> str:
    command = [sys.executable, "-m", "falconet", "doctor", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def trained(options: list[str]) -> list[float]:
    """Images per second between log points."""
    with tempfile.TemporaryDirectory() as folder:
        line = ["train", *options, "--updates", "40", "--log-interval", "10", "--validation-mode", "none"]
        command = [sys.executable, "-m", "falconet", *line, "--pretrained", "none", "--run-dir", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        return [line["train/images_per_second"] for line in lines if "train/images_per_second" in line]


def main() -> None:
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        raise SystemExit(__doc__)
    if sys.argv[1] == "--photos":
        made(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    text = predicted(sys.argv[1:])
    print(text[text.index("part  ") :], flush=True)
    expected = float(text.partition("\ntogether")[2].split()[0].replace(",", ""))
    first, *rates = trained(sys.argv[1:])
    found = len(rates) / sum(1 / rate for rate in rates)
    print(f"trained: {found:,.0f} images/s, at first {first:,.0f}; predicted / trained {expected / found:.2f}")


if __name__ == "__main__":
    main()
