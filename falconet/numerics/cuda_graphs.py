"""A function of a batch as CUDA graphs: captured once for each shape, then replayed without the host's work."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from falconet.report.console import Say

Compute = Callable[[Tensor], Tensor]
Pool = Any  # torch does not export the type of a graph pool's handle
MOST = 16  # shapes: a program that predicts any number of photos at a time does not keep a graph for each number


class Recorded(Protocol):
    """The interface of a recorded call, which can be replayed."""

    inputs: Tensor  # read by every replay

    def replay(self) -> Tensor: ...  # overwritten by the next one


class Recording:
    """A captured call, which must have run at least once before so that libraries have chosen their kernels."""

    def __init__(
        self,
        compute: Compute,
        inputs: Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`pool`: memory shared by recordings that are never replayed at the same time."""
        self.inputs, self._graph = inputs, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(inputs.device)
        torch.cuda.empty_cache()  # what was computed before is not in the graph's pool
        with capturing(self._graph, stream=stream or _capturing_stream(inputs.device), pool=pool):
            self._outputs = compute(inputs)

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._outputs


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, stream: torch.cuda.Stream, pool: Pool | None = None) -> Iterator[None]:
    """Capture kernels launched in this context, without running them. `pool`: for graphs that never run together."""
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

    If CUDA has ended it, torch raises and leaves two things in the middle of it: its allocator, which then never
    frees memory that other streams used, and its generator, which then gives no random numbers.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = stream.device
        with suppress(RuntimeError):  # raised if the allocator knows
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros((), device=device)  # the end of any capture tells the generator that none is under way


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all recordings: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


Record = Callable[[Compute, Tensor], Recorded]


class Captured:
    """A function that is replayed from the second batch of a shape on; threads take turns.

    A shape that occurs once, such as a short last batch, is computed directly. So is one that cannot be captured, which
    `note` reports once.
    """

    def __init__(self, compute: Compute, device: torch.device, *, note: Say, record: Record | None = None) -> None:
        """`record`: captures a call; None: as a CUDA graph."""
        self._compute, self._device, self._note = compute, device, note
        self._record = record  # not a method of this object: in a cycle, graphs would keep their memory
        self._pool: Pool | None = None
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recorded] = {}
        self._fails = False
        self._turn = threading.Lock()  # all replays of a shape read the same input

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Apply the function to images in host or device memory; the result is a new tensor."""
        with self._turn:
            return self._computed(images)

    def _computed(self, images: Tensor) -> Tensor:
        shape = (images.shape, images.dtype, images.stride())
        if shape not in self._recorded and shape in self._seen and not self._fails and len(self._recorded) < MOST:
            self._capture(shape, images)
        if shape not in self._recorded:
            self._seen.add(shape)
            return self._compute(images.to(self._device, non_blocking=True))
        recorded = self._recorded[shape]
        recorded.inputs.copy_(images, non_blocking=True)
        return recorded.replay().clone()

    def prepare(self, images: Tensor) -> None:
        """Capture the shape of these images now, so that the next call replays it."""
        for _ in range(2):
            self(images)

    def _capture(self, shape: Hashable, images: Tensor) -> None:
        inputs = torch.empty_like(images, device=self._device)
        inputs.copy_(images)
        try:
            self._recorded[shape] = (self._record or self._graph)(self._compute, inputs)
        except RuntimeError as error:
            self._fails = True
            self._note(why_not(error))

    def _graph(self, compute: Compute, inputs: Tensor) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return Recording(compute, inputs, pool=self._pool)


def captured(compute: Compute, device: torch.device, *, note: Say, capture: bool = True) -> Compute:
    """The function with its batches captured, or the function itself if nothing can be captured."""
    return Captured(compute, device, note=note) if capture and device.type == "cuda" else compute


def why_not(error: RuntimeError) -> str:
    """A line about a failed capture."""
    reason = str(error).partition("\n")[0]
    return f"note: batches are computed without CUDA graphs: {reason}"
