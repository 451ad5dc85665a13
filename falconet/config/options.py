"""Most options, once: name, type, default, help, in the section they are shown under."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from falconet.config.fields import AtLeast, Auto, Between, MoreThan, local, portable
from falconet.errors import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run, and where its results go."""

    config: str | None = local(None)
    """A named config (`falconet configs` lists them) or a YAML file of options; the command line overrides it."""
    plan: bool = local(False)
    """Print the plan and every option with its source, and exit."""
    run_dir: Path | Auto = local("auto")
    """The run folder; auto: runs/<model>_<data>_<time>, in restore the one in which the checkpoint lies."""
    temporary: bool = local(False)
    """Put the run folder into a temporary place and remove it at a clean end; it stays after a failure or Ctrl-C."""
    name_suffix: str | None = local(None)
    """Text that the name of a new run folder gets, where --run-dir does not name it."""
    resume: bool = local(False)
    """Go on with the run that --run-dir holds if its options are the same, else refuse; begin it if there is none."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Seed of every random choice; the same seed gives the same run."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where images come from."""

    data: Literal["digits", "cifar10", "cifar100", "imagenet", "folder", "generated", "synthetic"] = "digits"
    """imagenet, folder: photos, layouts in docs/data.md; generated: random, by the host; synthetic: on the device."""
    data_dir: Path | None = portable(None)  # read, but for an index; no download follows from it (wiring/images.py)
    """Where the data lies (--imagenet-data-path is the same); without it, the environment variable DATA_DIR."""
    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: what the model was made for, 8 for the digits."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Classes of generated and synthetic data; auto: 1000, or 10 for the CIFAR networks. Other data has its own."""
    iterations: Annotated[int, AtLeast(1)] = 100
    """Updates in an epoch of generated or synthetic data; in `bench infer` batches of any data."""
    micro_batch_size: Annotated[int, AtLeast(1)] = 64
    """Images in one forward and backward pass on one replica."""
    validation_batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward pass of a validation on one replica, exact for any; auto: as --micro-batch-size."""
    dataloader_workers: Annotated[int, AtLeast(0)] | Auto = "auto"
    """Threads that read ahead; 0: the loop itself; auto: one a core, 32 at most, 3 for --decode-device cuda."""
    dataloader_rebatch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that a thread reads at once; the parts are written side by side. Smaller: less memory, more overhead."""
    decode_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where JPEG files are decoded; auto: cpu. `falconet doctor` measures both."""
    eight_bit_io: bool = True
    """Copy pixels to the device as bytes; otherwise in the compute format, two or four times as many bytes."""
    normalization_location: Literal["host", "device", "none"] = "device"
    """Where mean and standard deviation are applied; none: the model sees pixels of 0 to 255."""
    normalization: Literal["deviation", "mean", "image"] = "deviation"
    """Pixels less the data's mean over its deviation, only less ImageNet's mean, or each image by its own two."""
    pixel_mean: tuple[float, ...] = ()
    """Mean of red, green and blue in pixels of 0 to 1, instead of the data's own."""
    pixel_deviation: tuple[Annotated[float, MoreThan(0)], ...] = ()
    """Standard deviation of the same, instead of the data's own."""
    antialias: bool = True
    """Shrink images by all their pixels; no: by the four nearest to each of the result, as TensorFlow 1 did."""
    validation_crop: Literal["auto", "centre", "whole"] = "auto"
    """What is validated of an image: its centre, 7/8 of the short side, or all of it; auto: the centre of photos."""
    dataset_cache: bool = False
    """Keep validation's images decoded and training's photos encoded, in up to a quarter of the free memory each."""
    bad_images_allowed: Annotated[int, AtLeast(0)] | Auto = "auto"
    """Undecodable images skipped before the run stops; auto: 1 in 1,000 in training, none in validation."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, and in which portions."""

    epoch: Annotated[int, AtLeast(1)] = 30
    """Passes over the training images."""
    updates: Annotated[int, AtLeast(1)] | None = None
    """Length of the training in updates, instead of --epoch; it may end within an epoch. None undoes a stored one."""
    gradient_accumulation: Annotated[int, AtLeast(1)] = 1
    """Micro-batches in one update."""
    init_path: Path | None = local(None)
    """Begin with the weights of a checkpoint, of a run's newest one, or of a file (safetensors, torch) that fits."""
    batchnorm_per_update: bool = False
    """Move batch norm's statistics once an update, by the mean over its micro-batches, instead of with each of them."""
    trainable: tuple[str, ...] = ()
    """Train only weights that match one of these regular expressions, such as fc or layer4/.*/bias; all without it."""
    dataset_percentage: Annotated[float, Between(1, 100)] = 100.0
    """Percent of the training images that are used, spread evenly over all of them; validation uses all of its own."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights move."""

    optimizer: Literal["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"] = "sgd"
    """The update rule; sgd_combined keeps gradient and velocity in one tensor, rmsprop_tf is TensorFlow's form."""
    momentum: Annotated[float, Between(0, 1)] = 0.9
    """Momentum of sgd, rmsprop and lars."""
    weight_decay: Annotated[float, AtLeast(0)] = 5e-4
    """Decay of the weights, added to the gradient (decoupled in adamw)."""
    weight_decay_exclude: Literal["vectors", "norms", "nothing"] = "vectors"
    """What is not decayed: biases and norms, norms alone, or nothing."""
    optimizer_eps: Annotated[float, AtLeast(0)] = 1e-8
    """Epsilon of adamw, rmsprop and lars."""
    rmsprop_decay: Annotated[float, Between(0, 1)] = 0.99
    """Smoothing constant of rmsprop's squared gradients."""
    lars_eeta: Annotated[float, MoreThan(0)] = 0.001
    """Trust coefficient of lars."""
    lars_skip: tuple[str, ...] = ()
    """Regular expressions of weights that lars neither scales nor decays; without it, --weight-decay-exclude says."""
    ema_half_life: Annotated[float, MoreThan(0)] | None = None
    """Keep an exponential moving average of the weights with this half-life in epochs; validated beside them."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over time."""

    lr: Annotated[float, AtLeast(0)] = 0.1
    """Peak learning rate, for the global batch as it is."""
    lr_schedule: Literal["step", "cosine", "exponential", "polynomial"] = "cosine"
    """step: drops at --lr-epoch-decay; cosine: to 0; exponential: drops at each change; polynomial: to an end ratio."""
    lr_decay: tuple[Annotated[float, MoreThan(0)], ...] = (0.5,)
    """Factor of a drop in the step and exponential schedules; for step also one for each of --lr-epoch-decay."""
    lr_epoch_decay: tuple[Annotated[float, MoreThan(0)], ...] = ()
    """Epochs at which the step schedule drops."""
    lr_drop_shares: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Further drops of the step schedule, as shares of the training."""
    lr_scheduler_freq: Annotated[float, AtLeast(0)] = 0.0
    """Changes per epoch; 0: at every update."""
    lr_changes: Annotated[int, AtLeast(1)] | None = None
    """Changes in the whole training, evenly spaced, whatever its epochs; instead of --lr-scheduler-freq."""
    lr_power: Annotated[float, MoreThan(0)] = 2.0
    """Exponent of the polynomial schedule."""
    lr_end_ratio: Annotated[float, Between(0, 1)] = 1e-5
    """End of the polynomial schedule, as a share of the peak."""
    warmup_epoch: Annotated[float, AtLeast(0)] = 1.0
    """Epochs of linear warm-up."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Half precision without losing accuracy, and memory."""

    enable_stochastic_rounding: bool = False
    """Round what is written to 16 bits up with the probability of its distance, instead of to the nearest."""
    loss_scaling: Annotated[float, MoreThan(0)] = 1.0
    """Factor of the loss before the backward pass; the last of a stepped scale, the first of an automatic one."""
    initial_loss_scaling: Annotated[float, MoreThan(0)] | None = None
    """Begin with this scale and double it in equal stretches of epochs until it is --loss-scaling."""
    auto_loss_scaling: bool = False
    """Halve the scale when gradients come near overflow, double it otherwise."""
    auto_loss_scaling_period: Annotated[int, AtLeast(1)] = 1
    """Updates between changes of the automatic scale."""
    half_partial: bool = False
    """Let matrix products add up in half precision, where the device can."""
    enable_recompute: bool = False
    """Compute activations again in the backward pass instead of keeping all of them."""
    recompute_mode: Literal["none", "auto", "manual"] | None = None
    """auto: choose blocks, to fit --memory-budget; manual: keep --recompute-checkpoints; none: keep everything."""
    recompute_checkpoints: tuple[str, ...] = ()
    """Regular expressions of the layers whose outputs are kept, such as layer1/.*; the rest is computed again."""
    memory_budget: Annotated[float, MoreThan(0)] | None = None
    """GiB that activations may take; recomputes as many blocks as that needs."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What keeps the model from learning by heart."""

    augment: Literal["auto", "none", "shift", "shift-flip", "crop-flip"] = "auto"
    """Random shift, shift and mirror, or resized crop and mirror; auto: by the data, as the plan says."""
    use_bbox_info: bool = False
    """Random crops overlap an annotated object: boxes in *bounding_boxes.csv, XML files, or the TFRecords."""
    use_bbox_info_if_there: bool = False
    """The same where the data has boxes; where it has none, crops are plain and nothing is refused."""
    crop_area: Annotated[float, Between(0.001, 1)] = 0.08
    """Smallest share of a photo that a random crop covers; the largest is all of it."""
    crop_draw: Literal["area", "height"] = "area"
    """Drawn evenly: a crop's area and its ratio's logarithm; or ratio and height, a tenth of the photo at least."""
    object_crop_area: Annotated[float, Between(0.001, 1)] | Auto = "auto"
    """The same for crops that must overlap an annotated object; auto: --crop-area."""
    object_overlap: Literal["object", "crop"] = "object"
    """Crops overlap an object if they have a tenth of it, or if a tenth of the crop is object (else the tenth draw)."""
    label_smoothing: Annotated[float, Between(0, 1)] = 0.0
    """Share of the target spread evenly over all classes."""
    mixup_alpha: Annotated[float, Between(0, 1)] = 0.0
    """Mix each image with its neighbour, share drawn from Beta(a, a); 0: no mixup."""
    cutmix_lambda_low: Annotated[float, Between(0, 1)] = 0.0
    """Least share of the own image in cutmix; both bounds 0 or both 1: no cutmix."""
    cutmix_lambda_high: Annotated[float, Between(0, 1)] = 0.0
    """Greatest share of the own image in cutmix; equal bounds fix the share."""
    cutmix_disable_prob: Annotated[float, Between(0, 1)] = 0.0
    """Chance that a micro-batch skips cutmix."""
    cutmix_draw: Literal["even", "exponential"] = "even"
    """How the share is drawn between its bounds: evenly, or as 1 + ln(u) / 4, mostly near the greatest."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """When accuracy is measured."""

    validation_mode: Literal["none", "during", "after"] = "during"
    """Never, every --validation-frequency epochs (and at the end), or once at the end."""
    validation_frequency: Annotated[int, AtLeast(1)] = 1
    """Epochs between validations in mode during."""
    validate_checkpoints: Path | None = local(None, again="measure checkpoints after training")
    """After training, measure each checkpoint of this folder, such as the run's own: a table and validation.csv."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What it runs on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    precision: Literal["16.16", "16.32", "32.32", "bf16.bf16", "bf16.32"] = "32.32"
    """Number formats of compute, and of weights, gradients and their update; docs/numerics.md has the table."""
    threads: Annotated[int, AtLeast(1)] | Auto = "auto"
    """CPU threads of one process; auto: one a core, or what the restored run had, because the number changes bits."""
    deterministic: bool = True
    """On CUDA, use only kernels that give the same bits every time, so that a restored run equals a straight one."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many devices share the work."""

    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Copies of the model, one process each; auto: as many as torchrun, mpirun or srun started, else 1."""
    pipeline_splits: tuple[str, ...] = ()
    """Layers, such as layer3/0, with which a further stage begins, each in a process; auto:N finds N like ones."""
    pipeline_schedule: Literal["grouped", "interleaved", "sequential"] = "grouped"
    """grouped: all forward, then all backward; interleaved: by turns, in less memory; sequential: one at a time."""
    strict_devices: bool = False
    """Refuse fewer devices than replicas x stages, instead of folding replicas into accumulation, stages into one."""
    bucket_size: Annotated[float, MoreThan(0)] = 25.0
    """Megabytes of gradients in one message between replicas, and of weights whose offloaded state travels together."""
    batchnorm_span: Annotated[int, AtLeast(1)] = 1
    """Replicas that share the statistics of a batch in batch norm; must divide the replicas."""
    enable_optimizer_rts: bool = False
    """Divide the optimizer's state over the replicas: the same update with a share of the memory."""
    identical_replica_seeding: bool = False
    """Let every replica drop the same units of its own images; otherwise each drops others."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory: the same update, with copies beside the computation (CUDA)."""
    max_restarts: Annotated[int, AtLeast(0)] = 3
    """Times in a row that dead workers are started again without a new checkpoint in between."""
    collective_timeout: Annotated[float, MoreThan(0)] = 600.0
    """Seconds that one process waits for another before the run stops and names the one that is missing."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """What is read."""

    checkpoint_input_path: Path | None = local(None)
    """A checkpoint, a folder of checkpoints, or a run folder."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the result goes."""

    output: Path | None = local(None)
    """The CSV file; without it, validation.csv beside the checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """What is looked at."""

    distributed: bool = False
    """Start processes and check every collective, averaged gradients, shared batch norm, pipelines and checkpoints."""
    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Processes for --distributed; auto: one a CUDA device, or 2 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What is packed, and how."""

    source: Path | None = local(None)
    """The folder with train/ and val/, one folder a class; also the first word of the command."""
    target: Path | None = local(None)
    """The folder for the shards; also the second word."""
    shard_size: Annotated[int, AtLeast(1)] = 2048
    """Images in one shard; 2,048 photos of ImageNet are 220 MB."""
    resize: Annotated[int, AtLeast(1)] | None = None
    """Lossy: shrink photos to this short side in pixels and encode them anew, quality 90."""
    workers: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads; auto: one a core."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What is checked."""

    source: Path | None = local(None)
    """The folder with the shards; also the first word of the command."""


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """What is measured."""

    split: Literal["train", "validation"] = "train"
    """Training's random crops in a random order, or validation's fixed ones in order."""
    seconds: Annotated[float, MoreThan(0)] = 2.0
    """Seconds that each stage is measured for."""
    passes: Annotated[int, AtLeast(0)] = 0
    """Then also read all images this many times, and print the images per second of each pass."""
    md5: bool = False
    """Instead, compare the md5 of the files of both class folders with that of ILSVRC 2012."""
    output: Path | None = local(None)
    """A JSON file for the result."""


