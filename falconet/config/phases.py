"""The phases of a training, each with options of its own: one, or a reduced resolution and then fine-tuning."""

from dataclasses import dataclass, replace

from falconet.config.schema import TrainOptions


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with one resolution and one optimizer."""

    number: int  # from 1
    count: int  # of all phases
    options: TrainOptions  # those of the run, changed to what this phase does
    epochs_before: int = 0
    is_reduced: bool = False  # trains on smaller images than it validates on
    first_trained: str | None = None  # layers before it stay as they are; None: all are trained
    length: str = "--epoch"  # the option that says how long it is
    accumulation: str = "--gradient-accumulation"  # the option that says how many micro-batches

    @property
    def is_last(self) -> bool:
        return self.number == self.count


def phases_of(options: TrainOptions) -> tuple[Phase, ...]:
    """What a run goes through, in order."""
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
            epochs_before=options.training.epoch,
            first_trained=tuning.fine_tune_first_trainable_layer,
            length="--fine-tune-epoch",
            accumulation="--fine-tune-gradient-accumulation",
        ),
    )


def _fine_tuned(options: TrainOptions) -> TrainOptions:
    """Plain sgd on what validation sees; weight decay, label smoothing and number formats are those of the run.

    The rate changes at every update: a frequency for hundreds of epochs would hold it still for the few of this phase.
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
        numerics=replace(options.numerics, initial_loss_scaling=None),  # the stepped scale has arrived
        augmentation=replace(
            options.augmentation, augment="none", mixup_alpha=0.0, cutmix_lambda_low=0.0, cutmix_lambda_high=0.0
        ),
        averaging=replace(options.averaging, weight_avg_strategy="none"),
        parallel=replace(options.parallel, offload_optimizer=False),  # plain sgd has no state
        logging=replace(options.logging, profile=False),  # the trace is that of the first phase
    )
