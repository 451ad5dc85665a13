"""What may not be combined: one table of rules, and the derived facts that rules and runs share."""

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, Literal

from falconet.config.commands import TrainOptions
from falconet.config.options import (
    ALLOWED,
    BOUND_TO_WEIGHTS,
    MODELS,
    Augmentation,
    Inference,
    Model,
    Numerics,
    Parallel,
    further_average,
    is_rate_share,
    record_keys,
    resolutions,
)
from falconet.errors import ConfigError, did_you_mean

PHOTOS = ("imagenet", "folder")  # kinds of data that are encoded images of many sizes
_AUTO = re.compile(r"auto:\d{1,4}")


def check(options: object, *, but: Collection["Rule"] = ()) -> None:
    """Raise ConfigError for the first rule that the options break; `but`: rules that they need not follow yet."""
    for sections, rule in RULES:
        holds = rule not in but and all(hasattr(options, section) for section in sections)
        problem = rule(options) if holds else None
        if problem:
            raise ConfigError(problem)


# What options mean together.


def only_planned(options: Any) -> bool:
    """Whether a run is only planned, on data whose published size is known."""
    return options.data.data == "imagenet" and hasattr(options, "run") and options.run.plan


def normalises_by_dataset(options: Any) -> bool:
    """Whether pixels are normalised by numbers of the whole dataset."""
    return bool(options.data.normalization_location != "none" and options.data.normalization == "deviation")


def is_stored(options: Any) -> bool:
    """Whether images are read, not made up."""
    return options.data.data not in ("generated", "synthetic")


def crops(options: Any) -> bool:
    """Whether images may be cropped at random."""
    return options.augmentation.augment in ("auto", "crop-flip")


def crops_photos(options: Any) -> bool:
    """Whether photos are cropped at random."""
    return options.data.data in PHOTOS and crops(options)


def boxes_used(options: Any) -> Literal["no", "if there", "yes"]:
    """Whether these crops look at annotated objects."""
    if not crops_photos(options):
        return "no"
    if options.augmentation.use_bbox_info:
        return "yes"
    return "if there" if options.augmentation.use_bbox_info_if_there else "no"


def objects_by_area(options: Any) -> bool:
    """Whether the overlap with objects can be chosen; TensorFlow's draw fixes it."""
    return boxes_used(options) != "no" and options.augmentation.crop_draw == "area"


