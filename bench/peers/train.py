"""Compare training on images that stay on the device: Falconet, and the loops of timm's and torchvision's scripts.

    python bench/peers/train.py                                        ResNet-50, every method
    python bench/peers/train.py --networks resnet50 efficientnet-b0 efficientnet-b4 --output runs.jsonl
    python bench/peers/train.py --networks all --methods falconet --rounds 3
    python bench/peers/train.py --show runs.jsonl more.jsonl           the table of these runs; measures nothing
    python bench/peers/train.py --device cpu --networks mobilenet-v3-large --batch 8 --updates 8 --warmup 1

Falconet is `falconet train --data synthetic`, counted from its first log point on, with weights in half precision too;
falconet-mixed has fp32 weights, as the peers with `--amp`, and is the one to compare them with. Those are in loops.py,
channels-last, and their warm-up is not counted. First all networks are compiled at the same time, each in its own
processes, which wait while another one measures. Then the networks and methods take turns, one run at a time, so that a
change in the machine's speed affects all of them. Each run is printed, and added to --output, when it is done; the
table at the end, whose rows go to docs/knowing/results.md, has medians and the range of the runs. No run starts that is
expected to end after --minutes. Three networks take about 7 minutes on an H200, most of them to compile.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from networks import NETWORKS
from workers import FORMATS, METHODS, OURS, Falconet, Job, Peers, Worker

LIBRARIES = ("torch", "torchvision", "timm")
FIRST = 30.0  # seconds that the first run of a method is expected to take, with cuDNN's trials

Run = dict[str, str | float]  # a line of --output


class Clock:
    """A clock for the script's time."""

    def __init__(self, minutes: float) -> None:
        self._begin, self._end = time.monotonic(), time.monotonic() + 60 * minutes
        self._seconds: dict[str, float] = {}  # of the last run, by its title

    def passed(self) -> float:
        return time.monotonic() - self._begin

    def allows(self, run: str) -> bool:
        return time.monotonic() + self._seconds.get(run, FIRST) < self._end

    def measured(self, run: str, worker: Worker, method: str) -> float:
        begin = time.monotonic()
        rate = worker.measure(method)
        self._seconds[run] = time.monotonic() - begin
        return rate


def prepared(workers: dict[tuple[str, str], Worker], *, clock: Clock, minutes: float) -> set[Worker]:
    """Let all workers compile at the same time; return those that were ready in time."""
    every, ready = list(dict.fromkeys(workers.values())), set()
    for worker in every:
        worker.start_preparing()
    for worker in every:
        left = max(1.0, 60 * minutes - clock.passed())
        try:
            seconds = worker.answer(timeout=left)
            print(f"{clock.passed():5.0f} s  prepared in {seconds:.0f} s: {worker.title}", flush=True)
            ready.add(worker)
        except (RuntimeError, TimeoutError) as error:
            print(f"left out: {error}", flush=True)
            worker.end()
    return ready


def measured(
    jobs: Sequence[Job], methods: Sequence[str], *, rounds: int, clock: Clock, prepare: float
) -> Iterator[tuple[Job, str, float]]:
    """The images per second of each run; jobs and methods take turns."""
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[tuple[str, str], Worker] = {}
        for number, job in enumerate(jobs):
            ours, peers = [m for m in methods if m in OURS], [m for m in methods if m not in OURS]
            for kind, own in ((Falconet, ours), (Peers, peers)):
                if own:
                    worker = Worker(kind, job, own, Path(folder) / f"{number}-{own[0]}.log")
                    workers |= {(job.title, method): worker for method in own}
        try:
            ready = prepared(workers, clock=clock, minutes=prepare)
            for number in range(rounds):
                for job in jobs:
                    for method in (method for method in methods if workers[job.title, method] in ready):
                        run, worker = f"{job.title}, {method}", workers[job.title, method]
                        if not clock.allows(run):
                            print(f"{run}, run {number + 1}: left out, no time left", flush=True)
                            continue
                        try:
                            rate = clock.measured(run, worker, method)
                        except RuntimeError as error:
                            print(f"left out: {error}", flush=True)
                            ready.discard(worker)
                            continue
                        print(f"{clock.passed():5.0f} s  {run}, run {number + 1}: {rate:,.1f} images/s", flush=True)
                        yield job, method, rate
        finally:
            for worker in dict.fromkeys(workers.values()):
                worker.end()


