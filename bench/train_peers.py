"""Compare ResNet-50 training on images already on the GPU: Falconet, and plain loops over timm and torchvision.

    python bench/train_peers.py                           batch 256, three rounds, the peers eager and compiled
    python bench/train_peers.py --batch 512 --rounds 5

The peers train as their own scripts do with mixed precision: channels-last, fp16 autocast with a gradient scaler, SGD
with momentum and torch's fused update. Falconet is `falconet train --data synthetic`. The methods take turns, so that a
change in the machine's speed affects all of them; warm-up and compilation are not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn

DEVICE = torch.device("cuda")
PARTS = 4  # log points of Falconet's run; the first is warm-up
OPTIONS = "--model resnet50 --image-size 224 --precision 16.16 --loss-scaling 128 --data synthetic --classes 1000"


def peer(model: nn.Module, batch: int, updates: int) -> float:
    """Images per second of a plain training loop."""
    images = torch.randn(batch, 3, 224, 224, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler()

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(10):
        update()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(updates):
        update()
    end.record()
    torch.cuda.synchronize()
    return batch * updates / (start.elapsed_time(end) / 1000)


def falconet(batch: int, updates: int) -> float:
    """Images per second of `falconet train`, after its first log interval."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"{OPTIONS} --micro-batch-size {batch} --iterations {updates} --epoch 1 --warmup-epoch 0"
        line += f" --validation-mode none --logs-per-epoch {PARTS} --run-dir {folder}/run"
        words = [sys.executable, "-m", "falconet", "train", *line.split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [entry["train/images_per_second"] for entry in map(json.loads, lines) if "train/images_per_second" in entry]
    return (PARTS - 1) / sum(1 / rate for rate in rates[1:PARTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    makers: dict[str, Callable[[], nn.Module]] = {
        "timm": lambda: timm.create_model("resnet50"),
        "torchvision": torchvision.models.resnet50,
    }
    methods: dict[str, Callable[[], float]] = {"falconet": lambda: falconet(args.batch, args.updates)}
    for name, make in makers.items():
        eager = make().to(DEVICE, memory_format=torch.channels_last)
        compiled = torch.compile(make().to(DEVICE, memory_format=torch.channels_last))
        methods[name] = lambda model=eager: peer(model, args.batch, args.updates)
        methods[f"{name}, compiled"] = lambda model=compiled: peer(model, args.batch, args.updates)
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.rounds):
        for name, measure in methods.items():
            rates[name].append(measure())
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}"
    print(
        f"{torch.cuda.get_device_name()}, {versions}, batch {args.batch},"
        f" {args.rounds} rounds of {args.updates} updates"
    )
    for name, found in rates.items():
        ratio = statistics.mean(found) / statistics.mean(rates["falconet"])
        print(
            f"{name:22} {statistics.mean(found):8,.0f} images/s  {min(found):,.0f} to {max(found):,.0f}  {ratio:5.2f}x"
        )


if __name__ == "__main__":
    main()
