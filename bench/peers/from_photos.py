"""Compare training from a folder of JPEG files: Falconet and timm's train.py at its defaults, in turns.

    python bench/peers/from_photos.py train.py                      on a CPU: resnet18, 640 photos that the script makes
    python bench/peers/from_photos.py train.py --photos FOLDER --model efficientnet_b0 --batch 32 --rounds 3
    python bench/peers/from_photos.py train.py --device cuda --photos FOLDER --model resnet50 --batch 256 --timm="--amp"

Both train the same network from random weights for one epoch, with the same batch, optimizer and rate, and validate.
Printed per run: images per second of the updates without the first quarter of them, and seconds from the start of the
process to its end. timm's train.py is not in its package: take it from its repository.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = 4  # log points of an epoch; the first is warm-up
RATE = 0.0125


def make_photos(folder: Path) -> Path:
    """Make 640 training and 64 validation photos of 10 classes, 500 x 375: colours, and noise as in a real photo."""
    random = np.random.default_rng(0)
    for split, count in (("train", 640), ("val", 64)):
        for number in range(count):
            colours = Image.fromarray(random.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
            pixels = np.asarray(colours).astype(int) + random.integers(-18, 18, (375, 500, 3))
            path = folder / split / f"class{number % 10}" / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(path, quality=88)
    return folder


def run(words: list[str]) -> tuple[float, str]:
    """Seconds of a program, and its output."""
    begin = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - begin, done.stdout + done.stderr


def falconet(args: argparse.Namespace, out: Path) -> tuple[float, float]:
    line = (
        f"--model timm:{args.model} --pretrained none --device {args.device} --micro-batch-size {args.batch} --epoch 1"
    )
    line += (
        f" --optimizer sgd --lr {RATE} --weight-decay 2e-5 --warmup-epoch 0 --logs-per-epoch {PARTS} {args.falconet}"
    )
    seconds, _ = run(
        [sys.executable, "-m", "falconet", "train", str(args.photos), *line.split(), "--run-dir", str(out / "run")]
    )
    entries = map(json.loads, (out / "run/metrics.jsonl").read_text().splitlines())
    rates = [entry["train/images_per_second"] for entry in entries if "train/images_per_second" in entry][1:PARTS]
    return len(rates) / sum(1 / rate for rate in rates), seconds


def timm(args: argparse.Namespace, out: Path) -> tuple[float, float]:
    classes = sum(1 for entry in (args.photos / "train").iterdir() if entry.is_dir())
    line = f"--model {args.model} --num-classes {classes} --device {args.device} -b {args.batch} --epochs 1"
    line += f" --lr {RATE} --warmup-epochs 0 --log-interval 1 --output {out} --experiment run {args.timm}"
    seconds, output = run([sys.executable, str(args.script), "--data-dir", str(args.photos), *line.split()])
    updates = [float(found) for found in re.findall(r"Train: 0 .*?Time: ([\d.]+)s", output)]
    counted = updates[len(updates) // PARTS :]
    return args.batch * len(counted) / sum(counted), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="timm's train.py")
    parser.add_argument("--photos", type=Path, help="folder with train/<class>/ and val/<class>/; default: made up")
    parser.add_argument("--model", default="resnet18", help="timm's name of the network")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timm", default="", help="further options of timm's script")
    parser.add_argument("--falconet", default="", help="further options of Falconet")
    args = parser.parse_args()
    tools: dict[str, Callable[[argparse.Namespace, Path], tuple[float, float]]] = {"falconet": falconet, "timm": timm}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory() as home:
        args.photos = args.photos or make_photos(Path(home) / "photos")
        for number in range(args.rounds):
            for name, measure in tools.items():
                with tempfile.TemporaryDirectory(dir=home) as out:
                    found[name].append(measure(args, Path(out)))
                rate, seconds = found[name][-1]
                print(f"{name}, run {number + 1}: {rate:.1f} images/s, {seconds:.1f} s in all", flush=True)
    print("| network | falconet, images/s | timm, images/s | ratio | falconet, seconds in all | timm, seconds in all |")
    print("|---|---:|---:|---:|---:|---:|")
    rates, whole = ({name: [each[part] for each in found[name]] for name in tools} for part in (0, 1))
    cells = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in (*rates.values(), *whole.values())]
    ratio = statistics.median(a / b for a, b in zip(rates["falconet"], rates["timm"], strict=True))
    print(f"| {args.model}, batch {args.batch} | {cells[0]} | {cells[1]} | {ratio:.2f}x | {cells[2]} | {cells[3]} |")


if __name__ == "__main__":
    main()