# The zoo's names, repeated here so that a typo is answered without importing torch; a test compares the two lists.
MODELS = (
    *("resnet10", "resnet14", "resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext14", "resnext26", "resnext50", "resnext101", "resnext152"),
    *(f"efficientnet-b{size}" for size in range(8)),
    "efficientnet-cifar",
    *("mobilenet", "mobilenet-v3-small", "mobilenet-v3-large"),
    *(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110, 11, 29, 38, 47, "56b", 65)),
    *(f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)),
    *("squeezenet", "squeezenet-cifar"),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    model: str = "resnet8-cifar"
    """A name of `falconet models`, or timm:NAME for any other model of timm."""
    weight_init: Literal["auto", "uniform", "normal", "lecun", "he", "glorot", "channels"] = "auto"
    """Distribution of new convolutions and linear layers; auto: the library's own. Formulas: docs/numerics.md."""
    zero_init: Literal["auto", "none", "last", "identity", "shortcut"] = "auto"
    """ResNets: scales that begin at 0: every block's last, only that beside an identity, or else the shortcut's own."""
    padding: Literal["symmetric", "same"] = "symmetric"
    """Zeros around what a convolution or pooling strides over: alike on both sides, or TensorFlow's SAME."""
    norm_type: Literal["batch", "group", "none"] = "batch"
    """Normalisation layers: as the model has them, group norm instead, or none."""
    norm_eps: Annotated[float, MoreThan(0)] | Auto = "auto"
    """Epsilon of the normalisation layers; auto: the model's own."""
    norm_num_groups: Annotated[int, AtLeast(1)] = 32
    """Groups of group norm; must divide the channels of every layer."""
    enable_fast_groupnorm: bool = False
    """Group norm by a fused kernel on CUDA; the same groups and checkpoints as without."""
    norm_grouping: Literal["contiguous", "strided"] = "contiguous"
    """Channels of a group: neighbours, or every G-th, as in the TensorFlow original (then without a fused kernel)."""
    disable_stable_batchnorm: bool = False
    """Batch norm's variance in one pass over the images: less exact where the mean is far from zero."""
    batchnorm_momentum: Annotated[float, Between(0, 1)] | Auto = "auto"
    """Weight of a new batch in batch norm's running statistics; auto: the model's own."""
    proxy_norm: bool = False
    """EfficientNet: subtract mean and divide by deviation of the activation of a Gaussian; for --norm-type group."""
    proxy_epsilon: Annotated[float, MoreThan(0)] = 0.03
    """Epsilon under the root of proxy norm's deviation."""
    proxy_recompute: bool = True
    """Compute proxy norm's activations again in the backward pass; no: keep them, two more tensors for each."""
    efficientnet_expand_ratio: Annotated[int, AtLeast(1)] = 6
    """EfficientNet: expansion of every stage after the first."""
    efficientnet_group_dim: Annotated[int, AtLeast(1)] = 1
    """EfficientNet: channels per group of the depthwise convolutions."""
    efficientnet_dropout: Annotated[float, Between(0, 1)] | Auto = "auto"
    """EfficientNet: dropout before the classifier; auto: by its size."""
    efficientnet_drop_path: Annotated[float, Between(0, 1)] = 0.2
    """EfficientNet: chance that the last block is skipped, growing from 0 at the first."""
    efficientnet_se: bool = True
    """EfficientNet: squeeze and excitation in every block."""
    efficientnet_activation: Literal["silu", "relu"] = "silu"
    """EfficientNet: the activation."""
    efficientnet_depth_divisor: Annotated[int, AtLeast(1)] = 8
    """EfficientNet: channels are multiples of this."""
    efficientnet_top_width: Annotated[int, AtLeast(1)] = 1280
    """EfficientNet: channels of the last convolution, before the width is applied."""
    efficientnet_width: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: factor of all channels; auto: by its size."""
    efficientnet_depth: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: factor of all repeats; auto: by its size."""
    resnext_groups: Annotated[int, AtLeast(1)] = 32
    """ResNeXt: groups of the middle convolutions."""
    resnext_group_dim: Annotated[int, AtLeast(1)] = 4
    """ResNeXt: channels per group in the first stage."""
    resnext_wide: bool = False
    """ResNeXt for CIFAR: stages of 256, 512 and 1024 channels instead of 64, 128 and 256."""
    squeezenet_bypass: bool = False
    """SqueezeNet: add the input of fire modules 3, 5, 7 and 9 to their output."""
    mobilenet_wide_head: bool = False
    """MobileNetV3: 1,280 channels and no bias before the classifier; else 1,024 for the small one, with a bias."""
    bottleneck_stride: Literal["1x1", "3x3"] = "3x3"
    """ResNets of 50 layers and more: which convolution of a block strides; 1x1 is He's original, 3x3 is v1.5."""
    shortcut_type: Literal["auto", "A", "B", "C", "stages"] = "auto"
    """ResNets: zero channels (A), projections where the shape changes (B), everywhere (C), or at each stage's start."""
    stem: Literal["auto", "imagenet", "cifar"] = "auto"
    """ResNets: begin with 7 x 7 pixels and pooling, or with 3 x 3 as for small images; auto: by the model's name."""
    conv_bias: bool = False
    """Convolutions have biases; for --norm-type none."""
    input_image_padding: bool = False
    """Give the first convolution a fourth, zero, input channel: the same function, sometimes faster."""


