"""A run's input pipeline: loaders from a dataset and options, and its lines in the plan."""

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from falconet.config.fields import value_or
from falconet.config.options import Augmentation, Data
from falconet.config.values import bad_images
from falconet.data import native
from falconet.data.buffers import Buffers, PixelRows, RowReader, StandardRows, ValueRows
from falconet.data.cache import EncodedCache, PixelCache, can_keep, encoded_bytes
from falconet.data.crops import Crops
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.loader import MOST_AHEAD, BatchShape, EvaluationLoader, Loader, Resources, SyntheticLoader
from falconet.data.order import Order
from falconet.data.preprocessing import Normalise
from falconet.data.readers import NativeReader, Reader, reader_for
from falconet.data.resident import ResidentRows
from falconet.data.storage import ArraySource, Source
from falconet.errors import DeviceError
from falconet.numerics.precision import Regime
from falconet.parallel import world
from falconet.parallel.environment import find_place
from falconet.parallel.host import available
from falconet.parallel.world import World
from falconet.report.console import Say

MOST_WORKERS = 32  # the originals' limit
DEVICE_WORKERS = 3  # if the device decodes: two threads keep it busy, more than four compete with each other
RESIDENT_WORKERS = 2  # if images are on the device: a batch is one launch, so more threads only take more memory
SHARE = 4  # a quarter of the free memory each for reading ahead, the training cache and the validation cache


@dataclass(frozen=True, kw_only=True)
class Input:
    """How one process reads images."""

    data: Data
    regime: Regime
    world: World
    note: Say  # told about images that cannot be decoded

    def training_loader(
        self, dataset: Dataset, *, crops: Crops, shape: BatchShape, order: Order | None = None
    ) -> Loader | SyntheticLoader:
        """The batches to train on. `crops`: the dataset's `training_crops`; `order`: None means each image once."""
        source, device = dataset.train, self.world.device
        if self.data.data == "synthetic":
            classes, seed = dataset.classes, crops.seed
            return SyntheticLoader(
                shape, image_size=crops.size, classes=classes, images=len(source), seed=seed, device=device
            )
        bad = self.bad_images("training", images=len(source), skipped=len(dataset.check.training))
        return Loader(
            self.row_reader(source, crops, bad),
            labels=source.labels,
            shape=shape,
            seed=crops.seed,
            augmentation=crops.augmentation,
            resources=self.resources(source),
            order=order,
            fill=crops.preprocessing.mean,
        )

    def evaluation_loader(
        self, dataset: Dataset, *, shape: BatchShape, bad: BadImages | None = None
    ) -> EvaluationLoader:
        """The validation images of one replica. `bad` collects the unreadable ones, which are not counted."""
        source = dataset.validation
        left_out = BadImages(None, note=self.note) if bad is None else bad
        reader = self.row_reader(source, dataset.validation_crops(), left_out)
        return EvaluationLoader(reader, labels=source.labels, shape=shape, resources=self.resources(source))

    def bad_images(self, split: str, *, images: int, skipped: int = 0) -> BadImages:
        """A counter that limits the bad ones among this many images. `skipped`: bad ones already left out."""
        allowed = bad_images(self.data.bad_images_allowed, images + skipped) - skipped
        return BadImages(allowed, note=self.note, count=self.world.counter(f"bad {split} images"))

    def row_reader(self, source: Source, crops: Crops, bad: BadImages) -> RowReader:
        """A reader of images in the form in which the device gets them, through the cache if there is one."""
        data, device, rows = self.data, self.world.device, self._rows
        if isinstance(source, ArraySource) and data.dataset_location == "device":
            return ResidentRows(device, source=source, crops=crops, rows=rows or len(source))
        reader = _cached(reader_for(source, crops=crops, bad=bad), source, crops, data)
        if not isinstance(source, ArraySource) and decode_device(data, source, device) == "cuda":
            from falconet.data.gpu import DeviceRows

            return DeviceRows(device, source=source, crops=crops, host=reader, rows=rows)
        if data.eight_bit_io:
            return PixelRows(reader, rows=rows)
        on_host, dtype = data.normalization_location == "host", self.regime.formats(device)["activations"]
        if on_host and crops.preprocessing.standardised:
            return StandardRows(reader, dtype, rows=rows)
        preprocessing = crops.preprocessing if on_host else crops.preprocessing.unnormalised
        return ValueRows(reader, Normalise(preprocessing, dtype=dtype), rows=rows)

    def images_on_device(self, source: Source, *, shape: BatchShape, side: int) -> int:
        """Images of this side that a training loader holds on the device before delivery; 0 if it uses the host."""
        data, device = self.data, self.world.device
        if device.type != "cuda" or data.data == "synthetic" or not _fills_on_device(data, source, device):
            return 0
        from falconet.data.gpu import PORTION

        rows = self._rows or (len(source) if isinstance(source, ArraySource) else PORTION)
        limits = Resources(workers=workers(data), ahead=most_ahead(data, source, device))
        return limits.images_held(_Pixels(side, rows), shape)

    @property
    def _rows(self) -> int | None:
        """Images per call, if that was asked for."""
        asked = self.data.dataloader_rebatch_size
        return None if asked == "auto" else min(asked, self.data.micro_batch)

    def resources(self, source: Source) -> Resources:
        """Threads and memory of a loader."""
        data, device = self.data, self.world.device
        if _fills_on_device(data, source, device):
            from falconet.data.gpu import DeviceBuffers

            buffers: Buffers = DeviceBuffers(device)
        else:
            buffers = Buffers(pin=device.type == "cuda")
        ahead = most_ahead(data, source, device)
        return Resources(workers=workers(data), device=device, buffers=buffers, ahead=ahead)


