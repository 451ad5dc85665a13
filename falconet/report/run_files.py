"""The files of a run folder as values: everything that can be read, and a line about each problem.

A run folder may come from another person: anything unexpected is left out.
"""

import contextlib
import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from falconet.errors import DataError, path_near, printable
from falconet.report import folders
from falconet.report.answers import MOST_PICTURES, Answers, Picture, best_validated, read_answers, read_picture
from falconet.report.foreign_folder import ForeignFolder, Known, count, number, numbers, objects, text

CONFIG, PLAN, METRICS, TIMES, SUMMARY = "config.yaml", "plan.txt", "metrics.jsonl", "updates.jsonl", "summary.json"
REPORT, RESULTS, RECORDS = "report.html", "results.csv", "report"  # RECORDS: the folder of what only a report needs
ANSWERS, SEEN, LAYERS = f"{RECORDS}/answers.json", f"{RECORDS}/batch.json", f"{RECORDS}/layers.json"
ENVIRONMENT, MEMORY, ENDED = f"{RECORDS}/environment.json", f"{RECORDS}/memory.jsonl", f"{RECORDS}/ending.json"
PROFILE = "profile_summary.json"  # of --profile
VALIDATED = "validation.json"  # what `falconet validate` wrote, for runs without answers of their own
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
EXPORTS, EXPORT_RECORD = "export", "export.json"  # the folder of all formats; in each: what it is, what was measured
MOST_CHECKPOINTS = 100
RECENT = 300.0  # seconds since a log point, within which a run counts as going on a file system without locks
DEFAULT = "default"  # the source of an option that was not set

State = Literal["done", "going", "stopped"]
_OPTION = re.compile(r"([a-zA-Z0-9-]{1,80}): (.*?)(?:  # (.*))?")


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


class EarlyEnd(NamedTuple):
    """The reason why a run ended before its last update."""

    kind: str  # interrupted or failed
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run folder."""

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
    ending: EarlyEnd | None = None  # None: it has not ended, or could not say how
    written: float | None = None  # when the last log point was, in seconds since 1970
    problems: Sequence[str] = ()  # a line each

    @property
    def metric(self) -> str:
        """The metric of validations: accuracy, or mAP for images with several labels."""
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
    with opened(folder) as files:
        run = read_all(files)
        return run if state is None else replace(run, state=state)


def opened(folder: Path, known: dict[str, Known] | None = None) -> ForeignFolder:
    """The files of a run folder; DataError if it is none. `known`: results of earlier reads."""
    try:
        if not folder.is_dir():
            what = "a file" if folder.is_file() else "no such folder"
            meant = path_near(folder, folders.home("runs"))
            raise DataError(f"{folder}: {what}; expected a run folder{meant}")
        files = ForeignFolder(folder, known)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; expected a run folder that you may read") from error
    if not is_run(files):
        with files:
            raise DataError(f"{folder}: not a run folder; expected one with {CONFIG} and {METRICS}")
    return files


def is_run(files: ForeignFolder) -> bool:
    return any(map(files.has, (CONFIG, METRICS, SUMMARY)))


def read_progress(files: ForeignFolder) -> RunFiles:
    """The files that change during a run, without pictures and answers."""
    locked = files.is_locked()  # first, because a run writes its last files before it releases the lock
    moments, summary, mark = _moments(files), files.json(SUMMARY), files.mark(METRICS)
    written = mark[2] / 1e9 if mark else None
    ending = files.json(ENDED)
    if not moments and files.has(METRICS) and not ending and locked is False:  # else there may be none yet
        files.note(f"{METRICS}: has no log points")
    return RunFiles(
        name=printable(files.folder.resolve().name),
        state=_state(summary, moments, locked=locked, written=written),
        options=_options(files),
        plan=files.text(PLAN).splitlines()[:1000],
        moments=moments,
        update_times=[each for line in files.lines(TIMES) for each in numbers(line.get("milliseconds"))],
        memory=_memory(files),
        summary=summary,
        ending=EarlyEnd(text(ending.get("kind")), text(ending.get("reason"))) if ending else None,
        checkpoints=_checkpoints(files),
        environment={
            str(name): str(value)[:500]
            for name, value in list(files.json(ENVIRONMENT).items())[:100]
            if isinstance(value, str | int | float)
        },
        written=written,
        problems=files.problems,
    )


def read_all(files: ForeignFolder) -> RunFiles:
    run = read_progress(files)
    answers, seen, layers = (
        _told(files, name, read) for name, read in ((ANSWERS, read_answers), (SEEN, _seen), (LAYERS, _layers))
    )
    return replace(
        run,
        answers=answers or read_answers(best_validated(files.json(VALIDATED))),
        seen=seen,
        layers=layers or (),
        profile=files.json(PROFILE),
        problems=files.problems,
    )


def _told(files: ForeignFolder, name: str, read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The value read from a file; a note if the file holds another kind of object."""
    content = files.json(name)
    found = read(content)
    if content and not found:
        files.note(f"{name}: not in the format of a run; left out")
    return found