def uses_cutmix(augmentation: Augmentation) -> bool:
    return (augmentation.cutmix_lambda_low, augmentation.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def least_micro_batch(augmentation: Augmentation) -> int:
    """Images of a micro-batch, so that mixing finds partners in it."""
    return 2 if uses_cutmix(augmentation) or augmentation.mixup_alpha > 0 else 1


def validates_whole(options: Any) -> bool:
    """Whether one process validates with the whole model; stages pass on micro-batches."""
    return options.validation.validation_mode != "none" and not options.parallel.pipeline_splits


def stages_of(section: Parallel | Inference) -> int:
    """Stages of one replica that the options ask for."""
    splits = section.pipeline_splits
    return int(splits[0][5:]) if splits and _AUTO.fullmatch(splits[0]) else len(splits) + 1


def recompute_mode(numerics: Numerics, parallel: Parallel) -> Literal["none", "auto", "manual"]:
    """The mode that the options ask for, the originals' flag included; pipeline stages recompute by default."""
    if numerics.recompute_mode is not None:
        return numerics.recompute_mode
    if not (numerics.enable_recompute or numerics.memory_budget is not None or parallel.pipeline_splits):
        return "none"
    return "manual" if numerics.recompute_checkpoints else "auto"


def is_scaled(options: TrainOptions) -> bool:
    """Whether updates use the loss scale and the half-precision update rules."""
    numerics = options.numerics
    asked = numerics.auto_loss_scaling or numerics.loss_scaling != 1.0 or numerics.initial_loss_scaling is not None
    return asked or options.machine.precision not in ("32.32", "bf16.32", "auto")


def averages(options: TrainOptions) -> bool:
    """Whether checkpoints are averaged after training."""
    return options.averaging.weight_avg_strategy != "none"


# Rules: each returns what is wrong, in one line, or None.


def unknown_model(options: Any) -> str | None:
    name = options.model.model
    if name in MODELS or name.startswith("timm:"):
        return None
    meant = did_you_mean(name, MODELS) or "; `falconet models` lists them, timm:NAME takes any other"
    return f"--model: '{name}' is not a model{meant}"


def _option_of_another_family(options: Any) -> str | None:
    """Refuse an option of one family for a model of another."""
    model = options.model
    name = model.model
    residual = name.startswith(("resnet", "resnext"))
    families = {
        "efficientnet_": (name.startswith("efficientnet"), "an EfficientNet"),
        "proxy_": (name.startswith("efficientnet"), "an EfficientNet"),
        "resnext_": (name.startswith("resnext"), "a ResNeXt"),
        "resnext_wide": (name.startswith("resnext") and name.endswith("-cifar"), "a ResNeXt for CIFAR"),
        "squeezenet_": (name.startswith("squeezenet"), "a SqueezeNet"),
        "speednet_": (name.startswith("speednet"), "a SpeedNet"),
        "mobilenet_": (name.startswith("mobilenet-v3"), "a MobileNetV3"),
        "zero_init": (residual, "a ResNet"),
        "bottleneck_": (residual and not name.endswith("-cifar"), "a ResNet"),
        "shortcut_": (residual, "a ResNet"),
        "stem": (residual, "a ResNet"),
    }
    for field in fields(model):
        for prefix, (is_one, kind) in families.items():
            if field.name.startswith(prefix) and not is_one and getattr(model, field.name) != field.default:
                return f"--{field.name.replace('_', '-')}: '{name}' is not {kind}"
    return None


def _speednet_has_three_stages(options: Any) -> str | None:
    widths = options.model.speednet_widths
    return f"--speednet-widths: got {len(widths)}, expected three" if len(widths) not in (0, 3) else None


def _proxy_norm_follows_a_norm(options: Any) -> str | None:
    if options.model.proxy_norm and options.model.norm_type == "none":
        return "--proxy-norm: contradicts --norm-type none, because it follows a norm; expected --norm-type group"
    return None


def _proxy_norm_without_lars(options: Any) -> str | None:
    """As in the original, which never tried it with layer-wise rates."""
    if options.model.proxy_norm and options.optimizer.optimizer == "lars":
        return "--proxy-norm: does not work with --optimizer lars; expected sgd, rmsprop_tf or adamw"
    return None


def _photos_need_a_folder(options: Any) -> str | None:
    kind = options.data.data
    if kind in PHOTOS and options.data.data_dir is None and not only_planned(options):
        return f"--data {kind}: needs --data-dir (or the environment variable DATA_DIR), a folder of photos"
    return None


def _allowed_is_a_number(options: Any) -> str | None:
    allowed = options.data.bad_images_allowed
    if not ALLOWED.fullmatch(allowed):
        return f"--bad-images-allowed: got '{allowed}', expected a number, a percentage such as 2%, or auto"
    return None


def _keys_have_names(options: Any) -> str | None:
    keys = options.data.tfrecord_keys
    if keys is not None and record_keys(keys) is None:
        return f"--tfrecord-keys: got '{keys}', expected image=KEY,label=KEY"
    return None


def _bytes_are_not_normalised(options: Any) -> str | None:
    if options.data.normalization_location == "host" and options.data.eight_bit_io:
        return (
            "--normalization-location host: contradicts --eight-bit-io, which copies pixels as bytes; expected device,"
            " or --no-eight-bit-io as well"
        )
    return None


def _colours_are_three(options: Any) -> str | None:
    for name in ("pixel_mean", "pixel_deviation"):
        count = len(getattr(options.data, name))
        if count not in (0, 3):
            return f"--{name.replace('_', '-')}: got {count} numbers, expected 3, for red, green and blue"
    return None


def unfit_for_weights(model: Model) -> str | None:
    """Name the option that published weights do not fit, not the tensors whose shape it changes."""
    needs = {  # what gives an option an effect; without that, it fits any weights
        "norm-num-groups": model.norm_type == "group",
        "norm-grouping": model.norm_type == "group",
        "proxy-epsilon": model.proxy_norm,
    }
    for name in BOUND_TO_WEIGHTS:
        field = name.replace("-", "_")
        if getattr(model, field) != getattr(Model, field) and needs.get(name, True):
            return (
                f"--{name}: the published weights of {model.model} were trained without it; expected --pretrained none,"
                f" which starts with random weights, or --pretrained PATH, a file that was trained with --{name}"
            )
    return None


def _published_weights_fit(options: Any) -> str | None:
    """Of `auto` this is checked when the weights are found: not every model has some."""
    section = options.training if hasattr(options, "training") else options.pretrained
    return unfit_for_weights(options.model) if section.pretrained == "published" else None


def _weights_from_one_place(options: Any) -> str | None:
    training = options.training
    if training.init_path is not None and training.pretrained not in ("none", "auto"):
        return "--pretrained: contradicts --init-path, which also gives the weights to start with; expected one of them"
    return None


def _sampling_is_bilinear(options: Any) -> str | None:
    if options.data.interpolation != "bilinear" and not options.data.antialias:
        return f"--interpolation {options.data.interpolation}: contradicts --no-antialias; expected bilinear"
    return None


def _decoded_pixels_are_bytes(options: Any) -> str | None:
    if options.data.decode_device == "cuda" and not options.data.eight_bit_io:
        return "--decode-device cuda: contradicts --no-eight-bit-io, because pixels stay bytes there; expected cpu"
    return None


def _mixing_needs_partners(options: Any) -> str | None:
    size, least = options.data.micro_batch, least_micro_batch(options.augmentation)
    asked_by = "--cutmix-lambda-low and -high" if uses_cutmix(options.augmentation) else "--mixup-alpha"
    return f"--micro-batch-size: got {size}, expected at least {least} for {asked_by}" if size < least else None


def _found_batch_is_the_fine_tunings_too(options: Any) -> str | None:
    tuning = options.fine_tuning
    given = tuning.fine_tune_gradient_accumulation != "auto" and tuning.fine_tune_micro_batch_size == "auto"
    if options.data.micro_batch_size == "auto" and tuning.half_res_training and given:
        return "--micro-batch-size auto: --fine-tune-gradient-accumulation needs --fine-tune-micro-batch-size as well"
    return None


def _stages_do_not_search(options: Any) -> str | None:
    if options.data.micro_batch_size == "auto" and options.parallel.pipeline_splits:
        return "--micro-batch-size auto: does not work with --pipeline-splits; expected a number"
    return None


def pixels_change(augmentation: Augmentation) -> str | None:
    """The first option that asks for changed pixels."""
    asked = {
        "auto-augment": augmentation.auto_augment != "none",
        "color-jitter": augmentation.color_jitter > 0,
        "random-erasing": augmentation.random_erasing > 0,
        "cutout": augmentation.cutout > 0,
        "vertical-flip": augmentation.vertical_flip > 0,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def _changed_pixels_are_bytes(options: Any) -> str | None:
    asked = pixels_change(options.augmentation)
    if asked is None or options.data.eight_bit_io:
        return None
    return f"--{asked}: changes pixels on the device, which gets values; expected --eight-bit-io"


def _resident_images_are_bytes_of_one_size(options: Any) -> str | None:
    """What is kept on the device is copied there once, before it is known how an image moves."""
    if options.data.dataset_location == "host":
        return None
    if options.data.data in PHOTOS:
        return (
            f"--dataset-location: got 'device', but --data {options.data.data} is decoded photo by photo; expected"
            " --data cifar10, cifar100, digits or generated"
        )
    if not options.data.eight_bit_io:
        return "--dataset-location: got 'device', which keeps bytes; expected --eight-bit-io"
    if options.augmentation.augment == "crop-flip":
        return "--augment: got 'crop-flip', which resizes; expected shift-flip with --dataset-location device"
    return None


def _cutmix_bounds_are_ordered(options: Any) -> str | None:
    low, high = options.augmentation.cutmix_lambda_low, options.augmentation.cutmix_lambda_high
    if low > high:
        return f"--cutmix-lambda-low: got {low:g}, expected at most --cutmix-lambda-high, which is {high:g}"
    return None


def _one_choice_of_weights(options: Any) -> str | None:
    training = options.training
    if training.freeze is not None and training.trainable:
        return "--freeze: contradicts --trainable, which names what is trained; expected one of the two"
    if training.freeze is not None and options.fine_tuning.half_res_training:
        return "--freeze: does not work with --half-res-training; expected --fine-tune-first-trainable-layer"
    if training.unfreeze_after is not None and training.freeze is None:
        return "--unfreeze-after: needs --freeze, which says what is frozen until then"
    if training.freeze_after is not None and training.freeze is None:
        return "--freeze-after: needs --freeze, which says what is frozen from then on"
    if training.freeze_after is not None and training.unfreeze_after is not None:
        return "--freeze-after: contradicts --unfreeze-after; expected one of the two"
    return None


def _unfreezing_is_undivided(options: Any) -> str | None:
    """The passes of stages, and the norms that sharded lars sums, have one set of weights."""
    for name in ("unfreeze_after", "freeze_after"):
        if getattr(options.training, name) is not None and options.parallel.pipeline_splits:
            option = f"--{name.replace('_', '-')}"
            return f"{option}: does not work with --pipeline-splits; expected --freeze alone, or one stage"
    if options.training.freeze_after is not None and options.optimizer.optimizer == "sgd_combined":
        return "--freeze-after: does not work with --optimizer sgd_combined, whose velocities would go on; expected sgd"
    for name, asked in (
        ("--freeze-after", options.training.freeze_after is not None),
        ("--unfreeze-after", options.training.unfreeze_after is not None),
        ("--layer-decay", options.optimizer.layer_decay != 1.0),
    ):
        if asked and options.optimizer.optimizer == "lars" and options.parallel.enable_optimizer_rts:
            return f"{name}: does not work with --optimizer lars and --enable-optimizer-rts; expected another optimizer"
    return None


def warmup_ends_before_training(options: Any) -> str | None:
    warmup, epochs = options.learning_rate.warmup_epoch, options.training.epoch
    if epochs == "auto" or warmup <= epochs or options.training.updates is not None:  # else it depends on the data
        return None
    if epochs < 1:  # the warm-up may be the default
        return f"--epoch: got {epochs:g}, but --warmup-epoch is {warmup:g}; expected --warmup-epoch {epochs / 10:g} too"
    return f"--warmup-epoch: got {warmup:g}, expected at most --epoch, which is {epochs}"


def _one_factor_per_drop(options: Any) -> str | None:
    rate = options.learning_rate
    factors, drops = len(rate.lr_decay), len(rate.lr_epoch_decay) + len(rate.lr_drop_shares)
    if factors == 1 or (factors > 1 and factors == drops and rate.lr_schedule == "step"):
        return None
    several = drops > 1 and rate.lr_schedule == "step"
    expected = f"one, or {drops}, one for each of --lr-epoch-decay" if several else "one"
    return f"--lr-decay: got {factors} factors, expected {expected}"


def _averaging_needs_checkpoints_kept(options: Any) -> str | None:
    kept, last = options.checkpoints.checkpoints_kept, options.averaging.weight_avg_N
    if options.averaging.weight_avg_strategy == "none" or not isinstance(kept, int):
        return None
    if options.averaging.weight_avg_epochs is not None:
        return f"--checkpoints-kept: got {kept}, expected all or auto, because --weight-avg-epochs averages older ones"
    if last in ("all", -1):
        return f"--checkpoints-kept: got {kept}, expected all, because --weight-avg-N all averages every checkpoint"
    if last > kept:
        return f"--weight-avg-N: got {last}, expected at most --checkpoints-kept, which is {kept}"
    return None


def _further_averages_are_known(options: Any) -> str | None:
    for text in options.averaging.weight_avg_also:
        if further_average(text) is None:
            known = "mean:N, mean:all, epochs:N or exponential:DECAY"
            return f"--weight-avg-also: got '{text}', expected {known}, such as mean:5"
    if options.averaging.weight_avg_also and options.averaging.weight_avg_strategy == "none":
        return "--weight-avg-also: adds to --weight-avg-strategy, which is none; expected mean or exponential"
    kept = options.checkpoints.checkpoints_kept
    if options.averaging.weight_avg_also and isinstance(kept, int):
        return f"--checkpoints-kept: got {kept}, expected all or auto, because --weight-avg-also averages older ones"
    return None


def _phases_are_whole_epochs(options: Any) -> str | None:
    training = options.training
    if training.has_whole_epochs:
        return None
    given, expected = f"--epoch {training.epoch}", "a whole number"
    if training.updates is not None:
        given, expected = "--updates", "--epoch"
    if options.fine_tuning.half_res_training:
        return f"{given}: does not work with --half-res-training, whose phases are whole epochs; expected {expected}"
    if options.numerics.initial_loss_scaling is not None:
        why = "which doubles after whole epochs"
        return f"{given}: does not work with --initial-loss-scaling, {why}; expected {expected}"
    return None


def _phases_do_not_end_early(options: Any) -> str | None:
    if options.training.early_stopping is not None and options.fine_tuning.half_res_training:
        return "--early-stopping: does not work with --half-res-training, whose phases have fixed lengths"
    return None


def _resolutions_are_in_order(options: Any) -> str | None:
    given = options.fine_tuning.resolution_schedule
    found = resolutions(given)
    if found is None:
        return (
            f"--resolution-schedule: got '{' '.join(given)}', expected sides in pixels and the epochs they start with,"
            " in order and from epoch 1, such as 128:1 176:13"
        )
    if found and options.fine_tuning.half_res_training:
        return "--resolution-schedule: contradicts --half-res-training, which has a schedule of its own"
    if found and options.data.dataset_location == "device":
        return "--resolution-schedule: contradicts --dataset-location device, which keeps images as they are"
    if found and options.parallel.pipeline_splits:
        return "--resolution-schedule: does not work with --pipeline-splits, whose stages expect images of one size"
    return None


def _fine_tuning_is_complete(options: Any) -> str | None:
    if not options.fine_tuning.half_res_training:
        return None
    if options.fine_tuning.fine_tune_epoch is None:
        return "--half-res-training: needs --fine-tune-epoch, the epochs at full size that follow"
    if not averages(options):
        return (
            "--half-res-training: needs --weight-avg-strategy mean or exponential, because fine-tuning starts with the"
            " average of the checkpoints"
        )
    return None


def _recompute_is_on_or_off(options: Any) -> str | None:
    numerics = options.numerics
    mode = recompute_mode(numerics, options.parallel)
    if numerics.recompute_mode == "none" and numerics.enable_recompute:
        return "--recompute-mode none: contradicts --enable-recompute; expected auto or manual, or neither option"
    if mode == "manual" and not numerics.recompute_checkpoints:
        return "--recompute-mode manual: needs --recompute-checkpoints, regular expressions of the layers to keep"
    if mode == "manual" and numerics.memory_budget is not None:
        return "--memory-budget: is for --recompute-mode auto, which --recompute-checkpoints contradicts"
    return None


def _one_kind_of_loss_scale(options: Any) -> str | None:
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling and initial not in (None, final):
        return f"--auto-loss-scaling: contradicts --initial-loss-scaling {initial:g}, which asks for a stepped scale"
    return None


def _sharded_lars_has_one_type(options: Any) -> str | None:
    """Layer norms are summed over the replicas in one message, which holds one type; normalisation layers are fp32."""
    lars = options.optimizer
    mixed = options.machine.precision in ("16.16", "bf16.bf16") and lars.weight_decay_exclude == "nothing"
    if options.parallel.enable_optimizer_rts and lars.optimizer == "lars" and mixed and not lars.lars_skip:
        return (
            f"--enable-optimizer-rts: does not work with --optimizer lars, --precision {options.machine.precision} and"
            " --weight-decay-exclude nothing; expected norms or vectors"
        )
    return None


def _only_training_chooses_a_precision(options: Any) -> str | None:
    if options.machine.precision == "auto" and not hasattr(options, "training"):
        return "--precision auto: is for train, which stores what it chose; expected 32.32, bf16.32 or another regime"
    return None


def _muon_has_whole_weights(options: Any) -> str | None:
    """An orthogonal step depends on all elements of a weight, and on all weights of a shape at once."""
    if options.optimizer.optimizer != "muon":
        return None
    for name in ("enable_optimizer_rts", "offload_optimizer"):
        if getattr(options.parallel, name):
            return f"--{name.replace('_', '-')}: does not work with --optimizer muon; expected another optimizer"
    return None


def _rate_shares_are_readable(options: Any) -> str | None:
    for text in options.optimizer.lr_share:
        if not is_rate_share(text):
            return f"--lr-share: got '{text}', expected PATTERN=FACTOR with a factor above 0, such as fc=10"
        if options.optimizer.optimizer == "lars" and options.parallel.enable_optimizer_rts:
            return (
                "--lr-share: does not work with --optimizer lars and --enable-optimizer-rts; expected another optimizer"
            )
    return None


def _state_can_be_offloaded(options: Any) -> str | None:
    if not options.parallel.offload_optimizer:
        return None
    rule = options.optimizer.optimizer
    if rule == "sgd_combined" and not is_scaled(options):
        return (
            "--offload-optimizer: does not work with --optimizer sgd_combined, whose velocity is the gradient itself"
            " and stays on the device; expected sgd"
        )
    if rule == "lars" and options.parallel.enable_optimizer_rts:
        return (
            "--offload-optimizer: does not work with --enable-optimizer-rts and --optimizer lars, whose norms are sums"
            " over all replicas; expected only one of the two options"
        )
    return None


def _resuming_needs_a_run_folder(options: Any) -> str | None:
    if options.run.resume and hasattr(options, "input"):
        return "--resume: is for train; restore always continues from --checkpoint-input-path"
    if options.run.resume and options.run.run_dir == "auto":
        return "--resume: needs --run-dir, the folder of the interrupted run"
    return None


def _url_or_server(options: Any) -> str | None:
    if options.load.url is not None and options.load.server != "falconet":
        return f"--server {options.load.server}: contradicts --url, whose server is already running"
    return None


def _splits_are_layers_or_auto(options: Any) -> str | None:
    return _wrong_splits(options.parallel.pipeline_splits)


def _splits_of_predictions_are_layers_or_auto(options: Any) -> str | None:
    return _wrong_splits(options.inference.pipeline_splits)


def _wrong_splits(splits: tuple[str, ...]) -> str | None:
    expected = "layers, such as layer2/0 layer3/0, or auto:N alone, with N at least 2, or nothing for one stage"
    for split in splits:
        if split.startswith("auto") and (len(splits) > 1 or not (_AUTO.fullmatch(split) and int(split[5:]) >= 2)):
            return f"--pipeline-splits: got '{' '.join(splits)}', expected {expected}"
    return None


def _one_pass_batchnorm_is_local(options: Any) -> str | None:
    span, model = options.parallel.batchnorm_span, options.model
    if span > 1 and model.disable_stable_batchnorm and model.norm_type == "batch":
        return (
            f"--batchnorm-span: got {span}, expected 1 with --disable-stable-batchnorm, whose single pass sees only one"
            " replica"
        )
    return None


def _interleaving_needs_micro_batches(options: Any) -> str | None:
    stages, accumulation = stages_of(options.parallel), options.training.gradient_accumulation
    if options.parallel.pipeline_schedule == "interleaved" and accumulation < stages:
        return (
            f"--gradient-accumulation: got {accumulation}, expected at least {stages}, the number of stages,"
            " for --pipeline-schedule interleaved; --pipeline-schedule grouped takes any number"
        )
    return None


def _stages_see_one_view(options: Any) -> str | None:
    if options.parallel.pipeline_splits and options.views.tta != "none":
        return "--tta: does not work with --pipeline-splits, whose stages validate one view of an image"
    return None


def _stages_have_no_memory_budget(options: Any) -> str | None:
    if options.parallel.pipeline_splits and options.numerics.memory_budget is not None:
        return "--memory-budget: does not work with --pipeline-splits, whose stages recompute every block anyway"
    return None


def _one_proportion_per_stage(options: Any) -> str | None:
    shares = len(options.workspace.available_memory_proportion)
    stages = stages_of(options.parallel)
    if shares in (0, 1, stages):
        return None
    expected = f"one, or {stages}, one per stage" if stages > 1 else "one, because there is one stage"
    return f"--available-memory-proportion: got {shares} values, expected {expected}"


def _histograms_need_a_sink(options: Any) -> str | None:
    logging = options.logging
    if logging.weight_histogram and not (logging.tensorboard or logging.wandb or logging.aim):
        return "--weight-histogram: needs --tensorboard, --wandb or --aim, where histograms go"
    return None


def _temporary_folder_has_no_name(options: Any) -> str | None:
    if not options.run.temporary:
        return None
    if hasattr(options, "input"):
        return "--temporary: is for train; restore continues a run that already has its folder"
    for name, folder in (
        ("run-dir", None if options.run.run_dir == "auto" else options.run.run_dir),
        ("checkpoint-output-path", options.checkpoints.checkpoint_output_path),
    ):
        if folder is not None:
            return f"--temporary: contradicts --{name} {folder}, which is kept; expected only one of the two"
    return None


def _restore_has_its_weights(options: Any) -> str | None:
    if options.training.init_path is not None:
        return "--init-path: is for train; restore continues with the checkpoint's weights"
    if options.training.pretrained not in ("none", "auto"):
        return "--pretrained: is for train; restore continues with the checkpoint's weights"
    return None


def _predictions_have_one_form(options: Any) -> str | None:
    if options.predict.json and options.predict.csv:
        return "--json: contradicts --csv; expected only one of the two"
    return None


def _predictions_are_of_one_checkpoint(options: Any) -> str | None:
    if options.table.predictions is not None and options.choice.checkpoint == "all":
        return "--predictions: takes one checkpoint, got --checkpoint all; expected best, last or an epoch"
    return None


def _tables_are_csv(options: Any) -> str | None:
    path = options.table.output
    if path is not None and path.suffix == ".json":
        return f"--output: got {path}, expected a CSV file; the details are written as JSON beside it"
    return None


def _int8_is_onnx_runtimes(options: Any) -> str | None:
    if options.serving.int8 and options.serving.engine not in ("auto", "onnxruntime"):
        return (
            f"--int8: contradicts --engine {options.serving.engine}; expected onnxruntime, whose accuracy is measured"
        )
    return None


def _int8_is_onnx(options: Any) -> str | None:
    if not options.export.int8:
        return None
    if options.export.format != "onnx":
        return f"--int8: --format {options.export.format} is not written in int8; expected --format onnx"
    if options.export.half:
        return "--int8: contradicts --half; expected only one of the two"
    return None


Rule = Callable[[Any], str | None]
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (  # the sections that a rule reads, and the rule
    (("model",), unknown_model),
    (("model",), _option_of_another_family),
    (("model",), _speednet_has_three_stages),
    (("model",), _proxy_norm_follows_a_norm),
    (("model", "optimizer"), _proxy_norm_without_lars),
    (("data",), _photos_need_a_folder),
    (("data",), _allowed_is_a_number),
    (("data",), _keys_have_names),
    (("data",), _bytes_are_not_normalised),
    (("data",), _colours_are_three),
    (("data",), _sampling_is_bilinear),
    (("training", "model"), _published_weights_fit),
    (("pretrained", "model"), _published_weights_fit),
    (("training",), _weights_from_one_place),
    (("data",), _decoded_pixels_are_bytes),
    (("augmentation",), _cutmix_bounds_are_ordered),
    (("augmentation", "data"), _changed_pixels_are_bytes),
    (("augmentation", "data"), _mixing_needs_partners),
    (("training", "fine_tuning"), _one_choice_of_weights),
    (("training", "optimizer", "parallel"), _unfreezing_is_undivided),
    (("learning_rate", "training"), warmup_ends_before_training),
    (("learning_rate",), _one_factor_per_drop),
    (("logging",), _histograms_need_a_sink),
    (("averaging", "checkpoints"), _averaging_needs_checkpoints_kept),
    (("averaging", "checkpoints"), _further_averages_are_known),
    (("fine_tuning", "training", "numerics"), _phases_are_whole_epochs),
    (("fine_tuning", "training"), _phases_do_not_end_early),
    (("fine_tuning", "parallel", "data"), _resolutions_are_in_order),
    (("fine_tuning", "averaging"), _fine_tuning_is_complete),
    (("fine_tuning", "data"), _found_batch_is_the_fine_tunings_too),
    (("parallel", "data"), _stages_do_not_search),
    (("numerics", "parallel"), _recompute_is_on_or_off),
    (("numerics",), _one_kind_of_loss_scale),
    (("machine",), _only_training_chooses_a_precision),
    (("data", "augmentation"), _resident_images_are_bytes_of_one_size),
    (("parallel", "optimizer"), _muon_has_whole_weights),
    (("parallel", "optimizer"), _rate_shares_are_readable),
    (("parallel", "numerics", "optimizer", "machine"), _state_can_be_offloaded),
    (("parallel", "optimizer", "machine"), _sharded_lars_has_one_type),
    (("load",), _url_or_server),
    (("parallel",), _splits_are_layers_or_auto),
    (("parallel", "model"), _one_pass_batchnorm_is_local),
    (("parallel", "training"), _interleaving_needs_micro_batches),
    (("parallel", "numerics"), _stages_have_no_memory_budget),
    (("parallel", "views"), _stages_see_one_view),
    (("parallel", "workspace"), _one_proportion_per_stage),
    (("run",), _resuming_needs_a_run_folder),
    (("run", "checkpoints"), _temporary_folder_has_no_name),
    (("input", "training"), _restore_has_its_weights),
    (("predict",), _predictions_have_one_form),
    (("table", "choice"), _predictions_are_of_one_checkpoint),
    (("table",), _tables_are_csv),
    (("export",), _int8_is_onnx),
    (("serving",), _int8_is_onnx_runtimes),
    (("inference",), _splits_of_predictions_are_layers_or_auto),
)
