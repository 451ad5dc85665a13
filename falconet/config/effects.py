"""Options that have no effect without others: a table for training, and one for every other command."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from falconet.config import commands
from falconet.config.commands import TrainOptions
from falconet.config.facts import (
    PHOTO_KINDS,
    averages,
    boxes_used,
    crops,
    crops_photos,
    is_stored,
    recompute_mode,
    uses_cutmix,
)
from falconet.config.fields import options_of, value_of
from falconet.config.options import Augmentation, Data, Machine, Model
from falconet.config.settings import is_asked_for

OptionsT = TypeVar("OptionsT")
Row = tuple[str, str, Callable[[OptionsT], bool]]  # an option, what follows "has no effect", when it has one


def _each(names: Iterable[str], why: str, holds: Callable[[OptionsT], bool]) -> list[Row[OptionsT]]:
    """Rows with the same reason and condition. `holds` is a named function: mypy does not look into a lambda here."""
    return [(name, why, holds) for name in names]


def _optimizer_in(*names: str) -> Callable[[TrainOptions], bool]:
    return lambda options: options.optimizer.optimizer in names


def _schedule_in(*names: str) -> Callable[[TrainOptions], bool]:
    return lambda options: options.learning_rate.lr_schedule in names


def _has_batch_norm(options: TrainOptions) -> bool:
    return options.model.norm_type == "batch"


def _has_proxy_norm(options: TrainOptions) -> bool:
    return options.model.proxy_norm


def _random_data(options: TrainOptions) -> bool:
    return not _stored_data(options)


def _stored_data(options: TrainOptions) -> bool:
    return is_stored(options.data)


def _host_data(options: TrainOptions) -> bool:
    return options.data.data != "synthetic"


def _photos(options: TrainOptions) -> bool:
    return options.data.data in PHOTO_KINDS


def _may_use_cuda(options: TrainOptions) -> bool:
    return options.machine.device != "cpu"


def _has_replicas(options: TrainOptions) -> bool:
    return options.parallel.replicas != 1


def _has_stages(options: TrainOptions) -> bool:
    return bool(options.parallel.pipeline_splits)


def _has_processes(options: TrainOptions) -> bool:
    return _has_replicas(options) or _has_stages(options)


def _may_shift(options: TrainOptions) -> bool:
    return options.augmentation.augment in ("auto", "shift", "shift-flip")


def _may_flip(options: TrainOptions) -> bool:
    return options.augmentation.augment in ("auto", "shift-flip", "crop-flip")


def _may_crop(options: TrainOptions) -> bool:
    return crops(options.augmentation)


def _crops_photos(options: TrainOptions) -> bool:
    return crops_photos(options.data, options.augmentation)


def _objects_by_area(options: TrainOptions) -> bool:
    """Whether the overlap with objects can be chosen; TensorFlow's draw fixes it."""
    return boxes_used(options.data, options.augmentation) != "no" and options.augmentation.crop_draw == "area"


def _augments_by(name: str) -> Callable[[TrainOptions], bool]:
    return lambda options: options.augmentation.auto_augment == name


def _pads_shortcuts(options: TrainOptions) -> bool:
    """Whether shortcuts have zero channels: by --shortcut-type, or by default in CIFAR networks of basic blocks."""
    kind, name = options.model.shortcut_type, options.model.model
    return kind == "A" or (kind == "auto" and name in CIFAR_BASIC)


def _draws_weights(options: TrainOptions) -> bool:
    """Whether weights are drawn, not read: restore reads its checkpoint's, --init-path a file's."""
    return options.training.init_path is None and not isinstance(options, commands.RestoreOptions)


def _normalises_by_dataset(options: TrainOptions) -> bool:
    """Whether pixels are normalised by the mean and deviation of the whole dataset."""
    return options.data.normalization_location != "none" and options.data.normalization == "deviation"


def _validates_whole(options: TrainOptions) -> bool:
    """Whether one process validates with the whole model; stages pass on micro-batches."""
    return options.validation.validation_mode != "none" and not options.parallel.pipeline_splits


