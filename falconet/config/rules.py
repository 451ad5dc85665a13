"""What may not be combined about data; rules like those of `rules`, which calls them."""

import re
from collections.abc import Callable
from typing import Any, Literal

from falconet.config import options
from falconet.config.commands import TrainOptions
from falconet.config.options import (
    Augmentation,
    Numerics,
    Parallel,
    further_average,
    missing_for_fine_tuning,
    missing_sink,
)
from falconet.errors import ConfigError

PHOTOS = ("imagenet", "folder")  # kinds of data that are encoded images of many sizes


def folder_needs_a_place(options: Any) -> str | None:
    kind = options.data.data
    if kind in PHOTOS and options.data.data_dir is None and not only_planned(options):
        return f"--data {kind}: needs --data-dir (or the environment variable DATA_DIR), a folder with train/ and val/"
    return None


def only_planned(options: Any) -> bool:
    """Whether a run is planned and not made, on data whose published size is known."""
    return options.data.data == "imagenet" and hasattr(options, "run") and options.run.plan


def bytes_are_not_normalised_yet(options: Any) -> str | None:
    if options.data.normalization_location == "host" and options.data.eight_bit_io:
        return (
            "--normalization-location host: contradicts --eight-bit-io, which copies pixels; wanted device, or"
            " --no-eight-bit-io beside it"
        )
    return None


def colours_are_three(options: Any) -> str | None:
    for name in ("pixel_mean", "pixel_deviation"):
        count = len(getattr(options.data, name))
        if count not in (0, 3):
            return f"--{name.replace('_', '-')}: got {count} numbers, wanted 3, of red, green and blue"
    return None


def by_pixels(options: Any) -> bool:
    """Whether pixels are normalised by numbers of the whole data."""
    return bool(options.data.normalization_location != "none" and options.data.normalization == "deviation")


def decoded_there_is_not_copied(options: Any) -> str | None:
    if options.data.decode_device == "cuda" and not options.data.eight_bit_io:
        return "--decode-device cuda: contradicts --no-eight-bit-io: its pixels are never copied; wanted cpu"
    return None


def is_stored(options: Any) -> bool:
    """Whether images lie somewhere, and are not made up."""
    return options.data.data not in ("generated", "synthetic")


def crops_photos(options: Any) -> bool:
    """Whether random crops of photos are drawn."""
    return options.data.data in PHOTOS and options.augmentation.augment in ("auto", "crop-flip")


def crops(options: Any) -> bool:
    """Whether images may be cropped at random."""
    return options.augmentation.augment in ("auto", "crop-flip")


def objects_by_area(options: Any) -> bool:
    """Whether crops must overlap objects by a rule that can be chosen; TensorFlow's draw has its own."""
    return boxes_used(options) != "no" and options.augmentation.crop_draw == "area"


def boxes_used(options: Any) -> Literal["no", "if there", "yes"]:
    """Whether these crops look at annotated objects."""
    if not crops_photos(options):
        return "no"
    if options.augmentation.use_bbox_info:
        return "yes"
    return "if there" if options.augmentation.use_bbox_info_if_there else "no"


def validates_whole(options: Any) -> bool:
    """Whether one process validates with the whole model; stages hand on micro-batches."""
    return options.validation.validation_mode != "none" and not options.parallel.pipeline_splits


_AUTO = re.compile(r"auto:\d{1,4}")


def check(options: object) -> None:
    """Raise ConfigError for the first rule that the options break."""
    for sections, rule in RULES:
        problem = rule(options) if all(hasattr(options, section) for section in sections) else None
        if problem:
            raise ConfigError(problem)


def minimum_micro_batch(augmentation: Augmentation) -> tuple[int, str]:
    """The smallest micro-batch that the mixing needs, and the options that ask for it."""
    if uses_cutmix(augmentation):
        return 3, "--cutmix-lambda-low and -high"
    return (2, "--mixup-alpha") if augmentation.mixup_alpha > 0 else (1, "")


