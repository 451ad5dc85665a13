"""What the data decides where the options say auto; a checkpoint then states the number that was used."""

from dataclasses import replace

from falconet.config import commands, rules
from falconet.config.load import Loaded
from falconet.data.dataset import open_dataset

PHOTOS_SEEN = 60_000  # photos that a training of automatic length shows to the model
FEWEST_EPOCHS, MOST_EPOCHS = 5, 40


def settled(loaded: Loaded[commands.TrainOptions]) -> Loaded[commands.TrainOptions]:
    """The same options with numbers for those that depend on the data."""
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
    """Epochs for so many training images: small data is repeated more often."""
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(PHOTOS_SEEN / max(1, images))))