def _fine_tunes(options: TrainOptions) -> bool:
    return options.fine_tuning.half_res_training


CIFAR_BASIC = tuple(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110))
_OWN_DATA = ("digits", "generated", "synthetic")
_HOST_OPTIONS = (
    *("validate-checkpoints", "augment", "mixup-alpha", "cutmix-lambda-low", "cutmix-lambda-high"),
    *(
        "auto-augment",
        "color-jitter",
        "random-erasing",
        "cutout",
        "vertical-flip",
        "repeated-augmentation",
        "dataset-location",
    ),
    *("dataloader-workers", "bad-images-allowed", "dataloader-rebatch-size", "eight-bit-io", "normalization-location"),
)
_BATCH_NORM_OPTIONS = ("disable-stable-batchnorm", "batchnorm-momentum", "batchnorm-span", "batchnorm-per-update")
_KEPT_OPTIONS = ("dataset-percentage", "antialias", "interpolation", "validation-crop", "validation-crop-ratio")
_OBJECT_OPTIONS = ("object-crop-area", "object-overlap")
_BOX_OPTIONS = ("use-bbox-info", "use-bbox-info-if-there")
_PHOTO_OPTIONS = ("decode-device", "dataset-cache", "val-fraction", "check-images", "exclude-list", "tfrecord-keys")
_FINE_TUNE_OPTIONS = ("epoch", "lr", "micro-batch-size", "gradient-accumulation", "first-trainable-layer")
_PROCESS_OPTIONS = ("strict-devices", "max-restarts", "collective-timeout")

