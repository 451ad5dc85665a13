"""Rules: which options may not be combined, and what they need of one another, in one table."""

from collections.abc import Callable, Collection
from dataclasses import fields
from inspect import get_annotations

from falconet.config.commands import Command, RestoreOptions, TrainOptions
from falconet.config.facts import (
    AUTO_STAGES,
    PHOTO_KINDS,
    averages,
    is_scaled,
    least_micro_batch,
    only_planned,
    recompute_mode,
    stages_of,
    uses_cutmix,
)
from falconet.config.options import (
    MODELS,
    Augmentation,
    Averaging,
    Checkpoints,
    Data,
    FineTuning,
    LearningRate,
    Logging,
    Machine,
    Model,
    Numerics,
    Optimizer,
    Parallel,
    Run,
    Training,
    Views,
    Workspace,
)
from falconet.config.tool_options import Choices, Export, Inference, Load, Predict, Pretrained, Serving, Table
from falconet.config.values import ALLOWED, BOUND_TO_WEIGHTS, further_average, is_rate_share, record_keys, resolutions
from falconet.errors import ConfigError, did_you_mean


def check(options: object, *, but: Collection["Rule"] = ()) -> None:
    """Raise ConfigError for the first rule that the options break; `but`: rules that they need not follow yet."""
    for rule in RULES:
        read = None if rule in but else read_by(rule, options)
        problem = None if read is None else rule(**read)
        if problem:
            raise ConfigError(problem)


def read_by(reader: Callable[..., object], options: object) -> dict[str, object] | None:
    """The parts of the options that a function reads, by parameter; None if the options lack one of them.

    A part is a section of the options, or the options themselves, by the type that the parameter declares.
    """
    given: dict[type, object] = dict.fromkeys(type(options).__mro__, options)
    given |= {type(section): section for section in vars(options).values()}
    kinds = {name: kind for name, kind in get_annotations(reader).items() if name != "return"}
    return {name: given[kind] for name, kind in kinds.items()} if given.keys() >= set(kinds.values()) else None


# Rules: each returns what is wrong, in one line, or None. Its parameters are the sections that it reads, and it holds
# for the commands that have them all. Where the command itself matters, a parameter takes its options: those of one
# command, or `Command` for any.


def unknown_model(model: Model) -> str | None:
    name = model.model
    if name in MODELS or name.startswith("timm:"):
        return None
    meant = did_you_mean(name, MODELS) or "; `falconet models` lists them, timm:NAME takes any other"
    return f"--model: '{name}' is not a model{meant}"


def _option_of_another_family(model: Model) -> str | None:
    """Refuse an option of one family for a model of another."""
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


def _speednet_has_three_stages(model: Model) -> str | None:
    widths = model.speednet_widths
    return f"--speednet-widths: got {len(widths)}, expected three" if len(widths) not in (0, 3) else None


def _proxy_norm_follows_a_norm(model: Model) -> str | None:
    if model.proxy_norm and model.norm_type == "none":
        return "--proxy-norm: contradicts --norm-type none, because it follows a norm; expected --norm-type group"
    return None


def _proxy_norm_without_lars(model: Model, optimizer: Optimizer) -> str | None:
    """Refuse what the original never tried: proxy norm with layer-wise rates."""
    if model.proxy_norm and optimizer.optimizer == "lars":
        return "--proxy-norm: does not work with --optimizer lars; expected sgd, rmsprop_tf or adamw"
    return None


def _photos_need_a_folder(data: Data, options: Command) -> str | None:
    if data.data in PHOTO_KINDS and data.data_dir is None and not only_planned(options):
        return f"--data {data.data}: needs --data-dir (or the environment variable DATA_DIR), a folder of photos"
    return None


def _allowed_is_a_number(data: Data) -> str | None:
    allowed = data.bad_images_allowed
    if not ALLOWED.fullmatch(allowed):
        return f"--bad-images-allowed: got '{allowed}', expected a number, a percentage such as 2%, or auto"
    return None


def _keys_have_names(data: Data) -> str | None:
    keys = data.tfrecord_keys
    if keys is not None and record_keys(keys) is None:
        return f"--tfrecord-keys: got '{keys}', expected image=KEY,label=KEY"
    return None


def _bytes_are_not_normalised(data: Data) -> str | None:
    if data.normalization_location == "host" and data.eight_bit_io:
        return (
            "--normalization-location host: contradicts --eight-bit-io, which copies pixels as bytes; expected device,"
            " or --no-eight-bit-io as well"
        )
    return None


