"""Figures of predictions in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What was measured, over the batches after the warm-up."""

    model: str
    micro_batch: int
    data: str
    dtype: str
    devices: int
    rates: Sequence[float]  # images per second
    latencies: Sequence[float]  # milliseconds


class TimedBatch(NamedTuple):
    """One batch of one process."""

    images_per_second: float
    milliseconds: float
    instance: int  # the process, from 0
    instances: int


def heading(found: Predictions) -> list[str]:
    """What the figures below it are of."""
    processes = f" in each of {found.devices} processes" if found.devices > 1 else ""
    return [f"{found.model}, batches of {found.micro_batch}{processes}, data {found.data}, {found.dtype}"]


def rate(mean: float, *, low: float, high: float) -> str:
    """Images per second, with the 95 % interval where there is one: a single measurement has none."""
    interval = f" (95 % {max(0.0, low):,.1f} to {high:,.1f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{mean:,.1f} images/s{interval}"


def percentiles(latency: Mapping[str, float]) -> str:
    """Milliseconds by name."""
    return "  ".join(f"{name} {value:.3f}" for name, value in latency.items())
