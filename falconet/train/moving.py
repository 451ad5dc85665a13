"""From gradients to moved weights: plainly, or with a loss scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from falconet.numerics.scaling import NonFinite, Offender, Scale, find_non_finite, watched
from falconet.optim.build import set_lr
from falconet.optim.ema import Ema
from falconet.optim.half import HalfOptimizer
from falconet.parallel.replicas import OneReplica, Replicas
from falconet.parallel.sharding import ShardedReplicas

SEEDS = 1 << 63  # torch takes no larger ones


class Move(Protocol):
    """What happens to the loss before, and to the gradients after, the backward passes of an update."""

    def begin(self, update: int) -> None:
        """Update number `update` begins: forget the gradients of the last one."""

    def root(self, loss: Tensor) -> Tensor:
        """Where the backward pass of a micro-batch's share of the loss begins."""

    def passed(self) -> None:
        """The backward pass of a micro-batch has added its gradients."""

    def end(self, update: int, lr: float) -> Tensor:
        """Move the weights; 1 if the update was skipped instead, 0 if not, on the device."""


class PlainMove:
    """The gradients as they are."""

    def __init__(self, optimizer: Optimizer, *, device: torch.device, step: Callable[[], object] | None = None) -> None:
        """`step`: what moves the weights, where that is more than the optimizer's own."""
        self.optimizer = optimizer
        self._step = step or optimizer.step
        self._moved = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, update: int) -> None:  # noqa: ARG002
        self.optimizer.zero_grad()

    def root(self, loss: Tensor) -> Tensor:
        return loss

    def passed(self) -> None: ...

    def end(self, update: int, lr: float) -> Tensor:  # noqa: ARG002
        set_lr(self.optimizer, lr)
        self._step()
        return self._moved


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Gradients of an update that other processes have, and how this one hears whether they are finite."""

    shards: ShardedReplicas | None = None  # who have the averaged gradients, if not the model's own parameters
    stages: Callable[[NonFinite], NonFinite] = lambda found: found  # what all stages of a pipeline found


NOWHERE = Elsewhere()


class ScaledMove:
    """The loss times a scale; an update with gradients that are not finite is skipped, on the device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: HalfOptimizer,
        scale: Scale,
        *,
        offender: Offender,
        step: Callable[[], object] | None = None,
        elsewhere: Elsewhere = NOWHERE,
    ) -> None:
        self.optimizer, self.scale, self.offender = optimizer, scale, offender
        self._step = step or optimizer.step
        shards = elsewhere.shards
        self._trained = [p for p in (shards.trained if shards else model).parameters() if p.requires_grad]
        self._everywhere, self._stages = shards.flags if shards else _same, elsewhere.stages
        self._watched = watched(model)
        device = scale.value.device
        self._nothing = NonFinite(
            torch.zeros((), dtype=torch.bool, device=device), torch.full_like(scale.value, -1).long()
        )

    def begin(self, update: int) -> None:
        self.optimizer.zero_grad()
        self.scale.before(update)

    def root(self, loss: Tensor) -> Tensor:
        return loss * self.scale.value

    def passed(self) -> None:
        self.scale.watch(_gradients(self._watched))

    def end(self, update: int, lr: float) -> Tensor:
        non_finite = self._stages(self._found())
        self.offender.note(non_finite)
        self.optimizer.scale, self.optimizer.found = self.scale.value, non_finite.found
        self.optimizer.at(update)
        set_lr(self.optimizer, lr)
        self._step()
        self.scale.after(non_finite.found)
        return non_finite.found.long()

    def _found(self) -> NonFinite:
        """In the gradients of this process, or of the replicas that divide them; a stage may have none to train."""
        grads = _gradients(self._trained)
        return find_non_finite(grads, everywhere=self._everywhere) if grads else self._nothing


@dataclass(frozen=True, kw_only=True)
class Moving:
    """A model whose weights move, update by update: what every kind of step does around its passes."""

    model: nn.Module
    move: Move
    seed: int = 0  # of dropout
    averages: Sequence[Ema] = ()
    replicas: Replicas = field(default_factory=OneReplica)

    def begin(self, update: int) -> None:
        """Before the first pass."""
        # Dropout draws from the device's generator: seeded anew for each update, there is no state to save.
        torch.manual_seed((self.seed * 1_000_003 + update) % SEEDS)
        self.model.train()
        self.move.begin(update)

    def end(self, update: int, lr: float) -> Tensor:
        """After the last pass: the replicas' mean moves the weights; 1 if they stayed instead, else 0."""
        self.replicas.average()
        skipped = self.move.end(update, lr)
        for average in self.averages:
            average.update(self.model)
        return skipped


def _same(flags: Tensor) -> Tensor:
    return flags


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
