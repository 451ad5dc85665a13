"""The batches of a run: those to train on, those to evaluate with, and what evaluates."""

import torch

from falconet.config import schema, sections
from falconet.config.ranges import value_or
from falconet.data.augment import CropRule
from falconet.data.decode import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Intake, Loader, SyntheticLoader
from falconet.data.mixing import Mixing
from falconet.data.readers import Reader, reader_for
from falconet.numerics.precision import REGIMES, Regime
from falconet.parallel.world import World
from falconet.report.screen import Say
from falconet.wiring import decoding, feeding
from falconet.wiring.feeding import Reading
from falconet.wiring.images import Images


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
        workers=decoding.workers(data),
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


def evaluation_loader(
    images: Images, data: sections.Data, *, shape: BatchShape, regime: Regime, world: World, note: Say
) -> EvaluationLoader:
    """The validation images of one replica."""
    bad = BadImages(value_or(data.bad_images_allowed, 0), note=note, count=world.counter("bad validation images"))
    intake = _intake(validation_reading(images), data, bad, regime=regime, device=world.device)
    return EvaluationLoader(intake, shape=shape)
