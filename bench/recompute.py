"""Measure the cost of recomputing activations: images per second and memory with and without --enable-recompute.

    python bench/recompute.py
    python bench/recompute.py --models resnet50:512 --rounds 3
    python bench/recompute.py --device cpu --models resnet8-cifar:8 --updates 8 --options="--image-size 32"

The two take turns on synthetic data. A second forward pass takes a third of the time, if a backward pass takes twice
as long as a forward pass.
"""

import argparse
import statistics

from product_runs import Speed, train

OPTIONS = "--image-size 224 --precision 16.16 --loss-scaling 128"
KINDS = {"plain": "", "recomputed": "--enable-recompute"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50:256", "efficientnet-b0:256"], metavar="NAME:BATCH")
    parser.add_argument("--updates", type=int, default=60, help="per run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--options", default=OPTIONS, help="of every run")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        name, _, batch = model.partition(":")
        line = f"--model {name} --micro-batch-size {batch} --device {args.device} {args.options}"
        line += f" --data synthetic --classes 1000 --iterations {args.updates}"
        found: dict[str, list[Speed]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds):
            for kind, option in KINDS.items():
                speed = train(f"{line} {option}")
                found[kind].append(speed)
                words = f"{speed.images_per_second:8,.0f} images/s, {speed.memory:.1f} GiB"
                print(f"{model:24} round {number + 1}  {kind:12} {words}", flush=True)
        rates = {kind: statistics.median(each.images_per_second for each in found[kind]) for kind in KINDS}
        cells = [f"{rates[kind]:,.0f} ({found[kind][-1].memory:.1f} GiB)" for kind in KINDS]
        more = rates["plain"] / rates["recomputed"] - 1
        rows.append(f"| {name}, {batch} | {' | '.join(cells)} | {more:.0%} |")
    print("| model and batch | plain, images/s (memory) | recomputed | more time |\n|---|---:|---:|---:|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
