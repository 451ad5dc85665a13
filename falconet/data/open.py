"""A source by the name of its kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from falconet.data.source import Splits
from falconet.data.sources import boxes, cifar, digits, generated, photos
from falconet.errors import ConfigError, DataError, did_you_mean

KINDS = ("digits", "cifar10", "cifar100", "imagenet", "folder", "generated", "synthetic")

UseObjects = Literal["no", "if there", "yes"]


@dataclass(frozen=True, kw_only=True)
class RandomImages:
    """What images are like that are made up."""

    image_size: int  # side, pixels
    classes: int
    images: int  # to train on
    seed: int


def open_source(kind: str, *, data_dir: Path | None, random: RandomImages, use_objects: UseObjects = "no") -> Splits:
    """The splits of a kind; `random` only concerns those that are made up, and `use_objects` photos.

    "synthetic" has the labels and classes of "generated"; its images never leave the device (see SyntheticLoader).
    """
    if kind == "digits":
        return digits.load()
    if kind == "cifar10":
        return cifar.load(data_dir, kind="cifar10")
    if kind == "cifar100":
        return cifar.load(data_dir, kind="cifar100")
    if kind in ("imagenet", "folder"):
        if data_dir is None:
            raise DataError(f"{kind}: no data folder given; --data-dir (or DATA_DIR) names one with train/ and val/")
        splits = photos.load(data_dir)
        if use_objects == "no":
            return boxes.without_objects(splits)
        look = boxes.with_objects if use_objects == "yes" else boxes.with_objects_if_there
        return look(splits, data_dir)
    if kind in ("generated", "synthetic"):
        return generated.make(
            images=random.images, image_size=random.image_size, classes=random.classes, seed=random.seed
        )
    raise ConfigError(f"data: got '{kind}', wanted one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
