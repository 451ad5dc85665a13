"""A source by the name of its kind."""

from pathlib import Path

from falconet.data.source import Splits
from falconet.data.sources import cifar, digits, folder, generated
from falconet.errors import ConfigError, DataError, did_you_mean

KINDS = ("digits", "cifar10", "cifar100", "folder", "generated", "synthetic")


def open_source(kind: str, *, data_dir: Path | None, image_size: int, classes: int, images: int, seed: int) -> Splits:
    """The splits of a kind; image size, classes, images and seed only concern the random ones.

    "synthetic" has the labels and classes of "generated"; its images never leave the device (see SyntheticLoader).
    """
    if kind == "digits":
        return digits.load()
    if kind == "cifar10":
        return cifar.load(data_dir, kind="cifar10")
    if kind == "cifar100":
        return cifar.load(data_dir, kind="cifar100")
    if kind == "folder":
        if data_dir is None:
            raise DataError("folder: no data folder given; --data-dir (or DATA_DIR) names one with train/ and val/")
        return folder.load(data_dir)
    if kind in ("generated", "synthetic"):
        return generated.make(images=images, image_size=image_size, classes=classes, seed=seed)
    raise ConfigError(f"data: got '{kind}', wanted one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
