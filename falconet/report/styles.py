"""How a run is told: a style prints its lines and writes its files. The others are the originals', for their tools."""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from falconet.report.throughput import Rate


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known before the first update."""

    options: Mapping[str, object]
    folder: Path
    parameters: int
    global_batch: int
    replicas: int
    stages: int  # of one replica
    image_size: int
    schedule: str


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

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)


class RunLog:
    """Lines for the screen, and files beside the run; without a folder, nothing is written."""

    def __init__(self, say: Callable[[str], None], folder: Path | None) -> None:
        self._say, self._folder = say, folder

    def line(self, text: str) -> None:
        self._say(text)

    def kept_line(self, text: str) -> None:
        """On the screen and in log.txt."""
        self._say(text)
        if self._folder:
            with (self._folder / "log.txt").open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def row(self, name: str, values: Mapping[str, object]) -> None:
        """One row of a CSV file, which begins with its names."""
        if self._folder:
            path = self._folder / name
            new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(values))
                if new:
                    writer.writeheader()
                writer.writerow(values)

    def json(self, name: str, content: Mapping[str, object]) -> None:
        if self._folder:
            text = json.dumps(content, indent=4, sort_keys=True, default=str)
            (self._folder / name).write_text(text + "\n", encoding="utf-8")


class Style(Protocol):
    """Whose lines and files."""

    def begin(self, facts: Facts) -> None: ...
    def log(self, point: Point) -> None: ...
    def end_epoch(self, point: Point) -> None: ...
    def validated(self, found: Validated) -> None: ...
    def saved(self, folder: Path) -> None: ...
    def checkpoint_name(self, update: int) -> str | None:
        """The original's name; None: ours, which is that of the PyTorch program without its ending."""


class Falconet:
    """Our own: the lines at the end of an epoch are those of the PyTorch program."""

    def __init__(self, log: RunLog) -> None:
        self.to = log

    def begin(self, facts: Facts) -> None:
        """The plan says it all."""

    def log(self, point: Point) -> None:
        """The progress bar shows it."""

    def end_epoch(self, point: Point) -> None:
        self.to.line(f"Epoch {point.epoch:.0f}/{point.epochs}")
        self.to.line(f"loss: {point.loss:.4f},")
        self.to.line(f"accuracy: {point.accuracy:.2f} %")
        self.to.line(f"throughput: {point.rate.images_per_second:.1f} samples/sec")

    def validated(self, found: Validated) -> None:
        self.to.line(f"Accuracy on test set: {found.accuracy:.2f}%")

    def saved(self, folder: Path) -> None:
        """Said at the end."""

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None
