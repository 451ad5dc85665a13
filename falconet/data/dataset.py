"""A run's data: its training and validation images, and how they become model input."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from falconet.config.fields import value_or
from falconet.config.options import Augmentation, Data
from falconet.config.values import bad_images, record_keys, reduced_size
from falconet.data import exclusion, layout
from falconet.data.crops import Augment, Crops
from falconet.data.headers import MISSING, Check, what_is_wrong, without_bad
from falconet.data.keyed import IntArray
from falconet.data.layout import Division
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Channels, Normalise, Preprocessing, normaliser
from falconet.data.shards import Shards
from falconet.data.sources import bounding_boxes, builtin, cifar, tfrecord
from falconet.data.sources.shard_index import MOST_CLASSES
from falconet.data.storage import ArraySource, FileSource, Places, ShardSource, Source, Splits
from falconet.errors import CheckpointError, ConfigError, DataError, named_option
from falconet.models import zoo
from falconet.parallel.world import cores
from falconet.report.console import counted
from falconet.report.epochs import ACCURACY, MEAN_AVERAGE_PRECISION, Metric
from falconet.writing import could_name_a_file

IMAGENET_CLASSES = 1000
MOST_NAMES = 10 << 20  # bytes of all class names as JSON: a manifest indents them, and may have 16 MiB
# Images of ILSVRC 2012, and bytes per file on average: the size of the published archive over its images.
IMAGENET_TRAIN = (1_281_167, 115_440)
IMAGENET_VALIDATION = (50_000, 134_898)
CIFAR_TRAIN, CIFAR_VALIDATION = 50_000, 10_000
DIGITS_SIZE = 8  # pixels, as stored: doubling it takes 2.6 times as long and gains nothing (docs/maintaining/log.md)

CHECKED = {"folder": ("auto", "yes"), "imagenet": ("yes",)}  # kinds of photos -> values of --check-images
MOST_WORKERS, WAITING = 32, 4  # threads that read headers: several per core, because they wait for the disk
MOST_BAD = 5  # broken photos named in a message
MOST_CLASSES_NAMED = 3  # per message
MOST_SHOWN = 48  # characters of class names per line
BAD_PHOTOS = "bad_photos.txt"  # lists all of them, in the run folder

UseObjects = Literal["no", "if there", "yes"]


@dataclass(frozen=True, kw_only=True)
class Dataset(Splits):
    """Splits at the model's image size."""

    kind: str
    preprocessing: Preprocessing
    training: Preprocessing  # the same, except that training may use a smaller image size
    on_host: bool = False  # whether images are normalised before they are copied to the device
    where: str = ""  # the user's folder or table of photos
    check: Check = field(default_factory=Check)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def metric(self) -> Metric:
        """What a validation measures."""
        return ACCURACY if self.label_sets is None else MEAN_AVERAGE_PRECISION

    def normalise(self, device: torch.device, *, dtype: torch.dtype = torch.float32, channels: int = 3) -> Normalise:
        """What the device does to images; channels beyond three are 0."""
        preprocessing = self.preprocessing.unnormalised if self.on_host else self.preprocessing
        return normaliser(preprocessing, dtype=dtype, channels=channels).to(device)

    def augment(self, asked: str) -> Augment:
        """The augmentation to use; "auto" depends on the kind of data."""
        automatic: dict[str, Augment] = {"digits": "shift", "generated": "none", "synthetic": "none"}
        if asked == "auto":
            native = self.native_size == self.training.image_size
            return automatic.get(self.kind, "shift-flip" if native else "crop-flip")
        return asked  # type: ignore[return-value]  # the option's choices are Augment's

    def training_crops(self, augmentation: Augmentation, *, seed: int) -> Crops:
        return Crops(
            preprocessing=self.training,
            augment=self.augment(augmentation.augment),
            augmentation=augmentation,
            seed=seed,
            objects=None if isinstance(self.train, ArraySource) else self.train.objects,
        )

    def validation_crops(self) -> Crops:
        return Crops(preprocessing=self.preprocessing)

    def at_reduced_size(self) -> "Dataset":
        """The same data with the smaller images of half-resolution training."""
        return self.trained_at(reduced_size(self.preprocessing.image_size))

    def trained_at(self, side: int) -> "Dataset":
        """The same data with images of another size for training."""
        training = replace(self.preprocessing, image_size=side, resize=self.preprocessing_at(side).resize)
        return replace(self, training=training)

    def found(self) -> list[str]:
        """Lines on the photos found: how many, how they are divided, and what to know about them."""
        if not self.where:
            return self._bad()
        labels = np.concatenate((self.train.labels, self.validation.labels))
        counts = self._counts(labels)
        fewest, most = int(counts.min()), int(counts.max())
        each = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        classes, photos = counted(self.classes, "class"), counted(len(labels), "photo")
        parts = f"{len(self.train):,} to train, {len(self.validation):,} to validate"
        several = "" if self.label_sets is None else ", any number of labels each"
        split = "split" if self.held_out is None else "split by file name"
        share = "" if self.held_out is None else f" ({self._met()}--val-fraction {self.held_out:g})"
        return [
            f"{self.where}: {classes} ({self._shown_classes()}), {photos} ({each} per class){several}{self._sizes()},"
            f" {self.layout}{self._boxes()}",
            f"{split}: {parts}{share}",
            *(f"note: {note}" for note in self.notes),
            *self._bad(),
        ]

    def _met(self) -> str:
        """The share that validates, if it differs from the one asked for."""
        met = 100 * len(self.validation) / max(1, len(self.train) + len(self.validation))
        return "" if self.held_out is None or round(met) == round(100 * self.held_out) else f"{met:.0f} %, for "

    def _shown_classes(self) -> str:
        """The first classes, as many as fit in a line, so that a folder that should not be a class is noticed."""
        lengths = np.cumsum([len(name) + 2 for name in self.class_names])
        shown = self.class_names[: max(1, int(np.searchsorted(lengths, MOST_SHOWN, side="right")))]
        return ", ".join((*shown, "...") if len(shown) < self.classes else shown)

    def _counts(self, labels: IntArray) -> IntArray:
        """The number of images in each class."""
        if self.label_sets is None:
            return np.bincount(labels, minlength=self.classes)
        return np.asarray(self.label_sets[labels].sum(axis=0), np.int64)

    def _sizes(self) -> str:
        smallest, largest = self.check.smallest, self.check.largest
        if smallest is None or largest is None:
            return ""
        ends = dict.fromkeys(f"{width}x{height}" for width, height in (smallest, largest))
        return f", {' to '.join(ends)}"

    def _bad(self) -> list[str]:
        """A note on photos that cannot be used, and the first of them."""
        lines = self.check.lines()
        if not lines:
            return []
        more = [f"  and {len(lines) - MOST_BAD:,} more"] if len(lines) > MOST_BAD else []
        bad = (*self.check.training, *self.check.validation)
        missing = sum(each.reason == MISSING for each in bad)
        words = f"{what_is_wrong(bad)} photo" if missing in (0, len(bad)) else "photo"
        numbers = "" if missing in (0, len(bad)) else f" ({missing:,} missing, {len(bad) - missing:,} broken)"
        headline = f"note: skipped {counted(len(bad), words)}{numbers}; {BAD_PHOTOS} in the run folder lists all"
        return [headline, *(f"  {line}" for line in lines[:MOST_BAD]), *more]

    def shape(self) -> str:
        """The size of the images."""
        size, trained = self.preprocessing.image_size, self.training.image_size
        return f"{size} x {size}" + (f" and {trained} x {trained} in training" if trained != size else "")

    def describe(self) -> str:
        return (
            f"{len(self.train):,} training and {counted(len(self.validation), 'validation image')} of"
            f" {counted(self.classes, 'class')}, {self.shape()}{self._stored()}"
        )

    def _stored(self) -> str:
        """The layout of photos, and how many have boxes."""
        return f", from {self.layout}{self._boxes()}" if self.layout else ""

    def _boxes(self) -> str:
        """How many photos have boxes for crops to overlap."""
        objects = getattr(self.train, "objects", None)
        return "" if objects is None else f", {objects.annotated:,} of them with boxes"

    def fingerprint(self) -> dict[str, int | str]:
        """What a checkpoint states about the images: their number, and a digest of their names and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for source in (self.train, self.validation):
            names = getattr(source, "names", None)
            digest.update(b"" if names is None else names.block)
            digest.update(source.labels.astype("<i8").tobytes())
        return {"training": len(self.train), "validation": len(self.validation), "digest": digest.hexdigest()}

    def changes_since(self, saved: object) -> str | None:
        """A note if the images are not those of a fingerprint."""
        now = self.fingerprint()
        match saved:
            case {"training": int() as training, "validation": int() as validation, "digest": str() as digest}:
                then = f"{training:,} to train and {validation:,} to validate"
            case _:  # from an older version
                return None
        if digest == now["digest"]:
            return None
        here = f"{now['training']:,} and {now['validation']:,}"
        are_as_many = (training, validation) == (now["training"], now["validation"])
        return (
            f"note: {self.where or self.kind} has changed since the checkpoint was saved: {then} then,"
            f" {'as many others' if are_as_many else here} now; the run continues with those, so its result will differ"
            " from an uninterrupted run's"
        )

    def left_out(self) -> tuple[str, ...]:
        """Validation photos that are not counted in the accuracy, because their files are broken."""
        return tuple(str(bad.path) for bad in self.check.validation)

    def check_trainable(self, allowed: str) -> None:
        """Require training photos of at least two classes, with no more bad ones than `--bad-images-allowed`."""
        self._check_bad(allowed)
        if not self.where:
            return
        if not len(self.train):
            raise DataError(
                f"{self.where}: no photos to train on, only {len(self.validation):,} to validate; expected train/ as"
                " well, or `falconet validate`"
            )
        bad = self.check.validation
        if not len(self.validation):
            raise DataError(
                f"{self.where}: no photos to validate on"
                + (f", because they are {what_is_wrong(bad)}; the first: {bad[0]}" if bad else "")
                + "; expected some in val/, or at least two photos in each class"
            )
        if self.label_sets is not None and not self._counts(self.validation.labels).any():
            raise DataError(f"{self.where}: none of the photos to validate on has a label; expected some with a label")
        if self.classes < 2:
            raise DataError(
                f"{self.where}: all photos are of one class, '{self.class_names[0]}'; expected at least two, each in a"
                " folder of its own"
            )

    def _check_bad(self, allowed: str) -> None:
        bad = self.check.training
        images = len(self.train) + len(bad)
        if bad and not len(self.train):
            raise DataError(f"none of the {images:,} training photos can be used; the first: {bad[0]}")
        limit = bad_images(allowed, images)
        if len(bad) > limit:
            shown = "; ".join(map(str, bad[:MOST_BAD])) + ("; ..." if len(bad) > MOST_BAD else "")
            with named_option("bad_images_allowed"):
                raise DataError(
                    f"{len(bad):,} of {images:,} training photos are {what_is_wrong(bad)}, {limit} are allowed;"
                    f" expected fewer, or {len(bad)} here: {shown}"
                )
        empty = np.flatnonzero(self._counts(self.train.labels) == 0)
        if bad and len(empty):
            name = self.class_names[int(empty[0])]
            raise DataError(f"no photo of '{name}' is left to train on; the {what_is_wrong(bad)} ones include {bad[0]}")

    def of_classes(self, class_names: tuple[str, ...], *, where: str, several: bool) -> "Dataset":
        """The images with a checkpoint's class numbers; it may know more classes than the photos show."""
        is_alike = several == (self.label_sets is not None) and {*self.class_names} <= {*class_names}
        is_alike = is_alike and self.class_names != class_names
        if not is_alike or not isinstance(self.train, FileSource) or not isinstance(self.validation, FileSource):
            self.check_classes(class_names, where=where, several=several)
            return self
        if self.label_sets is None:
            train, validation = (source.renumbered(class_names) for source in (self.train, self.validation))
            return replace(self, train=train, validation=validation)
        sets = np.zeros((len(self.label_sets), len(class_names)), np.bool_)
        sets[:, [class_names.index(name) for name in self.class_names]] = self.label_sets
        train, validation = (replace(source, class_names=class_names) for source in (self.train, self.validation))
        return replace(self, train=train, validation=validation, label_sets=sets)

    def renamed(self, names: Mapping[str, str]) -> "Dataset":
        """The same data with other names for its classes, in the same order."""
        called = tuple(names.get(name, name) for name in self.class_names)
        train, validation = replace(self.train, class_names=called), replace(self.validation, class_names=called)
        return replace(self, train=train, validation=validation)

    def check_classes(self, class_names: tuple[str, ...], *, where: str, several: bool | None = None) -> None:
        """Require the classes that a checkpoint was trained on. `several`: several labels per photo; None: unknown."""
        got = self.label_sets is not None
        if several not in (None, got):
            words = {False: "one label per photo", True: "several labels per photo"}
            raise CheckpointError(f"{where}: was trained on photos with {words[not got]}, the data has {words[got]}")
        if self.class_names != class_names:
            raise CheckpointError(
                f"{where}: was trained on {counted(len(class_names), 'class')}, the data has {self.classes}:"
                f" {_difference(self.class_names, class_names)}"
            )


