"""Every option, declared once: name, type, range, default and help, in sections that the code takes as values.

The sections for training come first, in the order of the help; then those for measuring, serving, and the tools.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.fields import AtLeast, Auto, Between, MoreThan, Range, local, portable, value_or

# The zoo's names, repeated here so that a typo is reported without importing torch; a test compares the two lists.
MODELS = (
    *("resnet10", "resnet14", "resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext14", "resnext26", "resnext50", "resnext101", "resnext152"),
    *(f"efficientnet-b{size}" for size in range(8)),
    "efficientnet-cifar",
    *("mobilenet", "mobilenet-v3-small", "mobilenet-v3-large"),
    *(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110, 11, 29, 38, 47, "56b", 65)),
    *(f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)),
    *("squeezenet", "squeezenet-cifar"),
    *("speednet8-cifar", "speednet11-cifar"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run folder, the named config, the seed."""

    config: str | None = local(None)
    """A named config (`falconet configs` lists them) or a YAML file, which may extend one; options override it."""
    plan: bool = local(False)
    """Print the plan and every option with its source, then exit."""
    run_dir: Path | Auto = local("auto")
    """The run folder; auto: runs/<model>_<data>_<time>, or in restore the folder that holds the checkpoint."""
    temporary: bool = local(False)
    """Use a temporary run folder and remove it after a clean end; it is kept after a failure or Ctrl-C."""
    name_suffix: str | None = local(None)
    """Text added to the name of a new run folder, unless --run-dir names it."""
    resume: bool = local(False)
    """Continue the run in --run-dir if its options are the same, else refuse; start a new run if there is none."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Seed of every random choice; the same seed gives the same run."""


