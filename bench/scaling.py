"""Measure the efficiency of two replicas on two cores relative to one: `python bench/scaling.py --rounds 5`.

One and two processes take turns, so that other work on the machine affects both. Each has one thread and generates its
images in the loop, so that nothing else uses the cores. Run it on a quiet machine; it prints the load average.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LINE = (
    "train --model resnet20-cifar --data generated --image-size 32 --micro-batch-size 64 --iterations {updates}"
    " --epoch 1 --warmup-epoch 0 --threads 1 --dataloader-workers 0 --device cpu --validation-mode none"
    " --replicas {replicas} --run-dir {folder}"
)


def images_per_second(replicas: int, *, updates: int) -> float:
    """The images per second of a whole training run, without its start-up."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        words = LINE.format(updates=updates, replicas=replicas, folder=folder).split()
        subprocess.run([sys.executable, "-m", "falconet", *words], check=True, capture_output=True, text=True)
        return float(json.loads((folder / "summary.json").read_text())["images_per_second"])


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):,.1f} (from {min(values):,.1f} to {max(values):,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60, help="updates per run, of 64 images per replica")
    arguments = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    found: dict[int, list[float]] = {1: [], 2: []}
    for number in range(arguments.rounds):
        order = (1, 2) if number % 2 == 0 else (2, 1)
        for replicas in order:
            found[replicas].append(images_per_second(replicas, updates=arguments.updates))
        print(f"round {number + 1}: one {found[1][-1]:,.1f}, two {found[2][-1]:,.1f} images/s", flush=True)
    shares = [100 * two / (2 * one) for one, two in zip(found[1], found[2], strict=True)]
    print(f"one replica, images/s: {spread(found[1])}")
    print(f"two replicas, images/s: {spread(found[2])}")
    print(f"efficiency, % of twice one: {spread(shares)}")
    print(f"load after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
