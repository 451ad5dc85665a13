"""What a run leaves behind: log lines, metrics, validations, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import falconet
from falconet.checkpoint import files
from falconet.checkpoint.state import Totals, TrainState
from falconet.checkpoint.writer import Writer
from falconet.errors import CheckpointError, DivergedError, Interrupted
from falconet.numerics.scaling import Offender
from falconet.report.screen import Screen
from falconet.report.sinks import Sink
from falconet.report.styles import Falconet, Point, RunLog, Style, Validated
from falconet.report.throughput import Laps, Rate, Stopwatch
from falconet.report.words import counted
from falconet.train.drawing import Draw, no_drawing
from falconet.train.evaluate import Evaluation, Measure, never
from falconet.train.metrics import Meter, NotFiniteError
from falconet.train.plan import Plan
from falconet.train.stop import StopRequest


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every checkpoint of a run says about itself."""

    model: str
    data: str
    classes: int
    content: Mapping[str, object]  # class names, preprocessing, config, plan, runtime

    def checkpoint_name(self, epoch: int, updates: int) -> str:
        """`model_data_epoch`, and `+updates` for one saved within an epoch."""
        safe = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.model)
        within = f"+{updates:05d}" if updates else ""
        return f"{safe}_{self.data}_{epoch}{within}"


@dataclass(kw_only=True)
class Record:
    """Logs, validates and saves when the loop says so."""

    plan: Plan
    state: TrainState
    identity: Identity
    checkpoints: Path
    kept: int | None  # newest checkpoints to keep; None: all
    evaluate: Measure
    screen: Screen
    sink: Sink
    writer: Writer
    stop: StopRequest
    offender: Offender
    trained: Sequence[str] = ()  # names of the weights that the offender counts
    vote: Callable[[bool], bool] = bool  # whether any process was asked to stop
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    metrics: dict[str, float] = field(default_factory=dict)  # the latest of each
    best: tuple[float, int] | None = None  # validation accuracy in percent, update
    last_saved: Path | None = None
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
        self._saved = {progress.update: self.last_saved} if self.last_saved else {}  # by the update they were saved at
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
        if self.best is None or accuracy > self.best[0]:
            self.best = (accuracy, self.state.progress.update)

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
        """Hand the state to the writer; a failed periodic save is said and the run goes on."""
        with self.stopwatch.standing():
            self._wait_for_writer()
            epoch, updates = self.plan.place(self.state.progress.update)
            folder = self.checkpoints / self._checkpoint_name()
            self.writer.save_state(folder, self.state, self._content(epoch, updates), after=self._prune)
            self.last_saved = self._saved[self.state.progress.update] = folder
            self._style.saved(folder)

    def in_turn(self, progress: files.Progress) -> bool:
        """Whether a run without interruptions has this checkpoint as well; those of other phases are taken to be."""
        return progress.phase != self.plan.phase or self.plan.saved_in_turn(progress.epoch, progress.images)

    def finish(self) -> Path:
        """Wait for the last checkpoint; here a failed save is an error."""
        self.writer.wait()
        assert self.last_saved is not None
        return self.last_saved

    def _stopping(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop.requested

    def stop_requested(self) -> bool:
        return self.vote(self.stop.requested)

    def lost(self) -> str:
        """What stopping at once costs."""
        whole = [update for update, folder in self._saved.items() if folder.exists()]
        newest = max(whole, default=self.plan.updates_before)
        since = f" since {self._saved[newest]}" if whole else ""
        return f"stopped at once: {counted(self.state.progress.update - newest, 'update')} lost{since}"

    def diverged(self, error: NotFiniteError) -> DivergedError:
        """The same error with the last good checkpoint named: one whose weights gave a loss that was a number."""
        self._wait_for_writer()
        good = [folder for update, folder in self._saved.items() if update < error.update - 1 and folder.exists()]
        found = f"the last good checkpoint is {good[-1]}" if good else "there is no good checkpoint from before"
        return DivergedError(f"{error}; {found}; a smaller --lr or a longer --warmup-epoch usually helps")

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
        ours = self.identity.checkpoint_name(*self.plan.place(update))
        return self._style.checkpoint_name(update) or ours

    def _write(self, metrics: Mapping[str, float]) -> None:
        update = self.state.progress.update
        self.metrics.update(metrics)
        if self._newest[0] != update:
            self._newest = (update, {})
        self._newest[1].update({name.replace("/", "_"): value for name, value in metrics.items()})
        self.sink.write(update, metrics)

    def _wait_for_writer(self) -> None:
        try:
            self.writer.wait()
        except CheckpointError as error:
            self.screen.line(f"warning: {error}; the run goes on and will save again")

    def _prune(self) -> None:
        files.prune(self.checkpoints, keep=self.kept, best="score", in_turn=self.in_turn)

    def _content(self, epoch: int, updates: int) -> dict[str, Any]:
        update = self.state.progress.update
        progress = {"epoch": epoch, "images": updates * self.plan.global_batch, "update": update}
        return {
            "model": self.identity.model,
            "classes": self.identity.classes,
            "progress": progress | {"phase": self.plan.phase},
            "meter": self.state.progress.to_json(),
            "metrics": self._newest[1] if self._newest[0] == update else {},
            "best": self.best,
            "versions": {"falconet": falconet.__version__, "torch": torch.__version__},
            **self.identity.content,
        }


def _named(group: str, found: Evaluation) -> dict[str, float]:
    return {
        f"{group}/accuracy": found.accuracy,
        f"{group}/top5_accuracy": found.top5_accuracy,
        f"{group}/loss": found.loss,
        f"{group}/images": found.images,
    }