EFFECTIVE_WHEN: tuple[Row[TrainOptions], ...] = (  # what follows "has no effect without"
    (
        "frozen-batchnorm",
        "--freeze or --trainable",
        lambda o: o.training.freeze is not None or bool(o.training.trainable),
    ),
    ("epoch", "a length in epochs: --updates replaces it", lambda options: options.training.updates is None),
    (
        "logs-per-epoch",
        "log points per epoch: --log-interval replaces them",
        lambda options: options.logging.log_interval is None,
    ),
    ("save-plots", "--report", lambda options: options.logging.report),
    *_each(("muon-momentum", "muon-steps", "muon-rescale"), "--optimizer muon", _optimizer_in("muon")),
    ("momentum", "--optimizer sgd, rmsprop, lars or muon", lambda options: options.optimizer.optimizer != "adamw"),
    ("optimizer-eps", "--optimizer adamw, rmsprop or lars", _optimizer_in("adamw", "rmsprop", "rmsprop_tf", "lars")),
    ("rmsprop-decay", "--optimizer rmsprop", _optimizer_in("rmsprop", "rmsprop_tf")),
    *_each(("lars-eeta", "lars-skip"), "--optimizer lars", _optimizer_in("lars")),
    ("lr-decay", "--lr-schedule step or exponential", _schedule_in("step", "exponential")),
    ("lr-scheduler-freq", "a number per epoch: --lr-changes replaces it", lambda o: o.learning_rate.lr_changes is None),
    ("lr-epoch-decay", "--lr-schedule step", _schedule_in("step")),
    ("lr-drop-shares", "--lr-schedule step", _schedule_in("step")),
    ("lr-power", "--lr-schedule polynomial", _schedule_in("polynomial")),
    ("lr-end-ratio", "--lr-schedule polynomial", _schedule_in("polynomial")),
    *_each(("weight-init", "zero-init"), "new weights: they are read from a file", _draws_weights),
    ("shortcut-padding", "shortcuts of zero channels, as in resnet20-cifar or with --shortcut-type A", _pads_shortcuts),
    ("norm-num-groups", "--norm-type group", lambda options: options.model.norm_type == "group"),
    (
        "enable-fast-groupnorm",
        "--norm-type group of neighbouring channels",
        lambda options: options.model.norm_type == "group" and options.model.norm_grouping == "contiguous",
    ),
    ("norm-grouping", "--norm-type group", lambda options: options.model.norm_type == "group"),
    *_each(_BATCH_NORM_OPTIONS, "--norm-type batch", _has_batch_norm),
    ("norm-eps", "--norm-type batch or group", lambda options: options.model.norm_type != "none"),
    *_each(("proxy-epsilon", "proxy-recompute"), "--proxy-norm", _has_proxy_norm),
    ("conv-bias", "--norm-type none", lambda options: options.model.norm_type == "none"),
    ("iterations", "--data generated or synthetic", _random_data),
    ("validation-images", "--data generated", lambda options: options.data.data == "generated"),
    *_each(_KEPT_OPTIONS, "--data other than generated and synthetic", _stored_data),
    ("validation-crop-ratio", "--validation-crop auto or centre", lambda o: o.data.validation_crop != "whole"),
    ("classes", "--data generated or synthetic", _random_data),
    *_each(_BOX_OPTIONS, "--data imagenet or folder, and --augment crop-flip or auto", _crops_photos),
    *_each(("crop-area", "crop-draw"), "--augment crop-flip or auto", _may_crop),
    *_each(_OBJECT_OPTIONS, "--use-bbox-info and --crop-draw area", _objects_by_area),
    *_each(("shift-reach", "shift-padding"), "--augment shift, shift-flip or auto", _may_shift),
    ("flip", "--augment shift-flip, crop-flip or auto", _may_flip),
    ("sampler", "data from the host (not --data synthetic)", _host_data),
    ("data-dir", "--data imagenet, folder, cifar10 or cifar100", lambda options: options.data.data not in _OWN_DATA),
    *_each(("randaugment-ops", "randaugment-magnitude"), "--auto-augment randaugment", _augments_by("randaugment")),
    ("autoaugment-policy", "--auto-augment autoaugment", _augments_by("autoaugment")),
    ("cutmix-disable-prob", "--cutmix-lambda-low and -high", lambda options: uses_cutmix(options.augmentation)),
    ("cutmix-draw", "--cutmix-lambda-low and -high", lambda options: uses_cutmix(options.augmentation)),
    ("normalization", "--normalization-location host or device", lambda o: o.data.normalization_location != "none"),
    *_each(("pixel-mean", "pixel-deviation"), "--normalization deviation", _normalises_by_dataset),
    ("validation-frequency", "--validation-mode during", lambda o: o.validation.validation_mode == "during"),
    ("early-stopping", "--validation-mode during", lambda o: o.validation.validation_mode == "during"),
    ("tta", "--validation-mode during or after", lambda o: o.validation.validation_mode != "none"),
    ("validation-batch-size", "--validation-mode during or after, and one stage", _validates_whole),
    (
        "weight-avg-exp-decay",
        "--weight-avg-strategy exponential",
        lambda o: o.averaging.weight_avg_strategy == "exponential",
    ),
    (
        "weight-avg-N",
        "--weight-avg-strategy, or with --weight-avg-epochs",
        lambda o: averages(o.averaging) and o.averaging.weight_avg_epochs is None,
    ),
    ("weight-avg-epochs", "--weight-avg-strategy", lambda o: averages(o.averaging)),
    *_each((f"fine-tune-{name}" for name in _FINE_TUNE_OPTIONS), "--half-res-training", _fine_tunes),
    (
        "enable-stochastic-rounding",
        "--precision 16.16 or bf16.bf16, which write 16-bit weights",
        lambda options: options.machine.precision in ("16.16", "bf16.bf16"),
    ),
    ("auto-loss-scaling-period", "--auto-loss-scaling", lambda options: options.numerics.auto_loss_scaling),
    (
        "recompute-checkpoints",
        "--enable-recompute or --recompute-mode manual",
        lambda options: recompute_mode(options.numerics, options.parallel) == "manual",
    ),
    (
        "bucket-size",
        "--replicas or --offload-optimizer",
        lambda options: options.parallel.replicas != 1 or options.parallel.offload_optimizer,
    ),
    (
        "offload-optimizer",
        "an optimizer with state, such as --momentum above 0",
        lambda options: options.optimizer.momentum > 0 or options.optimizer.optimizer not in ("sgd", "sgd_combined"),
    ),
    *_each(_HOST_OPTIONS, "data from the host (not --data synthetic)", _host_data),
    *_each(_PHOTO_OPTIONS, "--data imagenet or folder", _photos),
    ("dataset-cache", "--decode-device cpu", lambda options: options.data.decode_device != "cuda"),
    *_each(("enable-optimizer-rts", "identical-replica-seeding"), "--replicas", _has_replicas),
    *_each(_PROCESS_OPTIONS, "--replicas or --pipeline-splits", _has_processes),
    ("pipeline-schedule", "--pipeline-splits", _has_stages),
    ("wandb-project", "--wandb", lambda options: options.logging.wandb),
    *_each(("capture", "model-cache-path"), "--device cuda or auto", _may_use_cuda),
)

