"""Measure accuracy, memory and speed of the precision regimes: CIFAR-10 over seeds, then ResNet-50 on synthetic data.

python3 bench/regimes.py --data-dir DIR --output FILE.json [--seeds 4] [--parallel 8]

Accuracies are measured by runs that share the device; speeds afterwards, one run at a time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

REGIMES = {
    "32.32": "--precision 32.32",
    "16.32": "--precision 16.32 --loss-scaling 128",
    "16.16 nearest": "--precision 16.16 --loss-scaling 128",
    "16.16 stochastic": "--precision 16.16 --loss-scaling 128 --enable-stochastic-rounding",
    "bf16.bf16 nearest": "--precision bf16.bf16",
    "bf16.bf16 stochastic": "--precision bf16.bf16 --enable-stochastic-rounding",
}
RECIPE = (
    "--data cifar10 --model resnet20-cifar --micro-batch-size 512 --epoch 40 --lr 0.4 --weight-decay 5e-4"
    " --warmup-epoch 2 --validation-frequency 4 --checkpoint-save-freq 1000 --dataloader-workers 1 --threads 1"
)
SPEED = "--data synthetic --model resnet50 --micro-batch-size 256 --iterations 30 --epoch 4 --checkpoint-save-freq 1000"


def train(line: str, folder: Path) -> dict[str, object]:
    """The summary of one run, with its epochs' metrics."""
    command = [sys.executable, "-m", "falconet", "train", *line.split(), "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{folder.name}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()) | {"log": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--extra", default="", help="further `falconet train` lines to run as well, separated by ;")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--no-speeds", action="store_true", help="accuracies only")
    args = parser.parse_args()
    regimes = args.regimes
    home = Path(tempfile.mkdtemp())
    lines = {
        f"{name}/{seed}": f"{RECIPE} --data-dir {args.data_dir} {REGIMES[name]} --seed {seed}"
        for seed in range(args.seeds)
        for name in regimes
    }
    lines |= {f"extra/{number}": line for number, line in enumerate(filter(None, args.extra.split(";")))}
    results: dict[str, dict[str, object]] = {}
    speeds: dict[str, dict[str, object]] = {}

    def keep() -> None:
        """Save after every run, because the machine may be reclaimed at any time."""
        args.output.write_text(json.dumps({"runs": results, "speeds": speeds, "lines": lines}, indent=1))

    with ThreadPoolExecutor(args.parallel) as pool:
        ordered = sorted(lines, key=lambda name: not name.startswith("extra"))  # the long ones first
        begun = {pool.submit(train, lines[name], home / name.replace("/", "_")): name for name in ordered}
        for done in as_completed(begun):
            results[begun[done]] = done.result()
            keep()
    for name in [] if args.no_speeds else regimes:
        speeds[name] = train(f"{SPEED} {REGIMES[name]}", home / f"speed_{name}")
        keep()
    for name, result in results.items():
        if name.startswith("extra"):
            print(name, lines[name], result.get("metrics", {}).get("validation/accuracy"), result.get("best"),
                  result.get("training_seconds"))  # fmt: skip
    print(f"{'regime':22}{'accuracy %':>12}{'sd':>7}{'min':>8}{'max':>8}{'ResNet-50 images/s':>20}{'peak GiB':>10}")
    for name in regimes:
        runs = [results[f"{name}/{seed}"] for seed in range(args.seeds)]
        found = [run["metrics"]["validation/accuracy"] for run in runs if "metrics" in run]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        speed = speeds.get(name, {})
        logged = [line["train/images_per_second"] for line in speed.get("log", []) if "train/images_per_second" in line]
        print(
            f"{name:22}{statistics.mean(found or [0]):12.2f}{spread:7.2f}"
            f"{min(found, default=0):8.2f}{max(found, default=0):8.2f}"
            f"{max(logged, default=0):20,.0f}{speed.get('peak_memory_bytes', 0) / 2**30:10.2f}"
        )


if __name__ == "__main__":
    main()
