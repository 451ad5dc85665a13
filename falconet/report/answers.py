"""A model's answers for the validation images: accuracy by class, confusions, calibration, examples."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from falconet.report.foreign_folder import count, number, objects, text

MOST_CLASSES = 100_000
MOST_PICTURES, MOST_PICTURE = 256, 64 << 10  # pictures of a kind, and characters of one
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


class Picture(NamedTuple):
    """A small image."""

    kind: Literal["png", "jpeg"]
    data: str  # base64


@dataclass(frozen=True, kw_only=True)
class Example:
    """A validation image and the model's answer."""

    path: str
    label: str
    predicted: str
    probability: float  # 0 to 1
    picture: Picture | None


@dataclass(frozen=True, kw_only=True)
class ClassResult:
    """One class of a validation."""

    name: str
    images: int
    correct: int | None = None  # None: of images with several labels
    score: float | None = None  # percent: the accuracy, or the average precision; None: no images


class Bin(NamedTuple):
    """Images whose confidence lies in a range."""

    low: float
    high: float
    images: int
    accuracy: float | None  # percent
    confidence: float | None  # mean, percent


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers for the validation images."""

    checkpoint: str = ""
    epoch: str = ""
    update: int | None = None
    images: int  # which is not the sum over the classes if they have several labels
    classes: Sequence[ClassResult]
    cells: Sequence[tuple[int, int, int]] = ()  # of the confusion matrix: label, predicted, images
    bins: Sequence[Bin] = ()
    calibration_error: float | None = None  # percent
    mistakes: Sequence[Example] = ()  # the most confident first
    hits: Sequence[Example] = ()  # the least confident first

    def confusions(self) -> list[tuple[int, int, int]]:
        """The cells of wrong answers, largest first."""
        return sorted((cell for cell in self.cells if cell[0] != cell[1]), key=lambda cell: (-cell[2], cell))


def best_validated(content: Mapping[str, Any]) -> dict[str, Any]:
    """The best model of those that `falconet validate` measured."""
    models = list(objects(content.get("models"), 1000))
    return max(models, key=lambda each: number(each.get("accuracy", each.get("mAP"))) or 0.0, default={})


def read_answers(content: Mapping[str, Any]) -> Answers | None:
    classes = [
        ClassResult(
            name=text(each.get("class")),
            images=count(each.get("images")),
            correct=count(each["correct"]) if "correct" in each else None,
            score=number(each.get("accuracy", each.get("average_precision"))),
        )
        for each in objects(content.get("per_class"), MOST_CLASSES)
    ]
    if not classes:
        return None
    confusion, calibration = content.get("confusion"), content.get("calibration")
    cells = confusion.get("cells") if isinstance(confusion, dict) else None
    return Answers(
        checkpoint=text(content.get("checkpoint")),
        epoch=text(content.get("epoch")),
        update=count(content.get("update")) or None,
        images=count(content.get("images")) or sum(each.images for each in classes),
        classes=classes,
        cells=list(_cells(cells, classes=len(classes))),
        bins=list(_bins(calibration.get("bins"))) if isinstance(calibration, dict) else [],
        calibration_error=number(calibration.get("error")) if isinstance(calibration, dict) else None,
        mistakes=_examples(content.get("mistakes")),
        hits=_examples(content.get("hits")),
    )


def _cells(cells: object, *, classes: int) -> Iterator[tuple[int, int, int]]:
    for cell in cells if isinstance(cells, list) else ():
        match cell:
            case [int() as label, int() as predicted, int() as images]:
                if 0 <= label < classes and 0 <= predicted < classes and 0 < images < 1 << 53:
                    yield label, predicted, images


def _bins(bins: object) -> Iterator[Bin]:
    for each in objects(bins, 100):
        low, high = number(each.get("low")), number(each.get("high"))
        if low is not None and high is not None and 0 <= low < high <= 1:
            accuracy, confidence = number(each.get("accuracy")), number(each.get("confidence"))
            yield Bin(low, high, count(each.get("images")), accuracy, confidence)


def _examples(content: object) -> list[Example]:
    return [
        Example(
            path=text(each.get("path")),
            label=text(each.get("label")),
            predicted=text(each.get("predicted")),
            probability=number(each.get("probability")) or 0.0,
            picture=read_picture(each.get("picture")),
        )
        for each in objects(content, MOST_PICTURES)
    ]


def read_picture(content: object) -> Picture | None:
    match content:
        case {"kind": "png" | "jpeg" as kind, "data": str() as data}:
            if len(data) <= MOST_PICTURE and _BASE64.fullmatch(data):
                return Picture(kind, data)
    return None
