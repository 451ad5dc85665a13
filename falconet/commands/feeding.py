"""How images get from their source to the device: through how much memory, in which form, decoded where."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from falconet.config import sections
from falconet.data import memory
from falconet.data.augment import Augment, Crops
from falconet.data.cache import PixelCache
from falconet.data.landing import MOST_AHEAD, Allowance, Landing, PixelLanding, ValueLanding
from falconet.data.memory import Ring, Shape
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.data.readers import Reader
from falconet.data.source import ArraySource, Source
from falconet.errors import DeviceError
from falconet.numerics.precision import Regime
from falconet.parallel.environment import local_processes

AHEAD_SHARE, CACHE_SHARE = 4, 2  # a quarter of the free memory may be read ahead, half of it cached


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read, and how."""

    source: Source
    preprocessing: Preprocessing
    augment: Augment
    seed: int


def free_memory() -> int:
    """Bytes for this process; those of the host are divided among its processes."""
    return memory.available() // local_processes(os.environ)


def decode_device(data: sections.Data, source: Source, device: torch.device) -> Literal["cpu", "cuda"]:
    """Where this source is decoded; images that lie in memory decoded have no choice."""
    if data.decode_device != "cuda" or isinstance(source, ArraySource):
        return "cpu"
    if device.type != "cuda":
        raise DeviceError("--decode-device cuda: the run is on the CPU; wanted cpu, or --device cuda")
    return "cuda"


def most_ahead() -> int:
    """Bytes of images that may be read ahead of their use."""
    return min(MOST_AHEAD, free_memory() // AHEAD_SHARE)


def lines(data: sections.Data, *, train: Reading, validation: Reading, device: torch.device) -> list[str]:
    """What was decided, for the plan."""
    if data.data == "synthetic":
        return []
    on_device = decode_device(data, train.source, device) == "cuda"
    form = "left on the device" if on_device else "copied as bytes" if data.eight_bit_io else "copied as numbers"
    where = {"host": "normalised on the host", "device": "normalised on the device", "none": "not normalised"}
    said = [
        f"loader: at most {most_ahead() / 1e6:,.0f} MB of images read ahead, pixels {form} and"
        f" {where[data.normalization_location]}"
    ]
    for name, reading in (("training", train), ("validation", validation)):
        kept = cache_images(data, reading)
        if kept:
            size = kept * _bytes_an_image(reading) / 1e6
            said.append(f"cache: {kept:,} of {len(reading.source):,} {name} images decoded in memory, {size:,.0f} MB")
        elif data.dataset_cache and not isinstance(reading.source, ArraySource):
            said.append(f"cache: none of {name}, whose crops are other ones each time")
    return said


def landing(data: sections.Data, reading: Reading, *, regime: Regime, device: torch.device) -> Landing:
    """Where a micro-batch comes to lie, and in which form."""
    asked = data.dataloader_rebatch_size
    portion = None if asked == "auto" else min(asked, data.micro_batch_size)
    if decode_device(data, reading.source, device) == "cuda":
        return _on_device(reading, device, portion)
    allowance = Allowance(
        ring=Ring(pin=True) if device.type == "cuda" else None,
        portion=portion,
        most=most_ahead(),
    )
    if data.eight_bit_io:
        return PixelLanding(allowance)
    on_host = data.normalization_location == "host"
    preprocessing = reading.preprocessing if on_host else reading.preprocessing.unnormalised
    return ValueLanding(Normalise(preprocessing, dtype=regime.formats(device)["activations"]), allowance)


def _on_device(reading: Reading, device: torch.device, portion: int | None) -> Landing:
    from falconet.data.device.landing import DeviceLanding, bytes_of

    source = reading.source
    assert not isinstance(source, ArraySource)
    crops = Crops.of(reading.preprocessing, augment=reading.augment, seed=reading.seed, objects=source.objects)
    return DeviceLanding(device, encoded=bytes_of(source), crops=crops, portion=portion)


def cached(reader: Reader, data: sections.Data, reading: Reading) -> Reader:
    """The reader, behind a cache where one was asked for and what it reads is the same in every epoch."""
    most = cache_images(data, reading)
    return PixelCache(reader, images=len(reading.source), most=most) if most else reader


def cache_images(data: sections.Data, reading: Reading) -> int:
    """How many images the cache takes in; 0: there is none."""
    if not data.dataset_cache or reading.augment != "none" or isinstance(reading.source, ArraySource):
        return 0
    return min(len(reading.source), free_memory() // CACHE_SHARE // _bytes_an_image(reading))


def _bytes_an_image(reading: Reading) -> int:
    return Shape(1, reading.preprocessing.image_size).bytes_an_image
