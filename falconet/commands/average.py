"""`falconet average`: the mean, or exponential average, of a run's checkpoints."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from falconet.checkpoint import format
from falconet.checkpoint.average import average, select
from falconet.checkpoint.foreign import load_weights
from falconet.config.commands import AverageOptions, TrainOptions, ValidateOptions
from falconet.config.load import idle_lines, input_path, load_options, of_command
from falconet.config.rules import boxes_used
from falconet.config.settings import Setting
from falconet.data.dataset import open_dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.errors import CheckpointError, ConfigError
from falconet.numerics.precision import REGIMES
from falconet.parallel import resources
from falconet.parallel.environment import is_first
from falconet.report.console import Say, Screen, counted
from falconet.train import checkpoints, saved_model
from falconet.train.evaluate import reestimate


def run(line: Sequence[Setting]) -> int:
    if not is_first(os.environ):
        return 0
    path, screen = input_path(line), Screen()
    whole = _whole(path, screen.line)
    # What the newest was trained with says how to read its data, not how to average.
    stored = format.read_manifest(whole[-1]).config
    data = {name: entry for name, entry in stored.items() if not name.startswith(("weight-avg", "checkpoint"))}
    options = load_options(AverageOptions, line, data).options
    for note in idle_lines(options, line):
        screen.line(note)
    how = checkpoints.rule_of(options.average)
    folders = select(whole, how.last, discarded=how.discarded)
    if not folders and how.discarded:
        raise ConfigError(f"--weight-avg-discard: got {how.discarded}, which leaves none of the checkpoints of {path}")
    if not folders:
        raise CheckpointError(f"{path}: holds averages alone; wanted checkpoints of training")
    to = options.average.checkpoint_output_path or checkpoints.averaged_name(folders[-1])
    if any(to.resolve() == folder.resolve() for folder in whole if not format.read_manifest(folder).averaged):
        raise ConfigError(f"--checkpoint-output-path: {to} is a checkpoint of training; wanted another name")
    weights = average(folders, replace(how, discarded=0))  # they are left out already
    screen.line(
        f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}):"
        f" {', '.join(folder.name for folder in folders)}"
    )
    if options.average.batchnorm_images:
        opened = _opened(folders[-1], line)
        load_weights(opened.model, weights, where=str(path))
        _measure_batchnorm(opened, folders[-1], line, images=options.average.batchnorm_images, note=screen.line)
        weights = dict(opened.model.state_dict())
    checkpoints.write_average(folders, how, weights=weights, to=to)
    screen.line(f"written to {to}")
    if options.average.validate:
        found = saved_model.measure(_opened(to, line), screen.line)
        screen.line(f"Accuracy on test set: {found.accuracy:.2f}%")
    return 0


def _whole(path: Path, say: Say) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    whole = []
    for folder in format.checkpoints_in(path):
        try:
            format.verify(folder)
        except CheckpointError as error:
            say(f"passed over {error}")
        else:
            whole.append(folder)
    if not whole:
        raise CheckpointError(f"{path}: no whole checkpoint in it; wanted a run folder or a folder of checkpoints")
    return whole


def _opened(folder: Path, line: Sequence[Setting]) -> saved_model.Opened:
    return next(saved_model.open_checkpoint(folder, of_command(ValidateOptions, line)))


def _measure_batchnorm(
    opened: saved_model.Opened, folder: Path, line: Sequence[Setting], *, images: int, note: Say
) -> None:
    """Measure batch norm anew on `images` training images, or one epoch of them, prepared as in training."""
    world = resources.open_machine(opened.options.machine)
    shared = of_command(TrainOptions, line)
    own = [setting for setting in shared if not setting.option.startswith(("weight-avg", "checkpoint"))]
    loaded = load_options(TrainOptions, own, format.read_manifest(folder).config)
    saved_model.refuse_download(loaded)
    training = loaded.options
    shape = BatchShape(micro_batch=training.data.micro_batch_size)
    data = open_dataset(
        training.data,
        model=training.model.model,
        global_batch=saved_model.global_batch(training),
        seed=training.run.seed,
        use_objects=boxes_used(training),
        percentage=training.training.dataset_percentage,
    )
    regime = REGIMES[training.machine.precision]
    crops = data.training_crops(training.augmentation, seed=training.run.seed)
    loader = Input(data=training.data, regime=regime, world=world, note=note).training_loader(
        data, crops=crops, shape=shape
    )
    batches = min(-(-images // shape.micro_batch), loader.updates_per_epoch)
    updates = islice(loader.updates(0), batches)
    model = opened.model.to(world.device)
    normalise = data.normalise(world.device)
    reestimate(
        model,
        (batch for update in updates for batch in update),
        normalise=normalise,
        regime=REGIMES[training.machine.precision],
    )
    loader.close()
    note(f"batch norm measured anew on {batches * shape.micro_batch:,} training images")