MICRO_BATCH = 64  # images


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where images come from, and how they are read and normalised."""

    data: Literal["digits", "cifar10", "cifar100", "imagenet", "folder", "generated", "synthetic"] = "digits"
    """Source of images; folder: your photos (implied by --data-dir); generated: random; synthetic: on the device."""
    data_dir: Path | None = portable(None)  # only read; a checkpoint's data folder never leads to a download
    """Folder of the data (also --imagenet-data-path); default: the environment variable DATA_DIR."""
    val_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Fraction of each class to validate on if photos are not split, chosen by file name and --seed; 1: all of them."""
    tfrecord_keys: str | None = None
    """Keys in TFRecords, as image=KEY,label=KEY; default: ImageNet's, image/encoded and image/class/label."""
    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: the model's standard size, 8 for the digits."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Number of classes of generated and synthetic data; auto: 1000, or 10 for the CIFAR networks."""
    iterations: Annotated[int, AtLeast(1)] = 100
    """Updates per epoch of generated or synthetic data; in `bench infer`, batches of any data."""
    validation_images: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Validation images of generated data; auto: a tenth of the training images."""
    micro_batch_size: Annotated[int, AtLeast(1)] | Auto = MICRO_BATCH
    """Images in one forward and backward pass; auto: the most that fit; updates keep 64 x --gradient-accumulation."""
    validation_batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward pass of validation, per replica; accuracy stays exact; auto: --micro-batch-size."""
    dataloader_workers: Annotated[int, AtLeast(0)] | Auto = "auto"
    """Threads that read ahead; 0: read in the loop; auto: one per core, up to 32 (2 or 3 if the device reads)."""
    dataloader_rebatch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that a thread reads at once; several threads fill one batch. Fewer: less memory, more overhead."""
    decode_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where JPEG files are decoded; auto: cpu. `falconet doctor` measures both on this machine and recommends one."""
    eight_bit_io: bool = True
    """Copy pixels to the device as bytes; otherwise in the compute format, two or four times as many bytes."""
    normalization_location: Literal["host", "device", "none"] = "device"
    """Where pixels are normalised; none: the model sees values from 0 to 255."""
    normalization: Literal["deviation", "mean", "image"] = "deviation"
    """How to normalise pixels; deviation: (x - mean) / std; mean: x - ImageNet's mean; image: each image by itself."""
    pixel_mean: tuple[float, ...] = ()
    """Mean of red, green and blue for pixels from 0 to 1; default: the dataset's."""
    pixel_deviation: tuple[Annotated[float, MoreThan(0)], ...] = ()
    """Standard deviation of red, green and blue for pixels from 0 to 1; default: the dataset's."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How photos are resized; --pretrained sets what its weights expect."""
    antialias: bool = True
    """Average over all pixels when shrinking an image; otherwise over the four nearest, as TensorFlow 1 did."""
    validation_crop: Literal["auto", "centre", "whole"] = "auto"
    """Part of an image to validate on: its centre (--validation-crop-ratio) or all of it; auto: centre for photos."""
    validation_crop_ratio: Annotated[float, Between(0.1, 1)] = 0.875
    """Fraction of the short side that validation's centre crop keeps; --pretrained sets what its weights expect."""
    dataset_location: Literal["host", "device"] = "host"
    """Where images are kept; device: all as bytes, shifted and mirrored there, for CIFAR and other small images."""
    dataset_cache: bool = False
    """Cache decoded validation images and encoded training photos, each in up to a quarter of the free memory."""
    # Only read, a regular file, and part of what is trained on; it can leave photos out and nothing else.
    exclude_list: Path | None = portable(None)
    """File that lists photos to leave out, one path per line; `falconet data check` writes it."""
    check_images: Literal["auto", "yes", "no"] = "auto"
    """Read the header of every photo once before training; auto: only with --data folder."""
    bad_images_allowed: str = "auto"
    """Bad training images to skip before the run stops: a number or a percentage, such as 2%; auto: 1%, at least 5."""

    @property
    def micro_batch(self) -> int:
        """The size, or what auto stands for until it is found; only training searches for it."""
        return value_or(self.micro_batch_size, MICRO_BATCH)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long to train, what to start with, which weights to train."""

    epoch: Annotated[int | float, MoreThan(0)] | Auto = 30
    """Passes over the training images, such as 2.5; auto: depends on their number, see docs/using/photos.md."""
    updates: Annotated[int, AtLeast(1)] | None = None
    """Length of the training in updates instead of --epoch; may end within an epoch. None removes a stored value."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes in the training loss; balanced: inverse to their numbers of images, 1 on average."""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """Images of an epoch; shuffle: each once; balanced: equally many of each class, those of small ones repeated."""
    early_stopping: Annotated[int, AtLeast(1)] | None = None
    """Stop after this many epochs without a better validation."""
    gradient_accumulation: Annotated[int, AtLeast(1)] = 1
    """Micro-batches per update, on each replica."""
    device_iterations: Annotated[int, AtLeast(1)] = 1
    """Updates in a row between checks for a stop request; fewer before a log point, a checkpoint or a validation."""
    init_path: Path | None = local(None)
    """Start with the weights of this run (its best checkpoint), this checkpoint, or this safetensors or torch file."""
    pretrained: Literal["none", "auto", "published"] | Path = local("none", bare="published")
    """Start with published weights (the meaning without a value) or a file's; auto: published if there are any."""
    batchnorm_per_update: bool = False
    """Update batch norm's running statistics once per update, with the mean over its micro-batches."""
    trainable: tuple[str, ...] = ()
    """Train only weights whose name matches one of these regular expressions, such as fc or layer4/.*/bias."""
    freeze: str | None = None
    """Freeze the first N stages, everything but the classifier (backbone), or the weights that match a pattern."""
    unfreeze_after: Annotated[int, AtLeast(1)] | None = None
    """After this many epochs, train what --freeze names as well; its optimizer state starts fresh."""
    freeze_after: Annotated[float, MoreThan(0)] | None = None
    """Freeze what --freeze names only after this many epochs."""
    frozen_batchnorm: Literal["statistics", "batch"] = "statistics"
    """What frozen batch norm normalises by: stored statistics, or the batch, as in the TensorFlow original."""
    dataset_percentage: Annotated[float, Between(1, 100)] = 100.0
    """Percentage of the training images to use, spread evenly over the dataset; validation uses all its images."""

    @property
    def epochs(self) -> int:
        """The epochs as a number, once auto has been settled; the last may be cut short."""
        assert self.epoch != "auto"
        return ceil(self.epoch)

    @property
    def has_whole_epochs(self) -> bool:
        return self.updates is None and (self.epoch == "auto" or self.epoch == int(self.epoch))

    def limit(self, updates_per_epoch: int) -> int | None:
        """The length in updates; None: whole epochs."""
        if self.updates is not None or self.has_whole_epochs:
            return self.updates
        assert self.epoch != "auto"
        return max(1, round(Fraction(str(self.epoch)) * updates_per_epoch))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update rule, weight decay, moving average."""

    optimizer: Literal["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars", "muon"] = "sgd"
    """Update rule; sgd_combined: one tensor for gradient and velocity; muon: orthogonal steps, the rest by Nesterov."""
    momentum: Annotated[float, Between(0, 1)] = 0.9
    """Momentum of sgd, rmsprop and lars, and of what muon does not orthogonalise."""
    weight_decay: Annotated[float, AtLeast(0)] = 5e-4
    """Weight decay, added to the gradient; decoupled in adamw and muon."""
    weight_decay_exclude: Literal["vectors", "norms", "nothing"] = "vectors"
    """Weights that are not decayed; vectors: biases and normalisation layers; norms: normalisation layers only."""
    optimizer_eps: Annotated[float, AtLeast(0)] = 1e-8
    """Epsilon of adamw, rmsprop and lars."""
    rmsprop_decay: Annotated[float, Between(0, 1)] = 0.99
    """Smoothing constant of rmsprop's squared gradients."""
    lars_eeta: Annotated[float, MoreThan(0)] = 0.001
    """Trust coefficient of lars."""
    lars_skip: tuple[str, ...] = ()
    """Regular expressions for weights that lars neither scales nor decays; default: see --weight-decay-exclude."""
    muon_momentum: Annotated[float, Between(0, 1)] = 0.95
    """Momentum of the filters and matrices that muon orthogonalises: all but vectors and the classifier."""
    muon_steps: Annotated[int, Between(1, 20)] = 5
    """Steps of muon's orthogonalisation; fewer are faster and rougher."""
    muon_rescale: bool = False
    """Scale each filter or matrix to rows of norm 1, on average, before muon moves it, instead of decaying it."""
    lr_share: tuple[str, ...] = ()
    """Multiply the learning rate of some weights: PATTERN=FACTOR, such as fc=10 or .*/bias=2; not muon's decay."""
    layer_decay: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Multiply the learning rate by this for each block before the classifier, which trains at the full rate."""
    ema_half_life: Annotated[float, MoreThan(0)] | None = None
    """Keep an exponential moving average of the weights with this half-life in epochs, and validate it too."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The schedule, warm-up, decay."""

    lr: Annotated[float, AtLeast(0)] | Auto = 0.1
    """Peak learning rate, not scaled by the batch size; auto: found by a range test before the first update."""
    lr_schedule: Literal["step", "cosine", "exponential", "polynomial"] = "cosine"
    """step: drops at --lr-epoch-decay; cosine: to 0; exponential: drops at each change; polynomial: --lr-end-ratio."""
    lr_decay: tuple[Annotated[float, MoreThan(0)], ...] = (0.5,)
    """Factor of each drop in the step and exponential schedules; step also takes one factor per drop."""
    lr_epoch_decay: tuple[Annotated[float, MoreThan(0)], ...] = ()
    """Epochs at which the step schedule drops."""
    lr_drop_shares: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Further drops of the step schedule, as fractions of the training."""
    lr_scheduler_freq: Annotated[float, AtLeast(0)] = 0.0
    """Changes of the learning rate per epoch; 0: at every update."""
    lr_changes: Annotated[int, AtLeast(1)] | None = None
    """Changes of the learning rate in the whole training, evenly spaced; replaces --lr-scheduler-freq."""
    lr_power: Annotated[float, MoreThan(0)] = 2.0
    """Exponent of the polynomial schedule."""
    lr_end_ratio: Annotated[float, Between(0, 1)] = 1e-5
    """Final learning rate of the polynomial schedule, as a fraction of the peak."""
    warmup_epoch: Annotated[float, AtLeast(0)] = 1.0
    """Epochs of linear warm-up."""

    @property
    def peak(self) -> float:
        """The peak rate as a number; 1 until auto is found, because rates are shares of it."""
        return 1.0 if self.lr == "auto" else self.lr


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random crops, flips, auto-augment policies, erasing, label smoothing, mixup, cutmix."""

    augment: Literal["auto", "none", "shift", "shift-flip", "crop-flip"] = "auto"
    """Move images at random: shift, shift and flip, or resized crop and flip; auto: depends on the data, see --plan."""
    flip: Literal["random", "alternating"] = "random"
    """Which half of the images is mirrored; random: a new one each epoch; alternating: one half, then the other."""
    shift_reach: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Most pixels by which --augment shift moves an image, each way; auto: an eighth of its side."""
    shift_padding: Literal["zeros", "reflect"] = "zeros"
    """What fills the border that --augment shift uncovers: black, or the image reflected there."""
    cutout: Annotated[int, AtLeast(0)] = 0
    """Side in pixels of a square at a random place in each image that becomes the dataset's mean; 0: none."""
    vertical_flip: Annotated[float, Between(0, 1)] = 0.0
    """Probability of mirroring an image top to bottom, for photos that have no top, such as aerial ones."""
    auto_augment: Literal["none", "randaugment", "trivialaugment", "autoaugment"] = "none"
    """Random changes of colour and geometry, as in torchvision."""
    autoaugment_policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Dataset for which autoaugment's pairs of operations were found."""
    randaugment_ops: Annotated[int, AtLeast(1)] = 2
    """Operations that randaugment applies to each image."""
    randaugment_magnitude: Annotated[int, Between(0, 30)] = 9
    """Strength of randaugment's operations, from 0 to 30."""
    color_jitter: Annotated[float, AtLeast(0)] = 0.0
    """Multiply brightness, contrast and saturation by random factors from 1 - X to 1 + X; 0: none."""
    random_erasing: Annotated[float, Between(0, 1)] = 0.0
    """Probability that a random rectangle of 2 % to 33 % of an image becomes the dataset's mean."""
    repeated_augmentation: Annotated[int, AtLeast(1)] = 1
    """Copies of each image in an update, augmented differently; an epoch has as many updates, with fewer images."""
    use_bbox_info: bool = False
    """Make random crops overlap an annotated object, from *bounding_boxes.csv, XML files or the TFRecords."""
    use_bbox_info_if_there: bool = False
    """Like --use-bbox-info where the data has boxes; plain random crops where it has none."""
    crop_area: Annotated[float, Between(0.001, 1)] = 0.08
    """Smallest fraction of a photo that a random crop covers; the largest is 1."""
    crop_draw: Literal["area", "height"] = "area"
    """What is drawn uniformly; area: area and log ratio; height: ratio and height, at least a tenth of the photo."""
    object_crop_area: Annotated[float, Between(0.001, 1)] | Auto = "auto"
    """Like --crop-area, for crops that must overlap an annotated object; auto: --crop-area."""
    object_overlap: Literal["object", "crop"] = "object"
    """Overlap that is enough; object: a tenth of the object; crop: a tenth of the crop (at most ten draws)."""
    label_smoothing: Annotated[float, Between(0, 1)] = 0.0
    """Fraction of the target spread evenly over all classes."""
    mixup_alpha: Annotated[float, Between(0, 1)] = 0.0
    """Mix each image with its neighbour, in a ratio drawn from Beta(a, a); 0: no mixup."""
    cutmix_lambda_low: Annotated[float, Between(0, 1)] = 0.0
    """Smallest fraction that an image keeps in cutmix; both bounds 0 or both 1: no cutmix."""
    cutmix_lambda_high: Annotated[float, Between(0, 1)] = 0.0
    """Largest fraction that an image keeps in cutmix; equal bounds fix it."""
    cutmix_disable_prob: Annotated[float, Between(0, 1)] = 0.0
    """Probability that a micro-batch skips cutmix."""
    cutmix_draw: Literal["even", "exponential"] = "even"
    """Draw the fraction uniformly between its bounds (even), or as 1 + ln(u) / 4, mostly near the upper bound."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The architecture, its normalisation layers and initial weights."""

    model: str = "resnet8-cifar"
    """A name from `falconet models`, or timm:NAME for any other model of timm."""
    weight_init: Literal["auto", "uniform", "normal", "lecun", "he", "glorot", "channels"] = "auto"
    """Initialisation of convolutions and linear layers; auto: the library's. Formulas: docs/knowing/numerics.md."""
    zero_init: Literal["auto", "none", "last", "identity", "shortcut"] = "auto"
    """ResNets: norms that start at 0; last: a block's last; identity: beside identities; shortcut: projections' too."""
    padding: Literal["symmetric", "same"] = "symmetric"
    """Zero padding of strided convolutions and pooling: equal on both sides, or TensorFlow's SAME."""
    norm_type: Literal["batch", "group", "none"] = "batch"
    """Normalisation layers: the model's own (batch), group norm instead, or none."""
    norm_eps: Annotated[float, MoreThan(0)] | Auto = "auto"
    """Epsilon of the normalisation layers; auto: the model's."""
    norm_num_groups: Annotated[int, AtLeast(1)] = 32
    """Groups of group norm; must divide the channels of every layer."""
    enable_fast_groupnorm: bool = False
    """Fuse group norm on CUDA in stages and untraceable models too (others always do); checkpoints are unaffected."""
    norm_grouping: Literal["contiguous", "strided"] = "contiguous"
    """Channels in a group: neighbours, or every G-th, as in the TensorFlow original."""
    disable_stable_batchnorm: bool = False
    """Compute batch norm's variance in one pass: less exact where the mean is far from zero."""
    batchnorm_momentum: Annotated[float, Between(0, 1)] | Auto = "auto"
    """Weight of each new batch in batch norm's running statistics; auto: the model's."""
    proxy_norm: bool = False
    """EfficientNet: normalise activations by the mean and deviation of a Gaussian's; for --norm-type group."""
    proxy_epsilon: Annotated[float, MoreThan(0)] = 0.03
    """Epsilon under the square root of proxy norm's deviation."""
    proxy_recompute: bool = True
    """Recompute proxy norm's activations in the backward pass; otherwise keep them, two more tensors per layer."""
    efficientnet_expand_ratio: Annotated[int, AtLeast(1)] = 6
    """EfficientNet: expansion of every stage after the first."""
    efficientnet_group_dim: Annotated[int, AtLeast(1)] = 1
    """EfficientNet: channels per group of the depthwise convolutions."""
    efficientnet_dropout: Annotated[float, Between(0, 1)] | Auto = "auto"
    """EfficientNet: dropout before the classifier; auto: depends on the size."""
    efficientnet_drop_path: Annotated[float, Between(0, 1)] = 0.2
    """EfficientNet: probability of skipping the last block; grows linearly from 0 at the first."""
    efficientnet_se: bool = True
    """EfficientNet: squeeze and excitation in every block."""
    efficientnet_activation: Literal["silu", "relu"] = "silu"
    """EfficientNet: activation function."""
    efficientnet_depth_divisor: Annotated[int, AtLeast(1)] = 8
    """EfficientNet: channel counts are multiples of this."""
    efficientnet_top_width: Annotated[int, AtLeast(1)] = 1280
    """EfficientNet: channels of the last convolution, before the width factor."""
    efficientnet_width: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: width factor (channels); auto: depends on the size."""
    efficientnet_depth: Annotated[float, MoreThan(0)] | Auto = "auto"
    """EfficientNet: depth factor (repeats); auto: depends on the size."""
    resnext_groups: Annotated[int, AtLeast(1)] = 32
    """ResNeXt: groups of the middle convolutions."""
    resnext_group_dim: Annotated[int, AtLeast(1)] = 4
    """ResNeXt: channels per group in the first stage."""
    resnext_wide: bool = False
    """ResNeXt for CIFAR: stages of 256, 512 and 1024 channels instead of 64, 128 and 256."""
    squeezenet_bypass: bool = False
    """SqueezeNet: add the input of fire modules 3, 5, 7 and 9 to their output."""
    speednet_widths: tuple[Annotated[int, AtLeast(1)], ...] = ()
    """SpeedNet: channels of its three stages; default: 64 256 256, or 128 384 512 with 11 layers."""
    speednet_activation: Literal["gelu", "silu"] = "gelu"
    """SpeedNet: activation function; on CUDA, silu is fused with the norm before it."""
    speednet_whitening: bool = True
    """SpeedNet: compute the first filters, to whiten patches of 5,000 training images, instead of training them."""
    mobilenet_wide_head: bool = False
    """MobileNetV3: 1,280 channels without bias before the classifier; otherwise 1,024 (small) with a bias."""
    bottleneck_stride: Literal["1x1", "3x3"] = "3x3"
    """ResNets with 50 or more layers: which convolution of a block strides; 1x1: He et al.; 3x3: ResNet v1.5."""
    shortcut_type: Literal["auto", "A", "B", "C", "stages"] = "auto"
    """ResNets: shortcuts: zero channels (A), or projections where shapes change (B), everywhere (C), or per stage."""
    shortcut_padding: Literal["back", "both"] = "back"
    """ResNets whose shortcuts add zero channels: put them after the others (back), or half before and half after."""
    stem: Literal["auto", "imagenet", "cifar"] = "auto"
    """ResNets: first layers: 7 x 7 convolution and pooling, or 3 x 3 for small images; auto: by the model's name."""
    conv_bias: bool = False
    """Give convolutions a bias; for --norm-type none."""
    input_image_padding: bool = False
    """Give the first convolution a fourth input channel of zeros: the same function, sometimes faster."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Train at a reduced resolution, then fine-tune at the full one."""

    resolution_schedule: tuple[str, ...] = ()
    """Sides of training images: 128:1 176:13 trains at 128 pixels, from epoch 13 at 176; validation is unaffected."""
    half_res_training: bool = False
    """Train on smaller images (160 for 224, 252 for 380, else 5/7 of the side), average, fine-tune at full size."""
    fine_tune_epoch: Annotated[int, AtLeast(1)] | None = None
    """Epochs of fine-tuning after --epoch, by plain sgd without momentum, mixing or augmentation."""
    fine_tune_lr: Annotated[float, AtLeast(0)] = 0.25
    """Initial learning rate of fine-tuning; falls to 0 along a cosine, without warm-up."""
    fine_tune_micro_batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward and backward pass of fine-tuning; auto: --micro-batch-size."""
    fine_tune_gradient_accumulation: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Micro-batches per update of fine-tuning; auto: --gradient-accumulation."""
    fine_tune_first_trainable_layer: str | None = None
    """Freeze the layers before this one, such as layer4/0, while fine-tuning; default: train what phase 1 trains."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device, number formats, determinism, captured graphs, compiled kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: cuda if available, else cpu."""
    precision: Literal["auto", "16.16", "16.32", "32.32", "bf16.bf16", "bf16.32"] = "32.32"
    """Formats of compute and of weights (docs/knowing/numerics.md); auto: bf16.32 if the device has it, else 32.32."""
    threads: Annotated[int, AtLeast(1)] | Auto = "auto"
    """CPU threads per process (changes last bits); auto: a restored run's, else OMP_NUM_THREADS, else one per core."""
    deterministic: bool = True
    """On CUDA, use only deterministic kernels, so that a restored run equals an uninterrupted one bit for bit."""
    capture: bool = True
    """On CUDA, capture an update or a batch as a graph and replay it: the same numbers, less CPU work."""
    model_cache_path: Path | None = local(None)
    """Folder for compiled kernels; default: TRITON_CACHE_DIR or ~/.triton/cache (for a server's models: ~/.cache)."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Stochastic rounding, loss scaling, recomputation."""

    enable_stochastic_rounding: bool = False
    """Round 16-bit weights up or down at random, in proportion to the distance, instead of to the nearest value."""
    loss_scaling: Annotated[float, MoreThan(0)] = 1.0
    """Loss scale; the final value of a stepped scale, the initial value of an automatic one."""
    initial_loss_scaling: Annotated[float, MoreThan(0)] | None = None
    """Start with this loss scale and double it at equal intervals of epochs until it reaches --loss-scaling."""
    auto_loss_scaling: bool = False
    """Halve the loss scale when gradients come close to overflow, double it otherwise."""
    auto_loss_scaling_period: Annotated[int, AtLeast(1)] = 1
    """Updates between changes of the automatic loss scale."""
    half_partial: bool = False
    """Let matrix products sum in half precision, on CUDA; convolutions always sum in fp32."""
    enable_recompute: bool = False
    """Recompute activations in the backward pass instead of keeping all of them."""
    recompute_mode: Literal["none", "auto", "manual"] | None = None
    """What to recompute; auto: blocks, by --memory-budget; manual: all but --recompute-checkpoints; none: nothing."""
    recompute_checkpoints: tuple[str, ...] = ()
    """Regular expressions for layers whose outputs are kept, such as layer1/.*; everything else is recomputed."""
    memory_budget: Annotated[float, MoreThan(0)] | None = None
    """GiB that activations may take; as many blocks as necessary are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Memory for convolution workspaces."""

    available_memory_proportion: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Fraction of a CUDA device's memory that a convolution may use as workspace; one for all stages, or one each."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Replicas, pipeline stages, sharded and offloaded optimizer state, restarts."""

    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Copies of the model, one process each; auto: as many as torchrun, mpirun or srun started, else 1."""
    pipeline_splits: tuple[str, ...] = ()
    """Layers that start a new pipeline stage, such as layer3/0, one process per stage; auto:N: N balanced stages."""
    pipeline_schedule: Literal["grouped", "interleaved", "sequential"] = "grouped"
    """Micro-batches that a stage keeps; grouped: up to twice the stages; interleaved: half as many; sequential: one."""
    strict_devices: bool = False
    """Refuse to run on fewer devices than replicas x stages, instead of folding replicas and stages."""
    bucket_size: Annotated[float, MoreThan(0)] = 25.0
    """Megabytes of gradients per message between replicas, and of offloaded optimizer state per transfer."""
    batchnorm_span: Annotated[int, AtLeast(1)] = 1
    """Replicas that share batch norm's statistics; must divide the number of replicas."""
    enable_optimizer_rts: bool = False
    """Shard the optimizer's state over the replicas: the same update with a fraction of the memory."""
    identical_replica_seeding: bool = False
    """Use the same dropout mask on every replica; otherwise each draws its own."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory: the same update, with copies that overlap computation (CUDA)."""
    max_restarts: Annotated[int, AtLeast(0)] = 3
    """Restarts of failed workers in a row without a new checkpoint in between."""
    collective_timeout: Annotated[float, MoreThan(0)] = 600.0
    """Seconds that one process waits for another before the run stops and names the missing one."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """When accuracy is measured."""

    validation_mode: Literal["none", "during", "after"] = "during"
    """When to validate; during: every --validation-frequency epochs and at the end; after: only at the end."""
    validation_frequency: Annotated[int, AtLeast(1)] = 1
    """Epochs between validations with --validation-mode during."""
    validate_checkpoints: Path | None = local(None, again="measure checkpoints after training")
    """After training, measure every checkpoint in this folder, such as the run's own, and write validation.csv."""


