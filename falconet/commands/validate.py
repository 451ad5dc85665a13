"""`falconet validate`: measure the accuracy of a checkpoint, in total and by class, or of each one in a folder."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from falconet import writing
from falconet.checkpoint import format
from falconet.config.commands import ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, unused_notes
from falconet.config.settings import Setting
from falconet.errors import CheckpointError, ConfigError, named_option
from falconet.report.console import Counting, Say, Screen
from falconet.report.styles import FALCONET, Conventions, Origin, RunLog, Validated
from falconet.train import breakdown, evaluate, saved_model
from falconet.train.breakdown import Breakdown, Collected
from falconet.train.evaluate import Accuracy, Evaluation, Observe, overlook

FOREIGN = (".pt", ".pth", ".bin", ".safetensors")
Measured = tuple[saved_model.Opened, Evaluation, float]  # seconds for the images


def run(loaded: Loaded[ValidateOptions], conventions: Conventions = FALCONET) -> int:
    stated, screen = loaded.options, Screen()
    path = stated.input.checkpoint_input_path
    assert path is not None
    output = stated.table.output or _beside(path)
    style = conventions.style(RunLog(screen.line, output.parent))
    if not style.tabulates:  # its file, beside the checkpoints, grows; ours is one table, replaced each time
        for opened in _opened(loaded, screen.line):
            style.validated(_validated(_timed(opened, stated, screen.line)))
        return 0
    rows, details, shown = [], [], None
    for opened in _opened(loaded, screen.line):
        answers = Collected()
        _, found, _ = _timed(opened, stated, screen.line, answers.add)
        parts = Breakdown.of(answers.read(), opened.class_names)
        rows.append(Accuracy(name=opened.name, epoch=opened.epoch, found=found, classes=len(opened.class_names)))
        details.append(breakdown.measured_json(opened.name, opened.epoch, found, parts))
        shown = parts if opened.is_better else shown
    table = evaluate.tabulate_accuracies(rows)
    evaluate.show_accuracies(table, screen.line)
    if stated.choice.checkpoint != "all" and shown:
        for text in shown.lines():
            screen.line(text)
        screen.line("")
    evaluate.write_accuracies(table, output, option="--output", named=stated.table.output is not None)
    _write_details(details, output.with_suffix(".json"), named=stated.table.output is not None)
    screen.line(f"written to {output} and {output.with_suffix('.json')}")
    if stated.table.predictions:
        screen.line(f"predictions of every image written to {stated.table.predictions}")
    return 0


def _timed(opened: saved_model.Opened, stated: ValidateOptions, say: Say, observe: Observe = overlook) -> Measured:
    """Measure a model; the predictions of the better one of a checkpoint are written if that was asked for."""
    path, source = stated.table.predictions, opened.images.validation
    with contextlib.ExitStack() as held:
        counting = held.enter_context(Counting(f"validating {opened.name}", total=len(source)))
        observers = [observe, lambda _, labels: counting.add(len(labels))]
        if path is not None and opened.is_better:
            with named_option("predictions"):
                file = held.enter_context(breakdown.open_predictions(path))
            observers.append(breakdown.Predictions(file, source, opened.class_names).add)
        start = time.perf_counter()
        found = saved_model.measure(opened, say, breakdown.several(*observers))
    return opened, found, time.perf_counter() - start


def _write_details(models: Sequence[Mapping[str, object]], path: Path, *, named: bool) -> None:
    """Everything about each model, for programs; `named`: the user named the file, which may be a link."""
    text = json.dumps({"models": list(models)}) + "\n"
    try:
        if named:
            path.write_text(text, encoding="utf-8")
        else:
            writing.replace(path.parent, path.name, text)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror or error}") from error


def _validated(measured: Measured) -> Validated:
    opened, found, seconds = measured
    return Validated(
        name=opened.name,
        update=opened.update,
        epoch=float(opened.epoch.partition(" ")[0] or 0),
        accuracy=found.accuracy,
        loss=found.loss,
        images=found.images,
        seconds=seconds,
        batch=value_or(opened.options.data.validation_batch_size, opened.options.data.micro_batch_size),
        origin=Origin(
            model=opened.options.model.model,
            data=opened.options.data.data,
            loss=opened.metrics.get("train_loss"),
            accuracy=opened.metrics.get("train_accuracy"),
        ),
    )


def _opened(loaded: Loaded[ValidateOptions], say: Say) -> Iterator[saved_model.Opened]:
    """Each model; options without effect are noted before the first."""
    noted = False
    for opened in _models(loaded.options, loaded.line, say):
        for note in unused_notes(opened.options, loaded.line) if not noted else ():
            say(note)
        noted = True
        yield opened


def _models(stated: ValidateOptions, line: Sequence[Setting], say: Say) -> Iterator[saved_model.Opened]:
    """The models that were asked for; of all in a folder, damaged ones are noted and skipped."""
    path, which = stated.input.checkpoint_input_path, stated.choice.checkpoint
    assert path is not None
    if path.is_file() and path.suffix in FOREIGN:
        yield saved_model.open_foreign(path, line)
    elif which == "all":
        yield from _all_models(path, line, say)
    else:
        yield from saved_model.open_checkpoint(format.choose(path, which, say).folder, line)


def _all_models(path: Path, line: Sequence[Setting], say: Say) -> Iterator[saved_model.Opened]:
    folders = format.checkpoints_in(path)
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint in it; expected a checkpoint, a folder of them or a run folder")
    refused = []
    for folder in folders:
        try:
            format.verify(folder)
        except CheckpointError as error:
            refused.append(error)
            if len(folders) > 1:
                say(f"passed over {error}")
            continue
        yield from saved_model.open_checkpoint(folder, line)
    if len(refused) == len(folders):
        raise format.refuse(folders[0], refused[0])


def _beside(path: Path) -> Path:
    """Where the CSV goes: beside what was measured, never into a checkpoint, which holds only its own files."""
    one = path.is_file() or format.checkpoints_in(path) == [path]
    return (path.parent if one else path) / evaluate.ACCURACIES_FILE
