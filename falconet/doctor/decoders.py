"""The decoders of JPEG photos on this machine, measured on generated photos."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from falconet import writing
from falconet.config.options import Data
from falconet.data import input, measure, native
from falconet.data.buffers import PixelRows, RowReader
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import Resources
from falconet.data.measure import Pipeline
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import PillowReader, reader_for
from falconet.data.storage import FileSource
from falconet.report.console import counted

PHOTOS, WIDTH, HEIGHT = 48, 500, 375  # ImageNet's usual size
PREPROCESSING = Preprocessing(image_size=224, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
WORTH = 2.0  # times as fast: decoding and training take turns on the device, which about halves its speed
MEASURED = 1.0  # seconds for each decoder


def findings(device: torch.device, *, seconds: float) -> Iterator[str]:
    """Lines with the images per second of each decoder, and the one to use."""
    with writing.scratch() as folder:
        rates = _rates(made_photos(Path(folder)), device, seconds)
    threads = counted(input.workers(Data()), "thread")
    yield f"photos of {WIDTH} x {HEIGHT} to 224 x 224, random crops, {threads}, images per second:"
    yield from (f"  {name:<28} {rate:>8,.0f}" for name, rate in rates.items())
    yield f"recommended: {recommended(rates)}"


def recommended(rates: dict[str, float]) -> str:
    """The recommended `--decode-device` for these rates of the decoders."""
    host = max(rate for name, rate in rates.items() if not name.startswith("nvJPEG"))
    device = max((rate for name, rate in rates.items() if name.startswith("nvJPEG")), default=0.0)
    return "--decode-device cuda" if device > WORTH * host else "--decode-device cpu"


def made_photos(root: Path) -> FileSource:
    """Generate photos of clouds and grain, with as many bits per pixel as ImageNet's (about 100 kB each)."""
    random = np.random.default_rng(0)
    (root / "made").mkdir()
    names = [f"{number:02}.jpg" for number in range(PHOTOS)]
    for name in names:
        clouds = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(clouds.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        grain = random.normal(0, 9, (HEIGHT, WIDTH, 1)).astype(np.float32)
        pixels = (smooth + grain).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / "made" / name, quality=93, subsampling=0)
    return FileSource.of(root, names=names, labels=[0] * PHOTOS, class_names=("made",))


def _rates(source: FileSource, device: torch.device, seconds: float) -> dict[str, float]:
    crops = Crops(preprocessing=PREPROCESSING, augment="crop-flip")
    bad = BadImages(0, note=lambda _: None)
    host = reader_for(source, crops=crops, bad=bad)
    on_host = Resources(workers=input.workers(Data()))
    ways: dict[str, Pipeline] = {}
    library = native.library()
    if library is not None:
        ways[f"native decoder ({library.processor})"] = _pipeline(source, PixelRows(host), on_host)
    pillow = PixelRows(PillowReader(source, crops=crops, bad=bad))
    ways["Pillow"] = _pipeline(source, pillow, on_host)
    if device.type == "cuda":
        from falconet.data.gpu import DeviceBuffers, DeviceRows

        rows = DeviceRows(device, source=source, crops=crops, host=host)
        workers = input.workers(Data(decode_device="cuda"))
        ways["nvJPEG on the device"] = _pipeline(
            source, rows, Resources(workers=workers, buffers=DeviceBuffers(device))
        )
    return {name: measure.fill_rate(pipeline, seconds=seconds) for name, pipeline in ways.items()}


def _pipeline(source: FileSource, reader: RowReader, resources: Resources) -> Pipeline:
    return Pipeline(source=source, reader=reader, resources=resources, micro_batch=PHOTOS, training=True)
