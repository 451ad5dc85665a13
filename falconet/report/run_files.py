"""The files of a run folder as values: everything that can be read, and a line for each thing that cannot.

A run folder may come from another person. Its files are opened without following links, no more than a limit of each is
read, and every value is checked for its type: what is not as expected is left out.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from falconet.errors import DataError, printable

CONFIG, PLAN, METRICS, TIMES, SUMMARY = "config.yaml", "plan.txt", "metrics.jsonl", "updates.jsonl", "summary.json"
REPORT, RESULTS, RECORDS = "report.html", "results.csv", "report"  # RECORDS: the folder of what only a report needs
ANSWERS, SEEN, LAYERS = f"{RECORDS}/answers.json", f"{RECORDS}/batch.json", f"{RECORDS}/layers.json"
ENVIRONMENT, MEMORY = f"{RECORDS}/environment.json", f"{RECORDS}/memory.jsonl"
PROFILE = "profile_summary.json"  # of --profile
VALIDATED = "validation.json"  # what `falconet validate` wrote, for runs without answers of their own
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
MOST_BYTES = 64 << 20  # read of one file
MOST_CHECKPOINTS = 100
MOST_CLASSES = 100_000
MOST_PICTURES, MOST_PICTURE = 256, 64 << 10  # pictures of a kind, and characters of one
DEFAULT = "default"  # the source of an option that was not set

State = Literal["done", "going", "stopped"]
_OPTION = re.compile(r"([a-zA-Z0-9-]{1,80}): (.*?)(?:  # (.*))?")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Stated(NamedTuple):
    """The value of an option, and where it came from."""

    value: str
    source: str


@dataclass(frozen=True)
class Moment:
    """The metrics after an update."""

    update: int
    epoch: float
    metrics: Mapping[str, float]


class Picture(NamedTuple):
    """A small image."""

    kind: Literal["png", "jpeg"]
    data: str  # base64


@dataclass(frozen=True, kw_only=True)
class Example:
    """A validation image, and what the model took it for."""

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
    """What a model answered for the validation images."""

    checkpoint: str = ""
    epoch: str = ""
    update: int | None = None
    classes: Sequence[ClassResult]
    cells: Sequence[tuple[int, int, int]] = ()  # of the confusion matrix: label, predicted, images
    bins: Sequence[Bin] = ()
    calibration_error: float | None = None  # percent
    mistakes: Sequence[Example] = ()  # the most confident first
    hits: Sequence[Example] = ()  # the least confident first

    def confusions(self) -> list[tuple[int, int, int]]:
        """The wrong cells, the largest first."""
        return sorted((cell for cell in self.cells if cell[0] != cell[1]), key=lambda cell: (-cell[2], cell))


@dataclass(frozen=True, kw_only=True)
class SeenBatch:
    """Training images as the network got them."""

    update: int
    pictures: Sequence[tuple[str, Picture]]  # with their labels, in words


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer with weights, or one that computes without any."""

    name: str
    kind: str
    parameters: int
    output: str = ""  # the shape for one image, in words
    multiplications: int | None = None  # for one image
    milliseconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint of the run."""

    name: str
    update: int
    epoch: float
    score: float | None  # percent
    loss: float | None  # of its validation
    megabytes: float
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Bytes at the end of an epoch."""

    update: int
    device: int | None  # the peak so far, of what torch holds on the device
    host: int | None  # resident in the process


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What is known of a run."""

    name: str
    state: State = "done"
    options: Mapping[str, Stated] = field(default_factory=dict)
    plan: Sequence[str] = ()
    moments: Sequence[Moment] = ()  # in the order of updates
    update_times: Sequence[float] = ()  # milliseconds
    memory: Sequence[MemoryPoint] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    answers: Answers | None = None
    seen: SeenBatch | None = None
    layers: Sequence[Layer] = ()
    checkpoints: Sequence[SavedCheckpoint] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)  # as it is on disk: `profile_part` checks it
    problems: Sequence[str] = ()  # a line each

    @property
    def metric(self) -> str:
        """What validations measure: accuracy, or mAP of images with several labels."""
        return "mAP" if any("validation/mAP" in moment.metrics for moment in self.moments) else "accuracy"

    @property
    def changed(self) -> dict[str, Stated]:
        """The options that are not at their defaults."""
        return {name: stated for name, stated in self.options.items() if stated.source != DEFAULT}

    def series(self, name: str) -> list[tuple[float, float]]:
        """One metric over the epochs."""
        return [(each.epoch, each.metrics[name]) for each in self.moments if name in each.metrics]


def read_run(folder: Path, *, state: State | None = None) -> RunFiles:
    """Read a run folder; DataError if it is none. `state`: None to find out."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected a run folder")
    try:
        files = _Files(folder)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; expected a run folder that you may read") from error
    with files:
        if not any(map(files.has, (CONFIG, METRICS, SUMMARY))):
            raise DataError(f"{folder}: not a run folder; expected one with {CONFIG} and {METRICS}")
        moments = _moments(files)
        summary = files.json(SUMMARY)
        return RunFiles(
            name=printable(folder.resolve().name),
            state=state or _state(files, summary, moments),
            options=_options(files.text(CONFIG, needed=True)),
            plan=files.text(PLAN).splitlines()[:1000],
            moments=moments,
            update_times=[time for line in files.lines(TIMES) for time in numbers(line.get("milliseconds"))],
            memory=_memory(files),
            summary=summary,
            answers=_answers(files.json(ANSWERS)) or _answers(_best_validated(files.json(VALIDATED))),
            seen=_seen(files.json(SEEN)),
            layers=_layers(files.json(LAYERS)),
            checkpoints=_checkpoints(files),
            environment={
                str(name): str(value)[:500]
                for name, value in list(files.json(ENVIRONMENT).items())[:100]
                if isinstance(value, str | int | float)
            },
            profile=files.json(PROFILE),
            problems=files.problems,
        )


