"""ImageNet and CIFAR as they were published: numbers to plan a run with where the images are not."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.shards import Shards
from falconet.data.source import ArraySource, Places, ShardSource, Source, Splits
from falconet.data.sources import cifar


@dataclass(frozen=True)
class _Photos:
    """One split of ILSVRC 2012."""

    images: int
    size: int  # bytes of a file, on average: those of the published archive over its images

    def source(self) -> Source:
        places = Places(
            np.zeros(self.images, np.int32), np.zeros(self.images, np.int64), np.full(self.images, self.size, np.uint32)
        )
        names = tuple(f"{number}" for number in range(CLASSES))
        return ShardSource(Shards([]), places, np.arange(self.images) % CLASSES, names)


CLASSES = 1000
TRAIN = _Photos(1_281_167, 115_440)
VALIDATION = _Photos(50_000, 134_898)
CIFAR_TRAIN, CIFAR_VALIDATION = 50_000, 10_000


def instead_of(kind: str, data_dir: Path | None) -> Splits | None:
    """What would be in `data_dir`, with nothing to read in it; None where something is, or nobody can know."""
    if kind == "imagenet" and not (data_dir and data_dir.is_dir()):
        return Splits(
            train=TRAIN.source(),
            validation=VALIDATION.source(),
            native_size=None,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            layout=_layout(data_dir),
        )
    name = next((each for each in cifar.CIFARS if each == kind), None)
    if name and not cifar.is_there(data_dir, kind=name):
        own = cifar.CIFARS[name]
        return Splits(
            train=_pictures(CIFAR_TRAIN, own.class_names),
            validation=_pictures(CIFAR_VALIDATION, own.class_names),
            native_size=cifar.SIDE,
            mean=own.mean,
            std=own.std,
            layout=_layout(data_dir or cifar.DEFAULT_DIR),
        )
    return None


def _pictures(images: int, class_names: tuple[str, ...]) -> Source:
    nothing = np.broadcast_to(np.uint8(0), (images, cifar.SIDE, cifar.SIDE, 3))
    return ArraySource(nothing, np.arange(images) % len(class_names), class_names)


def _layout(data_dir: Path | None) -> str:
    where = f"they are not in {data_dir}" if data_dir else "no --data-dir is given"
    return f"their published sizes, because {where}"
