"""Capturing a CUDA graph so that torch is as it was if that fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

Pool = Any  # torch does not export the type of a graph pool's handle


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, stream: torch.cuda.Stream, pool: Pool | None = None) -> Iterator[None]:
    """Capture what is launched within; nothing of it runs. `pool`: memory shared by graphs that never run together."""
    pool = pool or torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        # Threads of a loader may allocate pinned memory meanwhile, which only concerns them.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
            graph.capture_end()
        except BaseException:
            _abandon(graph, stream, pool)
            raise


def _abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Pool) -> None:
    """End a capture that failed.

    If CUDA has ended it, torch raises and leaves two things in the middle of it: its allocator, which then no longer
    frees what other streams used, and its generator, which then gives no random numbers at all.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = stream.device
        with contextlib.suppress(RuntimeError):  # raised if the allocator knows
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros((), device=device)  # the end of any capture tells the generator that none is under way
