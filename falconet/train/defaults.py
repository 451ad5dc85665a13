"""What the data and pretrained weights decide where the options leave it open; a checkpoint then states it."""

from dataclasses import replace
from typing import Any

from falconet.checkpoint import initial_weights
from falconet.checkpoint.initial_weights import Asked, InitialWeights
from falconet.config import commands, rules
from falconet.config.load import Loaded, Options
from falconet.config.settings import CHECKPOINT, WEIGHTS
from falconet.data.dataset import open_dataset
from falconet.errors import CheckpointError, ConfigError
from falconet.models import pretrained
from falconet.models.pretrained import FILE

PHOTOS_SEEN = 60_000  # photos that a training of automatic length shows to the model
FEWEST_EPOCHS, MOST_EPOCHS = 5, 40


def with_weights(loaded: Loaded[commands.TrainOptions]) -> tuple[Loaded[commands.TrainOptions], InitialWeights | None]:
    """The weights that a new run starts with, and the options with what they were trained with.

    Several processes may call it at once: the Hugging Face library locks its cache while it downloads.
    """
    options = loaded.options
    asked = options.training.pretrained
    if asked == "none" or (asked == "auto" and not _has_published(options)):
        return loaded, None
    if asked == "auto":
        asked, problem = "published", rules.unfit_for_weights(options.model)
        if problem:
            raise ConfigError(problem)
    found = find_weights(
        options.model.model,
        asked,
        fetched=not options.run.plan,
        otherwise="or --pretrained none to train from scratch",
    )
    return fitted(loaded, found), found


def find_weights(name: str, asked: Asked, *, otherwise: str, fetched: bool = True) -> InitialWeights:
    """The weights that --pretrained asks for; an error says how to get them. `otherwise`: the last of the ways."""
    try:
        return initial_weights.find(name, asked, fetched=fetched)
    except CheckpointError as error:
        if asked != "published":
            expected = "a safetensors or torch file, a checkpoint or a run folder"
        elif pretrained.is_published(name):
            expected = f"a network, its {FILE} as --pretrained PATH, a cache that has it in HF_HOME, {otherwise}"
        else:
            expected = f"a model of `falconet models` that has some, a file as --pretrained PATH, {otherwise}"
        raise CheckpointError(f"--pretrained: {error}; expected {expected}") from None


def fitted(loaded: Loaded[Options], weights: InitialWeights) -> Loaded[Options]:
    """The options with those that follow from weights, below the ones that the line states."""
    options: Any = loaded.options
    made = loaded.over({**weights.options, **weights.inputs.table(options.data)})
    sources = {name: WEIGHTS if source == CHECKPOINT else source for name, source in made.sources.items()}
    return replace(made, sources=sources)


def weight_notes(options: commands.TrainOptions, initial: InitialWeights | None) -> tuple[str, ...]:
    """Say why a run with --pretrained auto starts with random weights."""
    if options.training.pretrained != "auto" or initial or options.training.init_path:
        return ()
    return (f"there are no published weights for {options.model.model}: it starts with random ones",)


def _has_published(options: commands.TrainOptions) -> bool:
    """Whether auto means published weights: --init-path and models without any leave nothing to find."""
    return options.training.init_path is None and pretrained.is_published(options.model.model)


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
