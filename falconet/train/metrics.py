"""Metrics on their way from the device to the sinks; reading them is the loop's only wait for the device."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from falconet.checkpoint.manifest import rank
from falconet.checkpoint.state import Progress, Totals
from falconet.errors import DivergedError
from falconet.parallel.world import ALONE, World
from falconet.report.sinks import Sink
from falconet.train.step import Update, moments_of


class NotFiniteError(DivergedError):
    """The loss of one update is not finite, because of the weights that the update before it left."""

    def __init__(self, update: int, loss: float) -> None:
        super().__init__(f"update {update}: the loss is {loss}")
        self.update = update  # counted from 1


class _Sent(NamedTuple):
    """Numbers of some updates on their way to the host."""

    first: int  # the number of the first one, from 1
    losses: Tensor  # updates x 2: loss, the part of smoothing
    counts: Tensor  # updates x 2: correct images, all images
    skips: Tensor  # updates
    arrival: Any  # the moment when they are there


class Meter:
    """Collects updates on the device until their numbers are read, which are those of all replicas."""

    def __init__(self, progress: Progress, world: World = ALONE, *, replicas: int = 1) -> None:
        """`replicas`: how many processes of the world compute a loss; the others add 0."""
        self.progress, self._world, self._replicas = progress, world, replicas
        self._moments = moments_of(world.device)
        self._unread: list[Update] = []
        self._sent: list[_Sent] = []

    def add(self, update: Update) -> None:
        self._unread.append(update)

    def send(self) -> bool:
        """Let the numbers come to the host while the device goes on; returns whether the host would wait for them.

        A CPU has them at once. On other devices this is answered without a look, so that all processes do the same.
        """
        if self._unread:
            read, self._unread = self._unread, []
            # As few launches for many updates as for one: until the host is done, the device has nothing else to do.
            losses = torch.stack([value for each in read for value in (each.loss, each.smoothing)]).view(-1, 2)
            counts = torch.stack([value for each in read for value in (each.correct, each.images)]).view(-1, 2)
            here = _Sent(
                first=self.progress.update - len(read) + 1,
                losses=_to_host(self._world.sum(losses.double() / self._replicas)),
                counts=_to_host(self._world.sum(counts)),
                skips=_to_host(torch.stack([each.skipped for each in read])),  # the same in every process
                arrival=self._moments.mark(),
            )
            self._sent.append(here)
        return bool(self._sent) and self._world.device.type != "cpu"

    def read(self) -> None:
        """Wait for the device and add its updates to the totals, one after the other.

        The order matters, because sums of floats depend on it: a restored run logs exactly the same numbers.
        """
        self.send()
        while self._sent:
            sent = self._sent.pop(0)
            self._moments.reach(sent.arrival)
            read = zip(sent.losses.tolist(), sent.counts.tolist(), sent.skips.tolist(), strict=True)
            for number, ((loss, smoothing), (correct, images), skipped) in enumerate(read, start=sent.first):
                if not math.isfinite(loss):
                    raise NotFiniteError(number, loss)
                for totals in (self.progress.interval, self.progress.epoch):
                    totals.add(loss, correct, images, skipped, smoothing)

    def end_interval(self) -> Totals:
        """The totals since the last call."""
        self.read()
        totals, self.progress.interval = self.progress.interval, Totals()
        return totals

    def end_epoch(self) -> Totals:
        """The totals of the epoch so far."""
        self.read()
        totals, self.progress.epoch = self.progress.epoch, Totals()
        return totals


def _to_host(values: Tensor) -> Tensor:
    """Send values to the host: there when the device has come to the copy, and pinned, or it would be waited for."""
    return values.to("cpu", non_blocking=True)


class Best(NamedTuple):
    """The best validation so far."""

    accuracy: float  # percent
    update: int
    loss: float
    epoch: float  # the update says it only as long as the global batch stays the same


class Measurements:
    """Passes metrics on to a sink, and keeps the latest of each, those of the current update, and the best."""

    def __init__(
        self,
        sink: Sink,
        *,
        update: int = 0,
        restored: Mapping[str, float] | None = None,
        latest: Mapping[str, float] | None = None,
        best: Best | None = None,
    ) -> None:
        """`restored`: what a restored checkpoint measured at `update`, if its validation is still due.

        `latest`: the latest of each metric, as far as an earlier start of the run measured it.
        """
        self.latest = dict(latest or {})
        self.best = best
        self._sink, self._update, self._current = sink, update, dict(restored or {})

    def write(self, update: int, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        self.note(update, metrics)
        self._sink.write(update, metrics)

    def note(self, update: int, metrics: Mapping[str, float]) -> None:
        """Metrics for the checkpoint of `update` alone."""
        if self._update != update:
            self._update, self._current = update, {}
        self._current.update({name.replace("/", "_"): value for name, value in metrics.items()})

    def score(self, update: int, accuracy: float, loss: float, *, epoch: float) -> bool:
        """Note what checkpoints are compared by, accuracy in percent and then loss; whether it is the best so far."""
        self._current |= {"score": accuracy, "score_loss": loss}
        if self.best is not None and rank(accuracy, loss) <= rank(self.best.accuracy, self.best.loss):
            return False
        self.best = Best(accuracy, update, loss, epoch)
        return True

    def for_checkpoint(self, update: int) -> dict[str, object]:
        """What a checkpoint of `update` stores: metrics of that very update, and the best so far."""
        return {"metrics": self._current if self._update == update else {}, "best": self.best}
