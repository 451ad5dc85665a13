"""Time calls with the GPU's clock; shared by the comparisons in this folder."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CALLS = 8  # that are captured together, at least


def milliseconds(call: Callable[[], object], *, repeats: int) -> list[float]:
    """The milliseconds of each call; the host issues calls without waiting."""
    starts, ends = ([_event() for _ in range(repeats)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def median_milliseconds(call: Callable[[], object], *, repeats: int = 40) -> float:
    """The milliseconds of a call, the median of many after a short warm-up."""
    for _ in range(5):
        call()
    return statistics.median(milliseconds(call, repeats=repeats))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a captured graph, without the host's time."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def microseconds(call: Callable[..., object], buffers: Sequence[tuple[Tensor, ...]]) -> float:
    """The microseconds of one captured call; calls take turns in the buffers."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call(*buffers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-CALLS // len(buffers))
    with torch.cuda.graph(graph):
        for each in rounds * [*buffers]:
            call(*each)
    return 1000 * median_milliseconds(graph.replay, repeats=10) / (rounds * len(buffers))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
