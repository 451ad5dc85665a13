"""Compare loaders of photos: torchvision's DataLoader, our Pillow reader and our native decoder, on the same files.

    python bench/loader.py FOLDER                        FOLDER/<class>/*.jpg, as for ImageFolder
    python bench/loader.py FOLDER --images 2000 --rounds 5 --workers 1 2
    python bench/loader.py FOLDER --images 500 --repeat 20 --workers 1 8 16 --leave-out pillow     many cores

Every round measures each method once, in turn, so that a change in the machine's speed affects all of them; a ratio is
the median over rounds of the ratios within one round. Batches are uint8 N x 3 x 224 x 224 in every method. The first
round is warm-up, so that files come from memory. `cpu` is the processor time of one thread without a loader, which
hardly depends on other work on the machine; the other columns are wall time with that many workers (processes for
torchvision, threads for ours), and need a quiet machine. `marked` is the native reader on the same photos, losslessly
restart-marked. `--peers dali ffcv` adds those two if they are installed, on the CPU; FFCV reads its own file format, so
`native-ffcv` is our reader on the same JPEG bytes. `--repeat` reads every photo that many times, for when a few photos
would be read too quickly.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
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
from falconet.data.buffers import PixelRows
from falconet.data.crops import Augment, Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Loader, Resources
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.data.readers import NativeReader, PillowReader, Reader
from falconet.data.storage import FileSource
from loader_peers import BATCH, RESIZE, SIZE, Epoch, Method, dali_method, ffcv_method, write_for_ffcv

PREPROCESSING = Preprocessing(image_size=SIZE, resize=RESIZE, mean=IMAGENET_MEAN, std=IMAGENET_STD)


@dataclass(frozen=True)
class Photos:
    """The photos that every method reads: the first `images` of ImageFolder's listing, `repeat` times."""

    root: Path
    images: int
    repeat: int
    training: bool

    def indices(self) -> list[int]:
        return list(range(self.images)) * self.repeat

    def source(self) -> FileSource:
        return folder_source(self.root, self.images, self.repeat)


def folder_source(root: Path, images: int, repeat: int = 1) -> FileSource:
    listed = ImageFolder(root)
    samples = listed.samples[:images] * repeat
    names = [str(Path(path).relative_to(root / listed.classes[label])) for path, label in samples]
    labels = [label for _, label in samples]
    return FileSource.of(root, names=names, labels=labels, class_names=tuple(listed.classes))


def restart_marked(photos: Photos, folder: Path) -> Photos:
    """The same photos with a restart marker every 8 MCUs, in `folder`; those that cannot be marked stay unchanged."""
    library = native.library()
    assert library is not None
    source = folder_source(photos.root, photos.images)
    for index in range(len(source)):
        path = source.path(index)
        to = folder / path.relative_to(photos.root)
        to.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        marked = library.restart_marked(data)
        to.write_bytes(marked if isinstance(marked, bytes) else data)
    return Photos(folder, photos.images, photos.repeat, photos.training)