REPLACED_BY = {  # by another option, which states the same in another way
    "epoch": "updates",
    "logs-per-epoch": "log-interval",
    "lr-scheduler-freq": "lr-changes",
    "weight-avg-N": "weight-avg-epochs",
}


def notes(options: object, sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each option that was asked for and has no effect, unless a later source replaced it.

    `sources`: by name, in the order in which the options were stated.
    """
    known = options_of(type(options))
    for name, why in unused(options).items():
        changed = value_of(options, known[name]) != known[name].default  # a run's config.yaml names every default
        if changed and is_asked_for(sources.get(name)) and not _is_replaced(name, sources):
            yield f"--{name} has no effect {why}"


def _is_replaced(name: str, sources: Mapping[str, str]) -> bool:
    """Whether another source has stated the same in another way, later."""
    other, order = REPLACED_BY.get(name, ""), list(sources)
    is_other = is_asked_for(sources.get(other)) and sources[other] != sources[name]
    return is_other and order.index(name) < order.index(other)


def unused(options: object) -> dict[str, str]:
    """Every option without effect, and why."""
    found: dict[str, str] = {}
    for name, why, holds in ELSEWHERE.get(type(options), ()):
        if not holds(options):
            found.setdefault(name, why)
    trained, training = _as_training(options), options_of(commands.TrainOptions)
    for name, option in options_of(type(options)).items():
        if name not in training or training[name].path != option.path or (type(options), name) in OTHERWISE:
            continue
        for other, condition, holds in EFFECTIVE_WHEN:
            if other == name and not holds(trained):
                found.setdefault(name, f"without {condition}")
    return found


def _as_training(options: object) -> commands.TrainOptions:
    """Options of training with the sections that a command shares with it, and defaults for the others."""
    if isinstance(options, commands.TrainOptions):
        return options
    shared = {section.name for section in fields(commands.TrainOptions)}
    return commands.TrainOptions(**{name: section for name, section in vars(options).items() if name in shared})


def _names(section: type, *, but: tuple[str, ...] = ()) -> list[str]:
    return [field.name.replace("_", "-") for field in fields(section) if field.name not in but]


def _never(_: object) -> bool:
    return False


def _runs_a_model(options: commands.AverageOptions) -> bool:
    return options.average.validate or options.average.batchnorm_images > 0


_Opening = commands.PredictOptions | commands.ExportOptions
_Reading = _Opening | commands.ValidateOptions | commands.InferOptions | commands.BenchServeOptions


def _has_checkpoints(options: _Reading) -> bool:
    path = options.input.checkpoint_input_path
    return path is not None and not path.is_file()


def _opens_checkpoints(options: _Opening) -> bool:
    """Whether prediction or export takes its model from a folder of checkpoints."""
    weights = options.pretrained.pretrained
    return _has_checkpoints(options) or (isinstance(weights, Path) and not weights.is_file())


def _opens_no_checkpoints(options: _Opening) -> bool:
    return not _opens_checkpoints(options)


def _quantises(options: commands.ExportOptions) -> bool:
    return options.export.int8


def _trains_on_it(options: commands.DataBenchOptions) -> bool:
    return options.bench.split == "train"


def _measures(options: commands.DataBenchOptions) -> bool:
    return not options.bench.md5


_ONLY_IN_TRAINING = (
    *("batchnorm-momentum", "disable-stable-batchnorm", "efficientnet-dropout", "efficientnet-drop-path"),
    *("weight-init", "zero-init"),
)
_NOT_TRAINED = _each(_ONLY_IN_TRAINING, "on a model that is not being trained", _never)
_NOT_MIXED = ("label_smoothing", "mixup_alpha", "cutmix_lambda_low", "cutmix_lambda_high", "cutmix_disable_prob")
_ALONE = "on the input pipeline, which has no model"
_UNVALIDATED = ("validation-batch-size", "because nothing is validated", _never)
_ALL_LEFT_OUT = _each(
    ("bad-images-allowed", "check-images"),
    "outside training: every image that cannot be decoded is left out",
    _never,
)

_NO_CHOICE = ("checkpoint", "without a folder to choose from", _has_checkpoints)


def _in(command: type[OptionsT], *rows: Row[OptionsT]) -> tuple[type[object], tuple[Row[Any], ...]]:
    """A command with its rows; mypy checks that their conditions take its options."""
    return command, rows


ELSEWHERE = dict(
    (
        _in(commands.ValidateOptions, *_NOT_TRAINED, *_ALL_LEFT_OUT, _NO_CHOICE),
        _in(commands.BenchServeOptions, *_NOT_TRAINED, _UNVALIDATED, *_ALL_LEFT_OUT, _NO_CHOICE),
        _in(
            commands.InferOptions,
            *_NOT_TRAINED,
            _UNVALIDATED,
            *_ALL_LEFT_OUT,
            ("dataset-cache", "because batches are read once, before the clock starts", _never),
            _NO_CHOICE,
            ("weights", "with --checkpoint-input-path", lambda options: options.input.checkpoint_input_path is None),
        ),
        _in(
            commands.PredictOptions,
            *_NOT_TRAINED,
            ("checkpoint", "without a folder to choose from", _opens_checkpoints),
            *_each(("image-size", "classes"), "on a checkpoint, which has its own", _opens_no_checkpoints),
        ),
        _in(
            commands.ExportOptions,
            *_NOT_TRAINED,
            ("checkpoint", "without a folder to choose from", _opens_checkpoints),
            *_each(("image-size", "classes"), "with a checkpoint, which has its own", _opens_no_checkpoints),
            ("precision", "on an export, which is fp32, or fp16 with --half", _never),
            *_each(("calibration-images", "reduce-range"), "without --int8", _quantises),
            ("val-fraction", "without --int8 and --photos", lambda o: o.export.int8 and o.export.photos is not None),
            ("preprocessing", "with --format timm, whose config.json has it", lambda o: o.export.format != "timm"),
            ("half", "with --format timm, which opens fp32 weights", lambda o: o.export.format != "timm"),
            ("device", "without --format aoti: the file is for any device", lambda o: o.export.format == "aoti"),
            ("capture", "on an export: the program that runs the file may capture it", _never),
        ),
        _in(
            commands.AverageOptions,
            *_each((*_names(Data), *_names(Machine)), "without --validate or --batchnorm-images", _runs_a_model),
            (
                "weight-avg-exp-decay",
                "without --weight-avg-strategy exponential",
                lambda options: options.average.weight_avg_strategy == "exponential",
            ),
        ),
        _in(
            commands.DataBenchOptions,
            _UNVALIDATED,
            *_each(_names(Model, but=("model",)), _ALONE, _never),
            *_each((name.replace("_", "-") for name in _NOT_MIXED), _ALONE, _never),
            *_each(("deterministic", "capture", "model-cache-path"), _ALONE, _never),
            *_each(_names(Augmentation, but=_NOT_MIXED), "without --split train", _trains_on_it),
            *_each(("split", "seconds", "passes", "output"), "with --md5", _measures),
        ),
    )
)
# Options that have an effect in a command although the same line would have none in training.
OTHERWISE = {
    (commands.InferOptions, "iterations"),
    (commands.BenchServeOptions, "iterations"),
    (commands.DataBenchOptions, "bad-images-allowed"),
    *((command, "model-cache-path") for command in (commands.ServeOptions, commands.BenchServeOptions)),
}
