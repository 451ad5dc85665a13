"""Measure accuracy, memory and speed of the precision regimes: ResNet-20 on CIFAR-10, then ResNet-50 on synthetic data.

    python3 bench/regimes.py --data-dir DIR --output regimes.json [--seeds 3] [--parts full low speed] [--again]
        [-- OPTIONS OF FALCONET TRAIN, such as --device cpu --dataset-percentage 2]
    python3 bench/regimes.py --show docs/evidence/regimes.json --plot docs/img/regimes.png  for docs/knowing/numerics.md

`full` trains at an ordinary learning rate, `low` at a fortieth of it, where updates are often smaller than half the
distance between two numbers. All runs follow each other in this process. The file is written after each;
runs that it has are not measured again, unless --again forgets the requested parts. Runs of another device,
version of torch or other options are not added to a part.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from falconet import writing
from runs import device_of, divided, falconet, give_memory_back, train

REGIMES = {
    "32.32": "--precision 32.32",
    "16.32": "--precision 16.32 --loss-scaling 128",
    "16.16 nearest": "--precision 16.16 --loss-scaling 128",
    "16.16 stochastic": "--precision 16.16 --loss-scaling 128 --enable-stochastic-rounding",
    "bf16.32": "--precision bf16.32",
    "bf16.bf16 nearest": "--precision bf16.bf16",
    "bf16.bf16 stochastic": "--precision bf16.bf16 --enable-stochastic-rounding",
}
RECIPE = (
    "--data cifar10 --dataset-location device --model resnet20-cifar --micro-batch-size 512 --weight-decay 5e-4"
    " --validation-batch-size 2000 --checkpoint-save-freq 1000 --no-report"
)
FULL = "--epoch 40 --lr 0.4 --warmup-epoch 2 --validation-frequency 4"
LOW = "--epoch 10 --lr 0.01 --warmup-epoch 1 --validation-frequency 1"
SPEED = "--data synthetic --model resnet50 --micro-batch-size 256 --iterations 40"
PARTS = ("full", "low", "speed")
WHAT = (
    "full, low: resnet20-cifar on CIFAR-10, batch 512, [epoch, validation accuracy %]; speed: ResNet-50, batch 256,"
    " [images/s, peak GiB]"
)

Curve = list[list[float]]  # [epoch, validation accuracy in percent] of each validation


def curve(line: str) -> Curve:
    """The validations of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            falconet(["train", *line.split(), "--run-dir", str(run)], Path(folder) / "log")
        finally:
            give_memory_back()
        found, epoch = [], 0.0
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            epoch = row.get("epoch", epoch)  # only a log point has it
            if "validation/accuracy" in row:
                found.append([epoch, round(row["validation/accuracy"], 2)])
        return found


Found = dict[str, dict[str, list[Any]]]  # by part and regime: a curve, or images per second and GiB, for each seed


def missing(found: Found, parts: Sequence[str], *, seeds: int) -> Iterator[tuple[str, str, int]]:
    """The part, regime and seed of each missing run; all regimes with one seed come before the next seed."""
    for part in parts:
        for seed in range(seeds if part == "full" else 1):
            yield from ((part, name, seed) for name in REGIMES if len(found[part].get(name, [])) <= seed)


def measured(part: str, name: str, *, data_dir: str, seed: int, further: str) -> Any:
    """Train one run and return its row."""
    if part == "speed":
        speed = train(f"{SPEED} {REGIMES[name]} {further}")
        return [round(speed.images_per_second, 1), round(speed.memory, 2)]
    length = FULL if part == "full" else LOW
    return curve(f"{RECIPE} --data-dir {data_dir} {length} {REGIMES[name]} --seed {seed} {further}")


def tables(found: Found) -> Iterator[str]:
    """The results as Markdown tables."""
    yield "| regime | accuracy, % (mean, standard deviation) | at a fortieth of the learning rate, % |"
    yield "|---|---|---|"
    for name in REGIMES:
        full, low = ([run[-1][1] for run in found[part].get(name, [])] for part in ("full", "low"))
        spread = f", {statistics.stdev(full):.2f}" if len(full) > 1 else ""
        mean = f"{statistics.mean(full):.2f}{spread}" if full else ""
        yield f"| {name} | {mean} | {', '.join(f'{each:.2f}' for each in low)} |"
    yield ""
    yield "| regime | images/s | peak memory, GiB |"
    yield "|---|---|---|"
    for name, ((rate, memory), *_) in found["speed"].items():
        yield f"| {name} | {rate:,.0f} | {memory:.2f} |"


COLOURS = {"32.32": "#222222", "16.32": "#1f77b4", "16.16": "#d62728", "bf16.32": "#9467bd", "bf16.bf16": "#2ca02c"}


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for place, (name, runs) in enumerate(found["full"].items()):
        last, colour = [run[-1][1] for run in runs], COLOURS[name.split()[0]]
        left.plot([place] * len(last), last, "o", color=colour)
        left.plot(place, statistics.mean(last), "_", color=colour, markersize=22)
    left.set_xticks(range(len(found["full"])), [name.replace(" ", "\n") for name in found["full"]], fontsize=8)
    left.set(title="40 epochs, peak learning rate 0.4", ylabel="validation accuracy, %")
    for name, runs in found["low"].items():
        dashes = "--" if "nearest" in name else "-"
        right.plot(*zip(*runs[0], strict=True), color=COLOURS[name.split()[0]], linestyle=dashes, label=name)
    right.set(title="10 epochs, peak learning rate 0.01", xlabel="epoch", ylabel="validation accuracy, %")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    here, further = divided(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="forget what the file has of these parts")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of such a file; measures nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --show: draw the accuracies, too")
    args = parser.parse_args(here)
    if args.show:
        stored = json.loads(args.show.read_text())
        print("\n".join(tables(stored)))
        if args.plot:
            plot(stored, args.plot)
        return
    if not (args.data_dir and args.output):
        parser.error("expected --data-dir and --output, or --show")
    if not (torch.cuda.is_available() or any(word.startswith("--device") for word in further)):
        parser.error("no GPU here; -- --device cpu measures on the CPU, which takes days without further options")
    stored = json.loads(args.output.read_text()) if args.output.exists() else {}
    found: dict[str, Any] = {"what": WHAT, "measured": {}, **{part: {} for part in PARTS}, **stored}
    for part in args.parts if args.again else ():
        found[part] = {}
    label = " ".join([f"{device_of(further)}, torch {version('torch')}", *further])
    for part in args.parts:
        before = found["measured"].get(part, {}).get("on")
        if found[part] and before != label:
            parser.error(f"{args.output}: {part} is of {before}; this is {label}: --again, or another file")
    failed = set[tuple[str, str]]()
    for part, regime, seed in [*missing(found, args.parts, seeds=args.seeds)]:
        if (part, regime) in failed:
            continue  # the runs in the file are those of the first seeds
        try:
            result = measured(part, regime, data_dir=args.data_dir, seed=seed, further=" ".join(further))
        except RuntimeError as error:
            print(f"{part} {regime}, seed {seed}: left out: {error}", flush=True)
            failed.add((part, regime))
            continue
        print(part, regime, result[-1] if part != "speed" else result, flush=True)
        found[part].setdefault(regime, []).append(result)
        found["measured"][part] = {"on": label, "date": str(date.today())}
        writing.replace(args.output.parent, args.output.name, json.dumps(found) + "\n")
    print("\n".join(tables(found)))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
