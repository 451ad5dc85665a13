"""`falconet average`: average the checkpoints of a run into one."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

from falconet.checkpoint import format, weight_average
from falconet.checkpoint.foreign import load_weights
from falconet.checkpoint.manifest import MANIFEST
from falconet.checkpoint.weight_average import average, averaging_of, select
from falconet.config.commands import AverageOptions, TrainOptions, ValidateOptions
from falconet.config.facts import boxes_used
from falconet.config.load import Loaded, load_options, of_command, unused_notes
from falconet.config.settings import Setting
from falconet.data.dataset import open_dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.errors import CheckpointError, ConfigError
from falconet.evaluation import saved_model
from falconet.evaluation.running_statistics import reestimate
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import open_machine
from falconet.report.console import Say, Screen, counted
from falconet.train import run_folder


def run(loaded: Loaded[AverageOptions]) -> int:
    line, path, screen = loaded.line, loaded.options.input.checkpoint_input_path, Screen()
    assert path is not None
    whole = _whole(path, screen.line)
    # The options stored in the newest one decide how its data is read, not how to average.
    stored = format.read_manifest(whole[-1]).config
    data = {name: entry for name, entry in stored.items() if not name.startswith(("weight-avg", "checkpoint"))}
    options = loaded.over(data).options
    for note in unused_notes(options, line):
        screen.line(note)
    how = averaging_of(options.average)
    folders = select(whole, how.last, discarded=how.discarded)
    if not folders and how.discarded:
        raise ConfigError(f"--weight-avg-discard: got {how.discarded}, which leaves no checkpoint of {path}")
    if not folders:
        raise CheckpointError(f"{path}: holds only averages; expected checkpoints of training")
    made = weight_average.made_of(folders, how)
    to = _destination(options.average.checkpoint_output_path, folders[-1], made, say=screen.line)
    trained = [folder for folder in whole if not format.read_manifest(folder).averaged]
    if os.path.realpath(to) in map(os.path.realpath, trained):
        raise ConfigError(f"--checkpoint-output-path: {to} is a checkpoint of training; expected another name")
    to.parent.mkdir(parents=True, exist_ok=True)
    with _undisturbed(to.parent):
        weights = average(folders, replace(how, discarded=0))  # already left out
        screen.line(
            f"averaged {counted(len(folders), 'checkpoint')} ({how.strategy}):"
            f" {', '.join(folder.name for folder in folders)}"
        )
        if options.average.batchnorm_images:
            opened = _opened(folders[-1], line)
            load_weights(opened.model, weights, where=str(path))
            _reestimate_batchnorm(opened, folders[-1], line, images=options.average.batchnorm_images, note=screen.line)
            weights = dict(opened.model.state_dict())
        replaced = _made_otherwise(to, made)
        weight_average.write(folders, made, weights=weights, to=to)
    screen.line(f"written to {to}{', in place of another average' if replaced else ''}")
    if options.average.validate:
        found = saved_model.measure(_opened(to, line), screen.line)
        screen.line(f"{found.metric.name} of the average: {found.score:.2f}%")
    return 0


def _destination(asked: Path | None, newest: Path, made: Mapping[str, object], *, say: Say) -> Path:
    """The checkpoint to write: `asked`, or one inside it if it is a folder of other things, or beside the others.

    Under a name that is not asked for, an average that was made otherwise is kept.
    """
    is_folder = asked is not None and asked.is_dir() and not format.looks_like_one(asked)
    if asked is not None and not is_folder:
        return asked
    home = newest.parent if asked is None else asked / "checkpoints" if (asked / "checkpoints").is_dir() else asked
    to = home / weight_average.name_of(newest).name
    if not _made_otherwise(to, made):
        return to
    strategy, decay, of = made["strategy"], made["decay"], made["of"]
    assert isinstance(of, list)
    kind = f"exp_{decay:.15g}" if strategy == "exponential" else strategy
    say(f"{to} is another average, and kept")
    return home / weight_average.name_of(newest, f"{kind}_{len(of)}").name


def _made_otherwise(folder: Path, made: Mapping[str, object]) -> bool:
    """Whether an average is there that was made in another way, or of other checkpoints."""
    try:
        found = format.read_manifest(folder).content.get("averaged") if folder.is_dir() else None
    except CheckpointError:  # damaged: of no use
        return False
    return bool(found) and found != made


def _undisturbed(folder: Path) -> AbstractContextManager[None]:
    """The lock on a folder where a run saves, until the average is written; other folders need none."""
    if any(not _is_average(path.parent) for path in folder.glob(f"[!.]*/{MANIFEST}")):
        return run_folder.alone(folder, option="--checkpoint-output-path")
    return nullcontext()


def _is_average(folder: Path) -> bool:
    try:
        return format.read_manifest(folder).averaged
    except CheckpointError:  # damaged, so perhaps of a run
        return False


def _whole(path: Path, say: Say) -> list[Path]:
    """The undamaged checkpoints of a run, oldest first."""
    whole = format.undamaged(path, say)
    if not whole:
        raise CheckpointError(
            f"{path}: contains no undamaged checkpoint; expected a run folder or a folder of checkpoints"
        )
    return whole


def _opened(folder: Path, line: Sequence[Setting]) -> saved_model.Opened:
    return next(saved_model.open_checkpoint(folder, of_command(ValidateOptions, line)))


def _reestimate_batchnorm(
    opened: saved_model.Opened, folder: Path, line: Sequence[Setting], *, images: int, note: Say
) -> None:
    """Re-estimate batch norm's statistics on `images` training images, at most one epoch, prepared as in training."""
    world = open_machine(opened.options.machine)
    shared = of_command(TrainOptions, line)
    own = [setting for setting in shared if not setting.option.startswith(("weight-avg", "checkpoint"))]
    loaded = load_options(TrainOptions, own, format.read_manifest(folder).config)
    saved_model.refuse_download(loaded)
    training = loaded.options
    shape = BatchShape(micro_batch=training.data.micro_batch)
    data = open_dataset(
        training.data,
        model=training.model.model,
        global_batch=saved_model.global_batch(training),
        seed=training.run.seed,
        use_objects=boxes_used(training.data, training.augmentation),
        percentage=training.training.dataset_percentage,
        to_train=True,
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
    note(f"batch norm re-estimated on {batches * shape.micro_batch:,} training images")
