"""Histograms of the trained weights, drawn at log points."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from falconet.checkpoint import format
from falconet.checkpoint.state import Totals, TrainState
from falconet.config import commands, rules
from falconet.errors import Interrupted
from falconet.numerics.loss_scale import Offender
from falconet.parallel.world import World
from falconet.report.console import Screen, counted
from falconet.report.mlperf import Submission, tensor_name
from falconet.report.sinks import Sink, WeightSink, count_histograms, no_histograms, read_histograms
from falconet.report.styles import Facts, Falconet, Point, RunLog, Style, Validated
from falconet.report.throughput import Laps, Rate, Stopwatch
from falconet.train.evaluate import Evaluation, Measure, never
from falconet.train.metrics import Meter
from falconet.train.plan import Plan
from falconet.train.save import Saving
from falconet.train.stop import StopRequest

if TYPE_CHECKING:
    from falconet.train.phase import Run


Draw = Callable[[int], None]  # takes the number of updates so far


def no_drawing(update: int) -> None:
    """Draws nothing."""


def weight_drawing(
    model: nn.Module,
    names: Sequence[str],
    *,
    stages: World,
    sinks: Sequence[WeightSink],
    pause: Callable[[], AbstractContextManager[None]],
) -> Draw:
    """Draws every weight of a replica, whose stages each count their own and add them up in one message.

    `names`: of all trained weights, in every stage. To be called in every process of one replica, of which the first
    has the sinks. Replicas are alike, and weights are whole in each even where the optimizer's state is divided.
    `pause`: in which the training's clock stands.
    """
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def draw(update: int) -> None:
        with pause():
            rows = [count_histograms(own[name]) if name in own else no_histograms(stages.device) for name in names]
            found = read_histograms(stages.sum(torch.stack(rows)))
            for sink in sinks:
                sink.write_weights(update, dict(zip(names, found, strict=True)))

    return draw


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

    @property
    def tabulates(self) -> bool:
        """Whether the accuracies of further checkpoints go into one table."""
        return self._style.tabulates

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

    def validate_other(self, name: str, *, progress: format.Progress) -> Evaluation:
        """Measure the model with weights of another moment than the newest; reported now unless a table follows."""
        begun = self.stopwatch.clock()
        found = self.evaluate(self.state.model, self._stopping)
        self._warn(found, f"the validation of {name}")
        if not self._style.tabulates:
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


def open_style(run: "Run", folder: Path, *, sinks: Sequence[Sink]) -> Style:
    """The style of a run, which has said its first lines; in other processes than the first it is mute."""
    options, is_first = run.options, run.world.is_first
    say = run.screen.line if is_first else lambda _: None
    style = run.launch.conventions.style(RunLog(say, folder if is_first else None, sinks=sinks))
    style.begin(
        Facts(
            options={name: entry["value"] for name, entry in run.loaded.table().items()},
            folder=folder,
            model=str(run.model),
            parameters=run.placement.parameters,
            global_batch=run.plan.global_batch,
            replicas=run.plan.replicas,
            stages=rules.stages_of(options.parallel),
            image_size=run.images.training.image_size,
            restored=run.restored.folder if run.restored else None,
        )
    )
    return style


BENCHMARK = "resnet"


def submission(
    options: commands.TrainOptions, plan: Plan, *, weights: Sequence[str], validated: int, epochs: int, began: float
) -> Submission:
    """`weights`: names of the trained ones; `validated`: images of a validation; `epochs`: of all phases."""
    learning, rule = options.learning_rate, options.optimizer
    is_benchmark = options.model.model == "resnet50" and options.data.data == "imagenet"
    values = {
        "submission_benchmark": BENCHMARK,
        "submission_division": "closed" if is_benchmark else "open",
        "submission_org": "Falconet",
        "submission_status": "research",
        "submission_platform": f"{plan.replicas} x {_device(options)}",
        "seed": options.run.seed,
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "opt_weight_decay": rule.weight_decay,
        "opt_learning_rate_warmup_epochs": learning.warmup_epoch,
        "model_bn_span": options.parallel.batchnorm_span * plan.micro_batch,
        "train_samples": plan.images,
        "eval_samples": validated,
        **_rule(options, plan),
    }
    return Submission(values=values, tensors=[tensor_name(name) for name in weights], epochs=epochs, began=began)


def _rule(options: commands.TrainOptions, plan: Plan) -> dict[str, object]:
    """MLPerf names sgd and lars alone; of other rules their name is told, with what all rules have."""
    learning, rule = options.learning_rate, options.optimizer
    name = {"sgd_combined": "sgd"}.get(rule.optimizer, rule.optimizer)
    if name not in ("sgd", "lars"):
        return {"opt_name": name, "opt_base_learning_rate": learning.lr}
    end = learning.lr * learning.lr_end_ratio if learning.lr_schedule == "polynomial" else plan.lr(plan.updates)
    warmup = round(learning.warmup_epoch * plan.updates_per_epoch)
    values = {
        "base_learning_rate": learning.lr,
        "end_learning_rate": float(f"{end:.9g}"),  # a ratio of the peak has lost its last digits
        "learning_rate_decay_poly_power": learning.lr_power,
        "learning_rate_decay_steps": plan.epochs if name == "lars" else plan.updates - warmup,
        "momentum": rule.momentum,
        "weight_decay": rule.weight_decay,
    }
    more = {"lars_epsilon": rule.optimizer_eps, "lars_opt_learning_rate_warmup_epochs": learning.warmup_epoch}
    return {
        "opt_name": name,
        **{f"{name}_opt_{key}": value for key, value in values.items()},
        **(more if name == "lars" else {}),
    }


def _device(options: commands.TrainOptions) -> str:
    if options.machine.device == "cpu" or not torch.cuda.is_available():
        return "CPU"
    return torch.cuda.get_device_name()