def _difference(got: tuple[str, ...], expected: tuple[str, ...]) -> str:
    """How the data's classes differ from a checkpoint's, with examples."""
    new, absent = sorted({*got} - {*expected}), sorted({*expected} - {*got})
    words = [f"{_some(new)} {'is' if len(new) == 1 else 'are'} new"] if new else []
    words += [f"{_some(absent)} {'is' if len(absent) == 1 else 'are'} missing"] if absent else []
    return " and ".join(words) or "the same ones in another order"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_CLASSES_NAMED:,} more" if len(names) > MOST_CLASSES_NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_CLASSES_NAMED]) + more


def open_dataset(
    data: Data,
    *,
    model: str,
    global_batch: int,
    seed: int,
    use_objects: UseObjects = "no",
    percentage: float = 100.0,
    to_train: bool = False,
) -> Dataset:
    """Open the data at the model's image size; generated data ignores `percentage`, the share of training images.

    `to_train`: check the user's photos first, leave out the broken ones, and refuse what cannot be trained on.
    """
    size = _image_size(data, model)
    if data.data in ("generated", "synthetic"):  # these differ only in the loader
        classes = value_or(data.classes, 10 if model.endswith("-cifar") else 1000)
        images = data.iterations * global_batch
        validated = value_or(data.validation_images, max(1, images // 10))
        made = builtin.generate(images=images, validated=validated, image_size=size, classes=classes, seed=seed)
        return prepared(made, data, size=size)
    splits, check = _opened(data, use_objects, seed=seed), Check()
    if splits.held_out is None and data.data == "folder" and data.val_fraction != Data.val_fraction:
        note = f"--val-fraction {data.val_fraction:g} has no effect: the photos are split already"
        splits = replace(splits, notes=(*splits.notes, note))
    if data.exclude_list is not None and data.data_dir is not None:
        with named_option("exclude_list"):
            splits = exclusion.applied(splits, exclusion.read(data.exclude_list, home=home_of(data.data_dir)))
    if to_train and data.check_images in CHECKED.get(data.data, ()):
        assert data.data_dir is not None
        splits, check = without_bad(splits, home=home_of(data.data_dir), workers=min(MOST_WORKERS, WAITING * cores()))
    if to_train:
        splits = replace(splits, notes=(*splits.notes, *_unvalidated(splits)))
    opened = replace(prepared(share_of(splits, percentage=percentage), data, size=size), check=check)
    if to_train:
        opened.check_trainable(data.bad_images_allowed)
    return opened


def _unvalidated(splits: Splits) -> list[str]:
    """A note on classes of which no photo is held out: they have one photo, or their others are broken or excluded."""
    if splits.held_out is None or not len(splits.validation):
        return []
    labels, sets = splits.validation.labels, splits.label_sets
    there = np.bincount(labels, minlength=len(splits.class_names)) if sets is None else sets[labels].any(axis=0)
    absent = [splits.class_names[label] for label in np.flatnonzero(there == 0)]
    return [f"no photo of {counted(len(absent), 'class')} to validate on: {_some(absent)}"] if absent else []


def home_of(path: Path) -> Path:
    """The folder with the photos, or with their table."""
    return path if path.is_dir() else path.parent


def open_to_measure(data: Data, *, model: str, global_batch: int, seed: int, use_objects: UseObjects = "no") -> Dataset:
    """Open data to measure speed, which needs no classes: photos may lie directly in the folder."""
    if data.data == "folder" and data.data_dir is not None and layout.is_flat(data.data_dir):
        return prepared(layout.unlabelled(data.data_dir, classes=IMAGENET_CLASSES), data, size=_image_size(data, model))
    return open_dataset(data, model=model, global_batch=global_batch, seed=seed, use_objects=use_objects)


def published_dataset(data: Data, *, model: str, percentage: float = 100.0) -> Dataset | None:
    """The data as published, for a plan; None if it can be opened, or if its published size is unknown."""
    splits = published(data.data, data.data_dir)
    return (
        None
        if splits is None
        else prepared(share_of(splits, percentage=percentage), data, size=_image_size(data, model))
    )


def refitted(dataset: Dataset, data: Data, model: str) -> Dataset:
    """The same images, prepared by other options."""
    splits = Splits(**{each.name: getattr(dataset, each.name) for each in fields(Splits)})
    return replace(prepared(splits, data, size=_image_size(data, model)), check=dataset.check)


def prepared(splits: Splits, data: Data, *, size: int) -> Dataset:
    """The splits at an image size, with the preprocessing that the options ask for."""
    _check_class_names(splits.class_names, where=str(data.data_dir or data.data))
    if data.validation_crop != "auto":
        splits = replace(splits, centred=data.validation_crop == "centre")
    splits = replace(splits, crop_ratio=data.validation_crop_ratio)
    preprocessing = replace(splits.preprocessing_at(size), antialias=data.antialias, interpolation=data.interpolation)
    if data.pixel_mean:
        preprocessing = replace(preprocessing, mean=_channels(data.pixel_mean))
    if data.pixel_deviation:
        preprocessing = replace(preprocessing, std=_channels(data.pixel_deviation))
    if data.normalization == "mean":
        preprocessing = preprocessing.centred
    if data.normalization == "image":
        preprocessing = preprocessing.by_image
    if data.normalization_location == "none":
        preprocessing = preprocessing.unnormalised
    return Dataset(
        **vars(splits),
        kind=data.data,
        preprocessing=preprocessing,
        training=preprocessing,
        on_host=data.normalization_location == "host" and data.data != "synthetic",
        where=str(data.data_dir) if data.data == "folder" else "",
    )


def _check_class_names(names: tuple[str, ...], *, where: str) -> None:
    """Refuse names that no checkpoint could hold, before the run that would save them."""
    wrong = next((name for name in names if not could_name_a_file(name)), None)
    if wrong is not None:
        raise DataError(f"{where}: a class is called {wrong!a:.80}; expected text that a file name may have")
    length = len(json.dumps(names))
    if len(names) > MOST_CLASSES or length > MOST_NAMES:
        raise DataError(
            f"{where}: {len(names):,} class names of {length:,} bytes; expected at most {MOST_CLASSES:,} names and"
            f" {MOST_NAMES:,} bytes, which a checkpoint can hold"
        )


def require_local(data: Data) -> None:
    """Refuse data that would have to be downloaded."""
    if data.data in ("cifar10", "cifar100") and not cifar.is_there(data.data_dir, kind=data.data):
        raise DataError(f"{data.data}: not found under {data.data_dir or cifar.DEFAULT_DIR}")


def _opened(data: Data, use_objects: UseObjects, *, seed: int) -> Splits:
    if data.data == "digits":
        return builtin.load_digits()
    if data.data in ("cifar10", "cifar100"):
        return cifar.load(data.data_dir, kind=data.data)
    if data.data_dir is None:
        raise ConfigError(f"{data.data}: no data folder given, expected one with a folder per class")
    keys = tfrecord.Keys(**(record_keys(data.tfrecord_keys or "") or {}))
    try:
        splits = layout.load_photos(data.data_dir, Division(data.val_fraction, seed), keys)
    except tfrecord.MissingKeyError:
        with named_option("tfrecord_keys"):
            raise
    if use_objects == "no":
        return bounding_boxes.without_objects(splits)
    look = bounding_boxes.with_objects if use_objects == "yes" else bounding_boxes.with_objects_if_there
    return look(splits, data.data_dir)


def share_of(splits: Splits, *, percentage: float) -> Splits:
    """Keep a percentage of training images, evenly spread: sources are sorted by class, so each keeps its share."""
    count = len(splits.train)
    steps = np.arange(count + 1) * percentage // 100
    chosen = np.flatnonzero(np.diff(steps))
    if len(chosen) == count:
        return splits
    if not len(chosen):
        raise DataError(f"{percentage:g} % of {count:,} training images leaves none")
    train: Source = splits.train.subset(chosen)
    return replace(splits, train=train)


def _channels(values: tuple[float, ...]) -> Channels:
    red, green, blue = values  # the rules refuse any other number of them
    return red, green, blue


def _image_size(data: Data, model: str) -> int:
    with named_option("model"):
        size = value_or(data.image_size, DIGITS_SIZE if data.data == "digits" else zoo.image_size(model))
    with named_option("image_size"):
        zoo.check_image_size(model, size)
    return size


def published(kind: str, data_dir: Path | None) -> Splits | None:
    """Splits of the published sizes with nothing to read; None if `data_dir` has the data, or a size is unknown."""
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
