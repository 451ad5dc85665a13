"""What follows the last update of a phase: averages of its checkpoints, and validations of others."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import torch

from falconet.checkpoint import format, weight_average
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.weight_average import Averaging, average, averaging_of, select
from falconet.config import commands
from falconet.config.values import further_average
from falconet.data.dataset import Dataset
from falconet.errors import CheckpointError, Interrupted
from falconet.evaluation import accuracy_table
from falconet.evaluation.accuracy_table import Accuracy
from falconet.evaluation.saved_model import STEMS, epoch_of
from falconet.parallel.world import World
from falconet.report.console import counted
from falconet.report.styles import Origin, Validated
from falconet.train.build import BuiltPhase
from falconet.train.save import Saving
from falconet.train.validation import Validation

IsWhole = Callable[[Path], bool]  # of a checkpoint; says why not
Report = Callable[[Validated], None]


def conclude(built: BuiltPhase, saving: Saving, validation: Validation, folder: Path) -> Path | None:
    """Do what was asked for after the last update; return the average of the checkpoints, if there is one.

    Raises Interrupted if the run is to stop before all of it, or before the next phase.
    """
    options, world, path = built.options, built.site.world, built.options.validation.validate_checkpoints
    averaged: Path | None = None
    saving.finish()
    if options.averaging.weight_avg_strategy != "none":
        averaged = average_after_training(saving, validation, options, world=world)
    if path is not None and options.data.data != "synthetic" and built.phase.is_last:
        _validate_others(path, built, saving, validation, folder=folder)
    if not built.phase.is_last and world.max(torch.tensor(int(saving.stopping()))):
        raise Interrupted
    return averaged


def average_after_training(
    saving: Saving, validation: Validation, asked: commands.TrainOptions, *, world: World
) -> Path:
    """Write and measure every average that was asked for; the first one is what a next phase starts with."""

    @cache  # several averages may need a checkpoint, whose files take seconds to read
    def is_whole(folder: Path) -> bool:
        return format.is_whole(folder, saving.output.screen.line)

    first = _average(saving, validation, averaging_of(asked.averaging), suffix="", is_whole=is_whole, world=world)
    for text in asked.averaging.weight_avg_also:
        more = further_average(text)
        assert more is not None, "the rules of the options refuse others"
        how = Averaging(strategy=more.strategy, decay=more.decay, last=more.last, epochs=more.epochs)
        _average(saving, validation, how, suffix=more.suffix, is_whole=is_whole, world=world)
    return first


def _average(
    saving: Saving, validation: Validation, how: Averaging, *, suffix: str, is_whole: IsWhole, world: World
) -> Path:
    """Average the phase's checkpoints in the first process, and measure the result in all of them."""

    def written() -> str:
        folders = _averaged_folders(saving, how, is_whole=is_whole)
        if not folders:
            raise CheckpointError(f"{saving.folder}: contains no undamaged checkpoint to average")
        name = saving.output.style.average_name(_in_words(how, len(folders)))
        to = folders[-1].with_name(name) if name else weight_average.name_of(folders[-1], suffix)
        made = weight_average.made_of(folders, how)
        weight_average.write(folders, made, weights=average(folders, how), to=to)
        saving.output.screen.line(f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}) into {to}")
        return str(to)

    to = Path(world.once(written))
    if saving.plan.validation_mode != "none":
        state = saving.state  # which is saved by now, and can take other weights
        weights = format.read_tensors(to, "model", verified=format.verify(to))
        load_weights(state.model, state.stages.own(weights), where=str(to))
        origin = Origin(model=saving.identity.model, data=saving.identity.data, loss=None, accuracy=None)
        validation.average(to.name, suffix=suffix, origin=origin)
    return to