@dataclass(frozen=True, kw_only=True)
class Views:
    """Test-time augmentation."""

    tta: Literal["none", "flip", "flip-shift"] = "none"
    """Average the logits over an image and its mirror image, or over these and four more, shifted by a pixel."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where and how often checkpoints are saved, and how many are kept."""

    checkpoint_output_path: Path | None = local(None)
    """Folder for checkpoints; default: checkpoints/ in the run folder."""
    checkpoint_save_freq: Annotated[float, MoreThan(0)] = 1.0
    """Epochs between checkpoints; 0.25 saves four per epoch. The end of training is always saved."""
    checkpoint_first_epoch: Annotated[int, AtLeast(0)] = 0
    """Epoch of the first checkpoint; others follow every --checkpoint-save-freq epochs; 0: after that many."""
    initial_checkpoint: bool = False
    """Also save before the first update. --checkpoints-kept never removes it, and averages leave it out."""
    checkpoints_kept: Annotated[int, AtLeast(1)] | Literal["auto", "all"] = local(
        "auto", again="remove older checkpoints; until then all are kept"
    )
    """Newest checkpoints to keep, besides the best validated one; auto: 3, or as many as the averaging needs."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The average of the checkpoints, made after training."""

    weight_avg_strategy: Literal["none", "mean", "exponential"] = "none"
    """Average the saved checkpoints with equal weights (mean) or with exponentially decaying ones."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all or -1: every one."""
    weight_avg_epochs: Annotated[int, AtLeast(0)] | None = None
    """Average the checkpoints of the last N epochs and the one before them, instead of --weight-avg-N."""
    weight_avg_also: tuple[str, ...] = ()
    """Further averages to make and validate: mean:N, mean:all, epochs:N or exponential:DECAY."""


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Log points, TensorBoard, Weights & Biases, MLflow, Aim, profiling."""

    logs_per_epoch: Annotated[int, AtLeast(1)] = 1
    """Log points per epoch."""
    log_interval: Annotated[int, AtLeast(1)] | None = None
    """Updates between log points, instead of --logs-per-epoch."""
    tensorboard: bool = local(False, again="continue the TensorBoard files")
    """Also write TensorBoard files to the run folder: metrics, pictures, the confusion matrix, options, the model."""
    wandb: bool = local(False, again="continue uploading")
    """Also log to Weights & Biases; offline if there is no key or no connection."""
    mlflow: bool = local(False, again="continue the run in MLflow")
    """Also log to MLflow: MLFLOW_TRACKING_URI, else mlflow.db in the current folder; the report is an artifact."""
    aim: bool = local(False, again="log to Aim again")
    """Also log to Aim: to the nearest .aim in or above the current folder, else to a new one in it."""
    profile: bool = local(False, again="trace updates")
    """Profile some of the first updates: kernels, layers, memory; in the report and profile.json.gz (for Perfetto)."""
    wandb_project: str = local("falconet", again="upload to the same project")
    """Weights & Biases project."""
    weight_histogram: bool = local(False, again="continue the histograms")
    """Log histograms of all trained weights to --tensorboard, --wandb and --aim (also --wandb-weight-histogram)."""
    report: bool = portable(True)  # files in the run folder, as the next two
    """Write report.html, a page about the run, and results.csv to the run folder, after epochs and at the end."""
    save_plots: bool = portable(False)
    """Also draw the report's plots as PNG and PDF into plots/ in the run folder, at the end; needs matplotlib."""
    mlperf_logging: bool = portable(False)  # a file in the run folder, written like the others there
    """Also write result_<seed>.txt to the run folder, the log of MLPerf Training 1.1 (image classification)."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """The checkpoint to read."""

    checkpoint_input_path: Path | None = local(None)
    """A checkpoint, a folder of checkpoints, or a run folder."""


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights that were trained elsewhere, instead of a checkpoint's."""

    pretrained: Literal["none", "published"] | Path = local("none", bare="published")
    """Use the model's published weights or those of a file, and prepare photos as they expect."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which checkpoint of a folder is used."""

    checkpoint: Annotated[int, AtLeast(0)] | Literal["best", "last"] = local("best")
    """Checkpoint to use: the best validated one, the newest, or that of epoch N."""


