"""One update of the weights."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from falconet.data import mixing
from falconet.data.loader import Batch
from falconet.data.preprocessing import Normalise
from falconet.numerics.precision import Regime
from falconet.optim.build import set_lr
from falconet.optim.ema import Ema
from falconet.parallel.replicas import OneReplica, Replicas
from falconet.train.loss import Loss

SEEDS = 1 << 63  # torch takes no larger ones


class Update(NamedTuple):
    """What one update did. The tensors stay on the device: reading them costs a wait."""

    loss: Tensor  # mean over the images
    correct: Tensor  # images whose top class was right
    images: Tensor  # images that counted


class Step(Protocol):
    """Turns the micro-batches of one update into moved weights."""

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update: ...


class LocalStep:
    """The whole model on this device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        normalise: Normalise,
        loss: Loss,
        regime: Regime,
        seed: int,
        averages: Sequence[Ema] = (),
        replicas: Replicas | None = None,
    ) -> None:
        self.model, self.optimizer, self.averages = model, optimizer, averages
        self.normalise, self.loss, self.regime, self.seed = normalise, loss, regime, seed
        self.replicas = replicas or OneReplica()

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        # Dropout draws from the device's generator: seeded anew for each update, there is no state to save.
        torch.manual_seed((self.seed * 1_000_003 + update) % SEEDS)
        self.model.train()
        self.optimizer.zero_grad()
        images = sum(len(batch.labels) for batch in micro_batches)
        parts = [self._backward(batch, images) for batch in self.replicas.announced(micro_batches)]
        self.replicas.average()
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        for average in self.averages:
            average.update(self.model)
        return Update(*(torch.stack(values).sum(0) for values in zip(*parts, strict=True)))

    def _backward(self, batch: Batch, images: int) -> Update:
        """Add the gradient of one micro-batch, which has `1 / images` of the weight for each of its images."""
        inputs, targets = mixing.apply(self.normalise(batch.images), batch.labels, batch.mix, classes=self.loss.classes)
        with self.regime.computing(inputs.device):
            logits = self.model(inputs)
        # A sum over images divided once by their number: the same gradient however they are split.
        loss = self.loss(logits.float(), targets).sum() / images
        loss.backward()  # type: ignore[no-untyped-call]
        return Update(loss.detach(), (logits.argmax(1) == batch.labels).sum(), (batch.labels >= 0).sum())
