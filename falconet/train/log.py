"""What a run reports while it trains: log points, epochs, and histograms of weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from falconet.checkpoint.state import Totals, TrainState
from falconet.parallel.world import World
from falconet.report.console import Screen, counted
from falconet.report.epochs import ACCURACY, Metric
from falconet.report.styles import Point, Style
from falconet.report.throughput import Laps, Rate, Reading, Stopwatch
from falconet.report.trackers.histograms import count_histograms, no_histograms, read_histograms
from falconet.report.trackers.tracker import Tracker
from falconet.train.metrics import Measurements, Meter
from falconet.train.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a phase reports to, and the stopwatch, which is stopped while it does not train."""

    screen: Screen
    style: Style
    measurements: Measurements
    stopwatch: Stopwatch


@dataclass(kw_only=True)
class Log:
    """Reports on training, at log points and at the ends of epochs."""

    plan: Plan
    state: TrainState
    output: Output
    first_skipped: Callable[[], str | None] = lambda: None  # the layer that made updates skip since the last call
    metric: Metric = ACCURACY  # what validations measure
    also: Sequence[Callable[[int], None]] = ()  # called with the number of updates at every log point

    def __post_init__(self) -> None:
        progress, stopwatch = self.state.progress, self.output.stopwatch
        self._log_laps = Laps(stopwatch, already=progress.interval.images)
        self._epoch_laps = Laps(stopwatch, already=progress.epoch.images)
        self._run_laps = Laps(stopwatch)
        self._images = 0  # trained on by this process
        self._late: list[Callable[[], None]] = []  # what is to be reported once the device has work again
        self._begun, self._before = stopwatch.clock(), progress.seconds

    def begin_epoch(self, epoch: int) -> None:
        """`epoch`: whole epochs before it."""
        begin = partial(self.output.style.begin_epoch, epoch + 1, self.plan.last_epoch)
        if self._late:  # its line follows that of the epoch before
            self._late.append(begin)
        else:
            begin()

    def log(self, meter: Meter) -> None:
        """Report a log point; training waits for the device here."""
        totals = meter.end_interval()
        self.state.progress.points += 1
        rate = self._log_laps.end(totals.images)
        update = self.state.progress.update
        self.output.measurements.write(
            update,
            {
                "epoch": self.plan.epoch_at(update),
                "train/loss": totals.mean_loss,
                f"train/{self.metric.training}": totals.accuracy,
                "train/lr": self.plan.lr(update - 1),
                "train/images_per_second": rate.images_per_second,
                "train/waiting_percent": rate.waiting_percent,
                **self._scale_metrics(totals),
            },
        )
        self.output.measurements.note(update, self._means(self.state.progress.epoch))
        for each in self.also:
            each(update)
        self.output.style.log(self._point(totals, rate, self.output.stopwatch.lap()))
        self.output.screen.show(totals.mean_loss)

    def _scale_metrics(self, totals: Totals) -> dict[str, float]:
        """The loss scale, and the updates that were skipped in spite of it."""
        if self.state.scale is None:
            return {}
        scale, layer = float(self.state.scale.value), self.first_skipped()
        if layer:
            self.output.screen.line(
                f"note: skipped {totals.skipped} of {counted(totals.updates, 'update')} because gradients were not"
                f" finite, first in {layer}; the loss scale is now {scale:g}"
            )
        return {"train/loss_scale": scale, "train/skipped": totals.skipped}

    def end_epoch(self, meter: Meter) -> None:
        """End an epoch; it is reported by `catch_up` if its numbers are still on their way from the device."""
        end = self.output.stopwatch.split()
        is_late = meter.send()  # if this fails, there is nothing to report
        self._late.append(partial(self._report_epoch, meter, end))
        if not is_late:
            self.catch_up()

    def catch_up(self) -> None:
        """Report what is late: when the device has the next update to make, or before a save or a validation."""
        while self._late:
            self._late.pop(0)()

    def _report_epoch(self, meter: Meter, end: Callable[[], Reading]) -> None:
        totals, at = meter.end_epoch(), end()
        rate = self._epoch_laps.end(totals.images, at=at)
        self._images += rate.images
        self.output.measurements.note(self.state.progress.update, self._means(totals))
        self.output.style.end_epoch(self._point(totals, rate, at))

    def _means(self, epoch: Totals) -> dict[str, float]:
        """What a checkpoint states: of the epoch so far, not of the last interval alone."""
        return {"train/loss": epoch.mean_loss, f"train/{self.metric.training}": epoch.accuracy}

    def end(self) -> None:
        """End what is printed of the updates, after the last one."""
        stopwatch = self.output.stopwatch
        self.output.style.end(trained=stopwatch.lap().seconds - self._before, whole=self.seconds)

    def seconds_of(self, rate: Rate, *, validation: float) -> dict[str, float]:
        """What took how long since this process started to train; `counted`: what speed records count.

        `preparation` is a part of the training: compiling kernels and capturing CUDA graphs.
        """
        training, preparation = rate.seconds, self.output.stopwatch.preparation
        parts = {"training": training, "preparation": preparation, "validation": validation}
        counted = {"counted": training - preparation + validation}
        return {name: round(value, 4) for name, value in (parts | counted).items()}

    @property
    def seconds(self) -> float:
        """Since this phase began in this process, with validations and saves."""
        return self.output.stopwatch.clock() - self._begun

    @property
    def ended_early(self) -> bool:
        """Whether the validations ended the training, not its plan."""
        return self.state.progress.update < self.plan.updates

    def whole_run(self) -> Rate:
        """The rate of everything that this process trained on."""
        return self._run_laps.end(self._images)

    def _point(self, totals: Totals, rate: Rate, at: Reading) -> Point:
        update = self.state.progress.update
        return Point(
            update=update,
            updates=totals.updates,
            number=self.state.progress.points,
            epoch=self.plan.epoch_at(update),
            updates_per_epoch=self.plan.updates_per_epoch,
            epochs=self.plan.last_epoch,
            global_batch=self.plan.global_batch,
            loss=totals.mean_loss,
            smoothing_loss=totals.mean_smoothing,
            accuracy=totals.accuracy,
            lr=self.plan.lr(update - 1),
            scale=self.output.measurements.latest.get("train/loss_scale"),
            rate=rate,
            seconds=at.seconds,
            moment=at.moment,
            ends_epoch=self.plan.ends_epoch(update),
            validates=self.plan.validates_at(update),
        )


def weight_drawing(
    model: nn.Module,
    names: Sequence[str],
    *,
    stages: World,
    sinks: Sequence[Tracker],
    pause: Callable[[], AbstractContextManager[None]],
) -> Callable[[int], None]:
    """Draws a histogram of every weight of a replica; its stages each count their own and add them up in one message.

    `names`: of all trained weights, in every stage. Called in every process of one replica, the first of which has the
    sinks. Replicas are identical, and weights are whole in each even where the optimizer's state is sharded. `pause`: a
    context in which the stopwatch is stopped.
    """
    drawn = set(names)
    own = {name: weight for name, weight in model.named_parameters() if name in drawn}

    def draw(update: int) -> None:
        with pause():
            rows = [count_histograms(own[name]) if name in own else no_histograms(stages.device) for name in names]
            found = read_histograms(stages.sum(torch.stack(rows)))
            for sink in sinks:
                sink.write_weights(update, dict(zip(names, found, strict=True)))

    return draw
