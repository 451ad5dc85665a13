"""Options in, parts out: what the commands are wired from."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from falconet.config import schema, sections
from falconet.config.fine_tuning import reduced
from falconet.config.model import Model
from falconet.data import native, share
from falconet.data.augment import Augment, CropRule
from falconet.data.decode import BadImages
from falconet.data.feed import singly
from falconet.data.loader import BatchShape, EvaluationLoader, Intake, Loader, SyntheticLoader
from falconet.data.mixing import Mixing
from falconet.data.open import RandomImages, UseObjects, open_source
from falconet.data.preprocessing import Channels, Normalise, Preprocessing, normaliser
from falconet.data.readers import Reader, reader_for
from falconet.data.source import Splits
from falconet.data.sources import published
from falconet.errors import CheckpointError
from falconet.models import zoo
from falconet.models.mobile import MobileNetShape
from falconet.models.norms import Norm
from falconet.models.proxynorm import Proxy
from falconet.models.residual import ResidualShape
from falconet.models.squeeze import SqueezeNetShape
from falconet.numerics.precision import REGIMES, Regime
from falconet.parallel.environment import Place, cores_of
from falconet.parallel.world import World, open_world
from falconet.report.screen import Say
from falconet.report.words import counted
from falconet.train.evaluate import Evaluation, Measure, evaluate
from falconet.wiring import feeding
from falconet.wiring.feeding import Reading

DIGITS_SIZE = 8  # pixels, their own: doubling them costs 2.6 times as long and gains nothing (docs/log.md)
MOST_WORKERS = 32  # the originals' limit
DEVICE_WORKERS = 3  # where the device decodes: two keep it busy, and more than four get into each other's way


def cores(processes: int = 1) -> int:
    """Cores for this process; where none has been started yet, for each of as many as will be."""
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return cores_of(os.environ, host=host, own=own, expected=processes)


def value_or(value: int | Literal["auto"], automatic: int) -> int:
    return automatic if value == "auto" else value


def open_machine(machine: sections.Machine, *, place: Place | None = None) -> World:
    """The device that the options ask for and its threads, for this process or for all that a launcher started."""
    threads = value_or(machine.threads, cores())
    return open_world(machine.device, threads=threads, deterministic=machine.deterministic, place=place)


def decoder() -> str:
    """What reads JPEG files here."""
    library = native.library()
    return f"the native decoder ({library.processor})" if library else f"Pillow: {native.why_not()}"


def global_batch(options: schema.TrainOptions) -> int:
    """Images in one update of a training."""
    micro_batches = options.training.gradient_accumulation * value_or(options.parallel.replicas, 1)
    return options.data.micro_batch_size * micro_batches


def workers(data: sections.Data, processes: int = 1) -> int:
    most = DEVICE_WORKERS if data.decode_device == "cuda" else MOST_WORKERS
    return value_or(data.dataloader_workers, min(most, cores(processes)))


@dataclass(frozen=True, kw_only=True)
class Images:
    """The data of a run, and how it becomes model input."""

    kind: str
    splits: Splits
    preprocessing: Preprocessing
    training: Preprocessing  # the same, but for images of another size that training may have
    on_host: bool = False  # normalised before it gets to the device

    @property
    def classes(self) -> int:
        return len(self.splits.class_names)

    def normalise(self, device: torch.device) -> Normalise:
        """What the device does to the images that it gets."""
        preprocessing = self.preprocessing.unnormalised if self.on_host else self.preprocessing
        return normaliser(preprocessing).to(device)

    def augment(self, asked: str) -> Augment:
        """What `--augment auto` means for this data."""
        automatic: dict[str, Augment] = {"digits": "shift", "generated": "none", "synthetic": "none"}
        if asked == "auto":
            native = self.splits.native_size == self.training.image_size
            return automatic.get(self.kind, "shift-flip" if native else "crop-flip")
        return asked  # type: ignore[return-value]  # the schema's choices are Augment's

    def at_reduced_size(self) -> "Images":
        """The same with smaller images for training."""
        side = reduced(self.preprocessing.image_size)
        training = replace(self.preprocessing, image_size=side, resize=self.splits.preprocessing(side).resize)
        return replace(self, training=training)

    def describe(self) -> str:
        size, trained = self.preprocessing.image_size, self.training.image_size
        less = f" and {trained} x {trained} in training" if trained != size else ""
        return (
            f"{len(self.splits.train):,} training and {counted(len(self.splits.validation), 'validation image')} of"
            f" {counted(self.classes, 'class')}, {size} x {size}{less}{self._stored()}"
        )

    def _stored(self) -> str:
        """How photos lie there, and how many have boxes that crops look at."""
        objects = getattr(self.splits.train, "objects", None)
        boxes = f", {objects.annotated:,} of them with boxes" if objects is not None else ""
        return f", from {self.splits.layout}{boxes}" if self.splits.layout else ""


def open_images(
    data: sections.Data,
    *,
    model: str,
    global_batch: int,
    seed: int,
    use_objects: UseObjects = "no",
    percentage: float = 100.0,
) -> Images:
    """The data that the options name, at the model's size; `percentage`: of the training images, if not made up."""
    size = _size(data, model)
    splits = open_source(
        data.data,
        data_dir=data.data_dir,
        random=RandomImages(
            image_size=size,
            classes=value_or(data.classes, 10 if model.endswith("-cifar") else 1000),
            images=data.iterations * global_batch,
            seed=seed,
        ),
        use_objects=use_objects,
    )
    if data.data not in ("generated", "synthetic"):
        splits = share.reduced(splits, percentage=percentage)
    return images_of(splits, data, size=size)


