"""Photos in a folder, in one of four layouts: packed shards, class folders, TFRecords, tar archives."""

from pathlib import Path

from falconet.data.sources import folder, packed, tar, tfrecord
from falconet.data.storage import Splits
from falconet.errors import DataError

INNER = "imagenet-data"  # a subfolder that the TensorFlow program used as well


def load_photos(data_dir: Path) -> Splits:
    """The splits of the first layout found, in the order above."""
    try:
        return _first(data_dir)
    except OSError as error:
        raise DataError(f"{error.filename or data_dir}: cannot be read ({error.strerror or error})") from None


def _first(data_dir: Path) -> Splits:
    for place in (data_dir, data_dir / INNER):
        splits = _from(place)
        if splits is not None:
            return splits
    if not data_dir.is_dir() or (data_dir / "train").is_dir() or any(_existing(data_dir)):
        return folder.load(data_dir)  # names what is missing
    raise DataError(
        f"{data_dir}: found no photos; expected train/<class>/, train-00000-of-01024 (TFRecords), tar archives with"
        f" train in their name, or {packed.shard_name('train', 0)} (packed shards)"
    )


def _from(place: Path) -> Splits | None:
    if not place.is_dir():
        return None
    shards = packed.find(place)
    if any(shards.values()):
        return packed.load(place, shards)
    if _has_folders(place / "train"):
        return folder.load(place)
    records = tfrecord.find(place)
    if any(records.values()):
        return tfrecord.load(place, records)
    archives = tar.find(place)
    return tar.load(place, archives) if any(archives.values()) else None


def _has_folders(place: Path) -> bool:
    return place.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in place.iterdir())


def _existing(data_dir: Path) -> list[Path]:
    return [data_dir / name for name in folder.VALIDATION_NAMES if (data_dir / name).is_dir()]
