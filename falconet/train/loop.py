"""The training loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from falconet.checkpoint.state import Progress
from falconet.data.buffers import Batch
from falconet.errors import Interrupted
from falconet.evaluation.evaluate import FAILURES, never
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import ALONE, World
from falconet.train.log import Log
from falconet.train.metrics import Meter
from falconet.train.plan import Plan
from falconet.train.save import Saving
from falconet.train.step import Step
from falconet.train.validation import Validation

Updates = Callable[[int, int], Iterable[Sequence[Batch]]]  # (epoch, updates to skip) -> micro-batches of each update


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What happens around the updates."""

    log: Log
    validation: Validation
    saving: Saving
    stopping: Callable[[], bool]  # whether any process was asked to stop
    ended: Callable[[], bool] = never  # whether the validations so far end the training early


def train(
    plan: Plan, progress: Progress, step: Step, *, updates_of: Updates, watch: Watch, world: World = ALONE
) -> None:
    """Train from `progress` to the end of the plan, or until the validations end it early."""
    meter = Meter(progress, world, replicas=plan.replicas)
    if progress.unvalidated:
        _save_and_validate(plan, meter, watch, world=world)
    if _is_over(plan, progress, watch):
        return
    with _told_anyway(watch.log):
        world.at(f"reading the images of update {progress.update + 1}")
        for micro_batches in _batches_left(plan, progress, updates_of):
            world.at(f"update {progress.update + 1}")
            made = step(micro_batches, update=progress.update, lr=plan.lr(progress.update))
            watch.log.catch_up()  # on the epoch before, now that the device has something to do
            meter.add(made)
            progress.update += 1
            if not plan.returns_at(progress.update):
                continue
            stopping = watch.stopping()
            if plan.logs_at(progress.update):
                watch.log.log(meter)
            if plan.ends_epoch(progress.update):
                watch.log.end_epoch(meter)
            _save_and_validate(plan, meter, watch, world=world, stopping=stopping)
            if _is_over(plan, progress, watch):  # possibly within an epoch
                return
            world.at(f"reading the images of update {progress.update + 1}")


def _is_over(plan: Plan, progress: Progress, watch: Watch) -> bool:
    return progress.update >= plan.updates or watch.ended()


def _batches_left(plan: Plan, progress: Progress, updates_of: Updates) -> Iterator[Sequence[Batch]]:
    """The micro-batches of each update, from the epoch that is under way to the last one."""
    first, done = plan.place(progress.update)
    yield from updates_of(first, done)
    for epoch in range(first + 1, plan.last_epoch):
        yield from updates_of(epoch, 0)


@contextmanager
def _told_anyway(log: Log) -> Iterator[None]:
    """If training fails, the epoch before is still reported; if a loss of it was not finite, that is the error.

    Not if a process was lost: its part of the numbers may never come.
    """
    try:
        yield
    except FAILURES:
        with suppress(RuntimeError):  # of a device that is out of order
            log.catch_up()
        raise


def _save_and_validate(plan: Plan, meter: Meter, watch: Watch, *, world: World, stopping: bool = False) -> None:
    """Do what is due after an update; if the run is to stop here, save in any case, and raise Interrupted.

    The checkpoint is written first: a validation that fails must not lose the updates before it. Until the validation
    is made, `progress.unvalidated` says that it is due: a run that is about to stop leaves it for later.
    """
    progress, saving = meter.progress, watch.saving
    progress.unvalidated = plan.validates_at(progress.update)
    saved = plan.saves_at(progress.update) or stopping
    if saved or progress.unvalidated:
        watch.log.catch_up()
    if saved:
        meter.read()
        saving.save()
    if progress.unvalidated and not stopping:
        try:
            progress.unvalidated = not watch.validation.run()
            stopping = progress.unvalidated  # only a run that is asked to stop leaves its validation
        except (FailedTogetherError, *FAILURES) as error:
            # Saving needs all processes: after a failure of this one alone, the others are elsewhere.
            if not saved and (world.size == 1 or isinstance(error, FailedTogetherError)):
                saving.save()
            raise
        if not saved and (stopping or watch.ended()):
            saving.save()
        elif saved and not stopping:
            saving.amend()
    if stopping:
        raise Interrupted