def unknown(options: Any) -> str | None:
    """A name that is neither ours nor timm's."""
    name = options.model.model
    if name in MODELS or name.startswith("timm:"):
        return None
    meant = did_you_mean(name, MODELS) or "; `falconet models` lists them, timm:NAME takes any other"
    return f"--model: '{name}' is not a model{meant}"


def is_residual(name: str) -> bool:
    """Whether a model's name is that of a ResNet or ResNeXt for photos."""
    return name in MODELS and name.startswith(("resnet", "resnext")) and not name.endswith("-cifar")


def of_another_family(options: Any) -> str | None:
    """An option of a model's shape must not seem to be obeyed by another family."""
    model = options.model
    name = model.model
    families = {
        "efficientnet_": (name.startswith("efficientnet"), "an EfficientNet"),
        "proxy_": (name.startswith("efficientnet"), "an EfficientNet"),
        "resnext_": (name.startswith("resnext"), "a ResNeXt"),
        "resnext_wide": (name.startswith("resnext") and name.endswith("-cifar"), "a ResNeXt for CIFAR"),
        "squeezenet_": (name.startswith("squeezenet"), "a SqueezeNet"),
        "mobilenet_": (name.startswith("mobilenet-v3"), "a MobileNetV3"),
        "zero_init": (name.startswith(("resnet", "resnext")), "a ResNet"),
        "bottleneck_": (is_residual(name), "a ResNet"),
        "shortcut_": (name.startswith(("resnet", "resnext")), "a ResNet"),
        "stem": (name.startswith(("resnet", "resnext")), "a ResNet"),
    }
    for field in fields(model):
        for prefix, (is_one, kind) in families.items():
            if field.name.startswith(prefix) and not is_one and getattr(model, field.name) != field.default:
                return f"--{field.name.replace('_', '-')}: '{name}' is not {kind}"
    return None