# Searching and measuring.


@dataclass(frozen=True, kw_only=True)
class Search:
    """How many trials, and where they are kept."""

    budget: Annotated[int, AtLeast(1)] = 20
    """Trials in the whole study, including those of earlier starts and other workers."""
    study: Path | Auto = local("auto")
    """Folder of the study, to start, to continue or to share with other workers; auto: runs/search_<data>_<time>."""
    prune: bool = True
    """Stop a trial after an epoch that is worse than the median of the others at the same epoch."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Which checkpoints of a folder are measured."""

    checkpoint: Annotated[int, AtLeast(0)] | Literal["best", "last", "all"] = local("best")
    """Checkpoints to measure: the best validated one, the newest, that of epoch N, or all."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the result is written."""

    output: Path | None = local(None)
    """CSV file, details in a .json beside it; default: a run's validation.csv, or validation-NAME.csv by a model."""
    predictions: Path | None = local(None)
    """CSV file with a row per image: path, label, and the five most probable classes with their probabilities."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Processes that share the images."""

    replicas: Annotated[int, AtLeast(1)] | Auto = local("auto")
    """Processes that measure together, one per device; auto: as many as the launcher started, else 1."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Which checkpoints are averaged, and how."""

    checkpoint_output_path: Path | None = local(None)
    """The averaged checkpoint, or a folder for it; default: <model>_<data>_<epoch>_averaged beside the others."""
    weight_avg_strategy: Literal["mean", "exponential"] = "mean"
    """Average with equal weights (mean) or with exponentially decaying ones."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all or -1: every one."""
    weight_avg_discard: Annotated[int, AtLeast(0)] = 0
    """Leave out this many of the newest checkpoints first."""
    batchnorm_images: Annotated[int, AtLeast(0)] = 0
    """Re-estimate batch norm's statistics on this many training images; 0: average the statistics too."""
    validate: bool = False
    """Measure the accuracy of the result."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Which benchmarks run, how often, and what they are compared with."""

    spec: tuple[str, ...] = ()
    """Spec files in the originals' format, or names of built-in ones; default: ./benchmarks.yml."""
    benchmark: tuple[str, ...] = ()
    """Names of the benchmarks to run; default: all except those that end in _conv."""
    repeat: Annotated[int, AtLeast(1)] = 3
    """Runs per benchmark; differences are judged by the spread between them."""
    log_dir: Path | Auto = local("auto")
    """Folder for results and logs; auto: bench-results/<time>."""
    compare: Path | None = local(None)
    """A results.json of an earlier run; exit code 3 if a benchmark is slower by more than --margin."""
    margin: Annotated[float, AtLeast(0)] = 5.0
    """Percentage of throughput that may be lost before --compare fails."""
    timeout: Annotated[float, MoreThan(0)] | None = None
    """Seconds that one run may take; a longer one is stopped and counted as failed, and the next one starts."""
    include_convergence: bool = False
    """Also run the benchmarks that train to an accuracy, whose names end in _conv."""
    stop_on_error: bool = False
    """Stop after the first failure."""
    allow_wandb: bool = local(False)
    """Keep the --wandb options of the commands, which are removed otherwise."""
    profile: bool = local(False)
    """Pass --profile to commands that train, and mark their results as profiled."""
    show_output: bool = False
    """Also print the output of the commands."""
    csv_metrics: tuple[str, ...] = ()
    """Further metrics of the spec to add to results.csv as columns."""
    additional_metrics: bool = False
    """Add every metric of the spec to results.csv as a column."""
    plan: bool = local(False)
    """Print what would run, and the devices that each benchmark needs, then exit."""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How predictions are measured."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file, which may extend one; options override it."""
    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Processes that predict in parallel, one per device; auto: as many as the launcher started, else 1."""
    pipeline_splits: tuple[str, ...] = local(())
    """Layers that start a stage on another device, for a model too large for one; auto:N: N balanced stages."""
    device_iterations: Annotated[int, AtLeast(1)] = 1
    """Batches that the device computes per call from the host; on CUDA, as one captured graph."""
    repeat: Annotated[int, AtLeast(1)] = 1
    """Repetitions of --iterations batches; several are reported one by one."""
    seconds: Annotated[float, MoreThan(0)] | None = None
    """Seconds that a repetition may take, roughly: fewer batches than --iterations if need be, but at least one."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""
    weights: Literal["random", "pretrained", "auto"] = local("random")
    """Weights to use; pretrained: timm's, from the Hugging Face cache or network; auto: those if there, else random."""
    half_partial: bool = False
    """Let matrix products sum in half precision, on CUDA; convolutions always sum in fp32."""
    profile: bool = local(False)
    """Only trace two batches: profile/profile.json.gz (for Perfetto), profile.txt and profile_summary.json."""
    plan: bool = local(False)
    """Print what would be measured, then exit."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many clients send requests, and how; --iterations is the number of requests per client."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file, which may extend one; options override it."""
    url: str | None = local(None)
    """Measure a running server, such as http://127.0.0.1:8000, instead of starting one."""
    server: Literal["falconet", "triton", "both"] = "falconet"
    """The server to start: Falconet's, NVIDIA's Triton with the exported model, or both, measured in turns."""
    protocol: Literal["http", "grpc"] = "http"
    """What the clients speak; the port of --url must be that protocol's."""
    clients: Annotated[int, AtLeast(1)] = 1
    """Processes that send requests in parallel."""
    client_cores: Annotated[int, AtLeast(0)] = 0
    """CPU cores for the clients alone; the server gets the others. 0: all share all cores."""
    request_type: Literal["SYNC", "ASYNC"] = "SYNC"
    """How a client sends requests; SYNC: one at a time; ASYNC: it keeps --window of them in flight."""
    window: Annotated[int, AtLeast(1)] = 4
    """Requests that an ASYNC client keeps in flight, each on its own connection."""
    check_answers: bool = False
    """Compare every answer with the model's output, computed here."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """Which images are measured, and for how long."""

    split: Literal["train", "validation"] = "train"
    """Training images with random crops in random order, or validation images with fixed crops in order."""
    seconds: Annotated[float, MoreThan(0)] = 2.0
    """Seconds to measure each step."""
    passes: Annotated[int, AtLeast(0)] = 0
    """Then also read all images this many times, and print the images per second of each pass."""
    md5: bool = False
    """Only compare the md5 of the training and validation folders with those of ILSVRC 2012."""
    output: Path | None = local(None)
    """Also write the result to this JSON file."""


# Predicting.


@dataclass(frozen=True, kw_only=True)
class Predict:
    """The photos, and what is written about them."""

    photos: tuple[str, ...] = local(())
    """Photos, and folders to search recursively; -: stdin, which has one path per line, or is one photo."""
    top: Annotated[int, AtLeast(1)] = 1
    """Classes to report per photo, the most probable first."""
    json: bool = False
    """Print JSON instead of a table: an array with one object per photo, each on its own line."""
    csv: bool = False
    """Print CSV instead of a table: path, label and probability."""
    output: Path | None = local(None)
    """Write the table, the JSON or the CSV to this file instead of stdout."""
    save_dir: Path | None = local(None)
    """Folder to sort the photos into: it gets a folder per class, with a link to each photo."""
    embeddings: Path | None = local(None)
    """Also write the features before the classifier, and the paths, to this .npz file."""
    batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward pass; auto: as in the run's validation, or fewer if there are fewer photos."""


