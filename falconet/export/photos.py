"""The images for an export's checks: for comparing scores, for calibration, for measuring accuracy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from falconet.config.options import Data
from falconet.data.crops import Crops
from falconet.data.dataset import Dataset, open_dataset, require_local
from falconet.data.image_files import BadImages
from falconet.data.keyed import IntArray, Purpose, permutation
from falconet.data.preprocessing import Preprocessing
from falconet.data.readers import reader_for
from falconet.data.sources.folder import Listing, image_names
from falconet.data.storage import FileSource, Source
from falconet.errors import CheckpointError, ConfigError, DataError
from falconet.evaluation.saved_model import of_imagenet
from falconet.export.graph import Graph, Pixels
from falconet.report.console import Say, counted

COMPARED = 32  # for the scores of a file that should equal the model's
MEASURED = 2000  # for an accuracy: its standard error is 1 point at most
MADE_UP = ("generated", "synthetic")  # kinds of data that show no photos

Answers = npt.NDArray[np.int64]  # N x 1, the best class; or N x classes, whether each label is present


@dataclass(frozen=True)
class Photos:
    """Pixels as the model sees them before normalisation, and a description of them."""

    pixels: Pixels
    what: str


@dataclass(frozen=True)
class Sample:
    """Some images of a source, read as in validation; those that cannot be read are left out."""

    source: Source
    chosen: IntArray
    preprocessing: Preprocessing
    note: Say

    def __len__(self) -> int:
        return len(self.chosen)

    def batches(self, size: int) -> Iterator[tuple[IntArray, Pixels]]:
        """Batches of image numbers in the source and of pixels."""
        side = self.preprocessing.image_size
        reader = reader_for(
            self.source, crops=Crops(preprocessing=self.preprocessing), bad=BadImages(None, note=self.note)
        )
        for start in range(0, len(self.chosen), size):
            numbers = self.chosen[start : start + size]
            pixels = np.empty((len(numbers), side, side, 3), np.uint8)
            read = reader.read(numbers, epoch=0, out=pixels)
            if read.any():
                yield numbers[read], pixels[read]


@dataclass(frozen=True, kw_only=True)
class Divided:
    """Images for calibration, and others for measuring."""

    calibration: Sample
    measured: Sample
    right: Answers | None  # of each image of the measured source; None: its classes are not the model's
    what: tuple[str, str]  # one of those that calibrate, one of those that are measured


def validation_photos(data: Data, graph: Graph, note: Say, *, seed: int) -> Photos | None:
    """Some of a run's validation images, evenly spread; None, with the reason noted, if they cannot be read here."""
    if data.data in MADE_UP:
        return None
    try:
        images = _of_run(data, graph, seed=seed)
    except (DataError, ConfigError) as error:
        note(f"note: no validation images ({error})")
        return None
    return _read(images.validation, graph.preprocessing, what="validation image", note=note)


def photos_in(folder: Path, graph: Graph, note: Say) -> Photos:
    """Some of the photos in a folder and below, evenly spread."""
    source = _listed(folder)
    found = _read(source, graph.preprocessing, what=f"photo of {folder}", note=note) if len(source) else None
    if found is None:
        raise _none(folder)
    return found


def noise(graph: Graph) -> Photos:
    """Random pixels, always the same."""
    side = graph.preprocessing.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (COMPARED, side, side, 3), np.uint8)
    return Photos(pixels, f"{COMPARED} images of noise, which --photos replaces")


def divided_run(data: Data, graph: Graph, note: Say, *, seed: int, calibration: int) -> Divided:
    """A run's training images for calibration, its validation images for measuring."""
    if data.data in MADE_UP:
        raise DataError(f"the run's images are {data.data}, so they show no accuracy")
    images = _of_run(data, graph, seed=seed)
    what = ("training image", "validation image")
    return _divided(images, graph, note, seed=seed, calibration=calibration, what=what)


