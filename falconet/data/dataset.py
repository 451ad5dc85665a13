"""A share of the training images, spread evenly over all of them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from falconet.config import commands, options
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.config.options import reduced_size
from falconet.config.settings import is_asked_for
from falconet.data.crops import Augment
from falconet.data.keyed import IntArray
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Channels, Normalise, Preprocessing, normaliser
from falconet.data.shards import Shards
from falconet.data.source import ArraySource, FileSource, Names, Objects, Places, ShardSource, Source, Splits
from falconet.data.sources import builtin, cifar, photos
from falconet.errors import CheckpointError, ConfigError, DataError, did_you_mean, named_option
from falconet.models import zoo
from falconet.report.console import counted


def share_of(splits: Splits, *, percentage: float) -> Splits:
    """The same with that much of the training images; sources are sorted by class, so each keeps its share."""
    count = len(splits.train)
    steps = np.arange(count + 1) * percentage // 100
    chosen = np.flatnonzero(np.diff(steps))
    if len(chosen) == count:
        return splits
    if not len(chosen):
        raise DataError(f"--dataset-percentage: {percentage:g} % of {count:,} training images is none of them")
    return replace(splits, train=_part(splits.train, chosen))


def _part(source: Source, chosen: IntArray) -> Source:
    labels = source.labels[chosen]
    if isinstance(source, ArraySource):
        return replace(source, images=source.images[chosen], labels=labels)
    objects = None if source.objects is None else Objects.of([source.objects[index] for index in chosen.tolist()])
    names = None if source.names is None else Names.of([source.names[index] for index in chosen.tolist()])
    if isinstance(source, FileSource):
        assert names is not None
        return replace(source, names=names, labels=labels, objects=objects)
    return replace(source, places=_places(source.places, chosen), names=names, labels=labels, objects=objects)


def _places(places: Places, chosen: IntArray) -> Places:
    return Places(
        shards=places.shards[chosen],
        begins=places.begins[chosen],
        sizes=places.sizes[chosen],
        checksums=None if places.checksums is None else places.checksums[chosen],
        skips=None if places.skips is None else places.skips[chosen],
        lengths=None if places.lengths is None else places.lengths[chosen],
    )


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


def published_instead_of(kind: str, data_dir: Path | None) -> Splits | None:
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
        return builtin.load_digits()
    if kind == "cifar10":
        return cifar.load(data_dir, kind="cifar10")
    if kind == "cifar100":
        return cifar.load(data_dir, kind="cifar100")
    if kind in ("imagenet", "folder"):
        if data_dir is None:
            raise DataError(f"{kind}: no data folder given; --data-dir (or DATA_DIR) names one with train/ and val/")
        splits = photos.load_photos(data_dir)
        if use_objects == "no":
            return photos.without_objects(splits)
        look = photos.with_objects if use_objects == "yes" else photos.with_objects_if_there
        return look(splits, data_dir)
    if kind in ("generated", "synthetic"):
        return builtin.generate(
            images=random.images, image_size=random.image_size, classes=random.classes, seed=random.seed
        )
    raise ConfigError(f"data: got '{kind}', wanted one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")


DATA = ("data", "data-dir")  # naming one of them on the line allows a download
DIGITS_SIZE = 8  # pixels, their own: doubling them costs 2.6 times as long and gains nothing (docs/log.md)


@dataclass(frozen=True, kw_only=True)
class Images:
    """The data of a run, and how it becomes model input."""

    kind: str
    splits: Splits
    preprocessing: Preprocessing
    training: Preprocessing  # the same, but for images of another size that training may have
    on_host: bool = False  # normalised before it gets to the device

    @property
    def classes(self) -> int:
        return len(self.splits.class_names)

    def normalise(self, device: torch.device) -> Normalise:
        """What the device does to the images that it gets."""
        preprocessing = self.preprocessing.unnormalised if self.on_host else self.preprocessing
        return normaliser(preprocessing).to(device)

    def augment(self, asked: str) -> Augment:
        """What `--augment auto` means for this data."""
        automatic: dict[str, Augment] = {"digits": "shift", "generated": "none", "synthetic": "none"}
        if asked == "auto":
            native = self.splits.native_size == self.training.image_size
            return automatic.get(self.kind, "shift-flip" if native else "crop-flip")
        return asked  # type: ignore[return-value]  # the schema's choices are Augment's

    def at_reduced_size(self) -> "Images":
        """The same with smaller images for training."""
        side = reduced_size(self.preprocessing.image_size)
        training = replace(self.preprocessing, image_size=side, resize=self.splits.preprocessing(side).resize)
        return replace(self, training=training)

    def describe(self) -> str:
        size, trained = self.preprocessing.image_size, self.training.image_size
        less = f" and {trained} x {trained} in training" if trained != size else ""
        return (
            f"{len(self.splits.train):,} training and {counted(len(self.splits.validation), 'validation image')} of"
            f" {counted(self.classes, 'class')}, {size} x {size}{less}{self._stored()}"
        )

    def _stored(self) -> str:
        """How photos lie there, and how many have boxes that crops look at."""
        objects = getattr(self.splits.train, "objects", None)
        boxes = f", {objects.annotated:,} of them with boxes" if objects is not None else ""
        return f", from {self.splits.layout}{boxes}" if self.splits.layout else ""


def open_images(
    data: options.Data,
    *,
    model: str,
    global_batch: int,
    seed: int,
    use_objects: UseObjects = "no",
    percentage: float = 100.0,
) -> Images:
    """The data that the options name, at the model's size; `percentage`: of the training images, if not made up."""
    size = _size(data, model)
    splits = open_source(
        data.data,
        data_dir=data.data_dir,
        random=RandomImages(
            image_size=size,
            classes=value_or(data.classes, 10 if model.endswith("-cifar") else 1000),
            images=data.iterations * global_batch,
            seed=seed,
        ),
        use_objects=use_objects,
    )
    if data.data not in ("generated", "synthetic"):
        splits = share_of(splits, percentage=percentage)
    return images_of(splits, data, size=size)


