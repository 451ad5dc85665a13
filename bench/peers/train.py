"""Compare training on images that stay on the device: Falconet, and the loops of timm's and torchvision's scripts.

    python bench/peers/train.py                                        ResNet-50, every method
    python bench/peers/train.py --networks efficientnet-b0 --methods falconet timm timm-compiled
    python bench/peers/train.py --networks all --methods falconet --rounds 3
    python bench/peers/train.py --device cpu --networks mobilenet-v3-large --batch 8 --updates 3 --warmup 1

Falconet is `falconet train --data synthetic`, a process per run, counted from its first log point on; the peers are in
loops.py, channels-last, and their warm-up and compilation are not counted. Methods take turns, so that a change in the
machine's speed affects all of them. Each run is printed when it is done; the table at the end, whose rows go to
docs/knowing/results.md, has medians and the range of the runs. No run starts that is expected to end after --minutes:
compiling six networks takes longer than that, so choose networks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torchvision

from loops import timm_loop, torchvision_loop
from networks import CLASSES, NETWORKS, Network

METHODS = ("falconet", "torchvision", "torchvision-compiled", "timm", "timm-compiled")
FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REGIMES = {"float32": "32.32", "float16": "16.16 --loss-scaling 128", "bfloat16": "bf16.32"}
PARTS = 4  # log points of Falconet's run; the first is warm-up
FIRST = 60.0  # seconds that a first run is expected to take, with its compilation

Measure = Callable[[], float]  # images per second


@dataclass(frozen=True)
class Job:
    """How a network is measured."""

    network: Network
    batch: int
    image_size: int
    updates: int
    warmup: int
    device: torch.device
    format: str

    @property
    def title(self) -> str:
        return f"{self.network.title}, {self.image_size}, batch {self.batch}"

    @property
    def is_standard(self) -> bool:
        """Whether the network's goal is for this."""
        own = (self.network.batch, self.network.image_size)
        return self.device.type == "cuda" and (self.batch, self.image_size) == own

    def measure(self, method: str) -> Measure:
        if method == "falconet":
            return self._falconet
        library, _, compiled = method.partition("-")
        make, loop = {
            "timm": (self.network.of_timm, timm_loop),
            "torchvision": (self.network.torchvision, torchvision_loop),
        }[library]
        model = make().to(self.device, memory_format=torch.channels_last).train()
        update = loop(torch.compile(model) if compiled else model, self.device, FORMATS[self.format])
        return lambda: self._peer(update)

    def _peer(self, update: Callable[[torch.Tensor, torch.Tensor], None]) -> float:
        shape = (self.batch, 3, self.image_size, self.image_size)
        images = torch.randn(shape, device=self.device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (self.batch,), device=self.device)
        for _ in range(self.warmup):
            update(images, labels)
        begin = self._now()
        for _ in range(self.updates):
            update(images, labels)
        seconds = self._now() - begin
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next method's turn
        return self.batch * self.updates / seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _falconet(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            line = (
                f"--model {self.network.falconet} --image-size {self.image_size} --data synthetic --classes {CLASSES}"
            )
            line += f" --device {self.device.type} --precision {REGIMES[self.format]}"
            line += f" --micro-batch-size {self.batch} --iterations {self.updates} --epoch 1 --warmup-epoch 0"
            line += f" --validation-mode none --logs-per-epoch {PARTS} --run-dir {folder}/run"
            words = [sys.executable, "-m", "falconet", "train", *line.split()]
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
            if done.returncode:
                raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        entries = map(json.loads, lines)
        rates = [entry["train/images_per_second"] for entry in entries if "train/images_per_second" in entry][:PARTS]
        counted = rates[1:]
        return len(counted) / sum(1 / rate for rate in counted)


class Clock:
    """What is left of the script's time."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._longest: dict[str, float] = {}  # seconds of the last run, by its name

    def allows(self, run: str) -> bool:
        return time.monotonic() + self._longest.get(run, FIRST) < self._end

    def timed(self, run: str, measure: Measure) -> float:
        begin = time.monotonic()
        rate = measure()
        self._longest[run] = time.monotonic() - begin
        return rate


def rates_of(job: Job, methods: list[str], *, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Images per second of each run, by method."""
    rates: dict[str, list[float]] = {method: [] for method in methods}
    measures: dict[str, Measure] = {}
    for number in range(rounds):
        for method in methods:
            run = f"{job.title}, {method}"
            if not clock.allows(run):
                print(f"{run}: left out, no time left", flush=True)
                continue
            if method not in measures:
                measures[method] = job.measure(method)
            rate = clock.timed(run, measures[method])
            rates[method].append(rate)
            print(f"{run}, run {number + 1}: {rate:,.1f} images/s", flush=True)
    torch._dynamo.reset()  # a limit on compilations counts those of earlier networks
    return rates


def table(found: dict[str, dict[str, list[float]]], goals: dict[str, str], methods: list[str]) -> Iterator[str]:
    """Markdown: the median and the range of each method's runs."""
    yield "| network | " + " | ".join(method.replace("-", ", ") for method in methods) + " | of the best peer | goal |"
    yield "|---|" + "---:|" * (len(methods) + 2)
    for title, rates in found.items():
        cells = [_cell(rates[method]) for method in methods]
        yield f"| {title} | " + " | ".join([*cells, _ratio(rates), goals[title]]) + " |"


def _cell(rates: list[float]) -> str:
    digits = 0 if rates and max(rates) >= 100 else 1
    if len(rates) < 2:
        return f"{rates[0]:,.{digits}f}" if rates else ""
    return f"{statistics.median(rates):,.{digits}f} ({min(rates):,.{digits}f} to {max(rates):,.{digits}f})"


def _ratio(rates: dict[str, list[float]]) -> str:
    peers = [statistics.median(runs) for method, runs in rates.items() if method != "falconet" and runs]
    ours = rates.get("falconet")
    return f"{statistics.median(ours) / max(peers):.2f}x" if ours and peers else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, "all"], default=["resnet50"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--format", choices=FORMATS, help="default: float16 on cuda, float32 on a CPU")
    parser.add_argument("--batch", type=int, help="default: the network's")
    parser.add_argument("--image-size", type=int, help="default: the network's")
    parser.add_argument("--updates", type=int, default=80, help="per run")
    parser.add_argument("--warmup", type=int, default=10, help="updates of a peer before each run, not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.5, help="start no run that would end later")
    args = parser.parse_args()
    clock, device = Clock(args.minutes), torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    form = args.format or ("float16" if args.device == "cuda" else "float32")
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}"
    print(f"{name}, {versions}, {form}, {args.rounds} runs of {args.updates} updates", flush=True)
    found, goals = {}, {}
    for network in NETWORKS if "all" in args.networks else args.networks:
        each = NETWORKS[network]
        job = Job(
            each, args.batch or each.batch, args.image_size or each.image_size, args.updates, args.warmup, device, form
        )
        found[job.title] = rates_of(job, args.methods, rounds=args.rounds, clock=clock)
        goals[job.title] = f"{each.goal:,}" if job.is_standard else ""
    print("\n".join(table(found, goals, args.methods)))


if __name__ == "__main__":
    main()
