"""The options of training, declared once: name, type, range, default and help.

They are in sections, which the code takes as values, in the order of the help. tool_options.py has those of the tools.
"""

from dataclasses import dataclass
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

    @property
    def validation_batch(self) -> int:
        """Images per batch of a validation in one process."""
        return value_or(self.validation_batch_size, self.micro_batch)


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