def _averaged_folders(saving: Saving, how: Averaging, *, is_whole: IsWhole) -> list[Path]:
    """The whole checkpoints of this phase that an average is of, oldest first; no more are looked at than it takes.

    Without what an interruption saved: an uninterrupted run must give the same average.
    """
    plan, due = saving.plan, []
    final = saving.state.progress.update  # saved out of turn by a training that ended early
    first = -math.inf if how.epochs is None else final - how.epochs * plan.updates_per_epoch
    for folder in format.checkpoints_in(saving.folder):
        manifest = format.readable_manifest(folder)
        if manifest is None:
            is_whole(folder)  # which says why not
            continue
        progress = manifest.progress
        in_turn = saving.was_due(progress) or progress.update == final
        if in_turn and plan.update_after(progress.epoch, progress.images) >= first:
            due.append(folder)
    newest_first = filter(is_whole, reversed(select(due, None, phase=plan.phase)))
    return list(islice(newest_first, how.last))[::-1]


def _in_words(how: Averaging, count: int) -> str:
    """`N_5` or `exp_0.97`, as in the original's names, whose N are epochs; or `exp_0.97_N_5`, which it did not have."""
    if how.strategy == "mean":
        return f"N_{how.last or count}" if how.epochs is None else f"N_{how.epochs}"
    return f"exp_{how.decay:.15g}" + (f"_N_{how.last}" if how.last else "")


def _validate_others(path: Path, built: BuiltPhase, saving: Saving, validation: Validation, *, folder: Path) -> None:
    """Measure the checkpoints in `path`, and report each, or write all of them as a table into the run folder."""
    world, style, say = built.site.world, saving.output.style, built.site.screen.line
    report: Report = (lambda _: None) if style.tabulates else style.validated
    measured = validate_folder(path, saving, validation, images=built.images, world=world, report=report)
    if style.tabulates and world.is_first:
        rows, file = accuracy_table.tabulate(measured), folder / accuracy_table.FILE
        accuracy_table.show(rows, say)
        accuracy_table.write(rows, file, option="--run-dir")
        say(f"written to {file}")


def validate_folder(
    path: Path, saving: Saving, validation: Validation, *, images: Dataset, world: World, report: Report
) -> list[Accuracy]:
    """Measure every fitting checkpoint in `path` with the run's model, which keeps the last one's weights.

    `report` is called with each as it is measured. Every process reads the folder, as for averages.
    """
    state = saving.state
    names = world.once(lambda: "\n".join(str(folder) for folder in _fitting(path, saving, images)))
    measured = []
    for folder in map(Path, names.splitlines()):
        manifest = format.read_manifest(folder)
        for stem, suffix in STEMS:
            if stem in manifest.stems:
                weights = format.model_weights(folder, manifest, stem)
                load_weights(state.model, state.stages.own(weights), where=str(folder))
                origin = Origin(
                    model=manifest.model,
                    data=manifest.option("data"),
                    loss=manifest.metrics.get("train_loss"),
                    accuracy=manifest.metrics.get("train_accuracy"),
                )
                found = validation.other(folder.name + suffix, manifest.progress, report, origin=origin)
                epoch = epoch_of(manifest)
                measured.append(Accuracy(name=folder.name + suffix, epoch=epoch, found=found, classes=manifest.classes))
    return measured


def _fitting(path: Path, saving: Saving, images: Dataset) -> Iterator[Path]:
    """The checkpoints that the run's model and images fit; the others are skipped with a line each."""
    count, trained = 0, saving.identity
    for folder in format.checkpoints_in(path):
        try:
            manifest = format.verify(folder)
            if manifest.model != trained.model:
                raise CheckpointError(f"{folder}: holds {manifest.model}, expected {trained.model}, which was trained")
            images.check_classes(manifest.class_names, where=str(folder), several=manifest.several_labels)
        except CheckpointError as error:
            saving.output.screen.line(f"skipped {error}")
            continue
        count += 1
        yield folder
    if not count:
        raise CheckpointError(
            f"--validate-checkpoints: {path} holds no whole checkpoint of {trained.model} on {trained.data};"
            f" the training itself is complete and saved as {saving.last}"
        )