def uses_cutmix(augmentation: Augmentation) -> bool:
    return (augmentation.cutmix_lambda_low, augmentation.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def _mixing_needs_partners(options: Any) -> str | None:
    least, asked_by = minimum_micro_batch(options.augmentation)
    if options.data.micro_batch_size < least:
        return f"--micro-batch-size: got {options.data.micro_batch_size}, wanted at least {least} for {asked_by}"
    return None


def _cutmix_bounds_are_ordered(options: Any) -> str | None:
    low, high = options.augmentation.cutmix_lambda_low, options.augmentation.cutmix_lambda_high
    if low > high:
        return f"--cutmix-lambda-low: got {low:g}, wanted at most --cutmix-lambda-high, which is {high:g}"
    return None


def _warmup_ends_before_training(options: Any) -> str | None:
    warmup, epochs = options.learning_rate.warmup_epoch, options.training.epoch
    if warmup > epochs and options.training.updates is None:  # else the data decides on the epochs
        return f"--warmup-epoch: got {warmup:g}, wanted at most --epoch, which is {epochs}"
    return None


def _factors_are_of_drops(options: Any) -> str | None:
    rate = options.learning_rate
    factors, drops = len(rate.lr_decay), len(rate.lr_epoch_decay) + len(rate.lr_drop_shares)
    if factors == 1 or (factors > 1 and factors == drops and rate.lr_schedule == "step"):
        return None
    wanted = f"one, or {drops}, one for each of --lr-epoch-decay" if drops > 1 and rate.lr_schedule == "step" else "one"
    return f"--lr-decay: got {factors} factors, wanted {wanted}"


def _averaging_needs_checkpoints_kept(options: Any) -> str | None:
    kept, last = options.checkpoints.checkpoints_kept, options.averaging.weight_avg_N
    if options.averaging.weight_avg_strategy == "none" or not isinstance(kept, int):
        return None
    if last in ("all", -1):
        return f"--checkpoints-kept: got {kept}, wanted all, because --weight-avg-N all averages every checkpoint"
    if last > kept:
        return f"--weight-avg-N: got {last}, wanted at most --checkpoints-kept, which is {kept}"
    return None


def _further_averages_are_known(options: Any) -> str | None:
    for text in options.averaging.weight_avg_also:
        if further_average(text) is None:
            return f"--weight-avg-also: got '{text}', wanted mean:N, mean:all or exponential:DECAY, such as mean:5"
    if options.averaging.weight_avg_also and options.averaging.weight_avg_strategy == "none":
        return "--weight-avg-also: is for further averages; wanted the first one by --weight-avg-strategy"
    kept = options.checkpoints.checkpoints_kept
    if options.averaging.weight_avg_also and isinstance(kept, int):
        return f"--checkpoints-kept: got {kept}, wanted all or auto, because --weight-avg-also averages older ones"
    return None


def _phases_are_of_epochs(options: Any) -> str | None:
    if options.training.updates is not None and options.fine_tuning.half_res_training:
        return "--updates: not with --half-res-training, whose phases are whole epochs; wanted --epoch"
    if options.training.updates is not None and options.numerics.initial_loss_scaling is not None:
        return "--updates: not with --initial-loss-scaling, which doubles after whole epochs; wanted --epoch"
    return None


def _fine_tuning_is_whole(options: Any) -> str | None:
    needs = missing_for_fine_tuning(options.fine_tuning, averages=averages(options))
    return f"--half-res-training: needs {needs}" if needs else None


def _recompute_is_on_or_off(options: Any) -> str | None:
    numerics = options.numerics
    mode = recompute_mode(numerics, options.parallel)
    if numerics.recompute_mode == "none" and numerics.enable_recompute:
        return "--recompute-mode none: contradicts --enable-recompute; wanted auto or manual, or neither option"
    if mode == "manual" and not numerics.recompute_checkpoints:
        return "--recompute-mode manual: needs --recompute-checkpoints, regular expressions of layers to keep"
    if mode == "manual" and numerics.memory_budget is not None:
        return "--memory-budget: is for --recompute-mode auto, which --recompute-checkpoints contradicts"
    return None


def _scale_is_of_one_kind(options: Any) -> str | None:
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling and initial not in (None, final):
        return f"--auto-loss-scaling: contradicts --initial-loss-scaling {initial:g}, which asks for a stepped scale"
    return None


def _divided_lars_adapts_one_type(options: Any) -> str | None:
    """Its norms are summed over the replicas in one message, which holds weights of one type; norms' are fp32."""
    lars = options.optimizer
    mixed = options.machine.precision in ("16.16", "bf16.bf16") and lars.weight_decay_exclude == "nothing"
    if options.parallel.enable_optimizer_rts and lars.optimizer == "lars" and mixed and not lars.lars_skip:
        return (
            f"--enable-optimizer-rts: not with --optimizer lars, --precision {options.machine.precision} and"
            " --weight-decay-exclude nothing; wanted norms or vectors"
        )
    return None


def _state_can_be_offloaded(options: Any) -> str | None:
    if not options.parallel.offload_optimizer:
        return None
    rule = options.optimizer.optimizer
    if rule == "sgd_combined" and not is_scaled(options):
        return (
            "--offload-optimizer: not with --optimizer sgd_combined, whose velocity is the gradient itself and stays on"
            " the device; wanted sgd"
        )
    if rule == "lars" and options.parallel.enable_optimizer_rts:
        return (
            "--offload-optimizer: not with --enable-optimizer-rts and --optimizer lars, whose norms are sums over all"
            " replicas; wanted one of the two options"
        )
    return None


def _resuming_needs_a_folder(options: Any) -> str | None:
    if options.run.resume and hasattr(options, "input"):
        return "--resume: is for train; restore goes on with --checkpoint-input-path in any case"
    if options.run.resume and options.run.run_dir == "auto":
        return "--resume: needs --run-dir, the folder in which an interrupted run is looked for"
    return None


def _processes_are_for_the_self_test(options: Any) -> str | None:
    if options.doctor.replicas != "auto" and not options.doctor.distributed:
        return f"--replicas {options.doctor.replicas}: is for --distributed, which starts processes; wanted both"
    return None


def _splits_are_of_one_kind(options: Any) -> str | None:
    splits = options.parallel.pipeline_splits
    wanted = "wanted layers, such as layer2/0 layer3/0, or auto:N alone, N at least 2"
    for split in splits:
        if split.startswith("auto") and (len(splits) > 1 or not (_AUTO.fullmatch(split) and int(split[5:]) >= 2)):
            return f"--pipeline-splits: got '{' '.join(splits)}', {wanted}"
    return None


def _one_pass_sees_one_replica(options: Any) -> str | None:
    span, model = options.parallel.batchnorm_span, options.model
    if span > 1 and model.disable_stable_batchnorm and model.norm_type == "batch":
        return (
            f"--batchnorm-span: got {span}, which --disable-stable-batchnorm cannot have: its one pass sees one"
            " replica; wanted 1, or no --disable-stable-batchnorm"
        )
    return None


def _interleaving_needs_micro_batches(options: Any) -> str | None:
    stages, accumulation = stages_of(options.parallel), options.training.gradient_accumulation
    if options.parallel.pipeline_schedule == "interleaved" and accumulation < stages:
        return (
            f"--gradient-accumulation: got {accumulation}, wanted at least {stages}, the stages, for"
            " --pipeline-schedule interleaved; grouped takes any number"
        )
    return None


def _stages_recompute_whole(options: Any) -> str | None:
    if options.parallel.pipeline_splits and options.numerics.memory_budget is not None:
        return "--memory-budget: does not go with --pipeline-splits, whose stages recompute every block as it is"
    return None


def _shares_fit_the_stages(options: Any) -> str | None:
    shares = len(options.workspace.available_memory_proportion)
    stages = stages_of(options.parallel)
    if shares in (0, 1, stages):
        return None
    wanted = f"one, or {stages}, one a stage" if stages > 1 else "one, as there is one stage"
    return f"--available-memory-proportion: got {shares} values, wanted {wanted}"


def stages_of(parallel: Parallel) -> int:
    """Stages of one replica that the options ask for."""
    splits = parallel.pipeline_splits
    return int(splits[0][5:]) if splits and _AUTO.fullmatch(splits[0]) else len(splits) + 1


def recompute_mode(numerics: Numerics, parallel: Parallel) -> Literal["none", "auto", "manual"]:
    """What was asked for, the flag of the originals included; stages of a pipeline recompute unless told not to."""
    if numerics.recompute_mode is not None:
        return numerics.recompute_mode
    if not (numerics.enable_recompute or numerics.memory_budget is not None or parallel.pipeline_splits):
        return "none"
    return "manual" if numerics.recompute_checkpoints else "auto"


def is_scaled(options: TrainOptions) -> bool:
    """Whether updates go through the loss scale and the half-precision update rules."""
    numerics = options.numerics
    asked = numerics.auto_loss_scaling or numerics.loss_scaling != 1.0 or numerics.initial_loss_scaling is not None
    return asked or options.machine.precision not in ("32.32", "bf16.32")


def averages(options: TrainOptions) -> bool:
    """Whether checkpoints are averaged after training."""
    return options.averaging.weight_avg_strategy != "none"


Rule = Callable[[Any], str | None]
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (  # the sections a rule reads, and the rule
    (("model",), options.unknown),
    (("model",), options.of_another_family),
    (("model",), options.proxy_without_norm),
    (("model", "optimizer"), options.proxy_with_lars),
    (("data",), folder_needs_a_place),
    (("data",), bytes_are_not_normalised_yet),
    (("data",), colours_are_three),
    (("data",), decoded_there_is_not_copied),
    (("augmentation",), _cutmix_bounds_are_ordered),
    (("augmentation", "data"), _mixing_needs_partners),
    (("learning_rate", "training"), _warmup_ends_before_training),
    (("learning_rate",), _factors_are_of_drops),
    (("logging",), lambda options: missing_sink(options.logging)),
    (("averaging", "checkpoints"), _averaging_needs_checkpoints_kept),
    (("averaging", "checkpoints"), _further_averages_are_known),
    (("fine_tuning", "training", "numerics"), _phases_are_of_epochs),
    (("fine_tuning", "averaging"), _fine_tuning_is_whole),
    (("numerics", "parallel"), _recompute_is_on_or_off),
    (("numerics",), _scale_is_of_one_kind),
    (("parallel", "numerics", "optimizer", "machine"), _state_can_be_offloaded),
    (("parallel", "optimizer", "machine"), _divided_lars_adapts_one_type),
    (("parallel",), _splits_are_of_one_kind),
    (("parallel", "model"), _one_pass_sees_one_replica),
    (("parallel", "training"), _interleaving_needs_micro_batches),
    (("parallel", "numerics"), _stages_recompute_whole),
    (("parallel", "workspace"), _shares_fit_the_stages),
    (("run",), _resuming_needs_a_folder),
    (("run", "checkpoints"), options.temporary_elsewhere),
    (("doctor",), _processes_are_for_the_self_test),
)
