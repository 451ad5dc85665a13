"""`falconet validate`: measure the accuracy of a checkpoint, or of each one in a folder."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from falconet.checkpoint import format
from falconet.config.commands import ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, unused_notes
from falconet.config.settings import Setting
from falconet.errors import CheckpointError
from falconet.report.console import Say, Screen
from falconet.report.styles import FALCONET, Conventions, Origin, RunLog, Validated
from falconet.train import evaluate, saved_model
from falconet.train.evaluate import Accuracy, Evaluation

FOREIGN = (".pt", ".pth", ".bin", ".safetensors")
Measured = tuple[saved_model.Opened, Evaluation, float]  # seconds for the images


def run(loaded: Loaded[ValidateOptions], conventions: Conventions = FALCONET) -> int:
    line, stated, screen = loaded.line, loaded.options, Screen()
    path = stated.input.checkpoint_input_path
    assert path is not None
    output = stated.table.output or _beside(path)
    style = conventions.style(RunLog(screen.line, output.parent))
    if not style.tabulates:  # its file, beside the checkpoints, grows; ours is one table, replaced each time
        for measured in _measured(stated, line, screen.line):
            style.validated(_validated(measured))
        return 0
    found = [
        Accuracy(name=opened.name, epoch=opened.epoch, found=found)
        for opened, found, _ in _measured(stated, line, screen.line)
    ]
    rows = evaluate.tabulate_accuracies(found)
    evaluate.show_accuracies(rows, screen.line)
    evaluate.write_accuracies(rows, output, option="--output", named=stated.table.output is not None)
    screen.line(f"written to {output}")
    return 0


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


def _measured(stated: ValidateOptions, line: Sequence[Setting], say: Say) -> Iterator[Measured]:
    """Each model and its accuracy; options without effect are noted before the first."""
    noted = False
    for opened in _opened(stated, line, say):
        for note in unused_notes(opened.options, line) if not noted else ():
            say(note)
        noted = True
        start = time.perf_counter()
        yield opened, saved_model.measure(opened, say), time.perf_counter() - start


def _opened(stated: ValidateOptions, line: Sequence[Setting], say: Say) -> Iterator[saved_model.Opened]:
    """Each model; damaged checkpoints in a folder are noted and skipped."""
    path, which = stated.input.checkpoint_input_path, stated.choice.checkpoint
    assert path is not None
    if path.is_file() and path.suffix in FOREIGN:
        yield saved_model.open_foreign(path, line)
        return
    if which != "all":
        yield from saved_model.open_checkpoint(format.choose(path, which, say).folder, line)
        return
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
