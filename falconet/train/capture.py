"""Updates as CUDA graphs: what the host would launch kernel by kernel is replayed as a whole."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.train.step import LocalStep, Update

WARM = 3  # updates of a shape before it is captured: libraries choose kernels, and the update rule creates its state


@dataclass(frozen=True)
class _Graph:
    """A captured update: where its micro-batches are read from, and where its results lie."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Batch]
    result: Update

    def replay(self, micro_batches: Sequence[Batch]) -> Update:
        _copy(micro_batches, self.inputs)
        self.graph.replay()
        return Update(*(value.clone() for value in self.result))  # the next replay overwrites them


class CapturedStep:
    """A step that captures the updates of each shape and replays them: the same numbers, without the host's work.

    The first updates of a shape are made as they are, on the stream that is captured later, so capturing changes
    nothing. Layers that are frozen for a while are part of a shape.
    """

    def __init__(self, step: LocalStep, device: torch.device) -> None:
        self._step = step
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._made: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self._step.moving.at(update, lr)
        shape = self._shape(micro_batches)
        if shape not in self._graphs and self._made[shape] < WARM:
            self._made[shape] += 1
            return self._eager(micro_batches)
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(micro_batches)
        return self._graphs[shape].replay(micro_batches)

    def _shape(self, micro_batches: Sequence[Batch]) -> Hashable:
        """What one graph is for; frozen layers and weights change at most once in a run."""
        model = self._step.moving.model
        tensors = [(t.shape, t.dtype, t.stride()) for batch in micro_batches for t in _tensors(batch)]
        trained = tuple(p.requires_grad for p in model.parameters())
        return (*tensors, trained, tuple(module.training for module in model.modules()))

    def _eager(self, micro_batches: Sequence[Batch]) -> Update:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            made = self._step.make(micro_batches)
        current.wait_stream(self._stream)
        for tensor in (t for batch in micro_batches for t in _tensors(batch)):
            tensor.record_stream(self._stream)
        for value in made:
            value.record_stream(current)
        return made

    def _captured(self, micro_batches: Sequence[Batch]) -> _Graph:
        inputs = [_like(batch) for batch in micro_batches]
        _copy(micro_batches, inputs)
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # what the updates before used is not in the graph's pool
        graph = torch.cuda.CUDAGraph()
        # Threads of the loader may allocate pinned memory meanwhile, which only concerns them.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = self._step.make(inputs)
        return _Graph(graph, inputs, result)


def _tensors(batch: Batch) -> list[Tensor]:
    return [batch.images, batch.labels, *(batch.mix or ())]


def _like(batch: Batch) -> Batch:
    mix = batch.mix and Mix(*(torch.empty_like(tensor) for tensor in batch.mix))
    return Batch(torch.empty_like(batch.images), torch.empty_like(batch.labels), mix)


def _copy(source: Sequence[Batch], target: Sequence[Batch]) -> None:
    for given, taken in zip(source, target, strict=True):
        for a, b in zip(_tensors(given), _tensors(taken), strict=True):
            b.copy_(a, non_blocking=True)
