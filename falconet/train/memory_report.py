"""The memory that each process of a run holds between two updates, for the summary."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from falconet.checkpoint.state import TrainState
from falconet.parallel.data_parallel import Replicas
from falconet.parallel.grid import Grid


@dataclass(frozen=True)
class Held:
    """Bytes in the memory of the device and of the host; on a CPU all are the host's."""

    device: int
    host: int

    @property
    def both(self) -> int:
        return self.device + self.host


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one process holds between two updates."""

    weights: Held  # parameters and buffers
    gradients: Held
    optimizer_state: Held  # with the buffers that offloaded state is copied to
    messages: Held  # buffers for what replicas send each other
    whole_state: int  # bytes of the optimizer's state of all processes together

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        held: dict[str, Any] = {
            name: Held(**value) if isinstance(value, dict) else value for name, value in content.items()
        }
        return cls(**held)

    def told(self) -> dict[str, str]:
        """The lines of the summary on what sharding and offloading save, where they do."""
        state, lines = self.optimizer_state, {}
        if state.both < self.whole_state or (state.host and self.weights.device):
            lines["weights"] = f"{_megabytes(self.weights.both)}, gradients {_megabytes(self.gradients.both)}"
            lines["optimizer state"] = self.state_in_words()
        if state.both < self.whole_state:
            lines["optimizer state"] += f" of this process, {_megabytes(self.whole_state)} in total"
        return lines

    def state_in_words(self) -> str:
        """Where the optimizer's state of this process is."""
        state = self.optimizer_state
        where = f"{_megabytes(state.device)} on the device, " if state.device else ""
        return f"{where}{_megabytes(state.host)} on the host"


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one stage of the first replica; a model in one piece is one stage."""

    peak: int  # bytes, the most of its replicas
    held: Memory

    def to_json(self) -> dict[str, object]:
        return {"peak_memory_bytes": self.peak, "memory_bytes": self.held.to_json()}


def told(stages: Sequence[StageMemory], *, replicas: int) -> dict[str, str]:
    """The lines of the summary: the peak, and what dividing and offloading save; of several stages, all of each."""
    peaks = [f"{stage.peak / 2**30:.2f} GiB" for stage in stages]
    if len(stages) == 1:
        return {"peak memory": peaks[0] + (" per process, at most" if replicas > 1 else "")} | stages[0].held.told()
    total = f"; {_megabytes(stages[0].held.whole_state)} in total"
    return {
        "peak memory": _by_stage(peaks),
        "weights": _by_stage([_megabytes(stage.held.weights.both) for stage in stages]),
        "gradients": _by_stage([_megabytes(stage.held.gradients.both) for stage in stages]),
        "optimizer state": _by_stage([stage.held.state_in_words() for stage in stages]) + total,
    }


def _by_stage(texts: Sequence[str]) -> str:
    return "; ".join(f"stage {number}: {text}" for number, text in enumerate(texts))


def measure_stages(state: TrainState, replicas: Replicas, grid: Grid) -> list[StageMemory]:
    """The memory of each stage of this replica after an update; a collective."""
    held, peak = measure_memory(state, replicas, grid), torch.tensor(grid.world.peak_memory())
    mine = StageMemory(peak=int(grid.replicas.max(peak)), held=held)
    found = [json.loads(text) for text in grid.stages.texts(json.dumps(mine.to_json()), "the summary")]
    return [StageMemory(peak=each["peak_memory_bytes"], held=Memory.from_json(each["memory_bytes"])) for each in found]


def measure_memory(state: TrainState, replicas: Replicas, grid: Grid) -> Memory:
    """What this process holds after an update, gradients and state included; a collective."""
    kept = optimizer_tensors(state)
    dividing = grid.world if state.shards else grid.stages  # processes that all hold different state
    everywhere = int(dividing.sum(torch.tensor(bytes_of(kept))))
    trained = [*state.model.parameters(), *(state.shards.trained.parameters() if state.shards else ())]
    own = [] if state.hosted is None else state.hosted.tensors()
    return Memory(
        weights=_held([*state.model.parameters(), *state.model.buffers()]),
        gradients=_held(p.grad for p in trained if p.grad is not None),
        optimizer_state=_held([*kept, *own]),
        messages=_held(replicas.buffers()),
        whole_state=everywhere,
    )


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    """The state in this process, without what is a gradient as well: sgd_combined's velocity."""
    trained = [p for group in state.optimizer.param_groups for p in group["params"]]
    gradients = {p.grad.data_ptr() for p in trained if p.grad is not None}
    slots = (value for each in state.optimizer.state.values() for value in each.values())
    return [value for value in slots if isinstance(value, Tensor) and value.data_ptr() not in gradients]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory, counted once where several tensors are views of it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def _held(tensors: Iterable[Tensor]) -> Held:
    tensors = list(tensors)
    return Held(
        device=bytes_of(t for t in tensors if t.device.type != "cpu"),
        host=bytes_of(t for t in tensors if t.device.type == "cpu"),
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
