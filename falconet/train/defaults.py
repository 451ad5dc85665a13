"""What the data and pretrained weights decide where the options leave it open; a checkpoint then states it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from falconet.checkpoint import initial_weights
from falconet.checkpoint.initial_weights import InitialWeights
from falconet.config import commands, rules
from falconet.config.load import Loaded
from falconet.config.settings import CHECKPOINT, WEIGHTS
from falconet.data.dataset import open_dataset
from falconet.errors import CheckpointError, ConfigError
from falconet.models import pretrained

Table = Mapping[str, Mapping[str, Any]]  # options as a checkpoint stores them
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
        problem = rules.unfit_for_weights(options.model)
        if problem:
            raise ConfigError(problem)
    try:
        found = initial_weights.find(
            options.model.model, "published" if asked == "auto" else asked, fetched=not options.run.plan
        )
    except CheckpointError as error:
        raise CheckpointError(f"--pretrained: {error}; expected {_expected(asked)}") from None
    settled = loaded.over({**found.options, **_chosen(options, found.inputs.table())})
    sources = {name: WEIGHTS if source == CHECKPOINT else source for name, source in settled.sources.items()}
    return replace(settled, sources=sources), found


def weight_notes(options: commands.TrainOptions, initial: InitialWeights | None) -> tuple[str, ...]:
    """Say why a run with --pretrained auto starts with random weights."""
    if options.training.pretrained != "auto" or initial or options.training.init_path:
        return ()
    return (f"there are no published weights for {options.model.model}: it starts with random ones",)


def _has_published(options: commands.TrainOptions) -> bool:
    """Whether auto means published weights: --init-path and models without any leave nothing to find."""
    return options.training.init_path is None and pretrained.is_published(options.model.model)


def _expected(asked: object) -> str:
    if asked not in ("auto", "published"):
        return "a safetensors or torch file, a checkpoint or a run folder"
    return (
        "a network, its model.safetensors as --pretrained PATH, a cache that has it in HF_HOME, or --pretrained none"
        " to train from scratch"
    )


def _chosen(options: commands.TrainOptions, table: Table) -> Table:
    """Without what other options leave no room for."""
    data = options.data
    has_room = {
        "pixel-mean": rules.normalises_by_dataset(options),
        "pixel-deviation": rules.normalises_by_dataset(options),
        "interpolation": data.antialias,
        "validation-crop-ratio": data.validation_crop != "whole",
    }
    return {name: entry for name, entry in table.items() if has_room.get(name, True)}


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
