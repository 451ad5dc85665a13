"""One update of the weights."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from falconet.data import mixing
from falconet.data.loader import Batch
from falconet.data.preprocessing import Normalise
from falconet.numerics.precision import Regime
from falconet.train.loss import Loss
from falconet.train.moving import Moving


class Update(NamedTuple):
    """What one update did. The tensors stay on the device: reading them costs a wait."""

    loss: Tensor  # mean over the images
    correct: Tensor  # images whose top class was right
    images: Tensor  # images that counted
    skipped: Tensor  # 1 if a gradient was not finite and the weights stayed put, else 0


class Step(Protocol):
    """Turns the micro-batches of one update into moved weights."""

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update: ...


class LocalStep:
    """The whole model on this device."""

    def __init__(
        self, moving: Moving, *, normalise: Normalise, loss: Loss, regime: Regime, frozen: Sequence[nn.Module] = ()
    ) -> None:
        """`frozen`: layers of the model that stay in evaluation mode."""
        self.moving, self.normalise, self.loss, self.regime, self.frozen = moving, normalise, loss, regime, frozen

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self.moving.begin(update)
        for layer in self.frozen:
            layer.eval()
        images = sum(len(batch.labels) for batch in micro_batches)
        parts = [self._backward(batch, images) for batch in self.moving.replicas.announced(micro_batches)]
        skipped = self.moving.end(update, lr)
        loss, correct, counted = (torch.stack(values).sum(0) for values in zip(*parts, strict=True))
        return Update(loss, correct, counted, skipped)

    def _backward(self, batch: Batch, images: int) -> tuple[Tensor, Tensor, Tensor]:
        """Add the gradient of one micro-batch, which has `1 / images` of the weight for each of its images."""
        inputs, targets = mixing.apply(self.normalise(batch.images), batch.labels, batch.mix, classes=self.loss.classes)
        logits = self.regime.run(self.moving.model, inputs)
        # A sum over images divided once by their number: the same gradient however they are split.
        loss = self.loss(logits, targets).sum() / images
        self.moving.move.root(loss).backward()  # type: ignore[no-untyped-call]
        self.moving.move.passed()
        return loss.detach(), (logits.argmax(1) == batch.labels).sum(), (batch.labels >= 0).sum()
