"""The lines about predictions: one of ours, and those that tools of the originals read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, pstdev, quantiles

_MODES = {"folder": "real"}  # in the PyTorch program's words


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was measured."""

    model: str
    micro_batch: int
    data: str
    dtype: str
    devices: int


def told(style: str, facts: Facts, rates: Sequence[float], latencies: Sequence[float]) -> list[str]:
    """What a style says before our own figures; `rates` in images per second, `latencies` in milliseconds."""
    theirs = {"pytorch": summary, "tensorflow": tensorflow}.get(style)
    return theirs(facts, rates, latencies) if theirs else [heading(facts)]


def rate(mean: float, *, low: float, high: float) -> str:
    """Images per second, with the 95 % interval where one is known: of a single measurement it is not."""
    interval = f" (95 % {max(0.0, low):,.1f} to {high:,.1f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{mean:,.1f} images/s{interval}"


def percentiles(latency: Mapping[str, float]) -> str:
    """Milliseconds by their names."""
    return "  ".join(f"{name} {value:.3f}" for name, value in latency.items())


def heading(facts: Facts) -> str:
    """Our own: what the figures below it are of."""
    processes = f" in each of {facts.devices} processes" if facts.devices > 1 else ""
    return f"{facts.model}, batches of {facts.micro_batch}{processes}, data {facts.data}, {facts.dtype}"


def batch_line(rate: float, latency: float, *, instance: int, of: int) -> str:
    """One batch: images per second, milliseconds; the instance counts from 0 and is told when there are several."""
    who = f"[instance{instance + 1}/{of}]" if of > 1 else ""
    return f"[INFO] {who} Throughput: {rate:.2f} imgs/sec; Latency range: {latency:.3f}..{latency:.3f} ms"


def summary(facts: Facts, rates: Sequence[float], latencies: Sequence[float]) -> list[str]:
    """Means over the steady batches; `rates` in images per second, `latencies` in milliseconds."""
    throughput = f"throughput: {fmean(rates):.2f} samples/sec (mean)"
    latency = f"latency avg: {fmean(latencies):.3f} ms (mean)"
    told = [
        f"micro_batch_size: {facts.micro_batch}",
        f"data_mode: {_MODES.get(facts.data, facts.data)}",
        f"data_type: {facts.dtype}",
        f"num_ipus: {facts.devices}",
        f"{throughput} (min: {min(rates):.2f}, max: {max(rates):.2f}, std: {pstdev(rates):.2f})",
        f"{latency} (min: {min(latencies):.3f}, max: {max(latencies):.3f})",
    ]
    if facts.data == "synthetic":
        told.append("NOTE: synthetic data is on the device already: its latency is not that of a request")
    # The original's log lines begin with an end of line and a tab.
    return [f"[INFO] {'-' * 91}", f"[INFO] {facts.model} results:", *(f"[INFO] \n\t{text}" for text in told)]


def tensorflow(facts: Facts, rates: Sequence[float], latencies: Sequence[float]) -> list[str]:
    """The two lines of the TensorFlow program's validation; the accuracy of random weights is nobody's concern."""
    points = quantiles(latencies, n=1000, method="inclusive") if len(latencies) > 1 else [latencies[0]] * 999
    whole = harmonic_mean(rates)  # all images over all seconds, as there; the mean of the rates is more
    seconds = len(rates) * facts.micro_batch * facts.devices / whole
    return [
        f"Latencies - avg: {fmean(latencies):8.4f}, 99th percentile: {points[989]:8.4f},"
        f" 99.9th percentile: {points[998]:8.4f}, max: {max(latencies):8.4f}",
        f"Validation top-1 accuracy [{facts.model}] (iteration: {0:6d}, epoch: {0:6.2f}, img/sec: {whole:6.2f},"
        f" time: {seconds:8.6f}, latency (ms): {fmean(latencies):8.4f}): {float('nan'):6.3f}%",
    ]