class _Pixels(NamedTuple):
    """The form of images that are decoded or picked on the device."""

    size: int
    rows: int
    dtype: torch.dtype = torch.uint8


def workers(data: Data, processes: int = 1) -> int:
    """The number of threads that read images."""
    most = DEVICE_WORKERS if data.decode_device == "cuda" else MOST_WORKERS
    if data.dataset_location == "device":
        most = RESIDENT_WORKERS
    return value_or(data.dataloader_workers, min(most, world.cores(processes)))


def decoder(where: Literal["cpu", "cuda"] = "cpu") -> str:
    """What decodes JPEG files."""
    if where == "cuda":
        return "nvJPEG on the device"
    library = native.library()
    return f"the native decoder ({library.processor})" if library else f"Pillow: {native.why_not()}"


def decode_device(data: Data, source: Source, device: torch.device) -> Literal["cpu", "cuda"]:
    """Where a source is decoded; images in memory count as cpu."""
    if data.decode_device != "cuda" or isinstance(source, ArraySource):
        return "cpu"
    if device.type != "cuda":
        raise DeviceError("photos cannot be decoded on cuda, because the run is on the CPU")
    return "cuda"


def _fills_on_device(data: Data, source: Source, device: torch.device) -> bool:
    """Whether the pixels of a batch come from the device itself."""
    is_resident = isinstance(source, ArraySource) and data.dataset_location == "device"
    return decode_device(data, source, device) == "cuda" or (is_resident and device.type == "cuda")


def free_memory() -> int:
    """Free bytes for this process; the host's memory is divided among its processes."""
    place = find_place(os.environ)
    return available() // (place.local_size if place else 1)


def most_ahead(data: Data, source: Source, device: torch.device) -> int:
    """Bytes of images that may be read ahead, in the memory that they are read into.

    This is a share of what is free when a loader is made; validation's is made while training's holds its own.
    """
    on_device = _fills_on_device(data, source, device)
    free = torch.cuda.mem_get_info(device)[0] if on_device else free_memory()
    return min(MOST_AHEAD, free // SHARE)


def _cached(reader: Reader, source: Source, crops: Crops, data: Data) -> Reader:
    """The reader with the cache that was asked for.

    Images that are the same in every epoch are kept decoded, as far as memory allows. Randomly cropped photos are kept
    encoded, if there is memory for all of them.
    """
    if not _caches(data, source) or isinstance(source, ArraySource):
        return reader
    images = _images_cached(source, crops, data)
    if images:
        return PixelCache(reader, images=len(source), most=images)
    most = free_memory() // SHARE
    if isinstance(reader, NativeReader) and can_keep() and encoded_bytes(source) <= most:
        reader.keep(EncodedCache(source, most=most))
    return reader


def _caches(data: Data, source: Source) -> bool:
    """Whether images are cached; those decoded on the device are not."""
    return data.dataset_cache and data.decode_device != "cuda" and not isinstance(source, ArraySource)


def _images_cached(source: Source, crops: Crops, data: Data) -> int:
    """The number of images that are kept decoded."""
    if not _caches(data, source) or crops.augment != "none":
        return 0
    return min(len(source), free_memory() // SHARE // (crops.size * crops.size * 3))


def input_lines(dataset: Dataset, data: Data, augmentation: Augmentation, *, device: torch.device) -> list[str]:
    """The input pipeline in words, for the plan."""
    if data.data == "synthetic":
        return []
    if isinstance(dataset.train, ArraySource) and data.dataset_location == "device":
        count, side = len(dataset.train) + len(dataset.validation), dataset.preprocessing.image_size
        return [f"loader: keeps all images on the device, {count * side * side * 3 / 1e6:,.0f} MB of bytes"]
    on_device = decode_device(data, dataset.train, device) == "cuda"
    form = "left on the device" if on_device else "copied as bytes" if data.eight_bit_io else "copied as values"
    where = {"host": "normalised on the host", "device": "normalised on the device", "none": "not normalised"}
    most = most_ahead(data, dataset.train, device) / 1e6
    lines = [f"loader: reads at most {most:,.0f} MB ahead, pixels {form} and {where[data.normalization_location]}"]
    if _caches(data, dataset.train):
        training, validation = dataset.training_crops(augmentation, seed=0), dataset.validation_crops()
        lines += [
            f"training cache: {_describe_cache(dataset.train, training, data)}",
            f"validation cache: {_describe_cache(dataset.validation, validation, data)}",
        ]
    return lines


def _describe_cache(source: Source, crops: Crops, data: Data) -> str:
    images = _images_cached(source, crops, data)
    if images:
        return f"{images:,} of {len(source):,} images decoded, {images * crops.size * crops.size * 3 / 1e6:,.0f} MB"
    assert not isinstance(source, ArraySource)
    megabytes = encoded_bytes(source) / 1e6
    if not can_keep():
        return "none, because only the native decoder on Linux reads photos from memory"
    if encoded_bytes(source) > free_memory() // SHARE:
        return f"none, because {megabytes:,.0f} MB is more than a quarter of the free memory"
    return f"{len(source):,} encoded images, about {megabytes:,.0f} MB"
