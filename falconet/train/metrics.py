"""Metrics on their way from the device to a log line; reading them is the loop's only wait for the device."""

import math

import torch

from falconet.checkpoint.state import Progress, Totals
from falconet.errors import DivergedError
from falconet.parallel.world import ALONE, World
from falconet.train.step import Update


class NotFiniteError(DivergedError):
    """The loss of one update is no number: the weights that the update before it left are to blame."""

    def __init__(self, update: int, loss: float) -> None:
        super().__init__(f"update {update}: the loss is {loss}")
        self.update = update  # counted from 1


class Meter:
    """Collects updates on the device until somebody wants numbers, which are those of all replicas."""

    def __init__(self, progress: Progress, world: World = ALONE, *, replicas: int = 1) -> None:
        """`replicas`: how many processes of the world know a loss; the others say 0."""
        self.progress, self._world, self._replicas = progress, world, replicas
        self._unread: list[Update] = []

    def add(self, update: Update) -> None:
        self._unread.append(update)

    def read(self) -> None:
        """Wait for the device and add what it did to the totals, one update after the other.

        Added in order, because a sum of floats depends on it: a restored run then logs the very same numbers.
        """
        if not self._unread:
            return
        first = self.progress.update - len(self._unread) + 1
        losses = torch.stack([update.loss for update in self._unread]).double() / self._replicas
        counts = torch.stack([torch.stack((update.correct, update.images)) for update in self._unread])
        means, sums = self._world.sum(losses).tolist(), self._world.sum(counts).tolist()
        skips = torch.stack([update.skipped for update in self._unread]).tolist()  # the same in every process
        self._unread.clear()
        for number, (loss, (correct, images), skipped) in enumerate(zip(means, sums, skips, strict=True), start=first):
            if not math.isfinite(loss):
                raise NotFiniteError(number, loss)
            for totals in (self.progress.interval, self.progress.epoch):
                totals.add(loss, correct, images, skipped)

    def end_interval(self) -> Totals:
        """The totals since the last call, which start again from nothing."""
        self.read()
        totals, self.progress.interval = self.progress.interval, Totals()
        return totals

    def end_epoch(self) -> Totals:
        """The totals of the epoch so far, which start again from nothing."""
        self.read()
        totals, self.progress.epoch = self.progress.epoch, Totals()
        return totals
