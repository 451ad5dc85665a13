"""Phases and plans: which updates a run makes, of which images, and what is due after each. Pure arithmetic."""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

from falconet.checkpoint.manifest import Position
from falconet.config.commands import TrainOptions
from falconet.data.loader import BatchShape
from falconet.errors import ConfigError
from falconet.optim.schedules import Schedule, drops_at
from falconet.report.console import counted


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with one resolution and one optimizer."""

    number: int  # from 1
    count: int  # of all phases
    options: TrainOptions  # the run's, changed to what this phase does
    epochs_before: int = 0
    is_reduced: bool = False  # trains on smaller images than it validates on
    first_trained: str | None = None  # layers before it are frozen; None: what phase 1 trains is trained
    length: str = "--epoch"  # the option that sets its length
    accumulation: str = "--gradient-accumulation"  # the option that sets its micro-batches per update

    @property
    def is_last(self) -> bool:
        return self.number == self.count

    @property
    def prefix(self) -> str:
        """How the names of the options of its batch begin."""
        return "" if self.number == 1 else "fine-tune-"


def phases_of(options: TrainOptions) -> tuple[Phase, ...]:
    """The phases of a run, in order: one, or a reduced resolution and then fine-tuning."""
    tuning = options.fine_tuning
    if not tuning.half_res_training:
        length = "--epoch" if options.training.updates is None else "--updates"
        return (Phase(number=1, count=1, options=options, length=length),)
    return (
        Phase(number=1, count=2, options=options, is_reduced=True),
        Phase(
            number=2,
            count=2,
            options=_fine_tuned(options),
            epochs_before=options.training.epochs,
            first_trained=tuning.fine_tune_first_trainable_layer,
            length="--fine-tune-epoch",
            accumulation="--fine-tune-gradient-accumulation",
        ),
    )


def _fine_tuned(options: TrainOptions) -> TrainOptions:
    """Plain sgd on images as validation sees them; weight decay, label smoothing and precision are the run's.

    The learning rate changes at every update: a frequency meant for hundreds of epochs would keep it constant here.
    """
    tuning = options.fine_tuning
    assert tuning.fine_tune_epoch is not None
    micro_batch, accumulation = tuning.fine_tune_micro_batch_size, tuning.fine_tune_gradient_accumulation
    return replace(
        options,
        data=options.data if micro_batch == "auto" else replace(options.data, micro_batch_size=micro_batch),
        training=replace(
            options.training,
            epoch=tuning.fine_tune_epoch,
            gradient_accumulation=(options.training.gradient_accumulation if accumulation == "auto" else accumulation),
        ),
        optimizer=replace(options.optimizer, optimizer="sgd", momentum=0.0, ema_half_life=None),
        learning_rate=replace(
            options.learning_rate,
            lr=tuning.fine_tune_lr,
            lr_schedule="cosine",
            lr_scheduler_freq=0.0,
            lr_changes=None,
            warmup_epoch=0.0,
        ),
        numerics=replace(options.numerics, initial_loss_scaling=None),  # a stepped scale has reached its end
        augmentation=replace(
            options.augmentation,
            augment="none",
            vertical_flip=0.0,
            auto_augment="none",
            color_jitter=0.0,
            random_erasing=0.0,
            cutout=0,
            repeated_augmentation=1,
            mixup_alpha=0.0,
            cutmix_lambda_low=0.0,
            cutmix_lambda_high=0.0,
        ),
        averaging=replace(options.averaging, weight_avg_strategy="none"),
        parallel=replace(options.parallel, offload_optimizer=False),  # plain sgd has no state
        logging=replace(options.logging, profile=False),  # the first phase is traced
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many updates, of how many images, at which learning rate; when to log, validate and save."""

    epochs: int  # of this phase, the last of which may be cut by `limit`
    images: int  # training images in the source
    micro_batch: int
    accumulation: int
    replicas: int
    schedule: Schedule
    logs_per_epoch: int
    log_interval: int | None = None  # updates between log points; None: by `logs_per_epoch`
    validation_mode: Literal["none", "during", "after"]
    validation_frequency: int  # epochs
    epochs_per_save: float
    first_saved: int = 0  # epochs done at the first save; 0: one interval
    phase: int = 1
    epochs_before: int = 0  # of earlier phases; epochs and updates are counted through the whole run
    updates_before: int = 0  # the count that this phase starts at; see `start_of`
    limit: int | None = None  # updates of this phase, which may end within an epoch
    frozen_epochs: int | None = None  # after which frozen weights are trained too; None: never
    trained_epochs: float | None = None  # after which what is frozen from then on stops to train; None: never
    patience: int | None = None  # epochs without a better validation that end the training; None: any number
    in_a_row: int = 1  # updates, at most, after which the host does more than start the next one

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def updates_per_epoch(self) -> int:
        return self.schedule.updates_per_epoch

    @property
    def last_epoch(self) -> int:
        """Epochs done at the end."""
        return self.epochs_before + self.epochs

    @property
    def updates(self) -> int:
        """Updates done at the end."""
        whole = self.updates_per_epoch * self.epochs
        return self.updates_before + (whole if self.limit is None else min(whole, self.limit))

    @property
    def unfrozen_at(self) -> int | None:
        """Updates done when frozen weights start to train; None: never."""
        epochs = self.frozen_epochs
        return None if epochs is None else self.updates_before + epochs * self.updates_per_epoch

    @property
    def frozen_from(self) -> int | None:
        """Updates done when weights stop to train; None: never."""
        epochs = self.trained_epochs
        return None if epochs is None else self.updates_before + ceil(Fraction(str(epochs)) * self.updates_per_epoch)

    def place(self, update: int) -> tuple[int, int]:
        """Whole epochs after `update` updates, and the updates beyond them."""
        epochs, within = divmod(update - self.updates_before, self.updates_per_epoch)
        return self.epochs_before + epochs, within

    def update_at(self, epoch: int, within: int) -> int:
        """The inverse of `place`."""
        return self.updates_before + (epoch - self.epochs_before) * self.updates_per_epoch + within

    def update_after(self, epoch: int, images: int) -> int:
        """The update, as this plan counts, that ends after whole epochs and some images of the next one."""
        return self.update_at(epoch, images // self.global_batch)

    def start_of(self, done: Position) -> int:
        """The `updates_before` of a run that continues from a checkpoint, perhaps with another global batch.

        Updates that were made keep their numbers, and those to come are counted on from them: logs, trackers and the
        names of checkpoints go by the number. Epochs are counted as if the whole run had this global batch, so it may
        lie above or below the number of updates that were made before this phase.
        """
        if done.images % self.global_batch:
            raise ConfigError(
                f"--micro-batch-size: the checkpoint is {done.images:,} images into an epoch, which a global batch of"
                f" {self.global_batch} does not divide; expected the one it was trained with"
            )
        if done.images < self.images and done.images // self.global_batch >= self.updates_per_epoch:
            raise ConfigError(
                f"--micro-batch-size: the checkpoint is {done.images:,} images into an epoch of {self.images:,}, of"
                f" which a global batch of {self.global_batch} makes no further update; expected the one it was trained"
                " with"
            )
        return self.updates_before + done.update - self.update_after(done.epoch, done.images)

    def epoch_at(self, update: int) -> float:
        """`place` as one number."""
        return self.epochs_before + (update - self.updates_before) / self.updates_per_epoch

    def lr(self, update: int) -> float:
        """The learning rate of the update after `update` updates."""
        return self.schedule.lr(update - self.updates_before)

    def ends_epoch(self, update: int) -> bool:
        """Whether an epoch ends here, or the part of one that ends the training."""
        return self.place(update)[1] == 0 or update == self.updates

    def returns_at(self, update: int) -> bool:
        """Whether the host may do more here than start the next update; always where something is due."""
        due = (self.ends_epoch, self.logs_at, self.saves_at, self.validates_at)
        return (update - self.updates_before) % self.in_a_row == 0 or any(each(update) for each in due)

    def logs_at(self, update: int) -> bool:
        """Log points are spread evenly over an epoch, the last one at its end, or lie an interval apart."""
        if self.log_interval is not None:
            return (update - self.updates_before) % self.log_interval == 0 or update == self.updates
        done = self.place(update - 1)[1] + 1
        points = min(self.logs_per_epoch, self.updates_per_epoch)
        in_turn = done * points // self.updates_per_epoch > (done - 1) * points // self.updates_per_epoch
        return in_turn or update == self.updates

    def validates_at(self, update: int) -> bool:
        if self.validation_mode == "none":
            return False
        epoch, within = self.place(update)
        in_turn = self.validation_mode == "during" and not within and epoch % self.validation_frequency == 0
        return in_turn or update == self.updates

    def ends_early(self, update: int, *, best: float) -> bool:
        """Whether the validation after `update` updates ends the training; `best`: the epochs before the best one."""
        if self.patience is None or self.validation_mode != "during" or not self.validates_at(update):
            return False
        return self.epoch_at(update) - best >= self.patience

    def saves_at(self, update: int) -> bool:
        """Save points are spread evenly too: 0.25 saves four times per epoch, the last time at its end.

        They are counted from the first one if that is given: 1, 5, 9, ... for every 4 epochs from epoch 1.
        """
        interval = Fraction(str(self.epochs_per_save)) * self.updates_per_epoch  # updates, possibly a fraction
        done, first = update - self.updates_before, self._first_saved
        in_turn = (done - first) // interval > (done - first - 1) // interval
        return update == self.updates or (in_turn and done >= max(1, first))

    @property
    def _first_saved(self) -> int:
        """Updates of this phase done at its first save; 0: one interval."""
        return max(0, self.first_saved - self.epochs_before) * self.updates_per_epoch

    def saved_in_turn(self, epoch: int, images: int) -> bool:
        """Whether a checkpoint of this phase was due there, and not saved because of an interruption."""
        return self.saves_at(self.update_after(epoch, images))

    def lines(self) -> list[str]:
        """The plan in words."""
        tail = self.images - self.updates_per_epoch * self.global_batch
        left = f"; each epoch skips a different {tail:,}" if tail else ""
        return [
            f"global batch {self.global_batch:,} = micro-batch {self.micro_batch} x accumulation {self.accumulation}"
            f" x replicas {self.replicas}",
            f"{self._length()}; {counted(self.images, 'image')}{left}",
            *([f"{self.in_a_row} updates in a row, fewer where something is due"] if self.in_a_row > 1 else []),
            f"learning rate {self.schedule.describe()}",
            f"validates {self._validation()}; saves {self._saving()}at the end",
        ]

    def _saving(self) -> str:
        if self.first_saved > self.last_epoch:
            return ""
        first = f" from epoch {self.first_saved}" if self._first_saved else ""
        return f"{_every(self.epochs_per_save)}{first} and "

    def _length(self) -> str:
        updates, whole = self.updates - self.updates_before, self.updates_per_epoch * self.epochs
        epochs = counted(self.epochs, "epoch")
        if updates != whole:
            part = updates / self.updates_per_epoch
            epochs = f"{part:.4g} {'epoch' if part == 1 else 'epochs'}"
        if self._is_mixed:
            return (
                f"{counted(self.updates, 'update')} in {epochs}, the earlier ones with another global batch; now"
                f" {counted(self.updates_per_epoch, 'update')} per epoch"
            )
        return f"{counted(updates, 'update')} = {epochs} x {counted(self.updates_per_epoch, 'update')}"

    @property
    def _is_mixed(self) -> bool:
        """Whether updates were made with another global batch; of a later phase, the plan cannot tell."""
        return not self.epochs_before and self.updates_before != 0

    def _validation(self) -> str:
        words = {"none": "never", "after": "at the end", "during": _every(self.validation_frequency)}
        is_early = self.patience is not None and self.validation_mode == "during"
        early = f", ends after {counted(self.patience or 0, 'epoch')} without a better one" if is_early else ""
        return words[self.validation_mode] + early


def _every(epochs: float) -> str:
    return "every epoch" if epochs == 1 else f"every {epochs:g} epochs"


def updates_in_epoch(images: int, global_batch: int) -> int:
    """Whole updates in one pass over the images; the incomplete last one is left out."""
    if images < global_batch:
        raise ConfigError(
            f"--micro-batch-size: a global batch of {global_batch:,} is more than the {images:,} training images;"
            " expected a smaller --micro-batch-size, --gradient-accumulation or --replicas"
        )
    return images // global_batch


def plan_of(phase: Phase, *, images: int, shape: BatchShape, updates_before: int) -> Plan:
    """The plan of a phase; `images`: in the training set."""
    options = phase.options
    per_epoch = updates_in_epoch(images, shape.global_batch)
    limit = options.training.limit(per_epoch)
    if options.training.updates is not None:  # of the whole run, which has one phase
        limit = max(1, options.training.updates - updates_before)
    return Plan(
        epochs=options.training.epochs if limit is None else ceil(limit / per_epoch),
        limit=limit,
        images=images,
        micro_batch=shape.micro_batch,
        accumulation=shape.accumulation,
        replicas=shape.replicas,
        schedule=_schedule_of(phase, per_epoch, limit=limit),
        logs_per_epoch=options.logging.logs_per_epoch,
        log_interval=options.logging.log_interval,
        validation_mode="none" if options.data.data == "synthetic" else options.validation.validation_mode,
        validation_frequency=options.validation.validation_frequency,
        epochs_per_save=options.checkpoints.checkpoint_save_freq,
        first_saved=options.checkpoints.checkpoint_first_epoch,
        phase=phase.number,
        epochs_before=phase.epochs_before,
        updates_before=updates_before,
        frozen_epochs=options.training.unfreeze_after,
        trained_epochs=options.training.freeze_after,
        patience=options.training.early_stopping,
        in_a_row=options.training.device_iterations,
    )


def _schedule_of(phase: Phase, per_epoch: int, *, limit: int | None) -> Schedule:
    """`limit`: the length in updates, if it is not one of whole epochs."""
    rate, training = phase.options.learning_rate, phase.options.training
    updates = limit or training.epochs * per_epoch
    return Schedule(
        kind=rate.lr_schedule,
        peak=rate.peak,
        epochs=training.epochs if limit is None else limit / per_epoch,
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
