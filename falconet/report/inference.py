"""The speed of predictions in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The measurements over all batches after the warm-up."""

    model: str
    micro_batch: int
    data: str
    dtype: str
    devices: int
    rates: Sequence[float]  # images per second
    latencies: Sequence[float]  # milliseconds


class TimedBatch(NamedTuple):
    """The time of one batch in one process."""

    images_per_second: float
    milliseconds: float
    instance: int  # the process, from 0
    instances: int


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One of several passes over the same batches, warm-up included."""

    model: str
    number: int  # from 1
    of: int
    images: int  # of all processes
    seconds: float
    latencies: Sequence[float]  # milliseconds
    accuracy: float  # percent

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)


def repetition(found: Repetition) -> list[str]:
    """A line about one of several repetitions."""
    text = f"repetition {found.number} of {found.of}: {found.images_per_second:,.1f} images/s"
    return [f"{text}, latency of a batch {fmean(found.latencies):.3f} ms"] if found.of > 1 else []


def heading(found: Predictions) -> list[str]:
    """Lines above the figures that say what was measured."""
    processes = f" in each of {found.devices} processes" if found.devices > 1 else ""
    return [f"{found.model}, batches of {found.micro_batch}{processes}, data {found.data}, {found.dtype}"]


def rate(mean: float, *, low: float, high: float) -> str:
    """Images per second, with the 95 % interval where there is one: a single measurement has none."""
    interval = f" (95 % {max(0.0, low):,.1f} to {high:,.1f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{mean:,.1f} images/s{interval}"


def percentiles(latency: Mapping[str, float]) -> str:
    """Latencies in milliseconds, each with the name of its percentile."""
    return "  ".join(f"{name} {value:.3f}" for name, value in latency.items())