def torchvision_method(photos: Photos, workers: list[int]) -> Method:
    steps = (
        [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
        if photos.training
        else [v2.Resize(RESIZE), v2.CenterCrop(SIZE)]
    )
    data = Subset(ImageFolder(photos.root, v2.Compose([*steps, v2.PILToTensor()])), photos.indices())

    def alone(_: int) -> int:
        for index in range(photos.images):
            data[index]
        return photos.images

    def loader(count: int) -> Epoch:
        kept = DataLoader(data, BATCH, shuffle=photos.training, num_workers=count, persistent_workers=True)
        return lambda _: sum(len(labels) for _, labels in kept)

    return Method("torchvision", alone, {count: loader(count) for count in workers})


def our_method(name: str, reader: Reader, photos: Photos, workers: list[int]) -> Method:
    labels = photos.source().labels
    order = np.random.default_rng(0).permutation(photos.images)
    rows = np.empty((reader.rows, SIZE, SIZE, 3), np.uint8)
    shape = BatchShape(micro_batch=BATCH)

    def alone(epoch: int) -> int:
        for begin in range(0, len(order), reader.rows):
            part = order[begin : begin + reader.rows]
            reader.read(part, epoch=epoch, out=rows[: len(part)])
        return len(order)

    def batches(epoch: int, count: int) -> Iterator[int]:
        rows, resources = PixelRows(reader), Resources(workers=count)
        if photos.training:
            for update in Loader(rows, labels=labels, shape=shape, seed=0, resources=resources).updates(epoch):
                yield sum(len(batch.labels) for batch in update)
        else:
            for batch in EvaluationLoader(rows, labels=labels, shape=shape, resources=resources).batches():
                yield int((batch.labels >= 0).sum())

    def loader(count: int) -> Epoch:
        return lambda epoch: sum(batches(epoch, count))

    return Method(name, alone, {count: loader(count) for count in workers})


def readers(photos: Photos) -> tuple[Reader, Reader | None]:
    """The Pillow reader and, if it is built, the native one."""
    source = photos.source()
    augment: Augment = "crop-flip" if photos.training else "none"
    crops = Crops(preprocessing=PREPROCESSING, augment=augment, seed=0, objects=None)
    pillow = PillowReader(source, crops=crops, bad=BadImages(len(source), note=print))
    library = native.library()
    if library is None:
        return pillow, None
    return pillow, NativeReader(source, library=library, crops=crops, pillow=pillow)


def methods(photos: Photos, workers: list[int], peers: list[str], scratch: Path) -> list[Method]:
    pillow, fast = readers(photos)
    found = [torchvision_method(photos, workers), our_method("pillow", pillow, photos, workers)]
    if fast is None:
        print(f"native decoder: {native.why_not()}")
    else:
        marked = restart_marked(photos, scratch / "marked")
        found += [
            our_method("native", fast, photos, workers),
            our_method("marked", _native(marked), marked, workers),
        ]
    if "dali" in peers:
        found.append(dali_method(photos.source(), workers, photos.training))
    if "ffcv" in peers:
        files = write_for_ffcv(folder_source(photos.root, photos.images), scratch)
        same = Photos(files.jpegs, photos.images, photos.repeat, photos.training)
        found += [
            ffcv_method(files, photos.repeat, workers, photos.training),
            our_method("native-ffcv", _native(same), same, workers),
        ]
    return found


def _native(photos: Photos) -> Reader:
    fast = readers(photos)[1]
    assert fast is not None
    return fast


def rate(epoch: Epoch, number: int, clock: Callable[[], float]) -> float:
    begin = clock()
    images = epoch(number)
    return images / (clock() - begin)


def measure(found: list[Method], workers: list[int], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Images per second of each method and column, one number per round; the first round is warm-up."""
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for method in found:
            columns = {"cpu": rate(method.alone, number, method.clock)}
            columns |= {f"{count} w": rate(method.loaders[count], number, time.perf_counter) for count in workers}
            for column, value in columns.items():
                if number > 0:
                    rates.setdefault((method.name, column), []).append(value)
    return rates


def table(rates: dict[tuple[str, str], list[float]], title: str) -> None:
    """Print the median rate, half its range over the rounds, and the median ratio to torchvision in the same round."""
    names, columns = list(dict.fromkeys(n for n, _ in rates)), list(dict.fromkeys(c for _, c in rates))
    print(f"\n{title}: images per second (spread), times torchvision")
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
    for name in names:
        for column in columns[2:]:
            more = statistics.median(a / b for a, b in zip(rates[name, column], rates[name, columns[1]], strict=True))
            print(f"{name}: {column} are {more:.2f} times {columns[1]}")


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
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--peers", nargs="*", choices=["dali", "ffcv"], default=[])
    parser.add_argument("--leave-out", nargs="*", choices=["pillow", "marked", "native"], default=[])
    parser.add_argument("--mode", choices=["training", "validation", "both"], default="both")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    source = folder_source(args.folder, args.images)
    sizes = [source.path(index).stat().st_size for index in range(len(source))]
    print(f"{len(sizes)} photos of {statistics.mean(sizes) / 1000:.1f} kB on average, {args.rounds} rounds", flush=True)
    for mode in ("training", "validation"):
        if args.mode not in (mode, "both"):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            photos = Photos(args.folder, len(source), args.repeat, mode == "training")
            found = methods(photos, args.workers, args.peers, Path(scratch))
            found = [method for method in found if method.name not in args.leave_out]
            table(measure(found, args.workers, args.rounds), mode)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
