"""Checks of an exported file against its model: the scores on photos, and the time of a batch."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from falconet.export.formats import Engine
from falconet.export.graph import Graph, Pixels, Values
from falconet.export.photos import Answers, Divided, Photos, counted_photos

TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2  # of an image's largest score
INT8_LOSS = 0.01  # of all images: right answers that int8 may lose
INT8_CHANGES = 0.1  # of all images: other answers of int8, where the right ones are unknown
FASTEST, SLOWEST = 5, 50  # batches timed
SECONDS = 1.0  # for one latency, after the warm-up
WARM_UP = 3  # batches


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The difference between the scores of an exported file and the model's."""

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

    def advice(self) -> str:
        return "the difference exceeds the tolerance (--tolerance)"


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


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The answers of an int8 file compared with those of its model."""

    images: int
    photos: str
    answer: str  # what counts as an answer, in words
    right: int | None  # images that the file answers right; None: the right answers are unknown
    right_in_fp32: int | None
    same: int  # images with the same answer
    largest_difference: float  # of two logits
    mean_difference: float
    tolerance: float  # right answers that may be lost, or, if they are unknown, answers that may change; of all images

    @property
    def lost(self) -> int:
        if self.right is None or self.right_in_fp32 is None:
            return self.images - self.same
        return self.right_in_fp32 - self.right

    @property
    def passed(self) -> bool:
        """Whether the file is good enough; a single lost image is no evidence, however few images there are."""
        return bool(np.isfinite(self.largest_difference)) and self.lost <= max(1, self.tolerance * self.images)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}

    def line(self) -> str:
        allowed = f"tolerance {100 * self.tolerance:g} %"
        alike = f"same {self.answer} for {self._share(self.same)}"
        if self.right is None or self.right_in_fp32 is None:
            found = f"{alike} ({allowed} others)"
        else:
            fp32 = self._share(self.right_in_fp32)
            found = f"{self._share(self.right)} right, in fp32 {fp32} ({allowed} of the images); {alike}"
        return (
            f"int8 on {self.photos}: {found}; logits differ by at most {self.largest_difference:.2g},"
            f" by {self.mean_difference:.2g} on average"
        )

    def advice(self) -> str:
        """A line of advice for a file that is not good enough."""
        what = "changes more answers" if self.right is None else "loses more right answers"
        return (
            f"int8 {what} than the tolerance allows; try --calibration-images 512, --reduce-range if the processor"
            f" lacks VNNI, --tolerance {self.lost / self.images + 0.005:.2f} to accept it, or leave out --int8"
        )

    def _share(self, images: int) -> str:
        return f"{100 * images / self.images:.2f} %"


def measure(
    graph: Graph, ours: Engine, exported: Engine, photos: Divided, *, tolerance: float | None, batch: int
) -> Agreement:
    """Compute photos that were not used for calibration with both. `tolerance` None: the usual one."""
    read, expected, found = [], [], []
    for numbers, pixels in photos.measured.batches(batch):
        images = graph.feed(pixels)
        read.append(numbers)
        expected.append(ours(images))
        found.append(exported(images))
    before, after = np.concatenate(expected).astype(np.float64), np.concatenate(found)
    differences = np.abs(after - before)
    answers, answered = _answers(graph, before), _answers(graph, after)
    right = None if photos.right is None else photos.right[np.concatenate(read)]
    return Agreement(
        images=len(before),
        photos=counted_photos(len(before), photos.what[1]),
        answer="labels" if graph.activation == "sigmoid" else "best class",
        right=None if right is None else _equal(answered, right),
        right_in_fp32=None if right is None else _equal(answers, right),
        same=_equal(answered, answers),
        largest_difference=float(differences.max()),
        mean_difference=float(differences.mean()),
        tolerance=tolerance or (INT8_CHANGES if right is None else INT8_LOSS),
    )


def _answers(graph: Graph, logits: Values) -> Answers:
    if graph.activation == "sigmoid":
        return (logits > 0).astype(np.int64)
    best: Answers = logits.argmax(axis=1)[:, None]
    return best


def _equal(first: Answers, second: Answers) -> int:
    """The number of images with the same answer."""
    return int((first == second).all(axis=1).sum())


def _batches(graph: Graph, pixels: Pixels, batch: int) -> Iterator[Values]:
    """Batches of one image, then of the others, so that a file for only one batch size fails."""
    yield graph.feed(pixels[:1])
    for start in range(1, len(pixels), batch):
        yield graph.feed(pixels[start : start + batch])


def latency(engine: Engine, images: Values) -> float:
    """The milliseconds from an input in host memory to scores in host memory, the median of several batches."""
    for _ in range(WARM_UP):
        engine(images)
    times: list[float] = []
    while len(times) < FASTEST or (len(times) < SLOWEST and sum(times) < SECONDS):
        start = time.perf_counter()
        engine(images)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)
