"""Sizes of the published data sets, for a plan without the data."""

from pathlib import Path

import numpy as np

from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from falconet.data.shards import Shards
from falconet.data.sources import cifar
from falconet.data.storage import ArraySource, Places, ShardSource, Splits

IMAGENET_CLASSES = 1000
# Images of ILSVRC 2012, and bytes per file on average: the size of the published archive over its images.
IMAGENET_TRAIN = (1_281_167, 115_440)
IMAGENET_VALIDATION = (50_000, 134_898)
CIFAR_TRAIN, CIFAR_VALIDATION = 50_000, 10_000


def published(kind: str, data_dir: Path | None) -> Splits | None:
    """Splits of the published size with nothing to read; None if `data_dir` has the data, or the size is unknown."""
    if kind == "imagenet" and not (data_dir and data_dir.is_dir()):
        return Splits(
            train=_photos(*IMAGENET_TRAIN),
            validation=_photos(*IMAGENET_VALIDATION),
            native_size=None,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            layout=_reason(data_dir),
        )
    name = next((each for each in cifar.CIFARS if each == kind), None)
    if name and not cifar.is_there(data_dir, kind=name):
        found = cifar.CIFARS[name]
        return Splits(
            train=_pictures(CIFAR_TRAIN, found.class_names),
            validation=_pictures(CIFAR_VALIDATION, found.class_names),
            native_size=cifar.SIDE,
            mean=found.mean,
            std=found.std,
            layout=_reason(data_dir or cifar.DEFAULT_DIR),
        )
    return None


def _photos(images: int, size: int) -> ShardSource:
    places = Places(np.zeros(images, np.int32), np.zeros(images, np.int64), np.full(images, size, np.uint32))
    names = tuple(str(number) for number in range(IMAGENET_CLASSES))
    return ShardSource(Shards([]), places, np.arange(images) % IMAGENET_CLASSES, names)


def _pictures(images: int, class_names: tuple[str, ...]) -> ArraySource:
    nothing = np.broadcast_to(np.uint8(0), (images, cifar.SIDE, cifar.SIDE, 3))
    return ArraySource(nothing, np.arange(images) % len(class_names), class_names)


def _reason(data_dir: Path | None) -> str:
    return f"the published sizes, because {f'{data_dir} does not have them' if data_dir else 'no data folder is given'}"
