"""Styles, which decide what the users of a program see: its lines, its files and their names."""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from falconet import writing
from falconet.config.recipes import PHOTOS_CONFIG
from falconet.errors import NO_ROOM
from falconet.report import folders, inference
from falconet.report.epochs import ACCURACY, EpochTable, Metric, Row
from falconet.report.folders import RunShape
from falconet.report.inference import Predictions, Repetition, TimedBatch
from falconet.report.throughput import Rate

if TYPE_CHECKING:
    from falconet.report.sinks import Sink  # imports torch, which takes two seconds

HEARTBEAT = 30.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that are known before the first update."""

    options: Mapping[str, object]  # every one, by name
    folder: Path
    model: str  # its layers, in text
    parameters: int
    global_batch: int
    replicas: int
    stages: int  # of one replica
    image_size: int
    epochs: float  # done at the end
    metric: Metric = ACCURACY
    validates: bool = True
    averages: bool = False  # the moving average of the weights is validated too
    restored: Path | None = None  # the checkpoint that the run continues from
    is_newest: bool = True  # there is no newer one beside it
    typed: Mapping[str, object] | None = None  # the options of the original that was started; None: no original


@dataclass(frozen=True, kw_only=True)
class Point:
    """The numbers at a log point or the end of an epoch, since the previous one."""

    update: int
    updates: int  # since the previous one
    number: int  # of the log point, from 1
    epoch: float  # passes over the images so far
    updates_per_epoch: int
    epochs: int
    global_batch: int
    loss: float
    smoothing_loss: float  # the part of it that label smoothing adds
    accuracy: float  # percent
    lr: float
    scale: float | None  # the loss scale
    rate: Rate
    seconds: float  # of training so far
    moment: float  # of its end, by the clock of the host
    ends_epoch: bool = False
    validates: bool = False  # a validation follows

    @property
    def update_seconds(self) -> float:
        """The mean time of one update."""
        return self.global_batch / max(self.rate.images_per_second, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The facts that a checkpoint states about itself when it is validated."""

    model: str
    data: str
    loss: float | None  # in training
    accuracy: float | None  # in training, percent


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
    batch: int  # images per batch
    average: float | None = None  # of the moving average of the weights, percent
    is_best: bool = False  # better than all validations before, itself or the moving average
    origin: Origin | None = None  # of weights read from a checkpoint; None: of weights trained here

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)


class RunLog:
    """The output of a run: lines on the screen, files in the run folder if there is one, numbers for sinks."""

    def __init__(self, say: Callable[[str], None], folder: Path | None, *, sinks: Sequence["Sink"] = ()) -> None:
        """`sinks` receive a style's numbers under its names."""
        self._say, self._folder, self._sinks = say, folder, sinks
        self._ends: dict[str, int] = {}  # where the last row of each CSV file starts, in bytes
        self._left: dict[str, bytes] = {}  # bytes that a full disk did not take, for each file

    def line(self, text: str) -> None:
        self._say(text)

    def kept_line(self, text: str, *, kept: str | None = None) -> None:
        """Print a line, and append it to log.txt, or `kept` in its place."""
        self._say(text)
        if self._folder:
            self._append("log.txt", (kept or text) + "\n")

    def row(self, name: str, values: Mapping[str, object], *, update: int) -> None:
        """Append a row to a CSV file; the first one writes the header."""
        self.scalars(update, values)
        if self._folder:
            row = io.StringIO(newline="")
            writer = csv.DictWriter(row, list(values))
            if self._size(name) == 0:
                writer.writeheader()
            self._ends[name] = self._size(name) + len(writing.coded(row.getvalue()))
            writer.writerow(values)
            self._append(name, row.getvalue())

    def row_again(self, name: str, values: Mapping[str, object], *, update: int) -> None:
        """Replace the last row that this process wrote."""
        if self._folder and name in self._ends:
            with FileIO(writing.growing(self._folder, name), "ab") as file:
                written = min(self._ends[name], file.seek(0, os.SEEK_END))
                file.truncate(written)
            self._left[name] = self._left.get(name, b"")[: self._ends[name] - written]
        self.row(name, values, update=update)

    def _append(self, name: str, text: str) -> None:
        assert self._folder is not None
        self._left[name] = self._left.get(name, b"") + writing.coded(text)
        try:
            with FileIO(writing.growing(self._folder, name), "ab") as file:
                self._left[name] = writing.put(file, self._left[name])
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _size(self, name: str) -> int:
        """The size of a file in bytes, including those that are not written yet."""
        assert self._folder is not None
        path = self._folder / name
        return (path.stat().st_size if path.exists() else 0) + len(self._left.get(name, b""))

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file, including those of earlier starts; `row_again` then replaces the last one."""
        path = self._folder / name if self._folder else None
        if path is None or not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        if len(lines) > 1:
            self._ends[name] = sum(map(len, lines[:-1]))
        header, *rows = list(csv.reader(line.decode(errors="replace") for line in lines)) or [[]]
        return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]

    def scalars(self, update: int, values: Mapping[str, object]) -> None:
        """Send the numbers among the values to the sinks."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        for sink in self._sinks:
            sink.write(update, numbers)

    def has(self, name: str) -> bool:
        return self._folder is not None and (self._folder / name).exists()

    def json(self, name: str, content: Mapping[str, object]) -> None:
        self.text(name, json.dumps(content, indent=4, sort_keys=True, default=str))

    def text(self, name: str, content: str) -> None:
        if self._folder:
            writing.replace(self._folder, name, content + "\n")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A CSV file of a style."""

    name: str
    update: str  # the column that has the number of updates
    is_of_validations: bool = False


class Style(Protocol):
    """A program's lines and files about a run, and its names of checkpoints."""

    tabulates: bool  # accuracies of several checkpoints go into one table; else each is reported by `validated`

    def begin(self, facts: Facts) -> None: ...
    def begin_epoch(self, epoch: int, of: int) -> None: ...
    def log(self, point: Point) -> None: ...
    def end_epoch(self, point: Point) -> None: ...
    def validated(self, found: Validated) -> None: ...
    def stopped(self) -> None: ...  # before a validation that was due
    def averaged(self, found: Validated, *, which: str) -> None: ...  # an average of checkpoints was validated
    def saved(self, folder: Path) -> None: ...
    def end(self, *, trained: float, whole: float) -> None:
        """Report the end of training; `trained`: seconds of updates alone, `whole`: with validations and saves."""

    def checkpoint_name(self, update: int) -> str | None:
        """The name of the checkpoint after this many updates; None: the default name."""

    def average_name(self, how: str) -> str | None:
        """The name of an average, where `how` is such as exp_0.97 or N_4; None: the default name."""


