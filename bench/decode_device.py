"""Measure decoding, cropping and resizing on a CUDA device against the CPU's decoder, and how well the two agree.

    python bench/decode_device.py FOLDER                 any folder of JPEG files, flat or not
    python bench/decode_device.py FOLDER --images 8192 --workers 2 4 8 16

`nvJPEG alone` decodes files that are already in memory, without cropping or resizing. `loader` is the whole path to
batches of 256 on the device, with that many threads: the device's decoder, and the native one with its copies. Every
photo comes from the page cache. `agreement` is the PSNR against Pillow, in dB, of random crops at 224 x 224.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image

from falconet.data import native
from falconet.data.buffers import Buffers, PixelRows, RowReader
from falconet.data.crops import Crops
from falconet.data.gpu import DeviceBuffers, DeviceRows, decode_jpegs
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import PillowReader, reader_for
from falconet.data.storage import FileSource

ENDINGS = {".jpg", ".jpeg"}
SIZE, BATCH = 224, 256
PREPROCESSING = Preprocessing(image_size=SIZE, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
CROPS = Crops(preprocessing=PREPROCESSING, augment="crop-flip", seed=0, objects=None)
DEVICE = torch.device("cuda", 0)


def repeated(folder: Path, images: int) -> FileSource:
    """The folder's JPEG files, in turn, as `images` entries of one class."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not found:
        raise SystemExit(f"{folder}: contains no JPEG files")
    names = [str(found[number % len(found)].relative_to(folder)) for number in range(images)]
    return FileSource.of(folder, names=names, labels=[0] * images, class_names=(".",))


def bad() -> BadImages:
    return BadImages(10**6, note=print)


def nvjpeg_alone(source: FileSource, portion: int) -> float:
    indices = range(min(1024, len(source)))
    encoded = [torch.frombuffer(bytearray(source.encoded(index)), dtype=torch.uint8) for index in indices]
    for _ in range(2):  # the first is warm-up
        begin = time.perf_counter()
        refused = 0
        for first in range(0, len(encoded), portion):
            refused += sum(image is None for image in decode_jpegs(encoded[first : first + portion], DEVICE))
        torch.cuda.synchronize()
        rate = len(encoded) / (time.perf_counter() - begin)
    if refused:
        print(f"  nvJPEG refused {refused} of {len(encoded)}", flush=True)
    return rate


def loaded(source: FileSource, reader: RowReader, buffers: Buffers, workers: int) -> float:
    """Images per second on the device, after the first four updates."""
    shape, resources = BatchShape(micro_batch=BATCH), Resources(workers=workers, device=DEVICE, buffers=buffers)
    updates = Loader(reader, labels=source.labels, shape=shape, seed=0, resources=resources).updates(0)
    for _ in range(4):
        next(updates)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    for update in updates:
        count += len(update[0].labels)
    torch.cuda.synchronize()
    return count / (time.perf_counter() - begin)


def agreement(source: FileSource, images: int) -> None:
    pillow = PillowReader(source, crops=CROPS, bad=bad())
    device = DeviceRows(DEVICE, source=source, crops=CROPS, host=pillow)
    indices = np.arange(images)
    expected = np.empty((images, SIZE, SIZE, 3), np.uint8)
    pillow.read(indices, epoch=0, out=expected)
    out = DeviceBuffers(DEVICE).batch(images, size=SIZE).images.permute(0, 2, 3, 1)
    for begin in range(0, images, 64):
        device.read(indices[begin : begin + 64], epoch=0, out=out[begin : begin + 64])
    away = (out.cpu().numpy().astype(np.float64) - expected) ** 2
    decibels = 10 * np.log10(255**2 / np.maximum(away.mean(axis=(1, 2, 3)), 1e-6))
    kinds: dict[str, list[float]] = {"all": []}
    for index, value in enumerate(decibels.tolist()):
        kinds["all"].append(value)
        kinds.setdefault(sampling(source.path(index)), []).append(value)
    print(f"agreement with Pillow over {images} photos: median, 5th percentile, worst", flush=True)
    for kind, values in kinds.items():
        print(
            f"  {kind:12} {np.median(values):6.1f} {np.percentile(values, 5):6.1f} {min(values):6.1f}  ({len(values)})"
        )


def sampling(path: Path) -> str:
    with Image.open(path) as image:
        layers = getattr(image, "layer", [])
        return "grey" if image.mode == "L" else f"{image.mode} {layers[0][1]}x{layers[0][2]}" if layers else image.mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--portions", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, torchvision {torchvision.__version__}", flush=True
    )
    library = native.library()
    print(f"native decoder: {library.processor if library else native.why_not()}", flush=True)
    source = repeated(args.folder, args.images)
    distinct = len({source.path(index) for index in range(len(source))})
    agreement(source, min(distinct, 512))
    for portion in args.portions:
        print(f"nvJPEG alone, {portion:3} at once: {nvjpeg_alone(source, portion):8.0f} photos/s", flush=True)
    host = reader_for(source, crops=CROPS, bad=bad())
    for workers in args.workers:
        rates: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for portion in args.portions[1:4]:
                device = DeviceRows(DEVICE, source=source, crops=CROPS, host=host, rows=portion)
                rate = loaded(source, device, DeviceBuffers(DEVICE), workers)
                rates.setdefault(f"device, {portion:3} at once", []).append(rate)
            rates.setdefault("native", []).append(loaded(source, PixelRows(host), Buffers(pin=True), workers))
        for name, values in rates.items():
            print(
                f"loader, {workers:2} threads, {name:20} {statistics.median(values):8.0f} photos/s"
                f" ({min(values):.0f} to {max(values):.0f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
