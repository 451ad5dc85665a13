"""Where a model is right and where it is wrong: by class, by pairs that it confuses, and by its confidence."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
import torch
from rich.cells import cell_len
from torch import Tensor

from falconet import writing
from falconet.data.keyed import IntArray
from falconet.data.storage import ArraySource, BoolArray, Source
from falconet.errors import printable
from falconet.evaluation.average_precision import ClassPrecision, gathered
from falconet.evaluation.evaluate import TOP, Evaluation, Observe
from falconet.parallel.world import ALONE, World
from falconet.report.console import counted, padded
from falconet.report.epochs import ACCURACY

BINS = 15  # of the calibration error, as in Guo et al., 2017
MOST_SHOWN = 10  # classes, and pairs of them
LONGEST = 30  # letters of a class name in a table

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Answers:
    """What a model answered for the images that counted: 16 bytes each."""

    labels: IntArray  # N
    predicted: IntArray  # N
    confidence: FloatArray  # N, the probability of the predicted class
    numbers: IntArray  # N, of the images in their source

    def mistakes(self, most: int) -> IntArray:
        """The places of wrong answers, the most confident first."""
        return self._ordered(self.labels != self.predicted, -self.confidence)[:most]

    def hits(self, most: int) -> IntArray:
        """The places of right answers, the least confident first."""
        return self._ordered(self.labels == self.predicted, self.confidence)[:most]

    def _ordered(self, chosen: BoolArray, by: FloatArray) -> IntArray:
        places = np.flatnonzero(chosen)
        return places[np.argsort(by[places], kind="stable")]


@dataclass
class Collected:
    """Observes batches and keeps their answers on the device, so that nothing waits for it."""

    begin: int = 0  # the number of the first image of this process
    _parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        classes, probabilities = best(logits, 1)
        self._parts.append((labels.int(), classes[:, 0].int(), probabilities[:, 0]))

    def read(self, world: World = ALONE) -> Answers:
        """The answers of all processes, in the order of the images; a stage that computes no logits has none."""
        none = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0)
        own = [torch.cat(each).cpu() for each in zip(*(self._parts or [none]), strict=True)]
        own.append(torch.arange(self.begin, self.begin + len(own[0])))
        labels, predicted, confidence, numbers = (gathered(each, world).numpy() for each in own)
        is_counted = labels >= 0
        return Answers(labels[is_counted], predicted[is_counted], confidence[is_counted], numbers[is_counted])


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best classes in the order in which the accuracy counts them, and their probabilities; N x count each."""
    classes = logits.topk(min(TOP, logits.shape[1]), dim=1).indices[:, :count]
    return classes, logits.float().softmax(1).gather(1, classes)


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were taken for another."""

    label: str
    predicted: str
    count: int
    of: int  # images of the class


@dataclass(frozen=True)
class Bin:
    """Images whose confidence lies in a range."""

    low: float
    high: float
    images: int
    accuracy: float | None  # percent; None: no images
    confidence: float | None  # mean, percent


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The answers of one model, counted."""

    class_names: tuple[str, ...]
    images: IntArray  # by class
    correct: IntArray  # by class
    cells: list[tuple[int, int, int]]  # of the confusion matrix: label, predicted, images; only those with images
    bins: list[Bin]

    @classmethod
    def of(cls, answers: Answers, class_names: tuple[str, ...]) -> "Breakdown":
        classes = len(class_names)
        labels, predicted = answers.labels.astype(np.int64), answers.predicted.astype(np.int64)
        # A dense matrix of 100,000 classes would not fit into memory; there are never more cells than images.
        keys, counts = np.unique(labels * classes + predicted, return_counts=True)
        return cls(
            class_names=class_names,
            images=np.bincount(labels, minlength=classes),
            correct=np.bincount(labels[labels == predicted], minlength=classes),
            cells=[
                (key // classes, key % classes, number)
                for key, number in zip(keys.tolist(), counts.tolist(), strict=True)
            ],
            bins=_bins(answers),
        )

    @property
    def calibration_error(self) -> float:
        """The expected calibration error in percent: how far confidence and accuracy are apart on average."""
        gaps = [
            each.images * abs(each.accuracy - each.confidence)
            for each in self.bins
            if each.accuracy is not None and each.confidence is not None
        ]
        return sum(gaps) / max(1, int(self.images.sum()))

    def accuracy(self, label: int) -> float | None:
        """The accuracy of one class, in percent; None: it has no images."""
        return 100.0 * int(self.correct[label]) / int(self.images[label]) if self.images[label] else None

    def worst(self) -> list[int]:
        """The classes with images, the least accurate first."""
        there = [label for label in range(len(self.class_names)) if self.images[label]]
        return sorted(there, key=lambda label: (self.correct[label] / self.images[label], label))

    def confusions(self) -> list[Confusion]:
        """The wrong cells of the matrix, the largest first."""
        wrong = sorted((-count, label, other) for label, other, count in self.cells if label != other)
        names = self.class_names
        return [Confusion(names[label], names[other], -less, int(self.images[label])) for less, label, other in wrong]

    def lines(self) -> Iterator[str]:
        """Lines for a person: the worst of everything."""
        worst, confused = self.worst(), self.confusions()
        which = "" if len(worst) <= MOST_SHOWN else f", the worst {MOST_SHOWN} of {len(worst):,}"
        yield ""
        yield f"accuracy by class{which}:"
        width = max(cell_len(_short(self.class_names[label])) for label in worst[:MOST_SHOWN])
        for label in worst[:MOST_SHOWN]:
            right = f"{int(self.correct[label]):,} of {int(self.images[label]):,}"
            yield f"  {padded(_short(self.class_names[label]), width)}  {self.accuracy(label):6.2f}%  {right}"
        if confused:
            yield ""
            yield "most confused:"
            for each in confused[:MOST_SHOWN]:
                yield f"  {_short(each.label)} taken for {_short(each.predicted)}: {each.count:,} of {each.of:,}"
        yield ""
        yield f"calibration error {self.calibration_error:.2f}%: {self._calibration()}"

    def _calibration(self) -> str:
        there = [each for each in self.bins if each.accuracy is not None and each.confidence is not None]
        images = max(1, sum(each.images for each in there))
        sure = sum(each.images * (each.confidence or 0.0) for each in there) / images
        right = sum(each.images * (each.accuracy or 0.0) for each in there) / images
        return f"on average {sure:.2f}% sure and {right:.2f}% right (ECE, {BINS} bins)"

    def to_json(self) -> dict[str, object]:
        return {
            "per_class": [
                {
                    "class": name,
                    "images": int(self.images[label]),
                    "correct": int(self.correct[label]),
                    "accuracy": self.accuracy(label),
                }
                for label, name in enumerate(self.class_names)
            ],
            "confusion": {"columns": ["label", "predicted", "images"], "cells": self.cells},
            "calibration": {"error": self.calibration_error, "bins": [vars(each) for each in self.bins]},
        }


@dataclass(frozen=True)
class Precisions:
    """Photos with several labels: how well the model ranks those of each class."""

    class_names: tuple[str, ...]
    by_class: tuple[ClassPrecision, ...]

    def worst(self) -> list[tuple[float, str, int]]:
        """The classes that photos have, the least average precision first, with their photos."""
        pairs = zip(self.class_names, self.by_class, strict=True)
        known = [(each.average_precision, name, each.images) for name, each in pairs]
        return sorted((found, name, images) for found, name, images in known if found is not None)

    def lines(self) -> Iterator[str]:
        """Lines for a person: the worst classes."""
        worst = self.worst()
        which = "" if len(worst) <= MOST_SHOWN else f", the worst {MOST_SHOWN} of {len(worst):,}"
        yield ""
        yield f"average precision by class{which}:"
        width = max(cell_len(_short(name)) for _, name, _ in worst[:MOST_SHOWN])
        for found, name, images in worst[:MOST_SHOWN]:
            yield f"  {padded(_short(name), width)}  {found:6.2f}%  {counted(images, 'photo')}"

    def to_json(self) -> dict[str, object]:
        pairs = zip(self.class_names, self.by_class, strict=True)
        return {"several_labels": True, "per_class": [{"class": name, **vars(each)} for name, each in pairs]}


def _bins(answers: Answers) -> list[Bin]:
    """Equal ranges of confidence, each with its upper end; an answer without a finite confidence is in none."""
    hits, confidence = answers.labels == answers.predicted, answers.confidence.astype(np.float64)
    number = np.ceil(np.clip(np.nan_to_num(confidence, nan=-1.0), -1.0, 1.0) * BINS) - 1
    found = []
    for each in range(BINS):
        inside = number == each
        means = _percent(hits[inside]), _percent(confidence[inside])
        found.append(Bin(each / BINS, (each + 1) / BINS, int(inside.sum()), *means))
    return found


def _percent(values: npt.NDArray[np.bool_ | np.float64]) -> float | None:
    return 100.0 * float(values.mean()) if len(values) else None


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 2]}.."