class Falconet:
    """Falconet's style: one row per epoch, printed when it is complete; plan and summary show the rest."""

    tabulates = True

    def __init__(self, log: RunLog, clock: Callable[[], float] = time.perf_counter) -> None:
        self.to, self._clock = log, clock
        self._metric = ACCURACY
        self._table = EpochTable(epochs=0, metric=self._metric, validates=True, averages=False)
        self._pending: Point | None = None  # waits for its validation
        self._since = clock()  # the last row

    def begin(self, facts: Facts) -> None:
        self._metric = facts.metric
        self._table = EpochTable(
            epochs=facts.epochs, metric=facts.metric, validates=facts.validates, averages=facts.averages
        )
        self.to.line("")
        self.to.line(self._table.header())
        self._since = self._clock()

    def begin_epoch(self, epoch: int, of: int) -> None:
        """Do nothing: the progress bar shows the epoch."""

    def log(self, point: Point) -> None:
        if not point.ends_epoch:  # else its row follows
            self._row(point)

    def end_epoch(self, point: Point) -> None:
        if point.validates:
            self._pending = point
        else:
            self._row(point)

    def validated(self, found: Validated) -> None:
        point, self._pending = self._pending, None
        self._row(point, found)

    def stopped(self) -> None:
        if self._pending:
            point, self._pending = self._pending, None
            self._row(point)

    def averaged(self, found: Validated, *, which: str) -> None:
        named = f" ({which})" if which else ""
        self.to.line(f"{self._metric.name} of the averaged checkpoints{named}: {found.accuracy:.2f}%")

    def _row(self, point: Point | None, found: Validated | None = None) -> None:
        """Print a row; without `point` if an interrupted run had ended the epoch and the restored one validates it."""
        # An epoch may be reported late. The time of a row includes its validation and everything before it.
        now = self._clock() if found or point is None else point.moment
        seconds, self._since = now - self._since, now
        row = Row(epoch=found.epoch if found else 0.0, seconds=seconds)
        if point:
            row = replace(
                row,
                epoch=point.epoch,
                is_within=not point.ends_epoch,
                train_loss=point.loss,
                train_score=point.accuracy,
                lr=point.lr,
                images_per_second=point.rate.images_per_second,
            )
        if found:
            row = replace(
                row, loss=found.loss, score=found.accuracy, average_score=found.average, is_best=found.is_best
            )
        self.to.line(self._table.row(row))

    def saved(self, folder: Path) -> None:
        """Do nothing: the summary shows it."""

    def end(self, *, trained: float, whole: float) -> None:
        """Do nothing: the summary shows it."""

    def checkpoint_name(self, update: int) -> str | None:  # noqa: ARG002
        return None

    def average_name(self, how: str) -> str | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The conventions of the program that was started: everything about output that differs between programs."""

    style: Callable[[RunLog], Style]
    run_folder: Callable[[RunShape], Path]  # of a new run; does not exist yet
    predictions: Callable[[Predictions], Sequence[str]]  # lines before our own figures
    repetition: Callable[[Repetition], Sequence[str]] = inference.repetition  # lines of each pass that is measured
    batch: Callable[[TimedBatch], str] | None = None  # the line of each predicted batch; None: no lines
    tables: Sequence[Table] = ()  # what its style writes
    options_file: str | None = None  # where its style writes the options, once
    typed: Mapping[str, object] | None = None  # the options of the program as its user typed them; None: ours
    logs_where_it_saves: bool = False  # --checkpoint-output-path is the run folder too
    heartbeat: float | None = None  # seconds without a line after which a pipe gets one; None: one at the start
    words: Callable[[str], str] = str  # rewrites the options in a line to the names of the program that was started
    called: str | None = None  # the name with which errors begin; None: falconet and the command
    program: tuple[str, ...] = ("-m", "falconet")  # Python's arguments that start a worker, before its command
    photos_config: str | None = None  # the config that a folder of photos implies; None: photos imply none
    takes_several_labels: bool = False  # of an image; else what it prints has no word for their metric
    prints_whole_plan: bool = True  # else without the lines that only --plan and plan.txt show
    shows_compilation: bool = False  # a line where kernels are compiled
    shows_report: bool = False  # the summary names the report


FALCONET = Conventions(
    style=Falconet,
    run_folder=folders.fresh,
    predictions=inference.heading,
    heartbeat=HEARTBEAT,
    photos_config=PHOTOS_CONFIG,
    takes_several_labels=True,
    prints_whole_plan=False,
    shows_compilation=True,
    shows_report=True,
)