def proxy_without_norm(options: Any) -> str | None:
    if options.model.proxy_norm and options.model.norm_type == "none":
        return "--proxy-norm: contradicts --norm-type none: it follows a norm; wanted --norm-type group"
    return None


def proxy_with_lars(options: Any) -> str | None:
    """As in the original, whose layer-wise rates it was never tried with."""
    if options.model.proxy_norm and options.optimizer.optimizer == "lars":
        return "--proxy-norm: not with --optimizer lars; wanted sgd, rmsprop_tf or adamw"
    return None


REDUCED = {224: 160, 380: 252}  # the originals' pairs of sides, pixels
MULTIPLE = 4  # pixels, of every other reduced side


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Training at a reduced resolution, then fine-tuning at the full one."""

    half_res_training: bool = False
    """Train on smaller images (160 for 224, 252 for 380, else 5/7 of the side), average, fine-tune at full size."""
    fine_tune_epoch: Annotated[int, AtLeast(1)] | None = None
    """Epochs of fine-tuning, counted on from --epoch; it is sgd without momentum, mixing or augmentation."""
    fine_tune_lr: Annotated[float, AtLeast(0)] = 0.25
    """First learning rate of fine-tuning; a cosine takes it to 0, without warm-up."""
    fine_tune_micro_batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward and backward pass while fine-tuning; auto: as --micro-batch-size."""
    fine_tune_gradient_accumulation: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Micro-batches in one update while fine-tuning; auto: as --gradient-accumulation."""
    fine_tune_first_trainable_layer: str | None = None
    """Layers that run before this one, such as layer4/0, stay as they are while fine-tuning; without it, all train."""


def missing_for_fine_tuning(options: FineTuning, *, averages: bool) -> str | None:
    """What half-resolution training needs beside it; `averages`: whether checkpoints are averaged."""
    if not options.half_res_training or (options.fine_tune_epoch and averages):
        return None
    if options.fine_tune_epoch is None:
        return "--fine-tune-epoch, the epochs at full size that follow"
    return "--weight-avg-strategy mean or exponential, because fine-tuning begins with the average of the checkpoints"


def reduced_size(image_size: int) -> int:
    """The side that half-resolution training uses, in pixels: 5/7 of the full one, to a multiple of 4."""
    return REDUCED.get(image_size) or max(MULTIPLE, MULTIPLE * round(image_size * 5 / 7 / MULTIPLE))


_MEAN = re.compile(r"mean:(all|[1-9]\d{0,8})")
_EXPONENTIAL = re.compile(r"exponential:(0?\.\d+|[01](?:\.0*)?)")


@dataclass(frozen=True, kw_only=True)
class FurtherAverage:
    """One more average."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None  # checkpoints; None: all

    @property
    def suffix(self) -> str:
        """What its folder is called by, behind `averaged`."""
        return f"exp_{self.decay:.15g}" if self.strategy == "exponential" else f"mean_{self.last or 'all'}"