def _colours_are_three(data: Data) -> str | None:
    for name, numbers in (("pixel-mean", data.pixel_mean), ("pixel-deviation", data.pixel_deviation)):
        if len(numbers) not in (0, 3):
            return f"--{name}: got {len(numbers)} numbers, expected 3, for red, green and blue"
    return None


def unfit_for_weights(model: Model) -> str | None:
    """Name an option that published weights do not fit, rather than the tensors whose shapes it changes."""
    needs = {  # what an option needs to have an effect; without it, any weights fit
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


def _training_starts_with_weights_that_fit(training: Training, model: Model) -> str | None:
    """Check `published`; `auto` is checked when weights are found, because not every model has them."""
    return unfit_for_weights(model) if training.pretrained == "published" else None


def _published_weights_fit(pretrained: Pretrained, model: Model) -> str | None:
    return unfit_for_weights(model) if pretrained.pretrained == "published" else None


def _weights_from_one_place(training: Training) -> str | None:
    if training.init_path is not None and training.pretrained not in ("none", "auto"):
        return "--pretrained: contradicts --init-path, which also gives the weights to start with; expected one of them"
    return None


def _sampling_is_bilinear(data: Data) -> str | None:
    if data.interpolation != "bilinear" and not data.antialias:
        return f"--interpolation {data.interpolation}: contradicts --no-antialias; expected bilinear"
    return None


def _decoded_pixels_are_bytes(data: Data) -> str | None:
    if data.decode_device == "cuda" and not data.eight_bit_io:
        return "--decode-device cuda: contradicts --no-eight-bit-io, because pixels stay bytes there; expected cpu"
    return None


def _mixing_needs_partners(augmentation: Augmentation, data: Data) -> str | None:
    size, least = data.micro_batch, least_micro_batch(augmentation)
    asked_by = "--cutmix-lambda-low and -high" if uses_cutmix(augmentation) else "--mixup-alpha"
    return f"--micro-batch-size: got {size}, expected at least {least} for {asked_by}" if size < least else None


def _found_batch_is_the_fine_tunings_too(fine_tuning: FineTuning, data: Data) -> str | None:
    given = fine_tuning.fine_tune_gradient_accumulation != "auto" and fine_tuning.fine_tune_micro_batch_size == "auto"
    if data.micro_batch_size == "auto" and fine_tuning.half_res_training and given:
        return "--micro-batch-size auto: --fine-tune-gradient-accumulation needs --fine-tune-micro-batch-size as well"
    return None


def _stages_do_not_search(parallel: Parallel, data: Data) -> str | None:
    if data.micro_batch_size == "auto" and parallel.pipeline_splits:
        return "--micro-batch-size auto: does not work with --pipeline-splits; expected a number"
    return None


def pixels_change(augmentation: Augmentation) -> str | None:
    """The first option that changes pixels."""
    asked = {
        "auto-augment": augmentation.auto_augment != "none",
        "color-jitter": augmentation.color_jitter > 0,
        "random-erasing": augmentation.random_erasing > 0,
        "cutout": augmentation.cutout > 0,
        "vertical-flip": augmentation.vertical_flip > 0,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def _changed_pixels_are_bytes(augmentation: Augmentation, data: Data) -> str | None:
    asked = pixels_change(augmentation)
    if asked is None or data.eight_bit_io:
        return None
    return f"--{asked}: changes pixels as bytes, and --no-eight-bit-io copies values; expected --eight-bit-io"


def _resident_images_are_bytes_of_one_size(data: Data, augmentation: Augmentation) -> str | None:
    """Refuse what cannot be kept on the device: images are copied there once, before their moves are drawn."""
    if data.dataset_location == "host":
        return None
    if data.data in PHOTO_KINDS:
        return (
            f"--dataset-location: got 'device', but --data {data.data} is decoded photo by photo; expected"
            " --data cifar10, cifar100, digits or generated"
        )
    if not data.eight_bit_io:
        return "--dataset-location: got 'device', which keeps bytes; expected --eight-bit-io"
    if augmentation.augment == "crop-flip":
        return "--augment: got 'crop-flip', which resizes; expected shift-flip with --dataset-location device"
    return None


def _cutmix_bounds_are_ordered(augmentation: Augmentation) -> str | None:
    low, high = augmentation.cutmix_lambda_low, augmentation.cutmix_lambda_high
    if low > high:
        return f"--cutmix-lambda-low: got {low:g}, expected at most --cutmix-lambda-high, which is {high:g}"
    return None


def _one_choice_of_weights(training: Training, fine_tuning: FineTuning) -> str | None:
    if training.freeze is not None and training.trainable:
        return "--freeze: contradicts --trainable, which names what is trained; expected one of the two"
    if training.freeze is not None and fine_tuning.half_res_training:
        return "--freeze: does not work with --half-res-training; expected --fine-tune-first-trainable-layer"
    if training.unfreeze_after is not None and training.freeze is None:
        return "--unfreeze-after: needs --freeze, which says what is frozen until then"
    if training.freeze_after is not None and training.freeze is None:
        return "--freeze-after: needs --freeze, which says what is frozen from then on"
    if training.freeze_after is not None and training.unfreeze_after is not None:
        return "--freeze-after: contradicts --unfreeze-after; expected one of the two"
    return None


def _unfreezing_is_undivided(training: Training, optimizer: Optimizer, parallel: Parallel) -> str | None:
    """Refuse a change of trained weights for stages and sharded lars, which need one set throughout."""
    for name, epochs in (("--unfreeze-after", training.unfreeze_after), ("--freeze-after", training.freeze_after)):
        if epochs is not None and parallel.pipeline_splits:
            return f"{name}: does not work with --pipeline-splits; expected --freeze alone, or one stage"
    if training.freeze_after is not None and optimizer.optimizer == "sgd_combined":
        return "--freeze-after: does not work with --optimizer sgd_combined, whose velocities would go on; expected sgd"
    for name, asked in (
        ("--freeze-after", training.freeze_after is not None),
        ("--unfreeze-after", training.unfreeze_after is not None),
        ("--layer-decay", optimizer.layer_decay != 1.0),
    ):
        if asked and optimizer.optimizer == "lars" and parallel.enable_optimizer_rts:
            return f"{name}: does not work with --optimizer lars and --enable-optimizer-rts; expected another optimizer"
    return None


def warmup_ends_before_training(rate: LearningRate, training: Training) -> str | None:
    warmup, epochs = rate.warmup_epoch, training.epoch
    if epochs == "auto" or warmup <= epochs or training.updates is not None:  # else it depends on the data
        return None
    if epochs < 1:  # the warm-up may be the default
        return f"--epoch: got {epochs:g}, but --warmup-epoch is {warmup:g}; expected --warmup-epoch {epochs / 10:g} too"
    return f"--warmup-epoch: got {warmup:g}, expected at most --epoch, which is {epochs}"


def _one_factor_per_drop(rate: LearningRate) -> str | None:
    factors, drops = len(rate.lr_decay), len(rate.lr_epoch_decay) + len(rate.lr_drop_shares)
    if factors == 1 or (factors > 1 and factors == drops and rate.lr_schedule == "step"):
        return None
    several = drops > 1 and rate.lr_schedule == "step"
    expected = f"one, or {drops}, one for each of --lr-epoch-decay" if several else "one"
    return f"--lr-decay: got {factors} factors, expected {expected}"


def _averaging_needs_checkpoints_kept(averaging: Averaging, checkpoints: Checkpoints) -> str | None:
    kept, last = checkpoints.checkpoints_kept, averaging.weight_avg_N
    if averaging.weight_avg_strategy == "none" or not isinstance(kept, int):
        return None
    if averaging.weight_avg_epochs is not None:
        return f"--checkpoints-kept: got {kept}, expected all or auto, because --weight-avg-epochs averages older ones"
    if last == "all" or last == -1:
        return f"--checkpoints-kept: got {kept}, expected all, because --weight-avg-N all averages every checkpoint"
    if last > kept:
        return f"--weight-avg-N: got {last}, expected at most --checkpoints-kept, which is {kept}"
    return None


def _further_averages_are_known(averaging: Averaging, checkpoints: Checkpoints) -> str | None:
    for text in averaging.weight_avg_also:
        if further_average(text) is None:
            known = "mean:N, mean:all, epochs:N or exponential:DECAY"
            return f"--weight-avg-also: got '{text}', expected {known}, such as mean:5"
    if averaging.weight_avg_also and averaging.weight_avg_strategy == "none":
        return "--weight-avg-also: adds to --weight-avg-strategy, which is none; expected mean or exponential"
    kept = checkpoints.checkpoints_kept
    if averaging.weight_avg_also and isinstance(kept, int):
        return f"--checkpoints-kept: got {kept}, expected all or auto, because --weight-avg-also averages older ones"
    return None


def _phases_are_whole_epochs(fine_tuning: FineTuning, training: Training, numerics: Numerics) -> str | None:
    if training.has_whole_epochs:
        return None
    given, expected = f"--epoch {training.epoch}", "a whole number"
    if training.updates is not None:
        given, expected = "--updates", "--epoch"
    if fine_tuning.half_res_training:
        return f"{given}: does not work with --half-res-training, whose phases are whole epochs; expected {expected}"
    if numerics.initial_loss_scaling is not None:
        why = "which doubles after whole epochs"
        return f"{given}: does not work with --initial-loss-scaling, {why}; expected {expected}"
    return None


def _phases_do_not_end_early(fine_tuning: FineTuning, training: Training) -> str | None:
    if training.early_stopping is not None and fine_tuning.half_res_training:
        return "--early-stopping: does not work with --half-res-training, whose phases have fixed lengths"
    return None


def _resolutions_are_in_order(fine_tuning: FineTuning, parallel: Parallel, data: Data) -> str | None:
    given = fine_tuning.resolution_schedule
    found = resolutions(given)
    if found is None:
        return (
            f"--resolution-schedule: got '{' '.join(given)}', expected sides in pixels and the epochs they start with,"
            " in order and from epoch 1, such as 128:1 176:13"
        )
    if found and fine_tuning.half_res_training:
        return "--resolution-schedule: contradicts --half-res-training, which has a schedule of its own"
    if found and data.dataset_location == "device":
        return "--resolution-schedule: contradicts --dataset-location device, which keeps images as they are"
    if found and parallel.pipeline_splits:
        return "--resolution-schedule: does not work with --pipeline-splits, whose stages expect images of one size"
    return None


def _fine_tuning_is_complete(fine_tuning: FineTuning, averaging: Averaging) -> str | None:
    if not fine_tuning.half_res_training:
        return None
    if fine_tuning.fine_tune_epoch is None:
        return "--half-res-training: needs --fine-tune-epoch, the epochs at full size that follow"
    if not averages(averaging):
        return (
            "--half-res-training: needs --weight-avg-strategy mean or exponential, because fine-tuning starts with the"
            " average of the checkpoints"
        )
    return None


def _recompute_is_on_or_off(numerics: Numerics, parallel: Parallel) -> str | None:
    mode = recompute_mode(numerics, parallel)
    if numerics.recompute_mode == "none" and numerics.enable_recompute:
        return "--recompute-mode none: contradicts --enable-recompute; expected auto or manual, or neither option"
    if mode == "manual" and not numerics.recompute_checkpoints:
        return "--recompute-mode manual: needs --recompute-checkpoints, regular expressions of the layers to keep"
    if mode == "manual" and numerics.memory_budget is not None:
        return "--memory-budget: is for --recompute-mode auto, which --recompute-checkpoints contradicts"
    return None


def _one_kind_of_loss_scale(numerics: Numerics) -> str | None:
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling and initial not in (None, final):
        return f"--auto-loss-scaling: contradicts --initial-loss-scaling {initial:g}, which asks for a stepped scale"
    return None


def _sharded_lars_has_one_type(parallel: Parallel, optimizer: Optimizer, machine: Machine) -> str | None:
    """Refuse mixed types: lars sums norms over replicas in one message of one type; normalisation layers are fp32."""
    mixed = machine.precision in ("16.16", "bf16.bf16") and optimizer.weight_decay_exclude == "nothing"
    if parallel.enable_optimizer_rts and optimizer.optimizer == "lars" and mixed and not optimizer.lars_skip:
        return (
            f"--enable-optimizer-rts: does not work with --optimizer lars, --precision {machine.precision} and"
            " --weight-decay-exclude nothing; expected norms or vectors"
        )
    return None


def _only_training_chooses_a_precision(machine: Machine, options: Command) -> str | None:
    if machine.precision == "auto" and not isinstance(options, TrainOptions):
        return "--precision auto: is for train, which stores what it chose; expected 32.32, bf16.32 or another regime"
    return None


def _muon_has_whole_weights(parallel: Parallel, optimizer: Optimizer) -> str | None:
    """Refuse sharded state: an orthogonal step needs whole weights, and all weights of one shape at once."""
    if optimizer.optimizer != "muon":
        return None
    asked = {"enable-optimizer-rts": parallel.enable_optimizer_rts, "offload-optimizer": parallel.offload_optimizer}
    for name, is_asked in asked.items():
        if is_asked:
            return f"--{name}: does not work with --optimizer muon; expected another optimizer"
    return None


def _rate_shares_are_readable(parallel: Parallel, optimizer: Optimizer) -> str | None:
    for text in optimizer.lr_share:
        if not is_rate_share(text):
            return f"--lr-share: got '{text}', expected PATTERN=FACTOR with a factor above 0, such as fc=10"
        if optimizer.optimizer == "lars" and parallel.enable_optimizer_rts:
            return (
                "--lr-share: does not work with --optimizer lars and --enable-optimizer-rts; expected another optimizer"
            )
    return None


def _state_can_be_offloaded(
    parallel: Parallel, numerics: Numerics, optimizer: Optimizer, machine: Machine
) -> str | None:
    if not parallel.offload_optimizer:
        return None
    rule = optimizer.optimizer
    if rule == "sgd_combined" and not is_scaled(numerics, machine):
        return (
            "--offload-optimizer: does not work with --optimizer sgd_combined, whose velocity is the gradient itself"
            " and stays on the device; expected sgd"
        )
    if rule == "lars" and parallel.enable_optimizer_rts:
        return (
            "--offload-optimizer: does not work with --enable-optimizer-rts and --optimizer lars, whose norms are sums"
            " over all replicas; expected only one of the two options"
        )
    return None


def _restore_has_its_run(options: RestoreOptions) -> str | None:
    if options.run.resume:
        return "--resume: is for train; restore always continues from --checkpoint-input-path"
    if options.run.temporary:
        return "--temporary: is for train; restore continues a run that already has its folder"
    if options.training.init_path is not None:
        return "--init-path: is for train; restore continues with the checkpoint's weights"
    if options.training.pretrained not in ("none", "auto"):
        return "--pretrained: is for train; restore continues with the checkpoint's weights"
    return None


def _resuming_needs_a_run_folder(run: Run) -> str | None:
    if run.resume and run.run_dir == "auto":
        return "--resume: needs --run-dir, the folder of the interrupted run"
    return None


def _url_or_server(load: Load) -> str | None:
    if load.url is not None and load.server != "falconet":
        return f"--server {load.server}: contradicts --url, whose server is already running"
    return None


def _splits_are_layers_or_auto(parallel: Parallel) -> str | None:
    return _wrong_splits(parallel.pipeline_splits)


def _splits_of_predictions_are_layers_or_auto(inference: Inference) -> str | None:
    return _wrong_splits(inference.pipeline_splits)


def _wrong_splits(splits: tuple[str, ...]) -> str | None:
    expected = "layers, such as layer2/0 layer3/0, or auto:N alone, with N at least 2, or nothing for one stage"
    for split in splits:
        if split.startswith("auto") and (len(splits) > 1 or not (AUTO_STAGES.fullmatch(split) and int(split[5:]) >= 2)):
            return f"--pipeline-splits: got '{' '.join(splits)}', expected {expected}"
    return None


def _one_pass_batchnorm_is_local(parallel: Parallel, model: Model) -> str | None:
    span = parallel.batchnorm_span
    if span > 1 and model.disable_stable_batchnorm and model.norm_type == "batch":
        return (
            f"--batchnorm-span: got {span}, expected 1 with --disable-stable-batchnorm, whose single pass sees only one"
            " replica"
        )
    return None


def _interleaving_needs_micro_batches(parallel: Parallel, training: Training) -> str | None:
    stages, accumulation = stages_of(parallel), training.gradient_accumulation
    if parallel.pipeline_schedule == "interleaved" and accumulation < stages:
        return (
            f"--gradient-accumulation: got {accumulation}, expected at least {stages}, the number of stages,"
            " for --pipeline-schedule interleaved; --pipeline-schedule grouped takes any number"
        )
    return None


def _stages_see_one_view(parallel: Parallel, views: Views) -> str | None:
    if parallel.pipeline_splits and views.tta != "none":
        return "--tta: does not work with --pipeline-splits, whose stages validate one view of an image"
    return None


def _stages_have_no_memory_budget(parallel: Parallel, numerics: Numerics) -> str | None:
    if parallel.pipeline_splits and numerics.memory_budget is not None:
        return "--memory-budget: does not work with --pipeline-splits, whose stages recompute every block anyway"
    return None


def _one_proportion_per_stage(parallel: Parallel, workspace: Workspace) -> str | None:
    shares = len(workspace.available_memory_proportion)
    stages = stages_of(parallel)
    if shares in (0, 1, stages):
        return None
    expected = f"one, or {stages}, one per stage" if stages > 1 else "one, because there is one stage"
    return f"--available-memory-proportion: got {shares} values, expected {expected}"


def _histograms_need_a_sink(logging: Logging) -> str | None:
    if logging.weight_histogram and not (logging.tensorboard or logging.wandb or logging.aim):
        return "--weight-histogram: needs --tensorboard, --wandb or --aim, where histograms go"
    return None


def _temporary_folder_has_no_name(run: Run, checkpoints: Checkpoints) -> str | None:
    if not run.temporary:
        return None
    for name, folder in (
        ("run-dir", None if run.run_dir == "auto" else run.run_dir),
        ("checkpoint-output-path", checkpoints.checkpoint_output_path),
    ):
        if folder is not None:
            return f"--temporary: contradicts --{name} {folder}, which is kept; expected only one of the two"
    return None


def _predictions_have_one_form(predict: Predict) -> str | None:
    if predict.json and predict.csv:
        return "--json: contradicts --csv; expected only one of the two"
    return None


def _predictions_are_of_one_checkpoint(table: Table, choice: Choices) -> str | None:
    if table.predictions is not None and choice.checkpoint == "all":
        return "--predictions: takes one checkpoint, got --checkpoint all; expected best, last or an epoch"
    return None


def _tables_are_csv(table: Table) -> str | None:
    path = table.output
    if path is not None and path.suffix == ".json":
        return f"--output: got {path}, expected a CSV file; the details are written as JSON beside it"
    return None


def _int8_is_onnx_runtimes(serving: Serving) -> str | None:
    if serving.int8 and serving.engine not in ("auto", "onnxruntime"):
        return f"--int8: contradicts --engine {serving.engine}; expected onnxruntime, whose accuracy is measured"
    return None


def _int8_is_onnx(export: Export) -> str | None:
    if not export.int8:
        return None
    if export.format != "onnx":
        return f"--int8: --format {export.format} is not written in int8; expected --format onnx"
    if export.half:
        return "--int8: contradicts --half; expected only one of the two"
    return None


Rule = Callable[..., str | None]
RULES: tuple[Rule, ...] = (  # the first that is broken is reported
    unknown_model,
    _option_of_another_family,
    _speednet_has_three_stages,
    _proxy_norm_follows_a_norm,
    _proxy_norm_without_lars,
    _photos_need_a_folder,
    _allowed_is_a_number,
    _keys_have_names,
    _bytes_are_not_normalised,
    _colours_are_three,
    _sampling_is_bilinear,
    _training_starts_with_weights_that_fit,
    _published_weights_fit,
    _weights_from_one_place,
    _decoded_pixels_are_bytes,
    _cutmix_bounds_are_ordered,
    _changed_pixels_are_bytes,
    _mixing_needs_partners,
    _one_choice_of_weights,
    _unfreezing_is_undivided,
    warmup_ends_before_training,
    _one_factor_per_drop,
    _histograms_need_a_sink,
    _averaging_needs_checkpoints_kept,
    _further_averages_are_known,
    _phases_are_whole_epochs,
    _phases_do_not_end_early,
    _resolutions_are_in_order,
    _fine_tuning_is_complete,
    _found_batch_is_the_fine_tunings_too,
    _stages_do_not_search,
    _recompute_is_on_or_off,
    _one_kind_of_loss_scale,
    _only_training_chooses_a_precision,
    _resident_images_are_bytes_of_one_size,
    _muon_has_whole_weights,
    _rate_shares_are_readable,
    _state_can_be_offloaded,
    _sharded_lars_has_one_type,
    _url_or_server,
    _splits_are_layers_or_auto,
    _one_pass_batchnorm_is_local,
    _interleaving_needs_micro_batches,
    _stages_have_no_memory_budget,
    _stages_see_one_view,
    _one_proportion_per_stage,
    _restore_has_its_run,
    _resuming_needs_a_run_folder,
    _temporary_folder_has_no_name,
    _predictions_have_one_form,
    _predictions_are_of_one_checkpoint,
    _tables_are_csv,
    _int8_is_onnx,
    _int8_is_onnx_runtimes,
    _splits_of_predictions_are_layers_or_auto,
)
