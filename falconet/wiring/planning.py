"""From the options of a phase to its plan."""

from fractions import Fraction
from math import ceil

from falconet.config.phases import Phase
from falconet.data.loader import BatchShape
from falconet.optim.schedules import Schedule, drops_at
from falconet.train.plan import Plan, updates_in_epoch


def plan_of(phase: Phase, *, images: int, shape: BatchShape, updates_before: int) -> Plan:
    """The plan of a phase that trains on so many images."""
    options = phase.options
    per_epoch, limit = updates_in_epoch(images, shape.global_batch), options.training.updates
    return Plan(
        epochs=options.training.epoch if limit is None else ceil(limit / per_epoch),
        limit=limit,
        images=images,
        micro_batch=shape.micro_batch,
        accumulation=shape.accumulation,
        replicas=shape.replicas,
        schedule=_schedule_of(phase, per_epoch),
        logs_per_epoch=options.logging.logs_per_epoch,
        validation_mode="none" if options.data.data == "synthetic" else options.validation.validation_mode,
        validation_frequency=options.validation.validation_frequency,
        epochs_per_save=options.checkpoints.checkpoint_save_freq,
        first_saved=options.checkpoints.checkpoint_first_epoch,
        phase=phase.number,
        epochs_before=phase.epochs_before,
        updates_before=updates_before,
    )


def _schedule_of(phase: Phase, per_epoch: int) -> Schedule:
    rate, training = phase.options.learning_rate, phase.options.training
    updates = training.updates or training.epoch * per_epoch
    return Schedule(
        kind=rate.lr_schedule,
        peak=rate.lr,
        epochs=training.epoch if training.updates is None else training.updates / per_epoch,
        updates_per_epoch=per_epoch,
        warmup_epochs=rate.warmup_epoch,
        changes_per_epoch=rate.lr_scheduler_freq
        if rate.lr_changes is None
        else Fraction(rate.lr_changes * per_epoch, updates),
        decay=rate.lr_decay[0],
        drops=(*rate.lr_epoch_decay, *drops_at(rate.lr_drop_shares, updates, per_epoch)),
        factors=rate.lr_decay if len(rate.lr_decay) > 1 else (),
        power=rate.lr_power,
        end_ratio=rate.lr_end_ratio,
    )