# Serving.


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The address, and how requests are batched."""

    host: str = local("127.0.0.1")
    """Address to listen on; 0.0.0.0: all interfaces, which calls for --api-key-file and --tls-certificate."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """Port for HTTP; 0: any free one; auto: 8000, or any free one in `bench serve`."""
    grpc_port: Annotated[int, Between(0, 65535)] | Literal["auto", "none"] = local("auto")
    """Port for gRPC; 0: any free one; auto: the one after --port, 8001, if it is available; none: only HTTP."""
    max_batch: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Most images in a batch, and in one request; auto: 64, or the micro-batch in `bench serve`."""
    max_delay: Annotated[float, AtLeast(0)] = 0.0
    """Milliseconds that a request may wait for others to join it while the device is free."""
    max_queue: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that may wait; further requests are refused with status 429; auto: 16 x --max-batch."""
    max_body: Annotated[int, AtLeast(1)] = 64
    """MiB of one request with photos; larger ones are refused with status 413."""
    request_timeout: Annotated[float, MoreThan(0)] = 30.0
    """Seconds within which a received request must be computed; a later one is refused with status 504."""
    drain_timeout: Annotated[float, AtLeast(0)] = 20.0
    """Seconds to finish requests in progress when the server is stopped; those that need longer are cut off."""
    half_partial: bool = False
    """Let matrix products sum in half precision, on CUDA; convolutions always sum in fp32."""
    engine: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto"
    """What computes the scores; auto: torch on CUDA; on a CPU, ONNX Runtime if the precision is 32.32, else torch."""
    int8: bool = False
    """Compute in 8-bit integers on a CPU, calibrated on the run's images; its accuracy is reported beside fp32's."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Further models, and when they change."""

    more_models: tuple[Path, ...] = local(())
    """Further runs, checkpoints or weights files to serve, each under the name of its folder or file."""
    repository: Path | None = local(None)
    """Folder of runs that clients may load and unload by name, besides those served from the start."""
    watch: bool = local(False)
    """Serve a better checkpoint of a run as soon as there is one, without losing a request."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may send requests, and how they are protected on their way."""

    api_key_file: Path | None = local(None)
    """File of API keys, one per line; each request must have one; also the environment variable FALCONET_API_KEY."""
    tls_certificate: Path | None = local(None)
    """PEM file with the server's certificate and those of its issuers; turns on HTTPS and encrypts gRPC."""
    tls_key: Path | None = local(None)
    """PEM file with the key of --tls-certificate, not encrypted."""
    allowed_host: tuple[str, ...] = local(())
    """Host names that requests may use; on a loopback address, besides the server's own. Default elsewhere: any."""
    cors_origin: tuple[str, ...] = local(())
    """Web pages that may send requests from a browser, such as https://example.org; *: any. Default: its own page."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the server reports about requests, besides the metrics at /metrics."""

    access_log: Path | None = local(None)
    """File to which a line of JSON per request is appended, opened again after a rotation; -: stdout."""
    opentelemetry: bool = local(False)
    """Send a trace of each request to the collector that the environment variables OTEL_* name."""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Input size and classes of a model without a checkpoint."""

    val_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Fraction of each class to validate on if photos are not split, chosen by file name and --seed; 1: all of them."""
    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: the weights' or the model's. A checkpoint has its own."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Number of classes; auto: the weights', else 1000, or 10 for the CIFAR networks. A checkpoint has its own."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The format, where it is written, and how it is checked."""

    format: Literal["onnx", "pt2", "aoti", "timm", "triton", "openvino"] = "onnx"
    """Format; pt2: torch.export; aoti: AOTInductor's machine code; timm: a folder; triton: a model repository."""
    output: Path | None = local(None)
    """Folder for the result; default: export/FORMAT (or onnx-int8) in the run folder, beside the weights, or here."""
    overwrite: bool = local(False)
    """Replace an earlier export in that folder."""
    preprocessing: bool = False
    """Put normalisation into the graph: it takes uint8 pixels, N x S x S x 3, instead of normalised N x 3 x S x S."""
    half: bool = False
    """Write fp16 weights and compute in fp16 (openvino: only weights); otherwise fp32, whatever the run's precision."""
    int8: bool = False
    """Compute in 8-bit integers, for CPUs (onnx only), calibrated on training images or --photos."""
    calibration_images: Annotated[int, AtLeast(1)] = 128
    """Images on which --int8 is calibrated; accuracy is measured on others."""
    reduce_range: bool = False
    """Use 7-bit weights with --int8, for x86 processors without VNNI, where sums of 8-bit products can overflow."""
    photos: Path | None = local(None)
    """Folder of photos to compare scores on; default: the run's validation images, else noise."""
    tolerance: Annotated[float, MoreThan(0)] | Auto = "auto"
    """Allowed difference of a score, over the image's largest; auto: 1e-4, --half: 0.05; accuracy with --int8: 0.01."""
    latency_batch: Annotated[int, AtLeast(1)] = 8
    """Images in the batch whose latency is measured, besides that of one image."""


