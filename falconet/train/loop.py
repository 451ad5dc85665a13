"""The training loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from falconet.checkpoint.state import Progress
from falconet.data.buffers import Batch
from falconet.errors import Interrupted
from falconet.parallel.world import ALONE, World
from falconet.train.metrics import Meter
from falconet.train.plan import Plan
from falconet.train.step import Step


class Watch(Protocol):
    """What goes on around the updates: logging, validating, saving."""

    def log(self, meter: Meter) -> None: ...
    def end_epoch(self, meter: Meter) -> None: ...
    def validate(self) -> bool: ...  # whether it came to its end: it is left where the run is to stop
    def save(self) -> None: ...
    def stop_requested(self) -> bool: ...


def train(
    plan: Plan,
    progress: Progress,
    step: Step,
    *,
    updates_of: Callable[[int, int], Iterable[Sequence[Batch]]],
    watch: Watch,
    world: World = ALONE,
) -> None:
    """Train from `progress` to the end of the plan; `updates_of(epoch, skip)` gives an epoch's micro-batches."""
    meter = Meter(progress, world, replicas=plan.replicas)
    if progress.unvalidated:
        _conclude(plan, meter, watch)
        if progress.update == plan.updates:
            return
    first_epoch, done = plan.place(progress.update)
    for epoch in range(first_epoch, plan.last_epoch):
        world.at(f"reading the images of update {progress.update + 1}")
        for micro_batches in updates_of(epoch, done):
            world.at(f"update {progress.update + 1}")
            meter.add(step(micro_batches, update=progress.update, lr=plan.lr(progress.update)))
            progress.update += 1
            stopping = watch.stop_requested()
            if plan.logs_at(progress.update):
                watch.log(meter)
            if plan.ends_epoch(progress.update):
                watch.end_epoch(meter)
            _conclude(plan, meter, watch, stopping=stopping)
            if progress.update == plan.updates:  # maybe within an epoch
                return
            world.at(f"reading the images of update {progress.update + 1}")
        done = 0


def _conclude(plan: Plan, meter: Meter, watch: Watch, *, stopping: bool = False) -> None:
    """What is due after an update: validation, a checkpoint. A run that is to stop leaves its validation for later."""
    progress = meter.progress
    progress.unvalidated = plan.validates_at(progress.update)
    if progress.unvalidated and not stopping:
        stopping = progress.unvalidated = not watch.validate()
    if plan.saves_at(progress.update) or stopping:
        meter.read()
        watch.save()
    if stopping:
        raise Interrupted
