"""Measure the cost of an update of ResNet-50's weights on a GPU: our half-precision rules and torch's fused fp32 SGD.

    python bench/optimizers.py [--chunks 2048 4096 8192]

Time of the kernels alone (a replayed CUDA graph) and of a call from Python; medians with quartiles.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from falconet.models import zoo
from falconet.numerics.kernels.tensor_table import CHUNK, Tables
from falconet.numerics.rounding import Rounding
from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfOptimizer, HalfRMSpropTF, HalfSGD
from timing import milliseconds

GOAL = 1.15  # relative to torch's fused fp32 SGD
REPEATS = 60

RULES: dict[str, Callable[[list[Tensor], Rounding | None], HalfOptimizer]] = {
    "sgd": lambda params, r: HalfSGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4, rounding=r),
    "rmsprop_tf": lambda params, r: HalfRMSpropTF(params, lr=0.1, alpha=0.9, eps=1e-3, momentum=0.9, rounding=r),
    "adamw": lambda params, r: HalfAdamW(params, lr=0.1, eps=1e-8, weight_decay=1e-4, rounding=r),
    "lars": lambda params, r: HalfLars(params, lr=0.1, momentum=0.9, trust=1e-3, eps=1e-8, rounding=r),
}
TYPES = {
    "fp16, stochastic": (torch.float16, Rounding(0)),
    "fp16, nearest": (torch.float16, None),
    "bf16, stochastic": (torch.bfloat16, Rounding(0)),
    "fp32": (torch.float32, None),
}


def weights(dtype: torch.dtype) -> list[Tensor]:
    """ResNet-50's parameters, channels last, with gradients."""
    model = zoo.build("resnet50", classes=1000, seed=0).to("cuda", dtype)
    params: list[Tensor] = list(model.parameters())
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def times(call: Callable[[], None]) -> list[float]:
    """Microseconds of each of many calls, measured on the GPU."""
    return [1000 * each for each in milliseconds(call, repeats=REPEATS)]


def measured(optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """Times of the replayed graph, and of the plain call."""
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    times(graph.replay)
    return times(graph.replay), times(optimizer.step)


def row(name: str, optimizer: torch.optim.Optimizer, base: float | None) -> float:
    kernels, calls = measured(optimizer)
    low, middle, high = statistics.quantiles(kernels, n=4)
    ratio = f"{middle / base:5.2f}" if base else " 1.00"
    print(
        f"{name:34s} {middle:8.1f} us ({low:.1f} to {high:.1f})  x {ratio}   call {statistics.median(calls):8.1f} us",
        flush=True,
    )
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK])
    chunks = parser.parse_args().chunks
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, {REPEATS} repeats",
        flush=True,
    )
    fused = torch.optim.SGD(weights(torch.float32), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    base = row("torch SGD fp32, fused", fused, None)
    row("torch AdamW fp32, fused", torch.optim.AdamW(weights(torch.float32), lr=0.1, fused=True, capturable=True), base)
    worst = 0.0
    for chunk in chunks:
        print(f"chunks of {chunk}", flush=True)
        for rule, make in RULES.items():
            for name, (dtype, rounding) in TYPES.items():
                optimizer = make(weights(dtype), rounding)
                optimizer._tables = Tables(chunk=chunk)
                found = row(f"{rule} {name}", optimizer, base)
                if rule == "sgd" and dtype != torch.float32:
                    worst = max(worst, found / base)
    print(f"goal: sgd in half at most {GOAL} x torch's fused fp32 SGD; the worst was {worst:.2f} x")


if __name__ == "__main__":
    main()