# Tools.


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """What is checked."""

    distributed: bool = False
    """Start --replicas processes (default: one per CUDA device, or 2 on a CPU) and check that they work together."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What is packed, what is left out, and how."""

    source: Path | None = local(None)
    """Folder with train/ and val/, each with one folder per class; also the command's first argument."""
    target: Path | None = local(None)
    """Folder for the shards; also the command's second argument."""
    shard_size: Annotated[int, AtLeast(1)] = 2048
    """Images per shard; 2,048 ImageNet photos are 220 MB."""
    resize: Annotated[int, AtLeast(1)] | None = None
    """Shrink photos to this short side in pixels, and encode them again at quality 90 (lossy)."""
    exclude_list: Path | None = local(None)
    """File that lists photos to leave out, one path per line; `falconet data check` writes it."""
    workers: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads; auto: one per core."""


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """What is checked, what is reported, and what is written."""

    source: Path | None = local(None)
    """Folder of photos, or a table, in any layout that training reads; also the command's first argument."""
    output: Path | Auto = local("auto")
    """File that lists every finding, one per line; auto: NAME-check.txt here, where NAME is the folder's name."""
    json: Path | None = local(None)
    """Also write the findings as JSON."""
    html: Path | None = local(None)
    """Also write the findings as a page with small pictures: one file that needs no network."""
    exclude_list: Path | None = local(None)
    """Also write a list of the broken photos, which `train --exclude-list` leaves out."""
    exclude_duplicates: Literal["none", "exact", "near"] = "none"
    """Copies to add to that list, exact or near: training photos that recur in validation or in training."""
    near_bits: Annotated[int, Between(0, 80)] = 60
    """Bits, of 256, in which fingerprints of near copies may differ; different photos differ in 78 or more."""
    smallest_side: Annotated[int, AtLeast(1)] = 32
    """Report photos with a side of fewer pixels than this."""
    largest_megapixels: Annotated[float, MoreThan(0)] = 50.0
    """Report photos of more megapixels than this."""
    largest_ratio: Annotated[float, AtLeast(1)] = 4.0
    """Report photos with one side more than this many times as long as the other."""
    val_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Fraction of each class to validate on if the photos are not split, as in training."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Seed of that split, as in training."""
    workers: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads; auto: one per core."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What is checked."""

    source: Path | None = local(None)
    """Folder with the shards; also the command's first argument."""