def published_images(data: sections.Data, *, model: str, percentage: float = 100.0) -> Images | None:
    """The data that the options name as it was published, for a plan; None where it can be opened, or is unknown."""
    splits = published.instead_of(data.data, data.data_dir)
    if splits is None:
        return None
    return images_of(share.reduced(splits, percentage=percentage), data, size=_size(data, model))


def images_of(splits: Splits, data: sections.Data, *, size: int) -> Images:
    """Splits at a size, normalised as the options say."""
    if data.validation_crop != "auto":
        splits = replace(splits, centred=data.validation_crop == "centre")
    preprocessing = replace(splits.preprocessing(size), antialias=data.antialias)
    if data.pixel_mean:
        preprocessing = replace(preprocessing, mean=three(data.pixel_mean))
    if data.pixel_deviation:
        preprocessing = replace(preprocessing, std=three(data.pixel_deviation))
    if data.normalization == "mean":
        preprocessing = preprocessing.centred
    if data.normalization == "image":
        preprocessing = preprocessing.by_image
    if data.normalization_location == "none":
        preprocessing = preprocessing.unnormalised
    return Images(
        kind=data.data,
        splits=splits,
        preprocessing=preprocessing,
        training=preprocessing,
        on_host=data.normalization_location == "host" and data.data != "synthetic",
    )


def three(colours: tuple[float, ...]) -> Channels:
    red, green, blue = colours  # the rules refuse another number of them
    return red, green, blue


def _size(data: sections.Data, model: str) -> int:
    size = value_or(data.image_size, DIGITS_SIZE if data.data == "digits" else zoo.image_size(model))
    zoo.check_image_size(model, size)
    return size


def build_model(model: Model, *, classes: int, seed: int) -> nn.Module:
    norm = Norm(
        kind=model.norm_type,
        eps=None if model.norm_eps == "auto" else model.norm_eps,
        groups=model.norm_num_groups,
        momentum=None if model.batchnorm_momentum == "auto" else model.batchnorm_momentum,
        fast=model.enable_fast_groupnorm,
        stable=not model.disable_stable_batchnorm,
        strided=model.norm_grouping == "strided",
        proxy=Proxy(eps=model.proxy_epsilon, recompute=model.proxy_recompute) if model.proxy_norm else None,
        biases=model.conv_bias,
    )
    return zoo.build(
        model.model,
        classes=classes,
        seed=seed,
        norm=norm,
        shape=shape_of(model),
        variant=zoo.Variant(
            weights=model.weight_init,
            zeros=model.zero_init,
            padding=model.padding,
            padded_input=model.input_image_padding,
        ),
    )


def shape_of(model: Model) -> zoo.Shape | None:
    """What the options change about the model's family; the rules refuse those of another family."""
    if model.model.startswith("efficientnet"):
        return zoo.EfficientNetShape(
            expand_ratio=model.efficientnet_expand_ratio,
            group_dim=model.efficientnet_group_dim,
            dropout=None if model.efficientnet_dropout == "auto" else model.efficientnet_dropout,
            drop_path=model.efficientnet_drop_path,
            se=model.efficientnet_se,
            activation=model.efficientnet_activation,
            divisor=model.efficientnet_depth_divisor,
            top_width=model.efficientnet_top_width,
            width=None if model.efficientnet_width == "auto" else model.efficientnet_width,
            depth=None if model.efficientnet_depth == "auto" else model.efficientnet_depth,
        )
    if model.model.startswith(("resnet", "resnext")):
        return ResidualShape(
            groups=model.resnext_groups,
            group_dim=model.resnext_group_dim,
            stride=model.bottleneck_stride,
            wide=model.resnext_wide,
            shortcut=model.shortcut_type,
            stem=model.stem,
        )
    if model.model.startswith("mobilenet-v3"):
        return MobileNetShape(wide_head=model.mobilenet_wide_head)
    return SqueezeNetShape(bypass=True) if model.squeezenet_bypass else None


