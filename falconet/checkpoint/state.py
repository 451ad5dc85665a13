"""TrainState: everything a run needs to resume exactly where it stopped."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from falconet.checkpoint import foreign, format
from falconet.errors import CheckpointError
from falconet.numerics.loss_scale import Scale
from falconet.optim.ema import Ema
from falconet.optim.offload import HostedState
from falconet.optim.optimizer_state import coming_bytes, load_state_tensors, state_tensors
from falconet.parallel.grid import OneStage, Stages
from falconet.parallel.slices import Slice, fair_share
from falconet.parallel.zero import Layout


@dataclass
class Totals:
    """Sums over a number of updates."""

    updates: int = 0
    loss: float = 0.0  # sum of the updates' mean losses
    correct: int = 0
    images: int = 0
    skipped: int = 0  # updates that did not change the weights
    smoothing: float = 0.0  # the part of the loss that label smoothing adds

    def add(self, loss: float, correct: int, images: int, skipped: int, smoothing: float = 0.0) -> None:
        self.updates += 1
        self.loss += loss
        self.correct += correct
        self.images += images
        self.skipped += skipped
        self.smoothing += smoothing

    @property
    def mean_loss(self) -> float:
        return self.loss / self.updates

    @property
    def mean_smoothing(self) -> float:
        return self.smoothing / self.updates

    @property
    def accuracy(self) -> float:
        """The accuracy in percent."""
        return 100.0 * self.correct / max(1, self.images)


@dataclass
class Progress:
    """The progress of training."""

    update: int = 0
    interval: Totals = field(default_factory=Totals)  # since the last log point
    epoch: Totals = field(default_factory=Totals)  # since the start of the epoch
    unvalidated: bool = False  # the run stopped before the validation due here
    points: int = 0  # log points so far
    seconds: float = 0.0  # of training so far

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Progress":
        try:
            totals = Totals(**content["interval"]), Totals(**content["epoch"])
        except (LookupError, TypeError):
            raise CheckpointError(
                "the checkpoint's 'meter' lacks the totals of its run, so it cannot be continued"
            ) from None
        points, seconds = content.get("points", 0), content.get("seconds", 0.0)  # older checkpoints have neither
        numbers = [content.get("update"), points, seconds, *(v for each in totals for v in asdict(each).values())]
        if not all(isinstance(number, int | float) for number in numbers):
            raise CheckpointError("the checkpoint's 'meter' holds something other than numbers")
        unvalidated = bool(content.get("unvalidated"))
        return cls(content["update"], *totals, unvalidated=unvalidated, points=points, seconds=seconds)


@dataclass
class TrainState:
    """Model, optimizer, moving average, loss scale and progress, which are saved and loaded exactly."""

    model: nn.Module
    optimizer: Optimizer
    progress: Progress = field(default_factory=Progress)
    ema: Ema | None = None
    scale: Scale | None = None
    shards: Layout | None = None  # this process's slices of the optimizer state; None for all of it
    hosted: HostedState | None = None  # keeps the optimizer state in host memory
    stages: Stages = field(default_factory=OneStage)  # this process's stage of the model
    rank: int = 0  # among the processes that hold the same tensors
    copies: int = 1  # how many such processes there are

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor that this process holds, by file and name."""
        if self.hosted:
            self.hosted.settle()
        content = {"model": dict(self.model.state_dict()), "optimizer": state_tensors(self.optimizer, self._trained)}
        return content | {stem: part.state_tensors() for stem, part in self._optional().items()}

    def slices(self) -> dict[str, list[Slice]]:
        """The slices that this process saves, by file: its share of the tensors that others hold as well."""
        tensors = {stem: self.stages.answered(group) for stem, group in self.tensors().items()}
        slices = {stem: fair_share(group, rank=self.rank, size=self.copies) for stem, group in tensors.items()}
        return slices | ({"optimizer": self.shards.slices(tensors["optimizer"])} if self.shards else {})

    def saved_bytes(self) -> dict[str, int]:
        """The bytes of this process's share of a checkpoint saved after the next update, by file."""
        found = {
            stem: sum(each.values.numel() * each.values.element_size() for each in slices)
            for stem, slices in self.slices().items()
        }
        found["optimizer"] += coming_bytes(self.optimizer) // (1 if self.shards else self.copies)
        return found

    @property
    def _trained(self) -> nn.Module:
        return self.shards.trained if self.shards else self.model

    def _optional(self) -> dict[str, Ema | Scale]:
        """The parts of the state that only some runs have, by file."""
        return {stem: part for stem, part in (("ema", self.ema), ("scale", self.scale)) if part is not None}

    def _reader(self, folder: Path) -> Callable[[str], Mapping[str, Tensor]]:
        """Verify a checkpoint; return a function that reads this process's tensors of one kind."""
        manifest = format.verify(folder)
        return lambda stem: self.stages.own(format.read_tensors(folder, stem, verified=manifest))

    def begin_with(self, folder: Path, *, name: str) -> None:
        """Start a new phase with the weights and the loss scale of a checkpoint, and nothing else."""
        read = self._reader(folder)
        foreign.load_weights(self.model, read("model"), where=str(folder), name=name)
        if self.scale:
            self.scale.load_state_tensors(read("scale"))

    def load(self, folder: Path, *, name: str) -> None:
        """Load the tensors of a checkpoint; the caller finds its place in the plan."""
        read = self._reader(folder)
        foreign.load_weights(self.model, read("model"), where=str(folder), name=name)
        stored = read("optimizer")
        own = self.shards.scattered(stored) if self.shards else stored
        # On the device, all of it at once may not fit.
        load_state_tensors(self.optimizer, self._trained, own, home=torch.device("cpu") if self.hosted else None)
        if self.hosted:
            self.hosted.adopt()
        for stem, part in self._optional().items():
            part.load_state_tensors(read(stem))
