"""`falconet predict`: predict the classes of photos, with their probabilities."""

import csv
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TextIO

from rich.cells import cell_len

from falconet import writing
from falconet.config.commands import PredictOptions
from falconet.config.load import Loaded, unused_notes
from falconet.config.tool_options import Predict
from falconet.errors import named_option, printable
from falconet.exits import DONE, FAILED
from falconet.infer import photos
from falconet.infer.classifier import Classifier, open_classifier
from falconet.infer.embeddings import EmbeddingFile, classifier_layer
from falconet.infer.photos import Photo, Scored
from falconet.infer.prediction import Prediction, predicted
from falconet.models import pretrained, views
from falconet.report.console import Counting, Lines, Say, Screen, counted, padded

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
    with ExitStack() as held:
        answers = Answers(asked, classifier, held, say)
        # A table on the terminal shows the progress itself.
        counting = held.enter_context(Counting("predicting", quiet=answers.on_terminal, console=console))
        found = photos.find(asked.photos, stdin=sys.stdin.buffer, held=held, problem=answers.refuse)
        batch = None if asked.batch_size == "auto" else asked.batch_size
        for rows in photos.scored(classifier, found, batch=batch, features=asked.embeddings is not None):
            counting.add(len(rows))
            answers.add(rows)
    if written := _written(asked, answers.count):
        unread = f", {answers.refused:,} not" if answers.refused else ""
        say(f"{counted(answers.count, 'photo')} predicted{unread}; {written}")
    return FAILED if answers.refused else DONE


class Answers:
    """Everything that is written about photos, until `held` is closed: predictions, embeddings and links."""

    def __init__(self, asked: Predict, classifier: Classifier, held: ExitStack, say: Say) -> None:
        self.count = self.refused = 0  # photos with and without an answer
        self._top, self._class_names, self._several = asked.top, classifier.class_names, classifier.several_labels
        self._say = say
        out = held.enter_context(_output(asked.output, is_wanted=lambda: self.count > 0))
        self.on_terminal = out.isatty()
        self._sheet = held.enter_context(closing(_sheet(asked, out, several=self._several)))
        self._embeddings = held.enter_context(_embeddings(asked.embeddings, classifier)) if asked.embeddings else None
        self._links = Links(asked.save_dir) if asked.save_dir else None

    def refuse(self, name: str, reason: str) -> None:
        self.refused += 1
        self._say(f"{name}: {reason}")

    def add(self, rows: Sequence[Scored]) -> None:
        for row in rows:
            if row.problem:
                self.refuse(row.photo.name, row.problem)
        answered = [row for row in rows if not row.problem]
        self.count += len(answered)
        predictions = [self._predicted(row) for row in answered]
        self._sheet.add(predictions)
        for row, prediction in zip(answered, predictions, strict=True):
            if self._embeddings:
                self._embeddings.add(row.photo.name, row.features)
            if self._links:
                self._links.add(row.photo, prediction.labels)

    def _predicted(self, row: Scored) -> Prediction:
        return predicted(row.logits, self._class_names, top=self._top, several=self._several, name=row.photo.name)


def _embeddings(path: Path, classifier: Classifier) -> EmbeddingFile:
    with named_option("embeddings"):
        classifier_layer(classifier.model, len(classifier.class_names))  # refuses a model that has none
        return EmbeddingFile(path)


def _written(asked: Predict, count: int) -> str:
    """A list of the files that were written, in words; empty: none was asked for."""
    files = [str(path) for path in (asked.output, asked.embeddings) if path]
    if files and not count:
        return f"nothing written to {' or '.join(files)}"
    links = f"{asked.save_dir}/ (links)" if asked.save_dir else None
    places = [str(place) for place in (asked.output, links, asked.embeddings) if place]
    return f"written: {', '.join(places)}" if places else ""


