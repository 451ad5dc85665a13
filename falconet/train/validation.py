"""The validations of a run: what they measure, write and report."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import Tensor

from falconet.checkpoint.manifest import Position
from falconet.checkpoint.state import TrainState
from falconet.config import commands
from falconet.errors import Interrupted
from falconet.evaluation.evaluate import Evaluation, Measure, never
from falconet.report.epochs import ACCURACY, Metric
from falconet.report.styles import Origin, Validated
from falconet.train.log import Output
from falconet.train.plan import Plan

AVERAGED = "validation_averaged"  # the group of what averages of checkpoints reached, in metrics.jsonl

Which = Literal["model", "ema", "other"]  # the trained weights, their moving average, or those of a checkpoint


class Record(Protocol):
    """Keeps what validations answer, one model after the other."""

    def begin(self, which: Which) -> None: ...  # the next batches are this model's
    def add(self, logits: Tensor, labels: Tensor) -> None: ...  # an Observe
    def best(self, which: Which, found: Evaluation, validated: Validated) -> None: ...  # better than all before it


class NoRecord:
    """Keeps nothing."""

    def begin(self, which: Which) -> None: ...
    def add(self, logits: Tensor, labels: Tensor) -> None: ...
    def best(self, which: Which, found: Evaluation, validated: Validated) -> None: ...


@dataclass(kw_only=True)
class Validation:
    """Measures the model of a run when the loop asks for it, and reports what it finds."""

    plan: Plan
    state: TrainState
    output: Output
    measure: Measure
    batch: int  # images per batch on one replica
    checkpoint_name: Callable[[], str]  # the name of a checkpoint saved now
    stopping: Callable[[], bool] = never  # whether this process was asked to stop
    left_out: tuple[str, ...] = ()  # images that this process could not read so far
    metric: Metric = ACCURACY  # what was measured
    record: Record = field(default_factory=NoRecord)
    seconds: float = 0.0  # of all validations in this process, moving averages included

    def run(self) -> bool:
        """Validate; return whether it was completed. A run that is asked to stop leaves it, with nothing written."""
        stopwatch, update = self.output.stopwatch, self.state.progress.update
        try:
            with stopwatch.standing():
                begun = stopwatch.clock()
                self.record.begin("model")
                found = self.measure(self.state.model, self._glancing)
                seconds = stopwatch.clock() - begun
                self.record.begin("ema")
                averaged = self.measure(self.state.ema.model, self._glancing) if self.state.ema else None
                self.seconds += stopwatch.clock() - begun
        except Interrupted:
            return False
        self.output.screen.hide()
        self.left_out, self.metric = found.left_out, found.metric
        self.output.measurements.write(
            update,
            _named("validation", found)
            | {"validation/seconds": seconds}
            | (_named("validation_ema", averaged) if averaged else {}),
        )
        average = averaged.score if averaged else None
        better = max((found, averaged), key=lambda each: each.rank) if averaged else found
        is_best = self.output.measurements.score(update, better.score, better.loss, epoch=self.plan.epoch_at(update))
        validated = self._validated(found, seconds, self.checkpoint_name())
        self.output.style.validated(replace(validated, average=average, is_best=is_best))
        if is_best:
            with stopwatch.standing():
                self.record.best("model" if better is found else "ema", better, validated)
        self._warn(found, "validation")
        if averaged:
            self._warn(averaged, "the moving average's validation")
        return True

    def _glancing(self) -> bool:
        """Show that it goes on, and return whether to stop; called at every batch."""
        self.output.screen.glance("validating")
        return self.stopping()

    def average(self, name: str, *, suffix: str, origin: Origin) -> None:
        """Measure the model, which has averaged weights; `suffix` distinguishes further averages."""
        begun = self.output.stopwatch.clock()
        self.record.begin("other")
        found = self.measure(self.state.model, never)
        self._warn(found, "the averaged checkpoints' validation")
        group = f"{AVERAGED}_{suffix}" if suffix else AVERAGED
        self.output.measurements.write(self.state.progress.update, _named(group, found))
        seconds = self.output.stopwatch.clock() - begun
        validated = replace(self._validated(found, seconds, name), origin=origin)
        self.output.style.averaged(validated, which=suffix)

    def other(
        self, name: str, progress: Position, report: Callable[[Validated], None], *, origin: Origin
    ) -> Evaluation:
        """Measure the model, which has the weights of another checkpoint, and `report` it."""
        begun = self.output.stopwatch.clock()
        self.record.begin("other")
        found = self.measure(self.state.model, self.stopping)
        self._warn(found, f"the validation of {name}")
        validated = self._validated(found, self.output.stopwatch.clock() - begun, name)
        report(replace(validated, update=progress.update, epoch=progress.epochs, origin=origin))
        return found

    def _warn(self, found: Evaluation, what: str) -> None:
        warning = found.warning(what)
        if warning:
            self.output.screen.line(warning)

    def _validated(self, found: Evaluation, seconds: float, name: str) -> Validated:
        update = self.state.progress.update
        return Validated(
            name=name,
            update=update,
            epoch=self.plan.epoch_at(update),
            accuracy=found.score,
            loss=found.loss,
            images=found.images,
            seconds=seconds,
            batch=self.batch * self.plan.replicas,
        )


def _named(group: str, found: Evaluation) -> dict[str, float]:
    is_one = found.metric is ACCURACY
    return {
        f"{group}/{found.metric.name}": found.score,
        **({f"{group}/top5_accuracy": found.top5_accuracy} if is_one else {f"{group}/exact": found.accuracy}),
        f"{group}/loss": found.loss,
        f"{group}/images": found.images,
    }


def validation_batch(options: commands.TrainOptions) -> int:
    """Images per validation batch on one replica; pipeline stages pass on batches of one size only."""
    return options.data.micro_batch if options.parallel.pipeline_splits else options.data.validation_batch
