"""`falconet predict`: the classes of photos, with their probabilities."""

import csv
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TextIO

from falconet import writing
from falconet.config.commands import PredictOptions
from falconet.config.load import Loaded, unused_notes
from falconet.config.options import Predict
from falconet.errors import ConfigError, UserError, named_option, printable
from falconet.exits import DONE, FAILED
from falconet.infer import photos
from falconet.infer.classifier import open_classifier
from falconet.infer.embeddings import EmbeddingFile, classifier_layer
from falconet.infer.photos import Photo
from falconet.infer.prediction import Prediction, predicted
from falconet.models import pretrained, views
from falconet.report.console import Counting, Lines, Screen, counted

WIDEST = 60  # characters of a column; longer classes are cut, longer names push their row to the right
MOST_NAME = 255  # bytes of a file's name


def run(loaded: Loaded[PredictOptions]) -> int:
    asked = loaded.options.predict
    console = Lines(stderr=True, highlight=False, soft_wrap=True)
    say = Screen(console).line
    classifier, options = open_classifier(PredictOptions, loaded.line, say)
    views_used = [f"averages the logits of {views.describe(classifier.tta)}"] if classifier.tta != "none" else []
    for text in (*classifier.loaded(), *views_used, *unused_notes(options, loaded.line)):
        say(text)
    failed: list[str] = []
    count = 0

    def problem(name: str, reason: str) -> None:
        failed.append(name)
        say(f"{name}: {reason}")

    with ExitStack() as held:
        out = held.enter_context(_output(asked.output, is_wanted=lambda: count > 0))
        several = classifier.several_labels
        sheet = held.enter_context(closing(_sheet(asked, out, several=several)))
        embeddings = None
        if asked.embeddings:
            with named_option("embeddings"):
                classifier_layer(classifier.model, len(classifier.class_names))
                embeddings = held.enter_context(EmbeddingFile(asked.embeddings))
        links = Links(asked.save_dir) if asked.save_dir else None
        # A table on the terminal shows the progress itself.
        counting = held.enter_context(Counting("predicting", quiet=out.isatty(), console=console))
        found = photos.find(asked.photos, stdin=sys.stdin.buffer, held=held, problem=problem)
        batch = None if asked.batch_size == "auto" else asked.batch_size
        for rows in photos.scored(classifier, found, batch=batch, features=embeddings is not None):
            counting.add(len(rows))
            for row in rows:
                if row.problem:
                    problem(row.photo.name, row.problem)
            answered = [row for row in rows if not row.problem]
            count += len(answered)
            predictions = [
                predicted(row.logits, classifier.class_names, top=asked.top, several=several, name=row.photo.name)
                for row in answered
            ]
            sheet.add(predictions)
            for row, prediction in zip(answered, predictions, strict=True):
                if embeddings:
                    embeddings.add(row.photo.name, row.features)
                if links:
                    for label in prediction.labels:
                        links.add(row.photo, label)
    if written := _written(asked, count):
        unread = f", {len(failed):,} not" if failed else ""
        say(f"{counted(count, 'photo')} answered{unread}; {written}")
    return FAILED if failed else DONE


def _written(asked: Predict, count: int) -> str:
    """What was written beside the screen, in words."""
    if asked.output and not count:
        return f"nothing written to {asked.output}"
    links = f"{asked.save_dir}/ (links)" if asked.save_dir else None
    places = [str(place) for place in (asked.output, links, asked.embeddings) if place]
    return f"written: {', '.join(places)}" if places else ""


@contextmanager
def _output(path: Path | None, *, is_wanted: Callable[[], bool]) -> Iterator[TextIO]:
    """The file that was asked for, or stdout; names of files keep their bytes.

    An earlier file is replaced at the end, and only if it then `is_wanted`.
    """
    if path is None:
        yield sys.stdout  # before a progress bar takes its place
        sys.stdout.flush()
        return
    is_plain = True  # else a pipe or a device
    try:
        with suppress(FileNotFoundError):
            is_plain = stat.S_ISREG(path.stat().st_mode)
        place = path.resolve() if is_plain else path  # a link keeps leading to the file
        aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}") if is_plain else place
        file = aside.open("x" if is_plain else "w", encoding="utf-8", errors="surrogateescape", newline="")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror or error}") from error
    try:
        with file:
            yield file
        if is_plain and is_wanted():
            aside.replace(place)
    finally:
        if is_plain:
            aside.unlink(missing_ok=True)


