"""How much memory weights, gradients and optimizer state take, read off the tensors themselves."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from falconet.checkpoint.state import TrainState
from falconet.parallel.grid import Grid
from falconet.parallel.replicas import Replicas


@dataclass(frozen=True)
class Held:
    """Bytes in the memory of the device and of the host; on a CPU all is the host's."""

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
    optimizer_state: Held  # with the room that offloaded state is brought to
    messages: Held  # buffers for what goes between replicas
    whole_state: int  # bytes of the optimizer's state of all processes together

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> list[str]:
        """In words, with what dividing and offloading saved."""
        state = self.optimizer_state
        where = f"{_megabytes(state.device)} on the device, " if state.device else ""
        lines = [
            f"weights              {_megabytes(self.weights.both)}, gradients {_megabytes(self.gradients.both)}",
            f"optimizer state      {where}{_megabytes(state.host)} on the host",
        ]
        if state.both < self.whole_state:
            lines[1] += f" of this process, of {_megabytes(self.whole_state)} in all"
        return lines


def measure(state: TrainState, replicas: Replicas, grid: Grid) -> Memory:
    """What this process holds after an update, when gradients and state are there; every process calls it."""
    kept = optimizer_tensors(state)
    dividing = grid.world if state.shards else grid.stages  # those of whom no two hold the same state
    everywhere = int(dividing.sum(torch.tensor(bytes_of(kept))))
    trained = [*state.model.parameters(), *(state.shards.trained.parameters() if state.shards else ())]
    own = [] if state.hosted is None else state.hosted.tensors()
    return Memory(
        weights=_held(_tensors(state.model)),
        gradients=_held(p.grad for p in trained if p.grad is not None),
        optimizer_state=_held([*kept, *own]),
        messages=_held(replicas.buffers()),
        whole_state=everywhere,
    )


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    """The state that this process keeps; what is the gradient too (sgd_combined's velocity) is not counted again."""
    trained = [p for group in state.optimizer.param_groups for p in group["params"]]
    gradients = {p.grad.data_ptr() for p in trained if p.grad is not None}
    slots = (value for each in state.optimizer.state.values() for value in each.values())
    return [value for value in slots if isinstance(value, Tensor) and value.data_ptr() not in gradients]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory, of which several tensors may be views."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def _held(tensors: Iterable[Tensor]) -> Held:
    tensors = list(tensors)
    return Held(
        device=bytes_of(t for t in tensors if t.device.type != "cpu"),
        host=bytes_of(t for t in tensors if t.device.type == "cpu"),
    )


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
