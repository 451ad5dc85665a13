"""What decodes photos here, and how many threads read them."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from falconet.config import commands, options
from falconet.config.fields import value_or
from falconet.data import native
from falconet.data.buffers import (
    MOST_AHEAD,
    Allowance,
    Landing,
    PixelLanding,
    Ring,
    Shape,
    StandardLanding,
    ValueLanding,
)
from falconet.data.crops import CROP_RULE, Augment, CropRule, Crops
from falconet.data.dataset import Images
from falconet.data.decode import BadImages
from falconet.data.free_memory import available
from falconet.data.loader import BatchShape, EvaluationLoader, Intake, Loader, SyntheticLoader
from falconet.data.mixing import Mixing
from falconet.data.native.decoder import EncodedCache, NativeReader, can_keep, encoded_bytes
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.data.readers import PixelCache, Reader, reader_for
from falconet.data.source import ArraySource, Source
from falconet.errors import DeviceError
from falconet.numerics.precision import REGIMES, Regime
from falconet.parallel import resources
from falconet.parallel.environment import find_place
from falconet.parallel.world import World
from falconet.report.console import Say

MOST_WORKERS = 32  # the originals' limit
DEVICE_WORKERS = 3  # where the device decodes: two keep it busy, and more than four get into each other's way


def decoder() -> str:
    """What reads JPEG files here."""
    library = native.library()
    return f"the native decoder ({library.processor})" if library else f"Pillow: {native.why_not()}"


def workers(data: options.Data, processes: int = 1) -> int:
    most = DEVICE_WORKERS if data.decode_device == "cuda" else MOST_WORKERS
    return value_or(data.dataloader_workers, min(most, resources.cores(processes)))


SHARE = 4  # a quarter of the free memory may be read ahead, one cached for training and one for validation


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read, and how."""

    source: Source
    preprocessing: Preprocessing
    augment: Augment
    seed: int
    rule: CropRule = CROP_RULE


def free_memory() -> int:
    """Bytes for this process; those of the host are divided among its processes."""
    place = find_place(os.environ)
    return available() // (place.local_size if place else 1)


def decode_device(data: options.Data, source: Source, device: torch.device) -> Literal["cpu", "cuda"]:
    """Where this source is decoded; images that lie in memory decoded have no choice."""
    if data.decode_device != "cuda" or isinstance(source, ArraySource):
        return "cpu"
    if device.type != "cuda":
        raise DeviceError("--decode-device cuda: the run is on the CPU; wanted cpu, or --device cuda")
    return "cuda"


