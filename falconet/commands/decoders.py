"""How fast this machine decodes photos, by each decoder there is; on photos made for it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from falconet.config.sections import Data
from falconet.data import measure, native
from falconet.data.augment import Crops
from falconet.data.decode import BadImages
from falconet.data.landing import Landing, PixelLanding
from falconet.data.measure import Pipeline
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import FileReader, Reader, reader_for
from falconet.data.source import FileSource
from falconet.numerics.precision import REGIMES
from falconet.report.words import counted
from falconet.wiring import decoding, feeding
from falconet.wiring.feeding import Reading

PHOTOS, WIDTH, HEIGHT = 48, 500, 375  # ImageNet's usual size
PREPROCESSING = Preprocessing(image_size=224, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
WORTH = 1.2  # times as fast: decoding on the device takes time of the training, so a little more does not pay


def findings(device: torch.device, *, seconds: float) -> Iterator[str]:
    """Images a second of each decoder, and which one to use, in words."""
    with tempfile.TemporaryDirectory() as folder:
        rates = _rates(made_photos(Path(folder)), device, seconds)
    threads = counted(decoding.workers(Data()), "thread")
    yield f"photos of {WIDTH} x {HEIGHT} to 224 x 224, random crops, {threads}, images a second:"
    yield from (f"  {name:<28} {rate:>8,.0f}" for name, rate in rates.items())
    yield f"recommended: {recommended(rates)}"


def recommended(rates: dict[str, float]) -> str:
    """`--decode-device` for these rates, which are named by their decoders."""
    host = max(rate for name, rate in rates.items() if not name.startswith("nvJPEG"))
    device = max((rate for name, rate in rates.items() if name.startswith("nvJPEG")), default=0.0)
    return "--decode-device cuda" if device > WORTH * host else "--decode-device cpu"


def made_photos(root: Path) -> FileSource:
    """Clouds and grain, as many bits a pixel as ImageNet's photos (about 100 kB each)."""
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
    bad = BadImages(0, note=lambda _: None)
    crops = Crops.of(PREPROCESSING, augment="crop-flip", seed=0, objects=None)
    pillow = FileReader(source, crops=crops, bad=bad)
    host = reader_for(source, preprocessing=PREPROCESSING, augment="crop-flip", seed=0, bad=bad)
    ways: dict[str, tuple[Reader, Landing]] = {}
    library = native.library()
    if library is not None:
        ways[f"native decoder ({library.processor})"] = (host, PixelLanding())
    ways["Pillow"] = (pillow, PixelLanding())
    if device.type == "cuda":
        reading = Reading(source=source, preprocessing=PREPROCESSING, augment="crop-flip", seed=0)
        landing = feeding.landing(Data(decode_device="cuda"), reading, regime=REGIMES["32.32"], device=device)
        ways["nvJPEG on the device"] = (host, landing)
    return {name: measure.fill_rate(_pipeline(source, *way), seconds=seconds) for name, way in ways.items()}


def _pipeline(source: FileSource, reader: Reader, landing: Landing) -> Pipeline:
    on_device = not isinstance(landing, PixelLanding)
    return Pipeline(
        source=source,
        reader=reader,
        landing=landing,
        device=torch.device("cpu"),
        micro_batch=PHOTOS,
        workers=decoding.workers(Data(decode_device="cuda" if on_device else "cpu")),
        training=True,
    )