def read_memory(folder: Path) -> list[MemoryPoint]:
    """The memory that earlier starts of a run recorded."""
    with _Files(folder) as files:
        return _memory(files)


class _Files:
    """Opens files below a folder without following links, and collects what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        self.root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.root)

    def has(self, name: str) -> bool:
        with contextlib.suppress(OSError), self._opened(name):
            return True
        return False

    def names(self, subfolder: str) -> list[str]:
        """The folders in a subfolder."""
        try:
            with self._opened(subfolder, os.O_DIRECTORY) as handle, os.scandir(handle) as found:
                return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def text(self, name: str, *, needed: bool = False) -> str:
        """The beginning of a file; empty if there is none."""
        try:
            with self._opened(name) as handle:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(f"{name} is not a file")
                if found.st_size > MOST_BYTES:
                    self._note(f"{name}: only the first {MOST_BYTES >> 20} MiB are shown")
                with os.fdopen(os.dup(handle), "rb") as file:
                    return file.read(MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            if needed:
                self._note(f"{name} is missing")
        except OSError as error:
            self._note(f"{name}: cannot be read: {error.strerror or error}")
        return ""

    def json(self, name: str) -> dict[str, Any]:
        """An object; empty if there is none."""
        text = self.text(name)
        if not text:
            return {}
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            self._note(f"{name}: not JSON")
            return {}
        return content

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects of a file of JSON lines, the last of which a killed run may have left torn."""
        whole, end, rest = self.text(name).rpartition("\n")
        bad = 0
        for line in (*whole.split("\n"), rest) if end else (rest,):
            try:
                content = json.loads(line) if line else None
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                yield content
            elif line is rest and line:
                self._note(f"{name}: the last line is torn, and left out")
            else:
                bad += bool(line)
        if bad:
            self._note(f"{name}: {bad:,} {'line is' if bad == 1 else 'lines are'} not JSON, and left out")

    def is_locked(self) -> bool:
        """Whether a run holds the folder."""
        try:
            fcntl.flock(self.root, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        fcntl.flock(self.root, fcntl.LOCK_UN)
        return False

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int]:
        """The descriptor of `name`, which may be in a subfolder; ELOOP if any part of it is a link."""
        *parents, last = name.split("/")
        handle, above = os.dup(self.root), -1
        try:
            for part in parents:
                above, handle = handle, os.open(part, _OPENED | os.O_DIRECTORY, dir_fd=handle)
                os.close(above)
            above, handle = handle, os.open(last, _OPENED | flags, dir_fd=handle)
            os.close(above)
            yield handle
        finally:
            os.close(handle)

    def _note(self, problem: str) -> None:
        self.problems.append(printable(f"{self.folder.name}/{problem}"))