def further_average(text: str) -> FurtherAverage | None:
    """None: the text is none."""
    mean, exponential = _MEAN.fullmatch(text), _EXPONENTIAL.fullmatch(text)
    if mean:
        return FurtherAverage(strategy="mean", last=None if mean[1] == "all" else int(mean[1]))
    return FurtherAverage(strategy="exponential", decay=float(exponential[1])) if exponential else None


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What is saved."""

    checkpoint_output_path: Path | None = local(None)
    """Folder of the checkpoints; without it, checkpoints/ in the run folder."""
    checkpoint_save_freq: Annotated[float, MoreThan(0)] = 1.0
    """Epochs between checkpoints; 0.25 saves four times an epoch. The end of training is always saved."""
    checkpoint_first_epoch: Annotated[int, AtLeast(0)] = 0
    """Save from the end of this epoch on, then every --checkpoint-save-freq epochs; 0: after the first of those."""
    initial_checkpoint: bool = False
    """Also save before the first update. It is kept whatever --checkpoints-kept says, and in no average of the run."""
    checkpoints_kept: Annotated[int, AtLeast(1)] | Literal["auto", "all"] = local(
        "auto", again="remove older checkpoints; until then all are kept"
    )
    """Newest checkpoints to keep, beside the best validated one; auto: 3, or what the averaging needs."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The average of the checkpoints, made after training."""

    weight_avg_strategy: Literal["none", "mean", "exponential"] = "none"
    """Average the saved checkpoints, all alike or the newer ones more."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all, or -1: every one."""
    weight_avg_also: tuple[str, ...] = ()
    """Further averages, each made and validated: mean:N, mean:all or exponential:DECAY."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """How the average is made."""

    checkpoint_output_path: Path | None = local(None)
    """The averaged checkpoint; without it, <model>_<data>_<epoch>_averaged beside the others."""
    weight_avg_strategy: Literal["mean", "exponential"] = "mean"
    """All alike, or the newer ones more."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all, or -1: every one."""
    weight_avg_discard: Annotated[int, AtLeast(0)] = 0
    """Leave out this many of the newest checkpoints first."""
    batchnorm_images: Annotated[int, AtLeast(0)] = 0
    """Re-estimate batch norm's statistics on this many training images; 0: average the statistics too."""
    validate: bool = False
    """Measure the accuracy of the result."""