class Sheet(Protocol):
    """Takes predictions, some at a time."""

    def add(self, predictions: Sequence[Prediction]) -> None: ...

    def close(self) -> None: ...


def _sheet(asked: Predict, out: TextIO, *, several: bool) -> Sheet:
    if asked.json:
        return JsonSheet(out, several=several)
    return CsvSheet(out, asked.top, several=several) if asked.csv else TableSheet(out)


class TableSheet:
    """Columns of text, never narrower than before; further classes of a photo are in rows below it."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._left, self._middle = out, 0, 0

    def add(self, predictions: Sequence[Prediction]) -> None:
        rows = [
            ("" if number else printable(each.name), _short(guess.label), f"{100 * guess.probability:6.2f} %")
            for each in predictions
            for number, guess in enumerate(each.top)
        ]
        self._left = max(self._left, *(min(len(name), WIDEST) for name, _, _ in rows), 0)
        self._middle = max(self._middle, *(len(label) for _, label, _ in rows), 0)
        for name, label, probability in rows:
            self._out.write(f"{name.ljust(self._left)}  {label.ljust(self._middle)}  {probability}\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing is left to write."""


def _short(label: str) -> str:
    """A class as a column shows it: without the synonyms that ImageNet's have, in at most WIDEST characters."""
    first, *others = printable(label).split(", ")
    name = first if others and label in pretrained.imagenet_descriptions() else printable(label)
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


class JsonSheet:
    """An array with one object per photo, each on its own line."""

    def __init__(self, out: TextIO, *, several: bool) -> None:
        """`several`: photos have any number of labels, so they are listed."""
        self._out, self._several, self._before = out, several, "[\n"

    def add(self, predictions: Sequence[Prediction]) -> None:
        for each in predictions:
            row = {"path": each.name, **each.to_json(several=self._several)}
            self._out.write(self._before + json.dumps(row))
            self._before = ",\n"

    def close(self) -> None:
        self._out.write("[]\n" if self._before == "[\n" else "\n]\n")


class CsvSheet:
    """One row per photo; further classes are in further columns."""

    def __init__(self, out: TextIO, top: int, *, several: bool) -> None:
        """`several`: photos have any number of labels, so they are in a column of their own, as tables have them."""
        self._writer, self._top, self._several = csv.writer(out), top, several
        more = [f"{column}_{number}" for number in range(2, top + 1) for column in ("label", "probability")]
        self._writer.writerow(["path", *(["labels"] if several else []), "label", "probability", *more])

    def add(self, predictions: Sequence[Prediction]) -> None:
        for each in predictions:
            labels = ["|".join(each.labels)] if self._several else []
            self._writer.writerow([each.name, *labels, *(value for guess in each.top[: self._top] for value in guess)])

    def close(self) -> None:
        """Nothing is left to write."""


class Links:
    """Photos sorted into a folder per class, as links; nothing that is there is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[Path, int] = {}  # by place: the last number of photos with the same name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writing.probe(folder)
        except OSError as error:
            raise ConfigError(f"--save-dir: cannot write to {folder}: {error.strerror or error}") from error

    def add(self, photo: Photo, label: str) -> None:
        """Link to the photo; a photo of the same name gets a number, the same photo is linked once."""
        if photo.name == photos.STDIN:  # which is no file that a link could lead to
            return
        target = Path(os.path.abspath(photo.path))  # noqa: PTH100, a link of the user's stays one
        try:
            home = writing.subfolder(self._folder, folder_name(label))
            while not _linked(home / self._name(home, target), target):
                self._used[home / target.name] = self._used.get(home / target.name, 1) + 1
        except UserError as error:
            raise ConfigError(f"--save-dir: {error}") from None
        except OSError as error:
            raise ConfigError(f"--save-dir: cannot write to {self._folder}: {error.strerror or error}") from error

    def _name(self, home: Path, target: Path) -> str:
        number = self._used.get(home / target.name, 1)
        return target.name if number == 1 else f"{target.stem}-{number}{target.suffix}"


def folder_name(label: str) -> str:
    """A class as the name of a folder: a checkpoint may come from another person, and its names lead nowhere else."""
    name = label.replace("/", "_").replace("\0", "_")
    if name.startswith("."):
        name = f"_{name[1:]}"
    return os.fsdecode(os.fsencode(name)[:MOST_NAME]) or "_"


def _linked(place: Path, target: Path) -> bool:
    """Whether there is a link to the target now; False: the name is taken."""
    try:
        place.symlink_to(target)
    except FileExistsError:
        return place.is_symlink() and place.readlink() == target
    return True
