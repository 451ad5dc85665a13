"""The data of a run, and how it becomes model input."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from falconet.config import schema, sections
from falconet.config.fine_tuning import reduced
from falconet.config.load import Loaded
from falconet.config.ranges import value_or
from falconet.config.settings import is_asked_for
from falconet.data import share
from falconet.data.augment import Augment
from falconet.data.open import RandomImages, UseObjects, open_source
from falconet.data.preprocessing import Channels, Normalise, Preprocessing, normaliser
from falconet.data.source import Splits
from falconet.data.sources import cifar, published
from falconet.errors import CheckpointError, DataError
from falconet.models import zoo
from falconet.report.words import counted

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
        side = reduced(self.preprocessing.image_size)
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
    data: sections.Data,
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
        splits = share.reduced(splits, percentage=percentage)
    return images_of(splits, data, size=size)


def refuse_download(loaded: Loaded[Any]) -> None:
    """Of a command that has a checkpoint's options: data that the line does not name is read, and never fetched."""
    data: sections.Data = loaded.options.data
    if data.data not in ("cifar10", "cifar100") or any(is_asked_for(loaded.sources.get(name)) for name in DATA):
        return
    if not cifar.is_there(data.data_dir, kind=data.data):
        raise DataError(
            f"{data.data}: not found under {data.data_dir or cifar.DEFAULT_DIR}, and a checkpoint alone starts no"
            f" download; expected --data-dir, the folder that holds it, or --data {data.data}, which downloads it"
        )


def published_images(data: sections.Data, *, model: str, percentage: float = 100.0) -> Images | None:
    """The data that the options name as it was published, for a plan; None where it can be opened, or is unknown."""
    splits = published.instead_of(data.data, data.data_dir)
    if splits is None:
        return None
    return images_of(share.reduced(splits, percentage=percentage), data, size=_size(data, model))


def images_of(splits: Splits, data: sections.Data, *, size: int) -> Images:
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


def _size(data: sections.Data, model: str) -> int:
    size = value_or(data.image_size, DIGITS_SIZE if data.data == "digits" else zoo.image_size(model))
    zoo.check_image_size(model, size)
    return size


def global_batch(options: schema.TrainOptions) -> int:
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