@dataclass(frozen=True, kw_only=True)
class Configs:
    """What is listed."""

    evidence: bool = False
    """List only the configs that were trained here: what they reached, on which machine, when and how often."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which recipe is trained again, and on what."""

    name: str | None = None
    """A named config that `falconet configs --evidence` lists; also the command's first argument."""
    seeds: Annotated[int, AtLeast(1)] = 1
    """Number of runs, with the seeds 0, 1, ..."""
    data_dir: Path | None = local(None)
    """Folder of the data, as `falconet train` takes it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: cuda if available, else cpu."""
    runs: Path | Auto = local("auto")
    """Folder for the runs and their logs; auto: runs/recipe_NAME."""
    record: Path | None = local(None)
    """Write what was reached to this JSON file, and compare it with nothing."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Which runs are shown, and where the page goes."""

    runs: tuple[Path, ...] = local(())
    """Run folders; several are shown side by side. Also the command's arguments."""
    output: Path | None = local(None)
    """Page to write; default: report.html in the run folder; for several runs in the current one, with a CSV file."""
    save_plots: bool = False
    """Also draw plots as PNG and PDF into plots/ beside the page; needs matplotlib."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is watched, and where it is shown."""

    source: Path | None = local(None)
    """Run folder, or folder of runs; also the command's argument; default: runs, or what FALCONET_RUNS names."""
    page: bool = local(False)
    """Show the report as a page that follows the run, on 127.0.0.1, instead of on the terminal."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """Port of the page; 0: any free one; auto: 8600, or the next free one."""
    browser: bool = local(False)
    """Also open the page in a browser."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Which run is uploaded, and under which name."""

    source: Path | None = local(None)
    """Run folder, of Falconet or of an original; also the command's first argument."""
    name: str | None = None
    """Name of the uploaded run; default: the name of its folder."""
    wandb_project: str = local("falconet")
    """Weights & Biases project."""


