"""What data, device and pretrained weights decide where the options leave it open; a checkpoint then states it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from falconet.checkpoint import format
from falconet.checkpoint.foreign import read_file
from falconet.checkpoint.initial_weights import InitialWeights
from falconet.checkpoint.manifest import MANIFEST
from falconet.checkpoint.origin import Origin, find_origin, own_origin
from falconet.config import commands, facts, rules
from falconet.config.fields import options_of, value_or
from falconet.config.load import LOWERED, LoadedTraining
from falconet.config.recipes import EXTENDS, PHOTOS_CONFIG, is_file, source_of
from falconet.config.settings import is_asked_for
from falconet.data.dataset import Dataset, open_dataset, refitted
from falconet.errors import ConfigError
from falconet.evaluation.saved_model import find_weights, fitted
from falconet.models import pretrained
from falconet.numerics.precision import automatic
from falconet.parallel.world import device_kind, require_device
from falconet.report.console import counted

EPOCHS_OF_ONE = 1000  # photo; four times as many photos are repeated half as often
FEWEST_EPOCHS, MOST_EPOCHS = 5, 60


def with_origin(loaded: LoadedTraining) -> tuple[LoadedTraining, tuple[str, ...]]:
    """The options of the model that follow from the weights of --init-path, and what to print about them.

    They are stored with the run, which needs the weights only once. Missing ones are reported where they are read.
    """
    path = loaded.options.training.init_path
    if path is None or not path.exists():
        return loaded, ()
    asked = loaded.options.model.model if loaded.chooses("model") else None
    if path.is_file() and not (path.parent / MANIFEST).exists():
        origin = find_origin(read_file(path), model=asked)
    else:
        folder = path.parent if path.is_file() else path
        origin = own_origin(format.choose(folder, "best", lambda _: None).manifest, model=asked)
    known = options_of(commands.TrainOptions)
    of_model = {name: value for name, value in origin.options.items() if known[name].path[0] == "model"}
    if not of_model:
        return loaded, ()
    loaded = loaded.over(Origin(origin.why, of_model).table())
    concluded = origin.line(loaded.sources)
    return loaded, (concluded,) if concluded else ()


def with_weights(loaded: LoadedTraining) -> tuple[LoadedTraining, InitialWeights | None]:
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


def weight_notes(loaded: LoadedTraining, initial: InitialWeights | None) -> tuple[str, ...]:
    """Say why a run starts with random weights, where published ones may be expected."""
    options, sources = loaded.options, loaded.sources
    if initial or options.training.init_path:
        return ()
    if options.training.pretrained == "auto":
        return (f"there are no published weights for {options.model.model}: it starts with random ones",)
    files = filter(is_file, sources.values())
    if options.data.data == "folder" and not is_asked_for(sources.get("pretrained")) and (file := next(files, None)):
        return (
            f"{file} has no `{EXTENDS}: {PHOTOS_CONFIG}`: what it leaves out has general defaults, such as random"
            " weights",
        )
    return ()


def _has_published(options: commands.TrainOptions) -> bool:
    """Whether auto means published weights: --init-path and models without any leave nothing to find."""
    return options.training.init_path is None and pretrained.is_published(options.model.model)


def open_images(options: commands.TrainOptions, *, global_batch: int) -> Dataset:
    """The images of a training."""
    return open_dataset(
        options.data,
        model=options.model.model,
        global_batch=global_batch,
        seed=options.run.seed,
        use_objects=facts.boxes_used(options.data, options.augmentation),
        percentage=options.training.dataset_percentage,
        to_train=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The options of a run without auto for those that depend on its data or device, and what was opened for them."""

    loaded: LoadedTraining
    initial: InitialWeights | None  # the weights that a new run starts with
    images: Dataset | None  # the data, if it is open and does not depend on the batch