def read_memory(folder: Path) -> list[MemoryPoint]:
    """The memory that earlier starts of a run recorded."""
    with ForeignFolder(folder) as files:
        return _memory(files)


def logged_at(folder: Path, update: int) -> Mapping[str, float]:
    """The metrics that a run logged after an update."""
    with ForeignFolder(folder) as files:
        return next((each.metrics for each in _moments(files) if each.update == update), {})


def updates_in_summary(folder: Path) -> int:
    """The number of updates that a run had made when it ended; 0: it has not ended."""
    with ForeignFolder(folder) as files:
        return count(files.json(SUMMARY).get("updates"))


def _options(files: ForeignFolder) -> dict[str, Stated]:
    """Every option of config.yaml, which has one on a line, with its source as a comment."""
    found, bad, yaml = dict[str, Stated](), 0, files.text(CONFIG, needed=True)
    for line in yaml.splitlines()[:2000]:
        if match := _OPTION.fullmatch(line):
            name, value, source = match.groups()
            found[name] = Stated(_unquoted(value)[:1000], (source or DEFAULT)[:200])
        elif line.strip() and not line.startswith("#"):
            bad += 1
    if bad:
        files.note(f"{CONFIG}: {bad:,} {'line is not an option' if bad == 1 else 'lines are not options'}; left out")
    elif not found and files.has(CONFIG):
        files.note(f"{CONFIG}: has no options")
    return found


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        with contextlib.suppress(ValueError, RecursionError):
            plain = json.loads(value)
            return plain if isinstance(plain, str) else value
    return value


def _moments(files: ForeignFolder) -> list[Moment]:
    """The log points, merged by update; those of validations get their epoch from the others."""
    merged: dict[int, dict[str, float]] = {}
    for line in files.lines(METRICS):
        update = line.get("update")
        if isinstance(update, int) and not isinstance(update, bool) and 0 <= update < 1 << 53:
            values = {name[:200]: value for name, each in line.items() if (value := number(each)) is not None}
            values.pop("update")
            merged.setdefault(update, {}).update(values)
    known = [(update, metrics["epoch"]) for update, metrics in sorted(merged.items()) if "epoch" in metrics]
    return [
        Moment(update, metrics.get("epoch", _between(known, update)), metrics)
        for update, metrics in sorted(merged.items())
    ]


def _between(known: Sequence[tuple[int, float]], update: int) -> float:
    """The epoch at an update, interpolated from other updates."""
    if not known:
        return float(update)
    place = bisect_left(known, (update, -math.inf))
    low = known[place - 1] if place else (0, 0.0)
    if place == len(known):
        (first, begun), (last, ended) = (known[-2] if len(known) > 1 else (0, 0.0)), known[-1]
        return ended + (update - last) * (ended - begun) / max(1, last - first)
    high = known[place]
    return low[1] + (high[1] - low[1]) * (update - low[0]) / max(1, high[0] - low[0])


def _memory(files: ForeignFolder) -> list[MemoryPoint]:
    return [
        MemoryPoint(
            update=count(line.get("update")),
            device=count(line.get("device")) or None,
            host=count(line.get("host")) or None,
        )
        for line in files.lines(MEMORY)
    ]


def _state(
    summary: Mapping[str, Any], moments: Sequence[Moment], *, locked: bool | None, written: float | None
) -> State:
    if locked:
        return "going"
    last = max((moment.update for moment in moments), default=0)
    if summary and count(summary.get("updates")) >= last:
        return "done"
    is_recent = written is not None and time.time() - written < RECENT
    return "going" if locked is None and is_recent else "stopped"


def _seen(content: Mapping[str, Any]) -> SeenBatch | None:
    found = [(text(each.get("label")), read_picture(each)) for each in objects(content.get("pictures"), MOST_PICTURES)]
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
        for each in objects(content.get("layers"), 5000)
    ]


def _checkpoints(files: ForeignFolder) -> list[SavedCheckpoint]:
    """The checkpoints in the run folder; other places where a run may have saved are not read."""
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
