"""What the data and the device decide where the options say auto; a checkpoint then states what was used."""

from dataclasses import replace
from math import sqrt

from falconet.config import commands, rules
from falconet.config.load import Loaded
from falconet.data.dataset import open_dataset
from falconet.numerics.precision import automatic
from falconet.parallel.world import device_kind

EPOCHS_OF_ONE = 1000  # photo; four times as many photos are repeated half as often
FEWEST_EPOCHS, MOST_EPOCHS = 5, 60


def settled(loaded: Loaded[commands.TrainOptions]) -> Loaded[commands.TrainOptions]:
    """The same options without auto for those that depend on the data or the device."""
    return _with_epochs(_with_precision(loaded))


def _with_precision(loaded: Loaded[commands.TrainOptions]) -> Loaded[commands.TrainOptions]:
    machine = loaded.options.machine
    if machine.precision != "auto":
        return loaded
    machine = replace(machine, precision=automatic(device_kind(machine.device)))
    return replace(loaded, options=replace(loaded.options, machine=machine))


def _with_epochs(loaded: Loaded[commands.TrainOptions]) -> Loaded[commands.TrainOptions]:
    options = loaded.options
    if options.training.epoch != "auto":
        return loaded
    images = open_dataset(
        options.data,
        model=options.model.model,
        global_batch=options.data.micro_batch_size,
        seed=options.run.seed,
        use_objects=rules.boxes_used(options),
        percentage=options.training.dataset_percentage,
    )
    training = replace(options.training, epoch=epochs_for(len(images.train)))
    return replace(loaded, options=replace(options, training=training))


def epochs_for(images: int) -> int:
    """Epochs for so many training images: small data is repeated more often, large data is seen more of."""
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(EPOCHS_OF_ONE / sqrt(max(1, images)))))
