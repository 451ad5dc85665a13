"""The phases of a run: sizes, and what each one does differently."""

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_line
from falconet.config.values import reduced_size
from falconet.errors import ConfigError
from falconet.train.plan import phases_of

LINE = "--half-res-training --fine-tune-epoch 2 --weight-avg-strategy mean"
# Full side, reduced side: the originals' two, and 5/7 to the nearest multiple of 4 (128 x 5/7 = 91.4; 32 x 5/7 = 22.9).
SIDES = [(224, 160), (380, 252), (128, 92), (240, 172), (32, 24), (16, 12), (8, 4), (4, 4), (1, 4)]


def loaded(line):
    return load(TrainOptions, from_line(line.split(), options_of(TrainOptions)))


@pytest.mark.parametrize(("full", "side"), SIDES)
def test_the_side_at_half_resolution(full, side):
    assert reduced_size(full) == side


def test_a_run_has_one_phase_with_unchanged_options():
    options = loaded("--epoch 7").options
    (phase,) = phases_of(options)
    assert phase.options is options
    assert (phase.is_last, phase.is_reduced, phase.epochs_before) == (True, False, 0)


def test_fine_tuning_is_plain_sgd_on_images_without_augmentation():
    options = loaded(
        f"{LINE} --epoch 7 --lr 1 --optimizer rmsprop_tf --momentum 0.8 --weight-decay 0.01 --ema-half-life 2"
        " --warmup-epoch 3 --lr-scheduler-freq 0.4 --lr-schedule step"
        " --mixup-alpha 0.1 --cutmix-lambda-low 0.2 --cutmix-lambda-high 0.7"
        " --micro-batch-size 40 --gradient-accumulation 3 --loss-scaling 128 --initial-loss-scaling 64"
        " --label-smoothing 0.1 --fine-tune-lr 0.3 --fine-tune-micro-batch-size 20 --fine-tune-gradient-accumulation 5"
        " --fine-tune-first-trainable-layer layer4/0"
    ).options
    first, second = phases_of(options)
    assert first.options is options
    assert (first.is_reduced, second.is_reduced) == (True, False)
    assert (second.epochs_before, second.first_trained) == (7, "layer4/0")
    tuned = second.options
    assert (tuned.training.epoch, tuned.training.gradient_accumulation, tuned.data.micro_batch_size) == (2, 5, 20)
    assert (tuned.optimizer.optimizer, tuned.optimizer.momentum, tuned.optimizer.ema_half_life) == ("sgd", 0.0, None)
    rate = tuned.learning_rate
    assert (rate.lr, rate.lr_schedule, rate.lr_scheduler_freq, rate.warmup_epoch) == (0.3, "cosine", 0.0, 0.0)
    mixing = tuned.augmentation
    assert (mixing.augment, mixing.mixup_alpha, mixing.cutmix_lambda_low, mixing.cutmix_lambda_high) == (
        "none",
        0,
        0,
        0,
    )
    assert (tuned.numerics.loss_scaling, tuned.numerics.initial_loss_scaling) == (128.0, None)
    assert (tuned.optimizer.weight_decay, mixing.label_smoothing) == (0.01, 0.1)


def test_the_second_phase_defaults_to_the_batches_of_the_first():
    _, second = phases_of(loaded(f"{LINE} --micro-batch-size 12 --gradient-accumulation 3").options)
    assert (second.options.data.micro_batch_size, second.options.training.gradient_accumulation) == (12, 3)


def test_fine_tuning_trains_what_the_first_phase_trains():
    first, second = phases_of(loaded(f"{LINE} --trainable fc").options)
    assert first.options.training.trainable == second.options.training.trainable == ("fc",)
    assert second.first_trained is None


REFUSED = {
    "--half-res-training --weight-avg-strategy mean": "--half-res-training: needs --fine-tune-epoch, the epochs at",
    "--half-res-training --fine-tune-epoch 1": "--half-res-training: needs --weight-avg-strategy mean or exponential",
    f"{LINE} --fine-tune-epoch 0": "--fine-tune-epoch: got '0', expected a whole number, at least 1",
    f"{LINE} --fine-tune-lr -1": "--fine-tune-lr: got '-1', expected a number, at least 0",
    f"{LINE} --fine-tune-micro-batch-size 0": "--fine-tune-micro-batch-size: got '0', expected a whole number, at",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items())
def test_a_mistake_gives_one_line(line, message):
    with pytest.raises(ConfigError) as raised:
        loaded(line)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
