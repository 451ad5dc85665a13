"""Time calls with the GPU's clock; shared by the comparisons in this folder."""

import statistics
from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], None], *, repeats: int) -> list[float]:
    """Milliseconds of each call; the host issues them without waiting."""
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def median_milliseconds(call: Callable[[], None], *, repeats: int = 40) -> float:
    """Milliseconds of a call, the median of many after a short warm-up."""
    for _ in range(5):
        call()
    return statistics.median(milliseconds(call, repeats=repeats))
