"""How a run is told: a style prints its lines and writes its files. The others are the originals', for their tools."""

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from falconet import writing
from falconet.report.sinks import Sink
from falconet.report.throughput import Rate


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known before the first update."""

    options: Mapping[str, object]
    folder: Path
    model: str  # its layers, in text
    parameters: int
    global_batch: int
    replicas: int
    stages: int  # of one replica
    image_size: int
    restored: Path | None = None  # the checkpoint that the run goes on from


@dataclass(frozen=True, kw_only=True)
class Point:
    """A log point, or the end of an epoch: the numbers since the one before."""

    update: int
    epoch: float  # passes over the images so far
    updates_per_epoch: int
    epochs: int
    global_batch: int
    loss: float
    accuracy: float  # percent
    lr: float
    scale: float | None  # the loss scale
    rate: Rate
    seconds: float  # of training since this process began

    @property
    def update_seconds(self) -> float:
        """Of one update, on average."""
        return self.global_batch / max(self.rate.images_per_second, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of a checkpoint that is opened to be measured."""

    model: str
    data: str
    loss: float | None  # of its training, as its accuracy, which is in percent
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class Validated:
    """The accuracy of a model on the validation images."""

    name: str  # of its checkpoint
    update: int
    epoch: float
    accuracy: float  # percent
    loss: float
    images: int
    seconds: float
    batch: int  # images of one batch
    origin: Origin | None = None  # where the weights were read; None: they are trained here

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)


class RunLog:
    """Lines for the screen, files beside the run, numbers for sinks; without a folder, nothing is written."""

    def __init__(self, say: Callable[[str], None], folder: Path | None, *, sinks: Sequence[Sink] = ()) -> None:
        """`sinks`: those that get the numbers of a style under its own names."""
        self._say, self._folder, self._sinks = say, folder, sinks
        self._ends: dict[str, int] = {}  # where the last row of each CSV file begins, in bytes

    def line(self, text: str) -> None:
        self._say(text)

    def kept_line(self, text: str, *, kept: str | None = None) -> None:
        """On the screen and, maybe in other words, in log.txt."""
        self._say(text)
        if self._folder:
            with os.fdopen(writing.growing(self._folder, "log.txt"), "a", encoding="utf-8") as file:
                file.write((kept or text) + "\n")

    def row(self, name: str, values: Mapping[str, object], *, update: int) -> None:
        """One row of a CSV file, which begins with its names."""
        self.scalars(update, values)
        if self._folder:
            with os.fdopen(writing.growing(self._folder, name), "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(values))
                if file.tell() == 0:
                    writer.writeheader()
                self._ends[name] = file.tell()
                writer.writerow(values)

    def row_again(self, name: str, values: Mapping[str, object], *, update: int) -> None:
        """The last row once more, in its place."""
        if self._folder and name in self._ends:
            with os.fdopen(writing.growing(self._folder, name), "ab") as file:
                file.truncate(self._ends[name])
        self.row(name, values, update=update)

    def has_row(self, name: str, column: str, value: str) -> bool:
        """Whether a CSV file has a row with this value."""
        path = self._folder / name if self._folder else None
        if path is None or not path.exists():
            return False
        with path.open(newline="", encoding="utf-8") as file:
            return any(row.get(column) == value for row in csv.DictReader(file))

    def scalars(self, update: int, values: Mapping[str, object]) -> None:
        """The numbers among the values."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        for sink in self._sinks:
            sink.write(update, numbers)

    def json(self, name: str, content: Mapping[str, object]) -> None:
        self.text(name, json.dumps(content, indent=4, sort_keys=True, default=str))

    def text(self, name: str, content: str) -> None:
        if self._folder:
            writing.replace(self._folder, name, content + "\n")


class Style(Protocol):
    """Whose lines and files."""

    def begin(self, facts: Facts) -> None: ...
    def begin_epoch(self, epoch: int, of: int) -> None: ...
    def log(self, point: Point) -> None: ...
    def end_epoch(self, point: Point) -> None: ...
    def validated(self, found: Validated) -> None: ...
    def averaged(self, found: Validated, *, which: str) -> None: ...  # the same of an average of checkpoints
    def saved(self, folder: Path) -> None: ...
    def end(self, *, trained: float, whole: float) -> None:
        """Training is over: seconds of updates alone, and with validations and saves."""

    def checkpoint_name(self, update: int) -> str | None:
        """The original's name; None: ours, which is that of the PyTorch program without its ending."""

    def average_name(self, how: str) -> str | None:
        """Of the average of checkpoints; `how`: such as exp_0.97 or N_4; None: ours."""


class Falconet:
    """Our own: the lines at the end of an epoch are those of the PyTorch program."""

    def __init__(self, log: RunLog) -> None:
        self.to = log

    def begin(self, facts: Facts) -> None:
        """The plan says it all."""

    def begin_epoch(self, epoch: int, of: int) -> None:
        """The progress bar shows it."""

    def log(self, point: Point) -> None:
        """The progress bar shows it."""

    def end_epoch(self, point: Point) -> None:
        self.to.line(f"Epoch {point.epoch:.0f}/{point.epochs}")
        self.to.line(f"loss: {point.loss:.4f},")
        self.to.line(f"accuracy: {point.accuracy:.2f} %")
        self.to.line(f"throughput: {point.rate.images_per_second:.1f} samples/sec")

    def validated(self, found: Validated) -> None:
        self.to.line(f"Accuracy on test set: {found.accuracy:.2f}%")

    def averaged(self, found: Validated, *, which: str) -> None:
        named = f" ({which})" if which else ""
        self.to.line(f"Accuracy on test set of the averaged checkpoints{named}: {found.accuracy:.2f}%")

    def saved(self, folder: Path) -> None:
        """Said at the end."""

    def end(self, *, trained: float, whole: float) -> None:
        """The summary says it."""

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None