class Predictions:
    """Observes batches and writes a row for each image; images come in the order of their source, from `begin` on.

    The first image comes after the names of the columns.
    """

    def __init__(self, file: TextIO, source: Source, class_names: Sequence[str], *, begin: int = 0) -> None:
        self._writer, self._source, self._names = csv.writer(file), source, class_names
        self._done = begin  # images
        self._top = min(TOP, len(class_names))
        if begin == 0:
            self._writer.writerow(["path", *self._columns()])

    def add(self, logits: Tensor, labels: Tensor) -> None:
        rows = zip(labels.tolist(), self._answers(logits), strict=True)
        for number, (label, answers) in enumerate(rows, start=self._done):
            if label >= 0:
                self._writer.writerow([self._where(number), self._label(label), *answers])
        self._done += len(labels)

    def _columns(self) -> list[str]:
        more = [f"{column}_{place}" for place in range(2, self._top + 1) for column in ("predicted", "probability")]
        return ["label", "predicted", "probability", *more]

    def _label(self, label: int) -> str:
        return self._names[label]

    def _answers(self, logits: Tensor) -> Iterator[list[str]]:
        """The cells of each image after its label."""
        classes, probabilities = best(logits, self._top)
        for predicted, sure in zip(classes.tolist(), probabilities.tolist(), strict=True):
            pairs = zip(predicted, sure, strict=True)
            yield [cell for one, share in pairs for cell in (self._names[one], f"{share:.6f}")]

    def _where(self, number: int) -> str:
        return str(number) if isinstance(self._source, ArraySource) else self._source.where(number)


