"""What a run tells while it goes on: log lines, metrics, validations; and when it saves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from falconet.checkpoint import files
from falconet.checkpoint.state import Totals, TrainState
from falconet.errors import Interrupted
from falconet.numerics.scaling import Offender
from falconet.report.screen import Screen
from falconet.report.sinks import Sink
from falconet.report.styles import Falconet, Point, RunLog, Style, Validated
from falconet.report.throughput import Laps, Rate, Stopwatch
from falconet.report.words import counted
from falconet.train.drawing import Draw, no_drawing
from falconet.train.evaluate import Evaluation, Measure, never
from falconet.train.metrics import Meter
from falconet.train.plan import Plan
from falconet.train.saving import Saving
from falconet.train.stop import StopRequest


class Best(NamedTuple):
    """The best validation so far."""

    accuracy: float  # percent
    update: int


@dataclass(kw_only=True)
class Record:
    """Logs, validates and saves when the loop says so."""

    plan: Plan
    state: TrainState
    saving: Saving
    evaluate: Measure
    screen: Screen
    sink: Sink
    stop: StopRequest
    offender: Offender
    trained: Sequence[str] = ()  # names of the weights that the offender counts
    vote: Callable[[bool], bool] = bool  # whether any process was asked to stop
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    metrics: dict[str, float] = field(default_factory=dict)  # the latest of each
    best: Best | None = None
    noted: Mapping[str, float] = field(default_factory=dict)  # the metrics of a restored checkpoint
    style: Style | None = None  # None: our own
    draw: Draw = no_drawing  # of the weights
    write_times: Callable[[int, Sequence[float]], None] = lambda *_: None  # seconds of each update
    validation_batch: int | None = None  # images of a validation's batch on one replica; None: as the micro-batch

    def __post_init__(self) -> None:
        progress = self.state.progress
        self._style = self.style or Falconet(RunLog(self.screen.line, None))
        self._log_laps = Laps(self.stopwatch, already=progress.interval.images)
        self._epoch_laps = Laps(self.stopwatch, already=progress.epoch.images)
        self._run_laps = Laps(self.stopwatch)
        self._images = 0  # trained on by this process
        self._begun = self.stopwatch.clock()
        # An update and the metrics of that moment: the restored checkpoint's, where its validation is still due.
        self._newest: tuple[int, dict[str, float]] = (progress.update, dict(self.noted))

    def begin_epoch(self, epoch: int) -> None:
        """The epoch after `epoch` whole ones."""
        self._style.begin_epoch(epoch + 1, self.plan.last_epoch)

    def end(self) -> None:
        """All updates are made."""
        self._style.end(trained=self.stopwatch.lap()[0], whole=self.stopwatch.clock() - self._begun)

    def average_name(self, how: str) -> str | None:
        """What the style calls an average of checkpoints."""
        return self._style.average_name(how)

    def log(self, meter: Meter) -> None:
        """A log point: the only place where training waits for the device."""
        totals = meter.end_interval()
        rate = self._log_laps.end(totals.images)
        update = self.state.progress.update
        self._write(
            {
                "epoch": self.plan.epoch_at(update),
                "train/loss": totals.mean_loss,
                "train/accuracy": totals.accuracy,
                "train/lr": self.plan.lr(update - 1),
                "train/images_per_second": rate.images_per_second,
                "train/waiting_percent": rate.waiting_percent,
                **self._scale_metrics(totals),
            }
        )
        self.draw(update)
        self.write_times(update, self.stopwatch.update_seconds())
        self._style.log(self._point(totals, rate))
        self.screen.note(f"loss {totals.mean_loss:.4f}  {rate.images_per_second:,.0f} images/s")

    def _scale_metrics(self, totals: Totals) -> dict[str, float]:
        """The loss scale, and what it could not prevent."""
        if self.state.scale is None:
            return {}
        scale, layer = float(self.state.scale.value), self.offender.read(self.trained)
        if layer:
            self.screen.line(
                f"note: {totals.skipped} of {counted(totals.updates, 'update')} skipped, gradients not finite, first in"
                f" {layer}; the loss scale is now {scale:g}"
            )
        return {"train/loss_scale": scale, "train/skipped": totals.skipped}

    def end_epoch(self, meter: Meter) -> None:
        """The lines that tools of the originals read."""
        totals = meter.end_epoch()
        rate = self._epoch_laps.end(totals.images)
        self._images += rate.images
        self._style.end_epoch(self._point(totals, rate))

    def validate(self) -> bool:
        """Whether every image was seen; a run that is asked to stop meanwhile leaves it, with nothing written."""
        try:
            self._validate()
        except Interrupted:
            return False
        return True

    def _validate(self) -> None:
        with self.stopwatch.standing():
            begun = self.stopwatch.clock()
            found = self.evaluate(self.state.model, self._stopping)
            seconds = self.stopwatch.clock() - begun
            averaged = self.evaluate(self.state.ema.model, self._stopping) if self.state.ema else None
        accuracy = max(found.accuracy, averaged.accuracy if averaged else 0.0)
        self._write(
            _named("validation", found)
            | {"validation/seconds": seconds}
            | (_named("validation_ema", averaged) if averaged else {})
        )
        self._style.validated(self._validated(found, seconds, self._checkpoint_name()))
        self._warn(found, "the validation")
        if averaged:
            self._warn(averaged, "the moving average's validation")
            self.screen.line(f"Accuracy on test set of the moving average: {averaged.accuracy:.2f}%")
        self._newest[1]["score"] = accuracy
        if self.best is None or accuracy > self.best.accuracy:
            self.best = Best(accuracy, self.state.progress.update)

    def validate_average(self, model: torch.nn.Module, name: str, *, suffix: str = "") -> None:
        """Measure an average of the run's checkpoints; `suffix` tells further ones apart."""
        begun = self.stopwatch.clock()
        found = self.evaluate(model, never)
        self._warn(found, "the averaged checkpoints' validation")
        self._write(_named(f"validation_averaged_{suffix}" if suffix else "validation_averaged", found))
        self._style.averaged(self._validated(found, self.stopwatch.clock() - begun, name), which=suffix)

    def validate_other(self, name: str, *, progress: files.Progress) -> Evaluation:
        """Measure the model with weights of another moment than the newest; told in the style, unless it is ours."""
        begun = self.stopwatch.clock()
        found = self.evaluate(self.state.model, self._stopping)
        self._warn(found, f"the validation of {name}")
        if not isinstance(self._style, Falconet):
            told = self._validated(found, self.stopwatch.clock() - begun, name)
            self._style.validated(replace(told, update=progress.update, epoch=float(progress.epoch)))
        return found

    def _warn(self, found: Evaluation, what: str) -> None:
        warning = found.warning(what)
        if warning:
            self.screen.line(warning)

    def whole_run(self) -> Rate:
        """The rate of everything this process trained."""
        return self._run_laps.end(self._images)

    def save(self) -> None:
        """With what was measured at this very update."""
        update, metrics = self._newest
        facts = {"metrics": metrics if update == self.state.progress.update else {}, "best": self.best}
        with self.stopwatch.standing():
            self._style.saved(self.saving.save(self._checkpoint_name(), facts))

    def _stopping(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop.requested

    def stop_requested(self) -> bool:
        return self.vote(self.stop.requested)

    def _point(self, totals: Totals, rate: Rate) -> Point:
        update = self.state.progress.update
        return Point(
            update=update,
            epoch=self.plan.epoch_at(update),
            updates_per_epoch=self.plan.updates_per_epoch,
            epochs=self.plan.last_epoch,
            global_batch=self.plan.global_batch,
            loss=totals.mean_loss,
            accuracy=totals.accuracy,
            lr=self.plan.lr(update - 1),
            scale=self.metrics.get("train/loss_scale"),
            rate=rate,
            seconds=self.stopwatch.lap()[0],
        )

    def _validated(self, found: Evaluation, seconds: float, name: str) -> Validated:
        update = self.state.progress.update
        return Validated(
            name=name,
            update=update,
            epoch=self.plan.epoch_at(update),
            accuracy=found.accuracy,
            loss=found.loss,
            images=found.images,
            seconds=seconds,
            batch=(self.validation_batch or self.plan.micro_batch) * self.plan.replicas,
        )

    def _checkpoint_name(self) -> str:
        update = self.state.progress.update
        ours = self.saving.identity.checkpoint_name(*self.plan.place(update))
        return self._style.checkpoint_name(update) or ours

    def _write(self, metrics: Mapping[str, float]) -> None:
        update = self.state.progress.update
        self.metrics.update(metrics)
        if self._newest[0] != update:
            self._newest = (update, {})
        self._newest[1].update({name.replace("/", "_"): value for name, value in metrics.items()})
        self.sink.write(update, metrics)


def _named(group: str, found: Evaluation) -> dict[str, float]:
    return {
        f"{group}/accuracy": found.accuracy,
        f"{group}/top5_accuracy": found.top5_accuracy,
        f"{group}/loss": found.loss,
        f"{group}/images": found.images,
    }