def divided_folder(folder: Path, graph: Graph, note: Say, *, share: float, calibration: int) -> Divided:
    """A folder divided as for training: its training part for calibration, the other part for measuring.

    `share`: of each class for measuring, if the folder is not split. Photos without classes are halved at random.
    """
    whats = (f"photo of {folder}",) * 2
    try:
        data = Data(data="folder", data_dir=folder, val_fraction=share)
        images = open_dataset(data, model=graph.options.model, global_batch=1, seed=0)
    except DataError as error:
        source = _listed(folder)
        if len(source) < 2:
            raise _none(folder) from None
        note(f"note: no accuracy, because the classes of the photos are unknown ({error})")
        order = permutation(len(source), seed=0, epoch=0, purpose=Purpose.CALIBRATE)
        half = len(source) // 2
        return Divided(
            calibration=_sample(source, np.sort(order[:half][:calibration]), graph, note),
            measured=_sample(source, _spread(np.sort(order[half:]), MEASURED), graph, note),
            right=None,
            what=whats,
        )
    return _divided(images, graph, note, seed=0, calibration=calibration, what=whats)


def _divided(
    images: Dataset, graph: Graph, note: Say, *, seed: int, calibration: int, what: tuple[str, str]
) -> Divided:
    for source, part in ((images.train, "training"), (images.validation, "validation")):
        if not len(source):
            raise DataError(f"no {part} images; expected some to calibrate with, and others to measure on")
    order = permutation(len(images.train), seed=seed, epoch=0, purpose=Purpose.CALIBRATE)
    return Divided(
        calibration=_sample(images.train, np.sort(order[:calibration]), graph, note),
        measured=_sample(images.validation, _spread(np.arange(len(images.validation)), MEASURED), graph, note),
        right=_right(images, graph, note),
        what=what,
    )


def _right(images: Dataset, graph: Graph, note: Say) -> Answers | None:
    """The right answers of the validation images, if the model knows their classes."""
    several = graph.activation == "sigmoid"
    try:
        named = images if several else of_imagenet(images, graph.class_names, where=graph.name)
        known = named.of_classes(graph.class_names, where=graph.name, several=several)
    except CheckpointError as error:
        note(f"note: no accuracy, because the model does not know the classes of the photos ({error})")
        return None
    labels = known.validation.labels
    return labels[:, None] if known.label_sets is None else known.label_sets[labels].astype(np.int64)


def _of_run(data: Data, graph: Graph, *, seed: int) -> Dataset:
    require_local(data)  # data that only a checkpoint names is never downloaded
    if data.exclude_list is not None and not data.exclude_list.exists():  # checking an export needs no exact data
        data = replace(data, exclude_list=None)
    return open_dataset(data, model=graph.options.model, global_batch=data.micro_batch, seed=seed)


def _listed(folder: Path) -> FileSource:
    """All photos in a folder and below, without classes; none is left out because its folder may not be read."""
    listing = Listing()
    try:
        names = list(image_names(str(folder), "", listing, linked=True))
        if listing.refused:
            raise listing.refused[0]
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from None
    return FileSource.of(folder, names=names, labels=[0] * len(names), class_names=(".",))


def _none(folder: Path) -> DataError:
    return DataError(f"{folder}: holds no photo that can be read; expected some JPEG or PNG files")


def _spread(numbers: IntArray, most: int) -> IntArray:
    """At most `most` of the numbers, evenly spread."""
    return numbers[np.unique(np.linspace(0, len(numbers) - 1, most).astype(np.int64))]


def _sample(source: Source, chosen: IntArray, graph: Graph, note: Say) -> Sample:
    return Sample(source, chosen, graph.preprocessing, note)


def _read(source: Source, preprocessing: Preprocessing, *, what: str, note: Say) -> Photos | None:
    sample = Sample(source, _spread(np.arange(len(source)), COMPARED), preprocessing, note)
    found = [pixels for _, pixels in sample.batches(COMPARED)]
    if not found:
        return None
    return Photos(found[0], counted_photos(len(found[0]), what))


def counted_photos(count: int, what: str) -> str:
    """A count of photos in words: "3 photos of folder"."""
    noun, *rest = what.split(" of ", 1)
    return " of ".join([counted(count, noun), *rest])
