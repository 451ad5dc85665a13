"""Measure the cost of optimizer state in host memory on a GPU: updates of ResNet-50's weights next to computation.

    python bench/offload.py [--bucket 5]

`beside` is computation and update in turn, as in training, where copies overlap with computation; the difference from
the sum of both alone is what the overlap gains. The state crosses the bus twice per update: `copies` is the lower bound
that the bus sets, with both directions at once. Medians of rounds, measured on the GPU.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from falconet.config.options import Optimizer
from falconet.models import zoo
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import build_optimizer

ROUNDS, CALLS = 5, 10
SIDE = 8192  # of the matrices whose product stands in for computation


def milliseconds(*parts: Callable[[], None]) -> float:
    """Milliseconds per call, median over several rounds."""
    found = list[float]()
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        for part in parts * CALLS:
            part()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", type=float, nargs="+", default=[5.0, 25.0], help="megabytes")
    args = parser.parse_args()
    work = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16)

    def compute() -> None:
        for _ in range(20):
            torch.mm(work, work)

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-50, AdamW, fp32", flush=True)
    alone = milliseconds(compute)
    print(f"{'computation alone':30} {alone:8.2f} ms", flush=True)
    for bucket in [None, *args.bucket]:
        model = zoo.build("resnet50", classes=1000, seed=0).cuda()
        optimizer = build_optimizer(model, Optimizer(optimizer="adamw"))
        step: Callable[[], None] = optimizer.step
        if bucket is not None:
            host = HostedState(optimizer, bucket_megabytes=bucket, device=torch.device("cuda"))
            step = host.step
        grads = [torch.ones_like(p) for p in model.parameters()]

        def update(
            model: torch.nn.Module = model, grads: list[torch.Tensor] = grads, step: Callable[[], None] = step
        ) -> None:
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            step()

        own, beside = milliseconds(update), milliseconds(compute, update)
        where = "on the device" if bucket is None else f"on the host, buckets of {bucket:g} MB"
        print(
            f"{where:30} {own:8.2f} ms alone, {beside:8.2f} ms beside, {own + alone - beside:6.2f} ms overlapped",
            flush=True,
        )
    state = 2 * 4 * sum(p.numel() for p in model.parameters())
    there, here = (torch.empty(state, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    device = [torch.empty(state, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def copies() -> None:
        for stream, (to, source) in zip(streams, ((device[0], there), (here, device[1])), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)

    print(f"{'copies, both ways at once':30} {milliseconds(copies):8.2f} ms for {state / 1e6:.0f} MB each way")


if __name__ == "__main__":
    main()