def training_loader(
    images: Images, options: schema.TrainOptions, *, shape: BatchShape, world: World, note: Say
) -> Loader | SyntheticLoader:
    """The batches to train on."""
    data, seed = options.data, options.run.seed
    if data.data == "synthetic":
        return SyntheticLoader(
            shape,
            image_size=images.training.image_size,
            classes=images.classes,
            images=len(images.splits.train),
            seed=seed,
            device=world.device,
        )
    reading = training_reading(images, options)
    allowed = value_or(data.bad_images_allowed, len(reading.source.labels) // 1000)
    bad = BadImages(allowed, note=note, count=world.counter("bad training images"))
    intake = _intake(reading, data, bad, regime=REGIMES[options.machine.precision], device=world.device)
    return Loader(intake, shape=shape, seed=seed, mixing=mixing_of(options.augmentation))


def _intake(reading: Reading, data: sections.Data, bad: BadImages, *, regime: Regime, device: torch.device) -> Intake:
    return Intake(
        reader=feeding.cached(_reader(reading, bad), data, reading),
        labels=reading.source.labels,
        workers=workers(data),
        landing=feeding.landing(data, reading, regime=regime, device=device),
    )


def training_reading(images: Images, options: schema.TrainOptions) -> Reading:
    return Reading(
        source=images.splits.train,
        preprocessing=images.training,
        augment=images.augment(options.augmentation.augment),
        seed=options.run.seed,
        rule=crop_rule(options.augmentation),
    )


def crop_rule(augmentation: sections.Augmentation) -> CropRule:
    least, of_object = augmentation.crop_area, augmentation.object_crop_area
    return CropRule(
        draw=augmentation.crop_draw,
        least=least,
        least_of_object=least if of_object == "auto" else of_object,
        overlap=augmentation.object_overlap,
    )


def validation_reading(images: Images) -> Reading:
    return Reading(source=images.splits.validation, preprocessing=images.preprocessing, augment="none", seed=0)


def _reader(reading: Reading, bad: BadImages) -> Reader:
    return reader_for(
        reading.source,
        preprocessing=reading.preprocessing,
        augment=reading.augment,
        seed=reading.seed,
        bad=bad,
        rule=reading.rule,
    )


def mixing_of(augmentation: sections.Augmentation) -> Mixing | None:
    mixing = Mixing(
        mixup_alpha=augmentation.mixup_alpha,
        cutmix_lambda_low=augmentation.cutmix_lambda_low,
        cutmix_lambda_high=augmentation.cutmix_lambda_high,
        cutmix_disable_prob=augmentation.cutmix_disable_prob,
        cutmix_draw=augmentation.cutmix_draw,
    )
    return mixing if mixing.mixes or mixing.cuts else None


def validation_batch(options: schema.TrainOptions) -> int:
    """Images of one batch of a validation on one replica; stages hand on batches of one size alone."""
    asked, micro_batch = options.data.validation_batch_size, options.data.micro_batch_size
    return micro_batch if options.parallel.pipeline_splits else value_or(asked, micro_batch)


def evaluator(images: Images, data: sections.Data, *, regime: Regime, world: World, note: Say) -> Measure:
    """Measures a model on the validation images."""
    batch = value_or(data.validation_batch_size, data.micro_batch_size)
    shape = BatchShape(micro_batch=batch, replicas=world.size, replica=world.rank)
    loader = evaluation_loader(images, data, shape=shape, regime=regime, world=world, note=note)
    normalise = images.normalise(world.device)

    def measure(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
        batches = singly(loader.batches(), device=world.device, ring=loader.ring)
        return evaluate(model, batches, normalise=normalise, regime=regime, world=world, stopping=stopping)

    return measure


def evaluation_loader(
    images: Images, data: sections.Data, *, shape: BatchShape, regime: Regime, world: World, note: Say
) -> EvaluationLoader:
    """The validation images of one replica."""
    bad = BadImages(value_or(data.bad_images_allowed, 0), note=note, count=world.counter("bad validation images"))
    intake = _intake(validation_reading(images), data, bad, regime=regime, device=world.device)
    return EvaluationLoader(intake, shape=shape)


def check_classes(images: Images, class_names: tuple[str, ...], *, where: str) -> None:
    """The data must have the classes that a checkpoint was trained on."""
    own = images.splits.class_names
    if own != class_names:
        example = next((pair for pair in zip(own, class_names, strict=False) if pair[0] != pair[1]), None)
        differs = f"'{example[0]}' where it has '{example[1]}'" if example else "other classes"
        raise CheckpointError(
            f"{where}: was trained on {counted(len(class_names), 'class')}, the data has {len(own)}, {differs}"
        )
