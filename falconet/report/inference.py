"""The lines about predictions that tools of the originals read."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was measured."""

    model: str
    micro_batch: int
    data: str
    dtype: str
    devices: int


def batch_line(rate: float, latency: float, *, instance: int, of: int) -> str:
    """One batch: images per second, milliseconds; the instance counts from 0 and is told when there are several."""
    who = f"[instance{instance + 1}/{of}] " if of > 1 else ""
    return f"{who}Throughput: {rate:.2f} imgs/sec; Latency range: {latency:.3f}..{latency:.3f} ms"


def summary(facts: Facts, rates: Sequence[float], latencies: Sequence[float]) -> list[str]:
    """Means over the steady batches; `rates` in images per second, `latencies` in milliseconds."""
    throughput = f"throughput: {fmean(rates):.2f} samples/sec (mean)"
    latency = f"latency avg: {fmean(latencies):.3f} ms (mean)"
    lines = [
        f"{facts.model} results:",
        f"    micro_batch_size: {facts.micro_batch}",
        f"    data_mode: {facts.data}",
        f"    data_type: {facts.dtype}",
        f"    num_ipus: {facts.devices}",
        f"    {throughput} (min: {min(rates):.2f}, max: {max(rates):.2f}, std: {pstdev(rates):.2f})",
        f"    {latency} (min: {min(latencies):.3f}, max: {max(latencies):.3f})",
    ]
    if facts.data == "synthetic":
        lines.append("    NOTE: synthetic data is on the device already: its latency is not that of a request")
    return lines