def temporary_elsewhere(options: Any) -> str | None:
    """What contradicts a run folder that is thrown away."""
    if not options.run.temporary:
        return None
    if hasattr(options, "input"):
        return "--temporary: is for train; what restore goes on with is there already"
    for name, place in (
        ("run-dir", None if options.run.run_dir == "auto" else options.run.run_dir),
        ("checkpoint-output-path", options.checkpoints.checkpoint_output_path),
    ):
        if place is not None:
            return f"--temporary: contradicts --{name} {place}, which is to stay; wanted one of the two"
    return None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, how often, and what it is compared with."""

    spec: tuple[str, ...] = ()
    """Spec files in the format of the originals, or names of built-in ones; none: ./benchmarks.yml."""
    benchmark: tuple[str, ...] = ()
    """Names of the benchmarks to run; none: all, but those that end in _conv."""
    repeat: Annotated[int, AtLeast(1)] = 3
    """Runs of each; the spread between them is what a difference is judged by."""
    log_dir: Path | Auto = local("auto")
    """Where results and logs go; auto: bench-results/<time>."""
    compare: Path | None = local(None)
    """A results.json of an earlier run; exit code 3 when a benchmark is slower by more than --margin."""
    margin: Annotated[float, AtLeast(0)] = 5.0
    """Percent of throughput that may be lost before --compare fails."""
    timeout: Annotated[float, MoreThan(0)] | None = None
    """Seconds that one run may take; then it is stopped, told as failed, and the next one begins."""
    include_convergence: bool = False
    """Also run the benchmarks that train to an accuracy, whose names end in _conv."""
    stop_on_error: bool = False
    """Run nothing more after the first failure."""
    allow_wandb: bool = local(False)
    """Keep the --wandb options of the commands, which are taken out otherwise."""
    profile: bool = local(False)
    """Give --profile to commands that train; what they measure is marked as profiled."""
    show_output: bool = False
    """Also print what the commands print."""
    csv_metrics: tuple[str, ...] = ()
    """Further metrics of the spec that results.csv gets as columns."""
    additional_metrics: bool = False
    """Every metric of the spec as a column of results.csv."""
    plan: bool = local(False)
    """Say what would run, and what each needs, and exit."""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How predictions are measured."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file of options; the command line overrides it."""
    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Processes that predict side by side, one a device; auto: as many as a launcher started, else 1."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""
    weights: Literal["random", "pretrained", "auto"] = local("random")
    """pretrained: timm's, by the Hugging Face cache or network; auto: those if they can be had, else random ones."""
    half_partial: bool = False
    """Let matrix products add up in half precision, where the device can."""
    profile: bool = local(False)
    """Instead, trace three batches with torch.profiler: profile/profile.json (chrome://tracing) and profile.txt."""
    plan: bool = local(False)
    """Say what would be measured, and exit."""


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is reported."""

    logs_per_epoch: Annotated[int, AtLeast(1)] = 1
    """Log points in each epoch."""
    tensorboard: bool = local(False, again="continue the TensorBoard files")
    """Also write TensorBoard files into the run folder."""
    wandb: bool = local(False, again="continue uploading")
    """Also log to Weights & Biases (WANDB_MODE=offline works)."""
    profile: bool = local(False, again="trace updates")
    """Trace three updates with torch.profiler: profile.json (chrome://tracing) and profile.txt in the run folder."""
    wandb_project: str = local("falconet", again="upload to the same project")
    """Weights & Biases project."""
    weight_histogram: bool = local(False, again="continue the histograms")
    """At every log point, histograms of all trained weights to --wandb and --tensorboard (--wandb-weight-histogram)."""
    mlperf_logging: bool = portable(False)  # a file in the run folder, written like the others there
    """Also write result_<seed>.txt into the run folder, the log of MLPerf Training 1.1 (image classification)."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Which run is uploaded, and as what."""

    source: Path | None = local(None)
    """The run folder, of Falconet or of an original; also the first word of the command."""
    name: str | None = None
    """The name that the run gets; without it, that of its folder."""
    wandb_project: str = local("falconet")
    """Weights & Biases project."""


def missing_sink(options: Logging) -> str | None:
    """Where histograms would go."""
    if options.weight_histogram and not (options.wandb or options.tensorboard):
        return "--weight-histogram: needs --wandb or --tensorboard, where histograms go"
    return None


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, and how it puts requests together."""

    host: str = local("127.0.0.1")
    """The address to listen on; 0.0.0.0: every one of this machine. There is no password and no encryption."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """The port; 0: any free one; auto: 8000, in `bench serve` any free one."""
    max_batch: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images computed at once, and the most of one request; auto: 64, in `bench serve` the micro-batch."""
    max_delay: Annotated[float, AtLeast(0)] = 2.0
    """Milliseconds that a request may wait for others to join it while the device is free."""
    max_queue: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that may wait; a request beyond is refused with status 503; auto: 16 x --max-batch."""
    front_ends: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads that talk to clients; auto: 4 for a CUDA device, 1 for a CPU, which needs its cores to compute."""
    capture: bool = True
    """On CUDA, record the computation of each batch size once and replay it: the same scores, less work for the CPU."""
    half_partial: bool = False
    """Let matrix products add up in half precision, where the device can."""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """What a model without a checkpoint takes."""

    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: what the model was made for. A checkpoint has its own."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Classes; auto: 1000, or 10 for the CIFAR networks. A checkpoint has its own."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Who sends requests, and how many; --iterations are the requests of each client."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file of options; the command line overrides it."""
    url: str | None = local(None)
    """Measure a server that runs already, such as http://127.0.0.1:8000, instead of starting one."""
    clients: Annotated[int, AtLeast(1)] = 1
    """Processes that send requests side by side."""
    request_type: Literal["SYNC", "ASYNC"] = "SYNC"
    """SYNC: a client waits for each answer before it asks again; ASYNC: it keeps --window requests in flight."""
    window: Annotated[int, AtLeast(1)] = 4
    """Requests of an ASYNC client in flight, each on a connection of its own."""
    check_answers: bool = False
    """Compare every answer with the model's own, computed here."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What convolutions may use beside their data."""

    available_memory_proportion: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Share of a CUDA device's memory that a convolution may use beside its data; one for all, or one a stage."""


def share_of(proportions: tuple[float, ...], *, stage: int, stages: int) -> float | None:
    """The share for one stage; stages that run together have the largest."""
    if not proportions:
        return None
    return proportions[stage] if len(proportions) == stages else max(proportions)