# From JSON to values.


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def numbers(values: object) -> list[float]:
    found = map(number, values) if isinstance(values, list) else []
    return [each for each in found if each is not None]


def count(value: object) -> int:
    """A whole number from 0 on; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def text(value: object) -> str:
    return value[:1000] if isinstance(value, str) else ""


def _objects(value: object, most: int) -> Iterator[dict[str, Any]]:
    return (each for each in value[:most] if isinstance(each, dict)) if isinstance(value, list) else iter(())


def _options(yaml: str) -> dict[str, Stated]:
    """Every option of config.yaml, which has one on a line, with its source as a comment."""
    found = {}
    for line in yaml.splitlines()[:2000]:
        if match := _OPTION.fullmatch(line):
            name, value, source = match.groups()
            found[name] = Stated(_unquoted(value)[:1000], (source or DEFAULT)[:200])
    return found


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        with contextlib.suppress(ValueError, RecursionError):
            plain = json.loads(value)
            return plain if isinstance(plain, str) else value
    return value


def _moments(files: _Files) -> list[Moment]:
    """The log points, those of one update merged; those of validations get the epoch from the others."""
    merged: dict[int, dict[str, float]] = {}
    for line in files.lines(METRICS):
        update = line.pop("update", None)
        if isinstance(update, int) and not isinstance(update, bool) and 0 <= update < 1 << 53:
            values = {name[:200]: value for name, each in line.items() if (value := number(each)) is not None}
            merged.setdefault(update, {}).update(values)
    known = [(update, metrics["epoch"]) for update, metrics in sorted(merged.items()) if "epoch" in metrics]
    return [
        Moment(update, metrics.get("epoch", _between(known, update)), metrics)
        for update, metrics in sorted(merged.items())
    ]


def _between(known: Sequence[tuple[int, float]], update: int) -> float:
    """The epoch at an update, from those of others."""
    if not known:
        return float(update)
    place = bisect_left(known, (update, -math.inf))
    low = known[place - 1] if place else (0, 0.0)
    if place == len(known):
        (first, begun), (last, ended) = (known[-2] if len(known) > 1 else (0, 0.0)), known[-1]
        return ended + (update - last) * (ended - begun) / max(1, last - first)
    high = known[place]
    return low[1] + (high[1] - low[1]) * (update - low[0]) / max(1, high[0] - low[0])


def _memory(files: _Files) -> list[MemoryPoint]:
    return [
        MemoryPoint(
            update=count(line.get("update")),
            device=count(line.get("device")) or None,
            host=count(line.get("host")) or None,
        )
        for line in files.lines(MEMORY)
    ]


def _state(files: _Files, summary: Mapping[str, Any], moments: Sequence[Moment]) -> State:
    if files.is_locked():
        return "going"
    last = max((moment.update for moment in moments), default=0)
    return "done" if summary and count(summary.get("updates")) >= last else "stopped"


def _best_validated(content: Mapping[str, Any]) -> dict[str, Any]:
    """The best model that `falconet validate` measured."""
    models = list(_objects(content.get("models"), 1000))
    return max(models, key=lambda each: number(each.get("accuracy", each.get("mAP"))) or 0.0, default={})


def _answers(content: Mapping[str, Any]) -> Answers | None:
    classes = [
        ClassResult(
            name=text(each.get("class")),
            images=count(each.get("images")),
            correct=count(each["correct"]) if "correct" in each else None,
            score=number(each.get("accuracy", each.get("average_precision"))),
        )
        for each in _objects(content.get("per_class"), MOST_CLASSES)
    ]
    if not classes:
        return None
    confusion, calibration = content.get("confusion"), content.get("calibration")
    cells = confusion.get("cells") if isinstance(confusion, dict) else None
    return Answers(
        checkpoint=text(content.get("checkpoint")),
        epoch=text(content.get("epoch")),
        update=count(content.get("update")) or None,
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
    for each in _objects(bins, 100):
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
            picture=_picture(each.get("picture")),
        )
        for each in _objects(content, MOST_PICTURES)
    ]


def _picture(content: object) -> Picture | None:
    match content:
        case {"kind": "png" | "jpeg" as kind, "data": str() as data}:
            if len(data) <= MOST_PICTURE and _BASE64.fullmatch(data):
                return Picture(kind, data)
    return None


def _seen(content: Mapping[str, Any]) -> SeenBatch | None:
    found = [(text(each.get("label")), _picture(each)) for each in _objects(content.get("pictures"), MOST_PICTURES)]
    pictures = [(label, picture) for label, picture in found if picture is not None]
    return SeenBatch(update=count(content.get("update")), pictures=pictures) if pictures else None


def _layers(content: Mapping[str, Any]) -> list[Layer]:
    return [
        Layer(
            name=text(each.get("name")),
            kind=text(each.get("kind")),
            parameters=count(each.get("parameters")),
            output=text(each.get("output")),
            multiplications=count(each["multiplications"]) if "multiplications" in each else None,
            milliseconds=number(each.get("milliseconds")),
        )
        for each in _objects(content.get("layers"), 5000)
    ]


def _checkpoints(files: _Files) -> list[SavedCheckpoint]:
    """Those in the run folder; a run may have saved elsewhere, where nothing is read."""
    found: list[SavedCheckpoint] = []
    for parent in (f"{CHECKPOINTS}/", ""):
        names = [name for name in files.names(parent.rstrip("/") or ".") if not name.startswith(".")]
        for name in names[-MOST_CHECKPOINTS:]:
            if files.has(f"{parent}{name}/{MANIFEST}"):
                found += _checkpoint(name, files.json(f"{parent}{name}/{MANIFEST}"))
    best = max((each for each in found if each.score is not None), key=_rank, default=None)
    ordered = sorted(found, key=lambda each: (each.update, each.name))
    return [SavedCheckpoint(**(vars(each) | {"is_best": each is best})) for each in ordered]


def _rank(saved: SavedCheckpoint) -> tuple[float, float]:
    return saved.score or 0.0, -math.inf if saved.loss is None else -saved.loss


def _checkpoint(name: str, content: Mapping[str, Any]) -> Iterable[SavedCheckpoint]:
    progress, metrics, files = content.get("progress"), content.get("metrics"), content.get("files")
    if not isinstance(progress, dict):
        return ()
    metrics = metrics if isinstance(metrics, dict) else {}
    sizes = (
        [count(each.get("bytes")) for each in files.values() if isinstance(each, dict)]
        if isinstance(files, dict)
        else []
    )
    within = count(progress.get("images")) / (count(progress.get("epoch_images")) or 1)
    saved = SavedCheckpoint(
        name=name,
        update=count(progress.get("update")),
        epoch=count(progress.get("epoch")) + within,
        score=number(metrics.get("score", metrics.get("validation_accuracy"))),
        loss=number(metrics.get("score_loss", metrics.get("validation_loss"))),
        megabytes=sum(sizes) / 1e6,
    )
    return (saved,)