def table(runs: Iterable[Run]) -> Iterator[str]:
    """A Markdown table of the median and the range of each method's runs."""
    found: dict[str, dict[str, list[float]]] = {}
    goals: dict[str, str] = {}
    for run in runs:
        title = str(run["title"])
        found.setdefault(title, {}).setdefault(str(run["method"]), []).append(float(run["images_per_second"]))
        goals[title] = str(run["goal"])
    methods = [method for method in METHODS if any(method in rates for rates in found.values())]
    order = [network.title for network in NETWORKS.values()]
    ours = [method for method in methods if method in OURS]
    heads = [*methods, *(f"{method} / best peer" for method in ours)]
    yield "| network | " + " | ".join(head.replace("-", ", ") for head in heads) + " | goal |"
    yield "|---|" + "---:|" * (len(heads) + 1)
    for title in sorted(found, key=lambda title: order.index(title.partition(", ")[0])):
        rates = found[title]
        cells = [_cell(rates.get(method, [])) for method in methods]
        cells += [_ratio(method, rates) for method in ours]
        yield f"| {title} | " + " | ".join([*cells, goals[title]]) + " |"


def _cell(rates: Sequence[float]) -> str:
    digits = 0 if rates and max(rates) >= 100 else 1
    if len(rates) < 2:
        return f"{rates[0]:,.{digits}f}" if rates else ""
    return f"{statistics.median(rates):,.{digits}f} ({min(rates):,.{digits}f} to {max(rates):,.{digits}f})"


def _ratio(own: str, rates: dict[str, list[float]]) -> str:
    peers = [statistics.median(runs) for method, runs in rates.items() if method not in OURS]
    return f"{statistics.median(rates[own]) / max(peers):.2f}x" if own in rates and peers else ""


def _goal(job: Job) -> str:
    """The goal of a network, for its own batch and size on an H200."""
    own = (job.network.batch, job.network.image_size)
    return f"{job.network.goal:,}" if job.device == "cuda" and (job.batch, job.image_size) == own else ""


def _stored(paths: Sequence[Path]) -> Iterator[Run]:
    for path in paths:
        yield from map(json.loads, path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, "all"], default=["resnet50"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--format", choices=FORMATS, help="default: float16 on cuda, float32 on a CPU")
    parser.add_argument("--batch", type=int, help="default: the network's")
    parser.add_argument("--image-size", type=int, help="default: the network's")
    parser.add_argument("--updates", type=int, default=40, help="per run; Falconet counts the last three quarters")
    parser.add_argument("--warmup", type=int, default=5, help="updates of a peer before each run, not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.5, help="start no run that would end later")
    parser.add_argument("--prepare", type=float, default=5.0, help="minutes; what is not compiled then is left out")
    parser.add_argument("--output", type=Path, help="JSON lines to append each run to")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the table of such files")
    args = parser.parse_args()
    if args.show:
        print("\n".join(table(_stored(args.show))))
        return
    form = args.format or ("float16" if args.device == "cuda" else "float32")
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = ", ".join(f"{library} {version(library)}" for library in LIBRARIES)
    print(f"{name}, {versions}, {form}, {args.rounds} runs of {args.updates} updates", flush=True)
    chosen = [NETWORKS[network] for network in (NETWORKS if "all" in args.networks else args.networks)]
    jobs = [
        Job(
            each.falconet,
            args.batch or each.batch,
            args.image_size or each.image_size,
            args.updates,
            args.warmup,
            args.device,
            form,
        )
        for each in chosen
    ]
    clock, runs = Clock(args.minutes), list[Run]()
    all_methods = [method for method in METHODS if form != "float32" or method != OURS[1]]  # the same as OURS[0] there
    methods = [method for method in METHODS if method in (args.methods or all_methods)]
    for job, method, rate in measured(jobs, methods, rounds=args.rounds, clock=clock, prepare=args.prepare):
        run: Run = {"title": job.title, "method": method, "images_per_second": rate, "goal": _goal(job)}
        runs.append(run | {"updates": job.updates, "format": form, "device": name, "versions": versions})
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
