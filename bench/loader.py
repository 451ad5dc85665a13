"""Photographs to batches: torchvision's DataLoader, our Pillow reader and our native decoder, on the same files.

    python bench/loader.py FOLDER                        FOLDER/<class>/*.jpg, as ImageFolder wants it
    python bench/loader.py FOLDER --images 2000 --rounds 5 --workers 1 2

Every round measures each method once, in turn, so that a change of the machine's speed falls on all alike; a ratio is
the median over rounds of the ratios within one round. Batches are uint8 N x 3 x 224 x 224 in every method. The first
round only warms up, so that files come from memory. `cpu` is one thread's processor time alone, without a loader; the
other columns are wall time with that many workers (processes for torchvision, threads for ours). `--peers dali` adds
NVIDIA DALI where it is installed; it needs no GPU for this.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import PIL
import torch
import torchvision
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from falconet.data import native
from falconet.data.decode import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Loader
from falconet.data.native.reader import NativeReader
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import FileReader, Reader
from falconet.data.source import FileSource

SIZE, RESIZE, BATCH = 224, 256, 64
PREPROCESSING = Preprocessing(image_size=SIZE, resize=RESIZE, mean=IMAGENET_MEAN, std=IMAGENET_STD)
Epoch = Callable[[int], int]  # reads every photo once; how many


@dataclass(frozen=True)
class Method:
    """One way to read the photos: by one thread, and by a loader that stays up between rounds."""

    name: str
    alone: Epoch
    loaders: dict[int, Epoch]  # by workers


def folder_source(root: Path, images: int) -> FileSource:
    """The first `images` files of ImageFolder's listing, so that all methods read the same ones."""
    listed = ImageFolder(root)
    samples = listed.samples[:images]
    names = [str(Path(path).relative_to(root / listed.classes[label])) for path, label in samples]
    labels = [label for _, label in samples]
    return FileSource.of(root, names=names, labels=labels, class_names=tuple(listed.classes))