def refuse_download(loaded: Loaded[Any]) -> None:
    """Of a command that has a checkpoint's options: data that the line does not name is read, and never fetched."""
    data: options.Data = loaded.options.data
    if data.data not in ("cifar10", "cifar100") or any(is_asked_for(loaded.sources.get(name)) for name in DATA):
        return
    if not cifar.is_there(data.data_dir, kind=data.data):
        raise DataError(
            f"{data.data}: not found under {data.data_dir or cifar.DEFAULT_DIR}, and a checkpoint alone starts no"
            f" download; expected --data-dir, the folder that holds it, or --data {data.data}, which downloads it"
        )


def published_images(data: options.Data, *, model: str, percentage: float = 100.0) -> Images | None:
    """The data that the options name as it was published, for a plan; None where it can be opened, or is unknown."""
    splits = published_instead_of(data.data, data.data_dir)
    if splits is None:
        return None
    return images_of(share_of(splits, percentage=percentage), data, size=_size(data, model))


def images_of(splits: Splits, data: options.Data, *, size: int) -> Images:
    """Splits at a size, normalised as the options say."""
    if data.validation_crop != "auto":
        splits = replace(splits, centred=data.validation_crop == "centre")
    preprocessing = replace(splits.preprocessing(size), antialias=data.antialias)
    if data.pixel_mean:
        preprocessing = replace(preprocessing, mean=three(data.pixel_mean))
    if data.pixel_deviation:
        preprocessing = replace(preprocessing, std=three(data.pixel_deviation))
    if data.normalization == "mean":
        preprocessing = preprocessing.centred
    if data.normalization == "image":
        preprocessing = preprocessing.by_image
    if data.normalization_location == "none":
        preprocessing = preprocessing.unnormalised
    return Images(
        kind=data.data,
        splits=splits,
        preprocessing=preprocessing,
        training=preprocessing,
        on_host=data.normalization_location == "host" and data.data != "synthetic",
    )


def three(colours: tuple[float, ...]) -> Channels:
    red, green, blue = colours  # the rules refuse another number of them
    return red, green, blue


def _size(data: options.Data, model: str) -> int:
    with named_option("model"):
        size = value_or(data.image_size, DIGITS_SIZE if data.data == "digits" else zoo.image_size(model))
    with named_option("image_size"):
        zoo.check_image_size(model, size)
    return size


def global_batch(options: commands.TrainOptions) -> int:
    """Images in one update of a training."""
    micro_batches = options.training.gradient_accumulation * value_or(options.parallel.replicas, 1)
    return options.data.micro_batch_size * micro_batches


def check_classes(images: Images, class_names: tuple[str, ...], *, where: str) -> None:
    """The data must have the classes that a checkpoint was trained on."""
    own = images.splits.class_names
    if own != class_names:
        example = next((pair for pair in zip(own, class_names, strict=False) if pair[0] != pair[1]), None)
        differs = f"'{example[0]}' where it has '{example[1]}'" if example else "other classes"
        raise CheckpointError(
            f"{where}: was trained on {counted(len(class_names), 'class')}, the data has {len(own)}, {differs}"
        )