@contextmanager
def _output(path: Path | None, *, is_wanted: Callable[[], bool]) -> Iterator[TextIO]:
    """Open the file that was asked for, or stdout; names of files keep their bytes.

    An existing file is replaced at the end, and only if `is_wanted` is then true.
    """
    if path is None:
        yield sys.stdout  # before a progress bar takes its place
        sys.stdout.flush()
        return
    is_plain = True  # else a pipe or a device
    with writing.explained(path, option="--output"):
        with suppress(FileNotFoundError):
            is_plain = stat.S_ISREG(path.stat().st_mode)
        place = path.resolve() if is_plain else path  # a link keeps leading to the file
        aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}") if is_plain else place
        file = aside.open("x" if is_plain else "w", encoding="utf-8", errors="surrogateescape", newline="")
    try:
        with file:
            yield file
        if is_plain and is_wanted():
            aside.replace(place)
    finally:
        if is_plain:
            aside.unlink(missing_ok=True)


class Sheet(Protocol):
    """A form of output that takes predictions a few at a time."""

    def add(self, predictions: Sequence[Prediction]) -> None: ...

    def close(self) -> None: ...


def _sheet(asked: Predict, out: TextIO, *, several: bool) -> Sheet:
    if asked.json:
        return JsonSheet(out, several=several)
    return CsvSheet(out, asked.top, several=several) if asked.csv else TableSheet(out)


class TableSheet:
    """Columns of text that never become narrower; further classes of a photo are in rows below it."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._left, self._middle = out, 0, 0

    def add(self, predictions: Sequence[Prediction]) -> None:
        rows = [
            ("" if number else printable(each.name), _short(guess.label), f"{100 * guess.probability:6.2f} %")
            for each in predictions
            for number, guess in enumerate(each.top)
        ]
        self._left = max(self._left, *(min(cell_len(name), WIDEST) for name, _, _ in rows), 0)
        self._middle = max(self._middle, *(cell_len(label) for _, label, _ in rows), 0)
        for name, label, probability in rows:
            self._out.write(f"{padded(name, self._left)}  {padded(label, self._middle)}  {probability}\n")
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
        """`several`: whether photos have any number of labels, which are then listed."""
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
        """`several`: whether photos have any number of labels, which then have a column of their own, as in tables."""
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
    """Links to photos, in a folder per class; existing files are never replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[Path, int] = {}  # by place: the last number of photos with the same name
        with writing.explained(f"to {folder}", option="--save-dir"):
            folder.mkdir(parents=True, exist_ok=True)
            writing.probe(folder)

    def add(self, photo: Photo, labels: Iterable[str]) -> None:
        """Link to a photo from the folder of each class, once; another photo of the same name gets a number."""
        if photo.name == photos.STDIN:  # not a file that a link could lead to
            return
        target = Path(os.path.abspath(photo.path))  # noqa: PTH100, the user's own links are not resolved
        for label in labels:
            with writing.explained(f"to {self._folder}", option="--save-dir"):
                self._add(target, writing.subfolder(self._folder, folder_name(label)))

    def _add(self, target: Path, home: Path) -> None:
        while not _linked(home / self._name(home, target), target):
            self._used[home / target.name] = self._used.get(home / target.name, 1) + 1

    def _name(self, home: Path, target: Path) -> str:
        number = self._used.get(home / target.name, 1)
        return target.name if number == 1 else f"{target.stem}-{number}{target.suffix}"


def folder_name(label: str) -> str:
    """The name of a class's folder, which leads nowhere else: a checkpoint may come from another person."""
    name = label.replace("/", "_").replace("\0", "_")
    if name.startswith("."):
        name = f"_{name[1:]}"
    return os.fsdecode(os.fsencode(name)[:MOST_NAME]) or "_"


def _linked(place: Path, target: Path) -> bool:
    """Make a link to the target, unless it is there; False: the name is taken."""
    try:
        place.symlink_to(target)
    except FileExistsError:
        return place.is_symlink() and place.readlink() == target
    return True
