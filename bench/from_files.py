"""Compare training from JPEG files with synthetic data: images per second of each, their ratio, and the time waited.

    python bench/from_files.py FOLDER                                any folder of JPEG files, flat or not
    python bench/from_files.py FOLDER --decoders cpu cuda --rounds 3
    python bench/from_files.py FOLDER --updates 12 --options="--model resnet18 --image-size 64 --micro-batch-size 16"

Each measurement is a run of `falconet train` with the same options; the kinds take turns, so that a change in the
machine's speed affects all of them. The photos are linked repeatedly until there are enough for every update, and come
from the page cache. The first quarter of the updates is warm-up and not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ENDINGS = {".jpg", ".jpeg"}
CLASSES = 1000
OPTIONS = "--model resnet50 --image-size 224 --micro-batch-size 256 --precision 16.16 --loss-scaling 128"
PARTS = 4  # log points; the first one is warm-up


def link_photos(folder: Path, images: int, into: Path) -> None:
    """`into`/train and `into`/val with CLASSES folders of links to the photos."""
    found = sorted(path.resolve() for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not found:
        raise SystemExit(f"{folder}: contains no JPEG files")
    for split, count in (("train", images), ("val", CLASSES)):
        for number in range(count):
            place = into / split / f"{number % CLASSES:04}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:07}.jpg").symlink_to(found[number % len(found)])
    for path in found:
        path.read_bytes()  # into the page cache


def run(data: str, args: argparse.Namespace, home: Path) -> tuple[float, float]:
    """Images per second and the percentage of time spent waiting for data, after warm-up."""
    with tempfile.TemporaryDirectory(dir=home) as folder:
        line = f"{args.options} {data} --epoch 1 --warmup-epoch 0 --validation-mode none --logs-per-epoch {PARTS}"
        words = [sys.executable, "-m", "falconet", "train", *line.split(), "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if "train/images_per_second" in entry]
    counted = entries[1:PARTS]
    rate = len(counted) / sum(1 / entry["train/images_per_second"] for entry in counted)
    return rate, statistics.mean(entry["train/waiting_percent"] for entry in counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoders", nargs="+", choices=["cpu", "cuda"], default=["cpu"])
    parser.add_argument("--options", default=OPTIONS)
    args = parser.parse_args()
    words = args.options.split()
    batch = int(words[words.index("--micro-batch-size") + 1])
    with tempfile.TemporaryDirectory() as home:
        photos = Path(home) / "photos"
        link_photos(args.folder, max(args.updates * batch, CLASSES), photos)
        kinds = {"synthetic": f"--data synthetic --classes {CLASSES} --iterations {args.updates}"}
        kinds |= {f"files, {d}": f"--data folder --data-dir {photos} --decode-device {d}" for d in args.decoders}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(args.rounds):
            for kind, data in kinds.items():
                rate, waited = run(data, args, Path(home))
                rates[kind].append(rate)
                ratio = rate / rates["synthetic"][-1]
                print(
                    f"round {number + 1}  {kind:12} {rate:8.0f} images/s  {ratio:6.1%}  waited {waited:.1f} %",
                    flush=True,
                )
    for kind, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["synthetic"], strict=True))
        print(f"median   {kind:12} {statistics.median(values):8.0f} images/s  {ratio:6.1%} of synthetic")


if __name__ == "__main__":
    main()