def torchvision_method(root: Path, images: int, workers: list[int], training: bool) -> Method:
    steps = (
        [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
        if training
        else [v2.Resize(RESIZE), v2.CenterCrop(SIZE)]
    )
    data = Subset(ImageFolder(root, v2.Compose([*steps, v2.PILToTensor()])), range(images))

    def alone(_: int) -> int:
        for index in range(images):
            data[index]
        return images

    def loader(count: int) -> Epoch:
        kept = DataLoader(data, BATCH, shuffle=training, num_workers=count, persistent_workers=True)
        return lambda _: sum(len(labels) for _, labels in kept)

    return Method("torchvision", alone, {count: loader(count) for count in workers})


def our_method(name: str, reader: Reader, source: FileSource, workers: list[int], training: bool) -> Method:
    order = np.random.default_rng(0).permutation(len(source))
    rows = np.empty((reader.rows, SIZE, SIZE, 3), np.uint8)
    shape = BatchShape(micro_batch=BATCH)

    def alone(epoch: int) -> int:
        for begin in range(0, len(order), reader.rows):
            part = order[begin : begin + reader.rows]
            reader.read(part, epoch=epoch, out=rows[: len(part)])
        return len(order)

    def batches(epoch: int, count: int) -> Iterator[int]:
        if training:
            for update in Loader(reader, source.labels, shape=shape, seed=0, workers=count).updates(epoch):
                yield sum(len(batch.labels) for batch in update)
        else:
            for batch in EvaluationLoader(reader, source.labels, shape=shape, workers=count).batches():
                yield int((batch.labels >= 0).sum())

    loaders = {count: (lambda epoch, count=count: sum(batches(epoch, count))) for count in workers}
    return Method(name, alone, loaders)


def dali_method(source: FileSource, workers: list[int], training: bool) -> Method:
    """NVIDIA DALI on the CPU, decoding only the crop where it can; its threads take the place of workers."""
    from nvidia.dali import fn, pipeline_def, types

    files = [str(source.path(index)) for index in range(len(source))]

    @pipeline_def(batch_size=BATCH, device_id=None, prefetch_queue_depth=2)
    def pipeline():  # noqa: ANN202, DALI's own type
        data, labels = fn.readers.file(
            files=files, labels=source.labels.tolist(), random_shuffle=training, name="files"
        )
        size = {"size": SIZE, "interp_type": types.INTERP_LINEAR, "antialias": True}
        if training:
            crops = fn.decoders.image_random_crop(data, random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3])
            images = fn.flip(fn.resize(crops, **size), horizontal=fn.random.coin_flip())
        else:
            whole = fn.resize(fn.decoders.image(data), **(size | {"size": RESIZE}), mode="not_smaller")
            images = fn.crop(whole, crop=(SIZE, SIZE))
        return images, labels

    def loader(count: int) -> Epoch:
        kept = pipeline(num_threads=count)
        kept.build()
        batches = -(-len(files) // BATCH)
        return lambda _: sum(len(kept.run()[1]) for _ in range(batches))

    return Method("dali", lambda _: 0, {count: loader(count) for count in workers})


def methods(root: Path, images: int, workers: list[int], training: bool) -> list[Method]:
    source = folder_source(root, images)
    augment = "crop-flip" if training else "none"
    pillow = FileReader(
        source, preprocessing=PREPROCESSING, augment=augment, seed=0, bad=BadImages(len(source), note=print)
    )
    found = [
        torchvision_method(root, len(source), workers, training),
        our_method("pillow", pillow, source, workers, training),
    ]
    library = native.library()
    if library is None:
        print(f"native decoder: {native.why_not()}")
        return found
    reader = NativeReader(source, library=library, preprocessing=PREPROCESSING, augment=augment, seed=0, pillow=pillow)
    return [*found, our_method("native", reader, source, workers, training)]


def rate(epoch: Epoch, number: int, clock: Callable[[], float]) -> float:
    begin = clock()
    images = epoch(number)
    return images / (clock() - begin)


def measure(found: list[Method], workers: list[int], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Images a second of each method and column, one number a round; the first round only warms up."""
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for method in found:
            columns = {"cpu": rate(method.alone, number, time.thread_time)}  # 0 where a method has no such part
            columns |= {f"{count} w": rate(method.loaders[count], number, time.perf_counter) for count in workers}
            for column, value in columns.items():
                if number > 0:
                    rates.setdefault((method.name, column), []).append(value)
    return rates


def table(rates: dict[tuple[str, str], list[float]], title: str) -> None:
    """Median rate, half its range over the rounds, and the median ratio to torchvision in the same round."""
    names, columns = list(dict.fromkeys(n for n, _ in rates)), list(dict.fromkeys(c for _, c in rates))
    print(f"\n{title}: images a second (spread), times torchvision")
    print(f"{'':12}" + "".join(f"{column:>28}" for column in columns))
    for name in names:
        cells = []
        for column in columns:
            own, base = rates[name, column], rates[names[0], column]
            ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
            middle = statistics.median(own)
            spread = (max(own) - min(own)) / 2 / middle if middle > 0 else 0
            cells.append(f"{middle:8.0f} (+-{spread:4.1%}) {ratio:5.2f}x")
        print(f"{name:12}" + "".join(f"{cell:>28}" for cell in cells))


def machine() -> str:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    library = native.library()
    native_is = f"native {library.processor}" if library is not None else "no native decoder"
    return (
        f"{cpu or platform.processor()}, {len(os.sched_getaffinity(0))} cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}, {native_is}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peers", nargs="*", choices=["dali"], default=[])
    parser.add_argument("--mode", choices=["training", "validation", "both"], default="both")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    source = folder_source(args.folder, args.images)
    sizes = [source.path(index).stat().st_size for index in range(len(source))]
    print(f"{len(sizes)} photos of {statistics.mean(sizes) / 1000:.1f} kB on average, {args.rounds} rounds")
    for mode in ("training", "validation"):
        if args.mode in (mode, "both"):
            found = methods(args.folder, args.images, args.workers, mode == "training")
            if "dali" in args.peers:
                found.append(dali_method(source, args.workers, mode == "training"))
            table(measure(found, args.workers, args.rounds), mode)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
