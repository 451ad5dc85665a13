"""Updates as CUDA graphs: what the host would launch kernel by kernel is replayed as a whole."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.errors import memory_shortage
from falconet.numerics.cuda_graphs import capturing
from falconet.parallel.world import World
from falconet.report.console import Say
from falconet.train.step import LocalStep, Update

Preparing = Callable[[], AbstractContextManager[None]]
_SAME_IN_BOTH_MODES = (nn.Conv2d, nn.Linear, nn.Identity)  # which compute the same in training and evaluation
WARM = 1  # updates of a shape before it is captured: libraries choose kernels, and the update rule creates its state


@dataclass(frozen=True)
class _Graph:
    """A captured update: where its micro-batches are read from, and where its results lie."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Batch]
    result: Update

    def replay(self, micro_batches: Sequence[Batch]) -> Update:
        # Within the device: 0.02 ms for 256 photos. The copy from the host was made during the update before.
        _copy(micro_batches, self.inputs)
        self.graph.replay()
        return Update(*(value.clone() for value in self.result))  # the next replay overwrites them


class _Shape(NamedTuple):
    """What all updates of one graph have in common."""

    tensors: tuple[Hashable, ...]
    trained: tuple[bool, ...]  # by weight
    modes: tuple[Hashable, ...]  # by module

    def is_part_of(self, other: "_Shape") -> bool:
        """Whether such an update does nothing that the other does not: it trains the same weights, or fewer."""
        trains_fewer = all(mine <= its for mine, its in zip(self.trained, other.trained, strict=True))
        return (self.tensors, self.modes) == (other.tensors, other.modes) and trains_fewer


class CapturedStep:
    """A step that captures the updates of each shape and replays them: the same numbers, without the host's work.

    The first update of a shape is made as it is, on the stream that is captured later, so capturing changes nothing;
    but one of fewer weights than another that has a graph is captured at once: kernels were chosen and state was made
    for that one. Layers that are frozen for a while are part of a shape. What changes from update to update, the host
    writes into tensors that the graph reads: `Moving.at`. A generator that was seeded there gives a replay the random
    numbers of an update without a graph: torch copies its seed and offset to the device before each replay.

    Replicas capture the messages of their gradients too, so all of them replay an update, or none does: a replay would
    wait for ever for a replica that sends nothing.
    """

    def __init__(
        self, step: LocalStep, world: World, *, note: Say, preparing: Preparing = nullcontext, warm: int = WARM
    ) -> None:
        """`world`: all replicas. `note`: gets a line if an update cannot be captured.

        `preparing`: the context in which kernels are compiled and updates captured. `warm`: updates of a shape before
        it is captured, one or more.
        """
        self._step, self._world, self._note, self._preparing, self._warm = step, world, note, preparing, warm
        # Listed once: to find them takes as long as a small update.
        self._weights = list(step.moving.model.parameters())
        self._modules = [module for module in step.moving.model.modules() if type(module) not in _SAME_IN_BOTH_MODES]
        self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # one for all shapes: never two graphs run at once
        self._made: Counter[_Shape] = Counter()
        self._graphs: dict[_Shape, _Graph] = {}
        self._is_given_up = False
        self._replayed = world.replay_watch()

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self._step.moving.at(update, lr)
        shape = self._shape(micro_batches)
        if shape not in self._graphs and not self._made[shape]:
            torch.cuda.synchronize(self._stream.device)
            with self._preparing():
                self._step.prepare_for(micro_batches[0])
        if shape not in self._graphs and self._can_capture(shape) and not self._is_given_up:
            torch.cuda.synchronize(self._stream.device)  # the updates before are no part of it
            with self._preparing():
                self._capture(shape, micro_batches)
        if shape in self._graphs:
            made = self._graphs[shape].replay(micro_batches)
            self._replayed()
            return made
        self._made[shape] += 1
        return self._eager(micro_batches)

    def _shape(self, micro_batches: Sequence[Batch]) -> _Shape:
        """What one graph is for; frozen layers and weights change at most once in a run."""
        return _Shape(
            tensors=tuple((t.shape, t.dtype, t.stride()) for batch in micro_batches for t in _tensors(batch)),
            trained=tuple(p.requires_grad for p in self._weights),
            modes=tuple((module.training, module.__dict__.get("track_running_stats")) for module in self._modules),
        )

    def _can_capture(self, shape: _Shape) -> bool:
        """Whether what no capture can do is done: by updates of this shape, or before a graph of more weights."""
        if self._made[shape] or self._step.moving.uploads:
            return self._made[shape] >= self._warm
        return any(shape.is_part_of(other) for other in self._graphs)

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

    def _capture(self, shape: _Shape, micro_batches: Sequence[Batch]) -> None:
        """Add the graph of a shape. If one replica cannot capture the update, all make it, and all after it, without.

        If it was the first of its shape, only this one: the second may still be captured.
        """
        self._step.moving.model.zero_grad()  # they are made again in the graph's memory
        torch.cuda.empty_cache()  # what the updates before used is not in the graph's pool
        graph: _Graph | None = None
        try:
            graph, reason = self._captured([_like(batch) for batch in micro_batches])
            reasons = self._world.texts(reason, "capturing an update")
            if any(reasons):
                graph = None
                if self._made[shape]:
                    self._give_up(reasons)
        finally:
            if graph is None:
                self._step.moving.model.zero_grad()  # never computed
                torch.cuda.empty_cache()
        if graph is not None:
            self._graphs[shape] = graph

    def _captured(self, inputs: Sequence[Batch]) -> tuple[_Graph | None, str]:
        """The update as a graph, or why it cannot be one."""
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, stream=self._stream, pool=self._pool):
                result = self._step.make(inputs)
        except RuntimeError as error:
            if memory_shortage(error) is not None:
                raise
            return None, str(error).strip().partition("\n")[0] or type(error).__name__
        return _Graph(graph, inputs, result), ""

    def _give_up(self, reasons: Sequence[str]) -> None:
        """`reasons`: of each replica, empty for those that could capture; the first that could not reports it."""
        self._is_given_up = True
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        if rank == self._world.rank:
            self._note(f"note: updates are not captured as CUDA graphs, which takes longer: {reason}")


def _tensors(batch: Batch) -> list[Tensor]:
    return [batch.images, batch.labels, *(batch.mix or ())]


def _like(batch: Batch) -> Batch:
    mix = batch.mix and Mix(*(torch.empty_like(tensor) for tensor in batch.mix))
    return Batch(torch.empty_like(batch.images), torch.empty_like(batch.labels), mix)


def _copy(source: Sequence[Batch], target: Sequence[Batch]) -> None:
    for given, taken in zip(source, target, strict=True):
        for a, b in zip(_tensors(given), _tensors(taken), strict=True):
            b.copy_(a, non_blocking=True)