# What a value means, for the code that takes it.

# Options of a model that its weights leave open: only new weights, training or speed depend on them.
_OPEN_WITH_WEIGHTS = (
    *("model", "weight_init", "zero_init", "batchnorm_momentum", "disable_stable_batchnorm", "enable_fast_groupnorm"),
    *("efficientnet_dropout", "efficientnet_drop_path", "proxy_recompute"),
)
# All others, as typed: with another value for one of them, the same weights compute something else.
BOUND_TO_WEIGHTS = tuple(
    field.name.replace("_", "-") for field in fields(Model) if field.name not in _OPEN_WITH_WEIGHTS
)

REDUCED = {224: 160, 380: 252}  # the originals' pairs of sides, in pixels
MULTIPLE = 4  # pixels; every other reduced side is rounded to it


def record_keys(text: str) -> dict[str, str] | None:
    """The keys by what they hold; None unless the text is image=KEY,label=KEY or one of the two."""
    pairs = [part.strip().split("=", 1) for part in text.split(",")]
    keys = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
    return keys if len(keys) == len(pairs) and keys.keys() <= {"image", "label"} else None


_FROM_EPOCH = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,5})")


def resolutions(texts: Sequence[str]) -> dict[int, int] | None:
    """The side by its first epoch, counted from 1; None if the texts are not in order from epoch 1."""
    found = [_FROM_EPOCH.fullmatch(text) for text in texts]
    pairs = [(int(each[2]), int(each[1])) for each in found if each]
    epochs = [epoch for epoch, _ in pairs]
    in_order = epochs == sorted(set(epochs)) and epochs[:1] in ([], [1])
    return dict(pairs) if len(pairs) == len(texts) and in_order else None


ALLOWED = re.compile(r"auto|\d{1,12}|\d{1,3}(?:\.\d{1,6})?%")  # values of --bad-images-allowed
LEAST_ALLOWED = 5  # bad images, by default


def bad_images(allowed: str, images: int) -> int:
    """How many of this many training images may be bad."""
    if allowed == "auto":
        return max(LEAST_ALLOWED, images // 100)
    return int(images * float(allowed[:-1]) / 100) if allowed.endswith("%") else int(allowed)


def reduced_size(image_size: int) -> int:
    """The side that half-resolution training uses, in pixels: 5/7 of the full one, to a multiple of 4."""
    return REDUCED.get(image_size) or max(MULTIPLE, MULTIPLE * round(image_size * 5 / 7 / MULTIPLE))


@dataclass(frozen=True, kw_only=True)
class FurtherAverage:
    """One entry of --weight-avg-also."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None  # checkpoints; None: all
    epochs: int | None = None  # the last ones, whose checkpoints are averaged; None: all

    @property
    def suffix(self) -> str:
        """The end of its folder's name, after `averaged`."""
        if self.strategy == "exponential":
            return f"exp_{self.decay:.15g}"
        return f"mean_{self.last or 'all'}" if self.epochs is None else f"epochs_{self.epochs}"


_SHARE = re.compile(r"(.+)=(\d{1,9}(?:\.\d{1,9})?)")


def rate_share(text: str) -> tuple[str, float]:
    """The pattern and the factor in an entry of --lr-share, which the rules have checked."""
    found = _SHARE.fullmatch(text)
    assert found
    return found[1], float(found[2])


def is_rate_share(text: str) -> bool:
    found = _SHARE.fullmatch(text)
    return found is not None and float(found[2]) > 0


_MEAN, _EPOCHS = re.compile(r"mean:(all|[1-9]\d{0,8})"), re.compile(r"epochs:(\d{1,9})")
_EXPONENTIAL = re.compile(r"exponential:(0?\.\d+|[01](?:\.0*)?)")


def further_average(text: str) -> FurtherAverage | None:
    """Read `mean:5`, `epochs:5` or `exponential:0.97`; None if the text is none of them."""
    mean, exponential = _MEAN.fullmatch(text), _EXPONENTIAL.fullmatch(text)
    if mean:
        return FurtherAverage(strategy="mean", last=None if mean[1] == "all" else int(mean[1]))
    if epochs := _EPOCHS.fullmatch(text):
        return FurtherAverage(strategy="mean", epochs=int(epochs[1]))
    return FurtherAverage(strategy="exponential", decay=float(exponential[1])) if exponential else None


def share_of(proportions: tuple[float, ...], *, stage: int, stages: int) -> float | None:
    """The memory proportion of one stage; stages that share a process get the largest."""
    if not proportions:
        return None
    return proportions[stage] if len(proportions) == stages else max(proportions)
