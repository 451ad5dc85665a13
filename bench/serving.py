"""Compare a served model with the same model called directly: images per second, and what limits the difference.

    python bench/serving.py                                        ResNet-50 in 16 bits, 90 images per request
    python bench/serving.py --model resnet18 --image-size 64 --batch 8 --precision 32.32 --requests 40
    python bench/serving.py --model resnet50 --batch 1 --precision 32.32 --requests 10 --triton
    python bench/serving.py --model mobilenet-v3-large --batch 4 --precision 32.32 --client-cores 1

`local` is the server's engine in this process, with all of its lanes: images in host memory are gathered, copied to the
device and computed, and the scores copied back. `transport` is the server with a model that computes nothing. `served`
is `falconet serve` in a separate process. Clients are processes, with --client-cores on cores of their own; SYNC waits
for each response, ASYNC keeps four requests in flight. `triton` is NVIDIA's server with the exported model and as many
threads (`make triton` installs it); `falconet bench serve --server both` compares the two in turns. `local` is measured
before and after everything else, to show a change in the machine's speed.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from falconet.bench import load_test
from falconet.bench.client import Job
from falconet.bench.load_test import Target, Tensors
from falconet.bench.statistics import percentile
from falconet.commands import bench_serve
from falconet.config.commands import BenchServeOptions, ServeOptions
from falconet.config.load import load_options, read_line
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.infer.engines import open_engine
from falconet.infer.predictor import Execute, Lanes, Pixels, Scores, open_served
from falconet.parallel.host import keep_freed_memory
from falconet.serve import app, connections
from falconet.serve.batching import Policy
from falconet.serve.bodies import Memory
from falconet.serve.protocol import Served
from falconet.serve.repository import Opened, Repository

HELD, WINDOW = 4, 4
LOADS = (("SYNC", 1), ("ASYNC", 1), ("SYNC", 8), ("ASYNC", 8))


def serve_nothing(args: argparse.Namespace) -> None:
    """Run the server with a lane that responds immediately."""
    keep_freed_memory(os.environ)  # as `falconet serve` does

    def lane(portions: Sequence[Pixels]) -> list[Scores]:
        return [np.zeros((len(portion), 1000), dtype=np.float16) for portion in portions]

    preprocessing = Preprocessing(
        image_size=args.image_size, resize=args.image_size, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    names = tuple(map(str, range(1000)))
    served = Served(
        name="nothing", preprocessing=preprocessing, class_names=names, output="float16", max_batch=args.batch
    )
    policy = Policy(max_batch=args.batch, max_delay=0.0, max_queue=64 * args.batch)
    repository = Repository(sources=dict, policy=lambda _: policy)
    repository.adopt("nothing", Opened(served, Lanes(each=(lane, lane)), decode=np.frombuffer, stamp=0, about=""))
    front = app.FrontEnd(repository, memory=Memory(1 << 34), most_body=1, seconds=60.0)
    with connections.Address(host="127.0.0.1", port=0).open() as listening:
        line = f"serving nothing at http://127.0.0.1:{listening.getsockname()[1]}: "
        asyncio.run(connections.serve(front, listening, drain_seconds=20.0, started=lambda: print(line, flush=True)))
    repository.close()


@contextmanager
def nothing_served(args: argparse.Namespace) -> Iterator[Target]:
    argv = [sys.executable, __file__, "--nothing", "--batch", str(args.batch)]
    process = subprocess.Popen([*argv, "--image-size", str(args.image_size)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = load_test.STARTED.match(process.stdout.readline())
    assert found, "the server did not start"
    try:
        yield Target.at(found[2], found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def triton_served(args: argparse.Namespace, line: str) -> Iterator[Target]:
    words = f"{line} --micro-batch-size {args.batch} --data generated --server triton"
    settings = read_line(BenchServeOptions, words.split())
    options = load_options(BenchServeOptions, settings).options
    with bench_serve.targets(options, settings, lambda _: None) as targets:
        yield from targets.values()


def local(lanes: Sequence[Execute], images: Pixels, seconds: float) -> float:
    """The images per second of all lanes, each fed from memory by a thread."""
    counts = [0] * len(lanes)
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < end:
            lanes[number]([images[counts[number] % HELD]])
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(lanes))]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(sum(counts) * images.shape[1] / (time.monotonic() - begun))


def measured(target: Target, args: argparse.Namespace, images: Path, kind: str, clients: int) -> tuple[float, str]:
    """The images per second, and a description of the latency."""
    window, tensors = WINDOW if kind == "ASYNC" else 1, Tensors.of(target)
    job = Job(
        host=target.host,
        port=target.port,
        model=target.model,
        input=tensors.input,
        output=tensors.output,
        images=str(images.with_name("last.npy") if tensors.channels_last else images),
        expected=None,
        tolerance=0.0,
        window=window,
        count=args.requests,
        cores=args.cores,
    )
    found = load_test.together(load_test.run_clients(replace(job), clients), in_flight=clients * window)
    rate = found.requests * len(found.spacing) * args.batch / sum(found.spacing)
    return rate, "  ".join(f"p{p} {1000 * percentile(found.latencies, p):7.1f} ms" for p in (50, 99))


def compare(args: argparse.Namespace) -> None:
    line = f"--model {args.model} --image-size {args.image_size} --precision {args.precision} --max-batch {args.batch}"
    settings = read_line(ServeOptions, line.split())
    classifier, options = open_served(settings, lambda _: None)
    size = args.batch * 3 * args.image_size**2
    images = np.random.default_rng(0).integers(
        0, 256, (HELD, args.batch, 3, args.image_size, args.image_size), dtype=np.uint8
    )
    where = torch.cuda.get_device_name() if classifier.device.type == "cuda" else "CPU"
    cores = f"{len(os.sched_getaffinity(0))} cores, {len(args.cores) or 'no'} others for clients"
    print(f"{line}; {size / 1e6:.1f} MB per request; {where}, {cores}, torch {torch.__version__}", flush=True)
    engine = open_engine(classifier, options, settings, print, max_batch=args.batch)
    base = local(engine.lanes.each, images, args.seconds)
    print(f"local                             {base:10,.0f} images/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npy"
        np.save(path, images)
        np.save(path.with_name("last.npy"), np.ascontiguousarray(images.transpose(0, 1, 3, 4, 2)))
        with nothing_served(args) as target:
            tell(target, args, path, "transport", base)
        more = f"--port 0 --max-queue {64 * args.batch}"
        with load_test.started(["serve", *line.split(), *more.split()]) as target:
            tell(target, args, path, "served", base)
        if args.triton:
            with triton_served(args, line) as target:
                tell(target, args, path, "triton", base)
    again = local(engine.lanes.each, images, args.seconds)
    print(f"local, again                      {again:10,.0f} images/s ({100 * (again / base - 1):+.1f} %)")


def tell(target: Target, args: argparse.Namespace, images: Path, name: str, base: float) -> None:
    for kind, clients in LOADS:
        rate, latency = measured(target, args, images, kind, clients)
        volume = rate * 3 * args.image_size**2 / 1e9
        print(
            f"{name:24} {kind:5} x {clients}  {rate:10,.0f} images/s  {100 * rate / base:5.1f} % of local"
            f"  {volume:5.2f} GB/s  {latency}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--precision", default="16.16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=90)
    parser.add_argument("--requests", type=int, default=100, help="requests of each client")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each local measurement")
    parser.add_argument("--client-cores", type=int, default=0, help="cores for the clients alone")
    parser.add_argument("--triton", action="store_true", help="also measure NVIDIA's server")
    parser.add_argument("--nothing", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nothing:
        serve_nothing(args)
    else:
        with load_test.cores_apart(args.client_cores) as args.cores:
            compare(args)


if __name__ == "__main__":
    main()
