"""`falconet validate`: measure the accuracy of a checkpoint, in total and by class, or of each one in a folder."""

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from falconet import writing
from falconet.checkpoint import format
from falconet.config.commands import ValidateOptions
from falconet.config.facts import PHOTO_KINDS
from falconet.config.fields import value_or
from falconet.config.load import Loaded, typed, unused_notes
from falconet.config.settings import Setting
from falconet.data.loader import stretch
from falconet.errors import CheckpointError, ConfigError, named_option
from falconet.evaluation import accuracy_table, breakdown, saved_model
from falconet.evaluation.accuracy_table import Accuracy
from falconet.evaluation.breakdown import Breakdown, Collected, MultiLabelPredictions, Precisions, Predictions
from falconet.evaluation.evaluate import Evaluation, Observe, overlook, require_accuracy
from falconet.models import views
from falconet.parallel import environment
from falconet.parallel.world import World, open_machine
from falconet.report import console
from falconet.report.console import Counting, Say
from falconet.report.styles import FALCONET, Conventions, Origin, RunLog, Validated
from falconet.train import processes

Measured = tuple[saved_model.Opened, Evaluation, float]  # seconds for the images


def run(loaded: Loaded[ValidateOptions], conventions: Conventions = FALCONET) -> int:
    stated, place = loaded.options, environment.find_place(os.environ)
    asked = 1 if place else value_or(stated.copies.replicas, 1)
    devices, what = processes.devices_of(stated.machine) if asked > 1 else (1, "")
    count = min(asked, devices)
    if count < asked:
        console.spoken(words=conventions.words)(
            f"note: {asked} replicas requested, {what}: {count} measure, with the same result"
        )
    if count > 1:
        from falconet.parallel.launch import Workers, launch  # torch.distributed takes a second to import

        argv = ["validate", *typed(loaded.line)]
        workers = Workers(argv=argv, program=conventions.program, processes=count, restarts=0)
        return launch(workers, progress=lambda: None, say=console.spoken())
    with open_machine(stated.machine, place=place) as world:
        return _measured(loaded, conventions, world)


def _measured(loaded: Loaded[ValidateOptions], conventions: Conventions, world: World) -> int:
    """Measure each model; the first process prints and writes."""
    stated, screen = loaded.options, console.screen_of(world, words=conventions.words)
    say = console.spoken(world, words=conventions.words)  # about this process
    path = stated.input.checkpoint_input_path
    folder = stated.table.output.parent if stated.table.output else _folder(path)
    style = conventions.style(RunLog(screen.line, folder if world.is_first else None))
    if not style.tabulates:  # its file, beside the checkpoints, grows; ours is one table, replaced each time
        for opened in _opened(loaded, screen.line, world):
            require_accuracy(opened.images, "falconet validate")
            style.validated(_validated(_timed(opened, stated, world, say), count=world.size))
        return 0
    if world.is_first:
        writing.require_writable(stated.table.output or folder / accuracy_table.FILE, "--output")
    rows: list[Accuracy] = []
    details: list[dict[str, object]] = []
    better: list[Breakdown | Precisions] = []
    output = Path()
    for opened in _opened(loaded, screen.line, world):
        output = stated.table.output or folder / _file_name(path, opened)
        _require_apart(stated.table.predictions, output)
        answers, images, is_one = Collected(), len(_own(opened, world)), opened.images.label_sets is None
        with Counting(f"validating {opened.name}", total=images, quiet=not world.is_first) as counting:
            observers = [*([answers.add] if is_one else []), _counted(counting, images)]
            _, found, _ = _timed(opened, stated, world, say, breakdown.several(*observers))
        parts = (
            Breakdown.of(answers.read(world), opened.class_names)
            if is_one
            else Precisions(opened.class_names, found.by_class)
        )
        rows.append(Accuracy(name=opened.name, epoch=opened.epoch, found=found, classes=len(opened.class_names)))
        details.append(breakdown.measured_json(opened.name, opened.epoch, found, parts))
        better += [parts] if opened.is_better else []
    table = accuracy_table.tabulate(rows)
    if not world.is_first:
        return 0
    accuracy_table.show(table, screen.line)
    for text in (*better[0].lines(), "") if len(better) == 1 else ():
        screen.line(text)
    named, also = stated.table.output is not None, output.with_suffix(".json")
    accuracy_table.write(table, output, option="--output", named=named)
    accuracy_table.write_result(json.dumps({"models": details}) + "\n", also, option="--output", named=named)
    screen.line(f"written to {output} and {also}")
    if stated.table.predictions:
        screen.line(f"predictions of every image written to {stated.table.predictions}")
    return 0


def _require_apart(predictions: Path | None, table: Path) -> None:
    """Refuse one file for both: predictions are written first, and the table or its details would replace them."""
    written = [os.path.realpath(path) for path in (table, table.with_suffix(".json"))]
    if predictions and os.path.realpath(predictions) in written:
        raise ConfigError(f"--predictions: {predictions} is also written by --output; expected another file")


def _counted(counting: Counting, total: int) -> Observe:
    """An observer that counts images, without the padding of the last batch."""
    left = total

    def observe(_: Tensor, labels: Tensor) -> None:
        nonlocal left
        counting.add(min(left, len(labels)))
        left = max(0, left - len(labels))

    return observe


def _own(opened: saved_model.Opened, world: World) -> range:
    """The images that this process measures."""
    return stretch(len(opened.images.validation), replicas=world.size, replica=world.rank)


