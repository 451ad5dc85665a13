"""`falconet upload`: send the metrics of a finished run, Falconet's or an original's, to Weights & Biases."""

import contextlib
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from falconet.config.commands import UploadOptions
from falconet.config.load import Loaded
from falconet.config.settings import read_yaml
from falconet.errors import ConfigError, DataError
from falconet.report.console import Screen, counted
from falconet.report.trackers.weights_and_biases import WeightsAndBiases

CONFIG, METRICS, TRAINING, VALIDATION = "config.yaml", "metrics.jsonl", "training.csv", "validation.csv"
OPTIONS = ("arguments.json", "app.json")  # of the TensorFlow and the PyTorch program
# As the TensorFlow program's upload_run.py renamed its columns, and those that it left out.
RENAMED = {
    "img_per_sec": "train_img_per_sec",
    "lr": "learning_rate",
    "train_acc_avg": "train_accuracy",
    "val_acc": "validation_accuracy",
}
LEFT_OUT = {"step", "iteration", "it_time", "train_acc_batch", "loss_batch"}
VALIDATED = ("val_acc", "validation_accuracy")  # the columns of validation.csv that are uploaded
Moment = tuple[int, dict[str, float]]  # updates so far, and the metrics at that point


def run(loaded: Loaded[UploadOptions]) -> int:
    options = loaded.options.upload
    folder = options.source
    assert folder is not None
    moments = read_moments(folder)
    if not moments:
        raise ConfigError(f"--source: {folder} has no metrics yet")
    name = options.name or folder.resolve().name
    sink = WeightsAndBiases(folder, project=options.wandb_project, name=name, config=_config(folder))
    with contextlib.closing(sink):
        for update, metrics in moments:
            sink.write(update, metrics)
    Screen().line(
        f"uploaded {counted(len(moments), 'log point')} of {folder} as {name} to the project {options.wandb_project}"
    )
    return 0


def read_moments(folder: Path) -> list[Moment]:
    """The log points in the order of updates, from an original's CSV files if there are any, else metrics.jsonl."""
    found: dict[int, dict[str, float]] = {}
    for update, metrics in _from_csv(folder) if (folder / TRAINING).exists() else _from_lines(folder):
        found.setdefault(update, {}).update(metrics)  # the later of two lines for one update counts
    return sorted(found.items())


def read_options(folder: Path) -> dict[str, Any]:
    """The options of an original's run."""
    for name in OPTIONS:
        path = folder / name
        if path.exists():
            return _object(path.read_text(encoding="utf-8"), where=path)
    return {}


def _config(folder: Path) -> dict[str, Any]:
    """The options of the run, as its program spelled them."""
    ours = read_yaml(folder / CONFIG) if (folder / CONFIG).exists() else None
    return read_options(folder) or (ours if isinstance(ours, dict) else {})


def _from_lines(folder: Path) -> Iterator[Moment]:
    path = folder / METRICS
    if not path.exists():
        raise DataError(f"{folder}: no run in it; expected {METRICS}, or {TRAINING} of an original")
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]  # a killed run may leave half a line
    for line in whole.splitlines():
        metrics = _object(line, where=path)
        update = metrics.pop("update", None)
        if not isinstance(update, int):
            raise DataError(f"{path}: a line without its update: {line[:60]}")
        yield update, {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _from_csv(folder: Path) -> Iterator[Moment]:
    for row in _rows(folder / TRAINING):
        numbers = _numbers(row, where=folder / TRAINING)
        yield (
            _update(numbers, folder / TRAINING),
            {RENAMED.get(name, name): value for name, value in numbers.items() if name not in LEFT_OUT},
        )
    for row in _rows(folder / VALIDATION) if (folder / VALIDATION).exists() else ():
        numbers = _numbers(row, where=folder / VALIDATION)
        yield (
            _update(numbers, folder / VALIDATION),
            {RENAMED.get(name, name): numbers[name] for name in VALIDATED if name in numbers},
        )


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _numbers(row: Mapping[str, str], *, where: Path) -> dict[str, float]:
    """The columns that hold a number; names of checkpoints and empty cells are skipped."""
    found = {}
    for name, text in row.items():
        try:
            found[name] = float(text)
        except (TypeError, ValueError):
            continue
    if not found:
        raise DataError(f"{where}: a row without a number")
    return found


def _update(numbers: Mapping[str, float], path: Path) -> int:
    for name in ("iteration", "validation_iteration"):
        if name in numbers:
            return round(numbers[name])
    raise DataError(f"{path}: a row without an iteration; expected a file that an original wrote")


def _object(text: str, *, where: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{where}: not a JSON object: {text[:60]}")
    return content
