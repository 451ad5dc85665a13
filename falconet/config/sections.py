"""Every option, once: name, type, default, help, in the section it is shown under."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.ranges import AtLeast, Between, MoreThan

Auto = Literal["auto"]

# The zoo's names, repeated here so that a typo is answered without importing torch; a test compares the two lists.
MODELS = (
    *("resnet10", "resnet14", "resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext14", "resnext26", "resnext50", "resnext101", "resnext152"),
    *(f"efficientnet-b{size}" for size in range(8)),
    "efficientnet-cifar",
    *("mobilenet", "mobilenet-v3-small", "mobilenet-v3-large"),
    *(f"resnet{depth}-cifar" for depth in (8, 14, 20, 32, 44, 56, 110, 11, 29, 38, 47, "56b", 65)),
    *(f"resnext{depth}-cifar" for depth in (11, 29, 38, 47, 56, 65)),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run, and where its results go."""

    config: str | None = None
    """A named config (`falconet configs` lists them) or a YAML file of options; the command line overrides it."""
    plan: bool = False
    """Print the plan and every option with its source, and exit."""
    run_dir: Path | Auto = "auto"
    """The run folder; auto: runs/<model>_<data>_<time>."""
    resume: bool = False
    """Go on with the run that --run-dir holds if its options are the same, else refuse; begin it if there is none."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Seed of every random choice; the same seed gives the same run."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    model: str = "resnet8-cifar"
    """A name of `falconet models`, or timm:NAME for any other model of timm."""
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


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where images come from."""

    data: Literal["digits", "cifar10", "cifar100", "imagenet", "folder", "generated", "synthetic"] = "digits"
    """imagenet, folder: photos, layouts in docs/data.md; generated: random, by the host; synthetic: on the device."""
    data_dir: Path | None = None
    """Where the data lies (--imagenet-data-path is the same); without it, the environment variable DATA_DIR."""
    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: what the model was made for, 8 for the digits."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Classes of generated and synthetic data; auto: 1000, or 10 for the CIFAR networks. Other data has its own."""
    iterations: Annotated[int, AtLeast(1)] = 100
    """Updates in an epoch of generated or synthetic data; in `bench infer` batches of any data."""
    micro_batch_size: Annotated[int, AtLeast(1)] = 64
    """Images in one forward and backward pass on one replica."""
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
    normalization: Literal["deviation", "mean"] = "deviation"
    """Pixels less the data's mean over its deviation, or, of 0 to 255, only less ImageNet's mean."""
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
    """Length of the training in updates, instead of --epoch; it may end within an epoch."""
    gradient_accumulation: Annotated[int, AtLeast(1)] = 1
    """Micro-batches in one update."""
    init_path: Path | None = None
    """Begin with the weights of a checkpoint, of a run's newest one, or of a file (safetensors, torch) that fits."""
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
    ema_half_life: Annotated[float, MoreThan(0)] | None = None
    """Keep an exponential moving average of the weights with this half-life in epochs; validated beside them."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over time."""

    lr: Annotated[float, AtLeast(0)] = 0.1
    """Peak learning rate, for the global batch as it is."""
    lr_schedule: Literal["step", "cosine", "exponential", "polynomial"] = "cosine"
    """step: drops at --lr-epoch-decay; cosine: to 0; exponential: drops at each change; polynomial: to an end ratio."""
    lr_decay: Annotated[float, MoreThan(0)] = 0.5
    """Factor of a drop in the step and exponential schedules."""
    lr_epoch_decay: tuple[Annotated[float, MoreThan(0)], ...] = ()
    """Epochs at which the step schedule drops."""
    lr_drop_shares: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Further drops of the step schedule, as shares of the training."""
    lr_scheduler_freq: Annotated[float, AtLeast(0)] = 0.0
    """Changes per epoch; 0: at every update."""
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


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What is saved."""

    checkpoint_output_path: Path | None = None
    """Folder of the checkpoints; without it, checkpoints/ in the run folder."""
    checkpoint_save_freq: Annotated[float, MoreThan(0)] = 1.0
    """Epochs between checkpoints; 0.25 saves four times an epoch. The end of training is always saved."""
    checkpoints_kept: Annotated[int, AtLeast(1)] | Literal["auto", "all"] = "auto"
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
class Logging:
    """What is reported."""

    logs_per_epoch: Annotated[int, AtLeast(1)] = 1
    """Log points in each epoch."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder."""
    wandb: bool = False
    """Also log to Weights & Biases (WANDB_MODE=offline works)."""
    profile: bool = False
    """Trace three updates with torch.profiler: profile.json (chrome://tracing) and profile.txt in the run folder."""
    wandb_project: str = "falconet"
    """Weights & Biases project."""


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
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory: the same update, with copies beside the computation (CUDA)."""
    max_restarts: Annotated[int, AtLeast(0)] = 3
    """Times in a row that dead workers are started again without a new checkpoint in between."""
    collective_timeout: Annotated[float, MoreThan(0)] = 600.0
    """Seconds that one process waits for another before the run stops and names the one that is missing."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """What is read."""

    checkpoint_input_path: Path | None = None
    """A checkpoint, a folder of checkpoints, or a run folder."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the result goes."""

    output: Path | None = None
    """The CSV file; without it, validation.csv beside the checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """How the average is made."""

    checkpoint_output_path: Path | None = None
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

    source: Path | None = None
    """The folder with train/ and val/, one folder a class; also the first word of the command."""
    target: Path | None = None
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

    source: Path | None = None
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
    output: Path | None = None
    """A JSON file for the result."""
