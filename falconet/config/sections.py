"""Most options, once: name, type, default, help, in the section they are shown under."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.ranges import AtLeast, Auto, Between, MoreThan, local, portable


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
