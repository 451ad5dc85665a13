"""An exported file against its model: the same scores on photos, and how long a batch takes."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from falconet.config.options import Data
from falconet.data.crops import Crops
from falconet.data.dataset import open_dataset, require_local
from falconet.data.image_files import BadImages
from falconet.data.preprocessing import Preprocessing
from falconet.data.readers import reader_for
from falconet.data.sources.folder import Listing, image_names
from falconet.data.storage import FileSource, Source
from falconet.errors import ConfigError, DataError
from falconet.export.formats import Engine
from falconet.export.graph import Graph, Pixels, Values
from falconet.report.console import Say, counted

PHOTOS_COMPARED = 32
TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2  # of an image's largest score
FASTEST, SLOWEST = 5, 50  # batches timed
SECONDS = 1.0  # for one latency, after the warm-up
WARM_UP = 3  # batches


@dataclass(frozen=True)
class Photos:
    """Pixels as the model sees them before normalisation, and what they are, in words."""

    pixels: Pixels
    what: str


def validation_photos(data: Data, graph: Graph, note: Say, *, seed: int) -> Photos | None:
    """Some of a run's validation images, evenly spread; None, with the reason noted, if they cannot be read here."""
    if data.data in ("generated", "synthetic"):
        return None
    try:
        require_local(data)  # what only a checkpoint names is never downloaded
        images = open_dataset(data, model=graph.options.model, global_batch=data.micro_batch, seed=seed)
    except (DataError, ConfigError) as error:
        note(f"note: no validation images ({error})")
        return None
    return _read(images.validation, graph.preprocessing, what="validation image", note=note)


def photos_in(folder: Path, graph: Graph, note: Say) -> Photos:
    """Some of the photos in a folder and below, evenly spread."""
    names = list(image_names(str(folder), "", Listing(), linked=True))
    source = FileSource.of(folder, names=names, labels=[0] * len(names), class_names=(".",))
    found = _read(source, graph.preprocessing, what=f"photo of {folder}", note=note) if names else None
    if found is None:
        raise DataError(f"{folder}: holds no photo that can be read; expected some JPEG or PNG files")
    return found


def noise(graph: Graph) -> Photos:
    """Random pixels, always the same."""
    side = graph.preprocessing.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (PHOTOS_COMPARED, side, side, 3), np.uint8)
    return Photos(pixels, f"{PHOTOS_COMPARED} images of noise, which --photos replaces")


def _read(source: Source, preprocessing: Preprocessing, *, what: str, note: Say) -> Photos | None:
    chosen = np.unique(np.linspace(0, len(source) - 1, PHOTOS_COMPARED).astype(np.int64))
    side = preprocessing.image_size
    pixels = np.empty((len(chosen), side, side, 3), np.uint8)
    reader = reader_for(source, crops=Crops(preprocessing=preprocessing), bad=BadImages(None, note=note))
    read = reader.read(chosen, epoch=0, out=pixels)
    if not read.any():
        return None
    count, (noun, *rest) = int(read.sum()), what.split(" of ", 1)
    return Photos(pixels[read], " of ".join([counted(count, noun), *rest]))


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far the scores of an exported file are from the model's."""

    images: int
    photos: str
    largest_difference: float  # of two logits
    relative_difference: float  # the same, over the largest logit of its image
    tolerance: float  # of the relative one
    same_top_1: int  # images whose best class is the same

    @property
    def passed(self) -> bool:
        return self.relative_difference <= self.tolerance  # false for nan

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}

    def line(self) -> str:
        return (
            f"parity on {self.photos}: logits differ by at most {self.largest_difference:.1e},"
            f" {self.relative_difference:.1e} of an image's largest (tolerance {self.tolerance:g});"
            f" same best class for {self.same_top_1} of {self.images}"
        )


def compare(graph: Graph, ours: Engine, exported: Engine, photos: Photos, *, tolerance: float, batch: int) -> Parity:
    """Compute the photos with both, in batches of several sizes."""
    pairs = [(ours(images), exported(images)) for images in _batches(graph, photos.pixels, batch)]
    expected, found = (np.concatenate(each) for each in zip(*pairs, strict=True))
    differences = np.abs(found.astype(np.float64) - expected).max(axis=1)
    scale = np.maximum(np.abs(expected).max(axis=1), np.finfo(np.float32).tiny)
    return Parity(
        images=len(expected),
        photos=photos.what,
        largest_difference=float(differences.max()),
        relative_difference=float((differences / scale).max()),
        tolerance=tolerance,
        same_top_1=int((expected.argmax(axis=1) == found.argmax(axis=1)).sum()),
    )


def _batches(graph: Graph, pixels: Pixels, batch: int) -> Iterator[Values]:
    """One image alone, then the others: a file that takes one batch size only would not pass."""
    yield graph.feed(pixels[:1])
    for start in range(1, len(pixels), batch):
        yield graph.feed(pixels[start : start + batch])


def latency(engine: Engine, images: Values) -> float:
    """Milliseconds from an input in host memory to scores in host memory, the median of several batches."""
    for _ in range(WARM_UP):
        engine(images)
    times: list[float] = []
    while len(times) < FASTEST or (len(times) < SLOWEST and sum(times) < SECONDS):
        start = time.perf_counter()
        engine(images)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)