def settle(loaded: LoadedTraining, *, is_new: bool) -> Settled:
    """Settle the options; a new run's weights are downloaded, and its photos opened.

    The photos are opened first: a wrong folder, like a missing device, is reported before hundreds of megabytes of
    weights are downloaded.
    """
    require_device(loaded.options.machine.device)
    photos = _photos(loaded.options) if is_new else None
    weighted, initial = with_weights(loaded) if is_new else (loaded, None)
    fitting = refitted(photos, weighted.options.data, weighted.options.model.model) if photos else None
    settled, images = _with_length(_with_precision(weighted), fitting)
    return Settled(loaded=settled, initial=initial, images=images)


def _photos(options: commands.TrainOptions) -> Dataset | None:
    """The user's photos, if those are the data."""
    return open_images(options, global_batch=options.data.micro_batch) if options.data.data == "folder" else None


def _with_precision(loaded: LoadedTraining) -> LoadedTraining:
    machine = loaded.options.machine
    if machine.precision != "auto":
        return loaded
    device = device_kind(machine.device)
    machine = replace(machine, precision=automatic(device))
    sources = _explained(loaded.sources, ["precision"], why=f"auto on {device}")
    return replace(loaded, options=replace(loaded.options, machine=machine), sources=sources)


def _with_length(loaded: LoadedTraining, images: Dataset | None) -> tuple[LoadedTraining, Dataset | None]:
    """The options with epochs, batch and warm-up for the number of images, unless the line states them."""
    options = loaded.options
    is_open = {name: loaded.sources.get(name) == source_of(PHOTOS_CONFIG) for name in LOWERED}
    if options.training.epoch != "auto" and not any(is_open.values()):
        return loaded, images
    images = images or open_images(options, global_batch=options.data.micro_batch)
    if options.training.epoch == "auto":
        options = replace(options, training=replace(options.training, epoch=epochs_for(len(images.train))))
    if is_open["micro-batch-size"]:
        micro_batch = min(options.data.micro_batch, batch_for(len(images.train)))
        options = replace(options, data=replace(options.data, micro_batch_size=micro_batch))
    if is_open["warmup-epoch"]:
        batch = (
            options.data.micro_batch * options.training.gradient_accumulation * value_or(options.parallel.replicas, 1)
        )
        per_epoch = max(1, len(images.train) // batch)
        updates = options.training.limit(per_epoch) or options.training.epochs * per_epoch
        warmup = warmup_for(options.learning_rate.warmup_epoch, updates=updates, per_epoch=per_epoch)
        options = replace(options, learning_rate=replace(options.learning_rate, warmup_epoch=warmup))
    is_fixed = facts.is_stored(options.data)  # others depend on the batch
    before = loaded.options
    changed = {
        "epoch": before.training.epoch != options.training.epoch,
        "micro-batch-size": before.data.micro_batch_size != options.data.micro_batch_size,
        "warmup-epoch": before.learning_rate.warmup_epoch != options.learning_rate.warmup_epoch,
    }
    why = f"for {counted(len(images.train), 'training image')}"
    sources = _explained(loaded.sources, [name for name, is_changed in changed.items() if is_changed], why=why)
    return replace(loaded, options=options, sources=sources), images if is_fixed else None


def _explained(sources: Mapping[str, str], changed: Sequence[str], *, why: str) -> dict[str, str]:
    """The sources of all values, with the reason where a value is no longer the one that its source states."""
    return {name: f"{source}: {why}" if name in changed else source for name, source in sources.items()}


def batch_for(images: int) -> int:
    """The largest power of two that makes four updates of an epoch, or eight images if it cannot."""
    return 1 << (max(images // 4, min(images, 8), 1).bit_length() - 1)


def warmup_for(epochs: float, *, updates: int, per_epoch: int) -> float:
    """Epochs of warm-up, at most a tenth of the updates; none if only the first update, at rate 0, would be in it."""
    warmup = min(epochs, round(updates / per_epoch / 10, 4))
    return warmup if warmup * per_epoch > 1 else 0.0


def epochs_for(images: int) -> int:
    """Epochs for so many training images: small data is repeated more often, large data is seen more of."""
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(EPOCHS_OF_ONE / sqrt(max(1, images)))))