class MultiLabelPredictions(Predictions):
    """The same for photos with several labels: those they have, those predicted, and the probability of each class."""

    def __init__(
        self, file: TextIO, source: Source, class_names: Sequence[str], sets: BoolArray, *, begin: int = 0
    ) -> None:
        self._sets = sets
        super().__init__(file, source, class_names, begin=begin)

    def _columns(self) -> list[str]:
        return ["labels", "predicted", *self._names]

    def _label(self, label: int) -> str:
        return self._joined(self._sets[label].tolist())

    def _answers(self, logits: Tensor) -> Iterator[list[str]]:
        for row, scores in zip(logits.float().sigmoid().tolist(), (logits >= 0).tolist(), strict=True):
            yield [self._joined(scores), *(f"{share:.6f}" for share in row)]

    def _joined(self, present: Sequence[bool]) -> str:
        """The names of the classes, joined as in tables of labels."""
        return "|".join(name for name, is_present in zip(self._names, present, strict=True) if is_present)


def open_predictions(path: Path) -> TextIO:
    """The file for predictions; names of files keep their bytes."""
    with writing.explained(path):
        return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")


def measured_json(name: str, epoch: str, found: Evaluation, parts: Breakdown | Precisions) -> dict[str, object]:
    """One model in validation.json."""
    return {
        "checkpoint": name,
        "epoch": epoch,
        "images": found.images,
        found.metric.name: found.score,
        **_detail(found, classes=len(parts.class_names)),
        "loss": found.loss if math.isfinite(found.loss) else None,
        **parts.to_json(),
    }


def _detail(found: Evaluation, *, classes: int) -> dict[str, float]:
    if found.metric is not ACCURACY:
        return {found.metric.training: found.accuracy}
    return {"top5_accuracy": found.top5_accuracy} if classes > TOP else {}


def several(*observers: Observe) -> Observe:
    """An observer that passes what it observes to all of them."""

    def observe(logits: Tensor, labels: Tensor) -> None:
        for each in observers:
            each(logits, labels)

    return observe
