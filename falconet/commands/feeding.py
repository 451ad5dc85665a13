"""How images get from their source to the device: by which threads, through how much memory, in which form."""

import os
from typing import Literal

import torch

from falconet.config import sections
from falconet.data import memory
from falconet.data.cache import PixelCache
from falconet.data.crops import Crops
from falconet.data.landing import MOST_AHEAD, Allowance, Landing, PixelLanding, ValueLanding
from falconet.data.memory import Ring, Shape
from falconet.data.preprocessing import Normalise
from falconet.data.readers import Reader
from falconet.data.source import FileSource, Source
from falconet.errors import DeviceError
from falconet.numerics.precision import Regime
from falconet.parallel.environment import local_processes

FREE_SHARE = 4  # a quarter of the free memory may be read ahead, half of it cached


def free_memory() -> int:
    """Bytes for this process; those of the host are divided among its processes."""
    return memory.available() // local_processes(os.environ)


def decode_device(data: sections.Data, source: Source, device: torch.device) -> Literal["cpu", "cuda"]:
    """Where this source is decoded; images that lie in memory decoded have no choice."""
    if data.decode_device != "cuda" or not isinstance(source, FileSource):
        return "cpu"
    if device.type != "cuda":
        raise DeviceError("--decode-device cuda: training runs on the CPU here; wanted cpu, or --device cuda")
    return "cuda"


def prepare_on_host(data: sections.Data, crops: Crops, dtype: torch.dtype) -> Normalise | None:
    """What the loader's threads do to pixels, if anything."""
    if data.eight_bit_io:
        return None
    preprocessing = crops.preprocessing
    if data.normalization_location != "host":
        preprocessing = preprocessing.unnormalised
    return Normalise(preprocessing, dtype=dtype)


def landing(data: sections.Data, source: Source, *, crops: Crops, regime: Regime, device: torch.device) -> Landing:
    """Where a micro-batch comes to lie, and in which form."""
    portion = (
        None if data.dataloader_rebatch_size == "auto" else min(data.dataloader_rebatch_size, data.micro_batch_size)
    )
    if decode_device(data, source, device) == "cuda":
        from falconet.data.device.landing import DeviceLanding, file_bytes

        assert isinstance(source, FileSource)
        return DeviceLanding(device, encoded=file_bytes(source), crops=crops, portion=portion)
    allowance = Allowance(
        ring=Ring(pin=True) if device.type == "cuda" else None,
        portion=portion,
        most=min(MOST_AHEAD, free_memory() // FREE_SHARE),
    )
    prepare = prepare_on_host(data, crops, regime.formats(device)["activations"])
    return PixelLanding(allowance) if prepare is None else ValueLanding(prepare, allowance)


def cached(reader: Reader, data: sections.Data, *, images: int, augment: str) -> Reader:
    """The reader, behind a cache where one was asked for and what it reads is the same in every epoch."""
    most = cache_images(data, images=images, size=reader.size, augment=augment)
    return PixelCache(reader, images=images, most=most) if most else reader


def cache_images(data: sections.Data, *, images: int, size: int, augment: str) -> int:
    """How many images the cache takes in; 0: there is none."""
    if not data.dataset_cache or augment != "none":
        return 0
    return min(images, free_memory() // 2 // Shape(1, size).bytes_an_image)
