"""Predict ResNet-50's scaling to 8, 64 and 512 GPUs from one GPU's measured speed: `python bench/simulate_scaling.py`.

Print the table of docs/knowing/parallelism.md with its assumptions; `--plot docs/img/scaling.png` also draws it.
A model, not a measurement: we had one GPU.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BATCH = 512  # images in a micro-batch
PARAMETERS = 25_557_032  # of ResNet-50
IMAGES_PER_SECOND = {"16.16": 10_580.0, "16.32": 9_854.0}  # on one H200, docs/knowing/results.md
GRADIENT_BYTES = {"16.16": 2, "16.32": 4, "32.32": 4}  # per parameter as sent; the same for weights
ACTIVATION_BYTES = {"16.16": 2, "16.32": 2}  # per value sent between two stages
BACKWARD = 2 / 3  # of a micro-batch's time
NODE = 8  # GPUs with NVLink between them
NVLINK, INFINIBAND = 450e9, 50e9  # bytes per second out of one GPU, each way
NVLINK_LATENCY, INFINIBAND_LATENCY = 2e-6, 5e-6  # seconds per message
BUCKET = 25e6  # bytes; --bucket-size
STAGES, MICRO_BATCHES = 4, 16  # of the pipeline, within a node
BOUNDARY = 1024 * 14 * 14  # values per image between two stages; layer3 of ResNet-50
# Of a micro-batch's time: its forward pass again, as pipelines do by default; docs/knowing/results.md.
RECOMPUTED = 0.38


@dataclass(frozen=True)
class Link:
    """The path of a message in a group of GPUs: rings within nodes, and rings across them."""

    gpus: int

    def all_reduce(self, size: float) -> float:
        """Seconds of a reduce-scatter in the node, an all-reduce of shares across nodes, an all-gather in the node."""
        return 2 * self.one_way(size)

    def one_way(self, size: float) -> float:
        """Seconds of a reduce-scatter or an all-gather: half an all-reduce."""
        inside = min(self.gpus, NODE)
        nodes = math.ceil(self.gpus / NODE)
        within = (inside - 1) / inside * size / NVLINK + (inside - 1) * NVLINK_LATENCY
        across = (nodes - 1) / nodes * size / inside / INFINIBAND + (nodes - 1) * INFINIBAND_LATENCY
        return within + across


def exposed(size: float, *, backward: float, message: Callable[[float], float]) -> float:
    """Seconds of communication after the backward pass; buckets become ready evenly over it and are sent one by one.

    A backward pass of length 0 hides nothing.
    """
    count = math.ceil(size / BUCKET)
    free = 0.0
    for number in range(count):
        ready = backward * (number + 1) / count
        free = max(free, ready) + message(size / count)
    return free - backward


def micro_batch_seconds(regime: str) -> float:
    return BATCH / IMAGES_PER_SECOND[regime]


def gradients(regime: str) -> float:
    return PARAMETERS * GRADIENT_BYTES[regime]


def replicas(gpus: int, regime: str, *, accumulation: int = 1, sharded: bool = False, overlap: float = 1.0) -> float:
    """The efficiency: images per second on `gpus` GPUs, relative to `gpus` times those of one."""
    one, link, size = micro_batch_seconds(regime), Link(gpus), gradients(regime)
    if gpus == 1:
        return 1.0
    message = link.one_way if sharded else link.all_reduce
    lost = exposed(size, backward=overlap * BACKWARD * one, message=message)
    if sharded:  # the updated weights, after the update: nothing overlaps this
        lost += math.ceil(size / BUCKET) * link.one_way(size / math.ceil(size / BUCKET))
    return accumulation * one / (accumulation * one + lost)


def pipelined(gpus: int, regime: str, *, recomputed: float = RECOMPUTED) -> float:
    """The efficiency of pipelines of STAGES GPUs in one node, MICRO_BATCHES per update, replicated over all GPUs."""
    one = micro_batch_seconds(regime)
    sent = BATCH * BOUNDARY * ACTIVATION_BYTES[regime] / NVLINK + NVLINK_LATENCY
    turn = one * (1 + recomputed) / STAGES + 2 * sent  # one stage's share of a micro-batch: forward, backward, sends
    lost = 0.0
    if gpus > STAGES:
        # The replicas of one stage: NODE / STAGES of them in a node, so the ring crosses nodes with fewer shares.
        nodes, inside = math.ceil(gpus / NODE), NODE // STAGES
        size = gradients(regime) / STAGES

        def message(part: float) -> float:
            within = (inside - 1) / inside * part / NVLINK + (inside - 1) * NVLINK_LATENCY
            across = (nodes - 1) / nodes * part / inside / INFINIBAND + (nodes - 1) * INFINIBAND_LATENCY
            return 2 * (within + across)

        lost = exposed(size, backward=BACKWARD * one / STAGES, message=message)
    update = (MICRO_BATCHES + STAGES - 1) * turn + lost  # the bubble is (S - 1) / (M + S - 1) of it
    return MICRO_BATCHES * one / (STAGES * update)


WAYS: dict[str, Callable[[int, str], float]] = {
    "replicas": replicas,
    "the same without overlap": lambda gpus, regime: replicas(gpus, regime, overlap=0.0),
    "sharded state": lambda gpus, regime: replicas(gpus, regime, sharded=True),
    f"accumulation {MICRO_BATCHES}": lambda gpus, regime: replicas(gpus, regime, accumulation=MICRO_BATCHES),
    f"{STAGES} stages": pipelined,
    f"{STAGES} stages, no recomputation": lambda gpus, regime: pipelined(gpus, regime, recomputed=0.0),
}
SIZES = (8, 64, 512)


def assumptions() -> list[str]:
    return [
        f"one GPU: {', '.join(f'{name} {rate:,.0f} images/s' for name, rate in IMAGES_PER_SECOND.items())} (measured)",
        f"ResNet-50, {PARAMETERS:,} parameters, micro-batch {BATCH}; gradients of"
        f" {gradients('16.16') / 1e6:.0f} MB in 16.16 and {gradients('16.32') / 1e6:.0f} MB in 16.32",
        f"rings of {NODE} GPUs at {NVLINK / 1e9:.0f} GB/s and {NVLINK_LATENCY * 1e6:.0f} us per message, rings across"
        f" nodes at {INFINIBAND / 1e9:.0f} GB/s per GPU and {INFINIBAND_LATENCY * 1e6:.0f} us; always full bandwidth",
        f"the backward pass takes {BACKWARD:.2f} of the time; buckets of {BUCKET / 1e6:.0f} MB become ready evenly over"
        " it, and are sent one after the other meanwhile",
        "sharded state: reduce-scatter during the backward pass, all-gather of weights after the update, not hidden",
        f"pipeline: equal stages in one node, bubble (S-1)/(M+S-1) = {STAGES - 1}/{MICRO_BATCHES + STAGES - 1}, the"
        f" forward again ({RECOMPUTED:.2f} of the time), {BOUNDARY:,} values per image sent both ways, not hidden",
        "not included: stragglers, input, validation, checkpoints, whether such a large global batch still learns;"
        " updates of pipeline stages are not captured and their norms not fused, so they are slower than this",
    ]


def table() -> list[str]:
    head = "| GPUs | regime | " + " | ".join(WAYS) + " | replicas, images/s |"
    rows = [head, "|---|---|" + "---|" * len(WAYS) + "---|"]
    for gpus in SIZES:
        for regime in IMAGES_PER_SECOND:
            shares = [way(gpus, regime) for way in WAYS.values()]
            rate = shares[0] * gpus * IMAGES_PER_SECOND[regime]
            rows.append(f"| {gpus} | {regime} | " + " | ".join(f"{s:.1%}" for s in shares) + f" | {rate:,.0f} |")
    return rows


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpus = [1 << power for power in range(3, 10)]
    figure, panels = pyplot.subplots(1, len(IMAGES_PER_SECOND), figsize=(11, 4), sharey=True, layout="constrained")
    for axes, regime in zip(panels, IMAGES_PER_SECOND, strict=True):
        for (name, way), marker in zip(WAYS.items(), "osv^D*", strict=True):
            axes.plot(gpus, [100 * way(count, regime) for count in gpus], marker=marker, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus])
        axes.set_title(f"{regime}, {IMAGES_PER_SECOND[regime]:,.0f} images/s on one", fontsize=10)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("efficiency, %")
    panels[0].set_ylim(55, 101)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=len(WAYS))
    figure.suptitle("ResNet-50, simulated from one H200 (never run on several GPUs)", fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="also draw the efficiencies into this file")
    arguments = parser.parse_args()
    print("\n".join([*table(), "", *(f"- {line}" for line in assumptions())]))
    if arguments.plot:
        plot(arguments.plot)


if __name__ == "__main__":
    main()