def _timed(
    opened: saved_model.Opened, stated: ValidateOptions, world: World, say: Say, observe: Observe = overlook
) -> Measured:
    """Measure a model, and write its predictions if asked; of a checkpoint's two models, only those of the better."""
    path = stated.table.predictions if opened.is_better else None
    with contextlib.ExitStack() as held:
        rows = io.StringIO(newline="")  # of the other processes, for the first
        if path is not None:
            with named_option("predictions"):
                file = held.enter_context(breakdown.open_predictions(path)) if world.is_first else rows
            source, names, sets = opened.images.validation, opened.class_names, opened.images.label_sets
            begin = _own(opened, world).start
            written = (
                Predictions(file, source, names, begin=begin)
                if sets is None
                else MultiLabelPredictions(file, source, names, sets, begin=begin)
            )
            observe = breakdown.several(observe, written.add)
        start = time.perf_counter()
        found = saved_model.measure(opened, say, observe, among=world)
        seconds = time.perf_counter() - start
        if path is not None:
            _, *others = world.texts(rows.getvalue(), "gathering the predictions")
            if world.is_first:
                file.writelines(others)
    return opened, found, seconds


def _validated(measured: Measured, *, count: int) -> Validated:
    opened, found, seconds = measured
    return Validated(
        name=opened.name,
        update=opened.update,
        epoch=opened.epochs,
        accuracy=found.score,
        loss=found.loss,
        images=found.images,
        seconds=seconds,
        batch=count * opened.options.data.validation_batch,
        origin=Origin(
            model=opened.options.model.model,
            data=opened.options.data.data,
            loss=opened.metrics.get("train_loss"),
            accuracy=opened.metrics.get("train_accuracy"),
        ),
    )


def _opened(loaded: Loaded[ValidateOptions], say: Say, world: World) -> Iterator[saved_model.Opened]:
    """Open each model; before the first, notes tell about photos and about options without effect."""
    noted = False
    for opened in _models(loaded.options, loaded.line, say, world):
        for note in (*opened.images.found(), *unused_notes(opened.options, loaded.line)) if not noted else ():
            say(note)
        if opened.other_data and (opened.images.held_out or 1) < 1 and not noted:
            say("note: --val-fraction 1 validates on all of them")
        if opened.options.views.tta != "none" and not noted:
            say(f"averages the logits of {views.describe(opened.options.views.tta)}")
        noted = True
        yield opened


def _models(stated: ValidateOptions, line: Sequence[Setting], say: Say, world: World) -> Iterator[saved_model.Opened]:
    """Open the models that were asked for; for all in a folder, damaged ones are noted and skipped."""
    path, which = stated.input.checkpoint_input_path, stated.choice.checkpoint
    if path is None:  # then --pretrained is given
        yield saved_model.open_pretrained(line)
        return
    folders = [] if path.is_file() else format.checkpoints_in(path)
    files = [path] if path.is_file() else [] if folders else _torch_files(path)
    world.agree("the checkpoints", " ".join(each.name for each in (*folders, *files)))
    if len(files) > 1 and stated.table.predictions:
        raise ConfigError(f"--predictions: takes one model, but {path} holds {len(files)} files; expected one of them")
    for file in files:
        opened = saved_model.open_foreign(file, line, say)
        saved_model.warn_of_misfit(opened, say)
        yield opened
    if files:
        return
    if which == "all":
        yield from _all_models(path, folders, line, say)
    else:
        yield from saved_model.open_checkpoint(format.choose(path, which, say).folder, line)


def _all_models(path: Path, folders: Sequence[Path], line: Sequence[Setting], say: Say) -> Iterator[saved_model.Opened]:
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


def _torch_files(folder: Path) -> list[Path]:
    """The PyTorch program's checkpoints, in the order of the epochs at the end of their names."""

    def epoch(path: Path) -> int:
        digits = re.search(r"(\d{1,9})$", path.stem)
        return int(digits[1]) if digits else 0

    return sorted(folder.glob("*.pt"), key=lambda path: (epoch(path), path.name))


def _folder(path: Path | None) -> Path:
    """The folder for the CSV: beside the model, never inside a checkpoint, which holds only its own files."""
    if path is None:
        return Path()
    return _named(path).parent if _is_one(path) else path


def _is_one(path: Path) -> bool:
    """Whether a path is one model, which may have others beside it, and not a run or a folder of models."""
    return path.is_file() or format.checkpoints_in(path) == [path]


def _named(path: Path) -> Path:
    """The same place, by a path that ends with its name: `.` and `..` have neither a name nor a parent."""
    return path if path.name not in ("", "..") else path.resolve()


def _file_name(path: Path | None, opened: saved_model.Opened) -> str:
    """The name of the table; a single model's contains the model's name, and that of photos from elsewhere."""
    data, named = opened.options.data, [Path(accuracy_table.FILE).stem]
    if path is None or _is_one(path):
        named.append(Path(opened.name).name if path is None else _named(path).name)
    if opened.other_data is not None:
        named.append(_name_of(opened.other_data))
    elif path is None or path.is_file():  # weights have no data of their own
        named.append(_name_of(data.data_dir) if data.data in PHOTO_KINDS and data.data_dir else data.data)
    return f"{'-'.join(named)}.csv"


def _name_of(photos: Path) -> str:
    place = Path(os.path.realpath(photos))
    return place.name if place.is_dir() else place.stem