def most_ahead(data: options.Data, source: Source, device: torch.device) -> int:
    """Bytes of images that may be read ahead of their use, in the memory that they come to lie in."""
    on_device = decode_device(data, source, device) == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_device else free_memory()
    return min(MOST_AHEAD, free // SHARE)


def input_lines(data: options.Data, *, train: Reading, validation: Reading, device: torch.device) -> list[str]:
    """What was decided, for the plan."""
    if data.data == "synthetic":
        return []
    on_device = decode_device(data, train.source, device) == "cuda"
    form = "left on the device" if on_device else "copied as bytes" if data.eight_bit_io else "copied as numbers"
    where = {"host": "normalised on the host", "device": "normalised on the device", "none": "not normalised"}
    most = most_ahead(data, train.source, device) / 1e6
    said = [
        f"loader: at most {most:,.0f} MB of images read ahead, pixels {form} and {where[data.normalization_location]}"
    ]
    if _caches(data, train.source):
        said += [
            f"cache: {_cache_words(data, train)} of training",
            f"cache: {_cache_words(data, validation)} of validation",
        ]
    return said


def _cache_words(data: options.Data, reading: Reading) -> str:
    images = cache_images(data, reading)
    if images:
        megabytes = images * _bytes_an_image(reading) / 1e6
        return f"{images:,} of {len(reading.source):,} images decoded, {megabytes:,.0f} MB,"
    assert not isinstance(reading.source, ArraySource)
    found = encoded_bytes(reading.source)
    if not can_keep():
        return "nothing, because only the native decoder on Linux reads photos from memory,"
    if found > free_memory() // SHARE:
        return f"nothing, because {found / 1e6:,.0f} MB are more than a quarter of the free memory,"
    return f"{len(reading.source):,} images as they are encoded, about {found / 1e6:,.0f} MB,"


def build_landing(data: options.Data, reading: Reading, *, regime: Regime, device: torch.device) -> Landing:
    """Where a micro-batch comes to lie, and in which form."""
    asked = data.dataloader_rebatch_size
    portion = None if asked == "auto" else min(asked, data.micro_batch_size)
    most = most_ahead(data, reading.source, device)
    if decode_device(data, reading.source, device) == "cuda":
        return _on_device(reading, device, Allowance(portion=portion, most=most))
    allowance = Allowance(ring=Ring(pin=True) if device.type == "cuda" else None, portion=portion, most=most)
    if data.eight_bit_io:
        return PixelLanding(allowance)
    on_host, dtype = data.normalization_location == "host", regime.formats(device)["activations"]
    if on_host and reading.preprocessing.standardised:
        return StandardLanding(dtype, allowance)
    preprocessing = reading.preprocessing if on_host else reading.preprocessing.unnormalised
    return ValueLanding(Normalise(preprocessing, dtype=dtype), allowance)


def _on_device(reading: Reading, device: torch.device, allowance: Allowance) -> Landing:
    from falconet.data.gpu import DeviceLanding, bytes_of

    source = reading.source
    assert not isinstance(source, ArraySource)
    crops = Crops.of(
        reading.preprocessing,
        augment=reading.augment,
        seed=reading.seed,
        objects=source.objects,
        rule=reading.rule,
    )
    return DeviceLanding(device, encoded=bytes_of(source), crops=crops, allowance=allowance)


def with_cache(reader: Reader, data: options.Data, reading: Reading) -> Reader:
    """The reader, behind the cache that was asked for.

    What is the same in every epoch is kept decoded, as far as there is memory. Random crops are not: photos are kept as
    they are encoded, if there is memory for all of them.
    """
    if not _caches(data, reading.source) or isinstance(reading.source, ArraySource):
        return reader
    images = cache_images(data, reading)
    if images:
        return PixelCache(reader, images=len(reading.source), most=images)
    most = free_memory() // SHARE
    if isinstance(reader, NativeReader) and can_keep() and encoded_bytes(reading.source) <= most:
        reader.keep(EncodedCache(reading.source, most=most))
    return reader


def _caches(data: options.Data, source: Source) -> bool:
    """Whether anything is kept; what the device decodes is not."""
    return data.dataset_cache and data.decode_device != "cuda" and not isinstance(source, ArraySource)


def cache_images(data: options.Data, reading: Reading) -> int:
    """How many images are kept decoded."""
    if not _caches(data, reading.source) or reading.augment != "none":
        return 0
    return min(len(reading.source), free_memory() // SHARE // _bytes_an_image(reading))


def _bytes_an_image(reading: Reading) -> int:
    return Shape(1, reading.preprocessing.image_size).bytes_an_image


def training_loader(
    images: Images, options: commands.TrainOptions, *, shape: BatchShape, world: World, note: Say
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


def _intake(reading: Reading, data: options.Data, bad: BadImages, *, regime: Regime, device: torch.device) -> Intake:
    return Intake(
        reader=with_cache(_reader(reading, bad), data, reading),
        labels=reading.source.labels,
        workers=workers(data),
        landing=build_landing(data, reading, regime=regime, device=device),
    )


def training_reading(images: Images, options: commands.TrainOptions) -> Reading:
    return Reading(
        source=images.splits.train,
        preprocessing=images.training,
        augment=images.augment(options.augmentation.augment),
        seed=options.run.seed,
        rule=crop_rule(options.augmentation),
    )


def crop_rule(augmentation: options.Augmentation) -> CropRule:
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


def mixing_of(augmentation: options.Augmentation) -> Mixing | None:
    mixing = Mixing(
        mixup_alpha=augmentation.mixup_alpha,
        cutmix_lambda_low=augmentation.cutmix_lambda_low,
        cutmix_lambda_high=augmentation.cutmix_lambda_high,
        cutmix_disable_prob=augmentation.cutmix_disable_prob,
        cutmix_draw=augmentation.cutmix_draw,
    )
    return mixing if mixing.mixes or mixing.cuts else None


def evaluation_loader(
    images: Images, data: options.Data, *, shape: BatchShape, regime: Regime, world: World, note: Say
) -> EvaluationLoader:
    """The validation images of one replica."""
    bad = BadImages(value_or(data.bad_images_allowed, 0), note=note, count=world.counter("bad validation images"))
    intake = _intake(validation_reading(images), data, bad, regime=regime, device=world.device)
    return EvaluationLoader(intake, shape=shape)
