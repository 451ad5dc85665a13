"""Checkpoints and foreign weights as models: to measure, or to start with."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from falconet.checkpoint import format, initial_weights
from falconet.checkpoint.foreign import fitting_model, load_foreign, load_weights, read_file, read_weights
from falconet.checkpoint.initial_weights import Asked, InitialWeights
from falconet.checkpoint.manifest import Manifest, require_folder
from falconet.checkpoint.origin import find_origin
from falconet.config.commands import TrainOptions, ValidateOptions
from falconet.config.facts import PHOTO_KINDS
from falconet.config.fields import value_or
from falconet.config.load import Loaded, OptionsT, load_options
from falconet.config.options import Data
from falconet.config.settings import CHECKPOINT, WEIGHTS, Setting, is_asked_for
from falconet.data.dataset import Dataset, open_dataset, require_local
from falconet.data.sources.folder import validates_by_name
from falconet.errors import CheckpointError, ConfigError, DataError, named_option
from falconet.evaluation import evaluate
from falconet.evaluation.evaluate import Evaluation, Observe, never, overlook
from falconet.evaluation.running_statistics import misfit_warning
from falconet.models import pretrained
from falconet.models.pretrained import FILE
from falconet.models.zoo import build_model
from falconet.numerics.precision import REGIMES
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import ALONE, World, open_machine
from falconet.report.console import Say

STEMS = (("model", ""), ("ema", " (moving average)"))  # which models of a checkpoint are measured, and their labels


@dataclass(frozen=True)
class Opened:
    """A model with its weights, its options and images, and its source."""

    name: str
    epoch: str
    model: nn.Module
    options: ValidateOptions
    images: Dataset
    class_names: tuple[str, ...]
    update: int = 0  # updates that made its weights
    epochs: float = 0.0  # as many, `epoch` as a number
    metrics: Mapping[str, float] = field(default_factory=dict)  # of its training, at the update it was saved at
    is_better: bool = True  # of a checkpoint's weights and their moving average, by their validation
    other_data: Path | None = None  # the data folder, if it is not the one that its run was trained on


def global_batch(options: TrainOptions) -> int:
    """Images in one update of a training."""
    micro_batches = options.training.gradient_accumulation * value_or(options.parallel.replicas, 1)
    return options.data.micro_batch * micro_batches


def _here(gone: Path) -> str:
    """A suggestion, if the end of a path leads somewhere from the current folder: a project may have been moved."""
    ends = (Path(*gone.parts[start:]) for start in range(1, len(gone.parts)))
    found = next((end for end in ends if end.exists()), None)
    return f"; did you mean '--data-dir {found}'?" if found else ""


def refuse_download(loaded: Loaded[Any]) -> None:
    """Never download data that only a checkpoint names; its photos must be where the run had them."""
    if any(is_asked_for(loaded.sources.get(name)) for name in ("data", "data-dir")):
        return
    data = loaded.options.data
    if data.data in PHOTO_KINDS and data.data_dir is not None and not data.data_dir.exists():
        here = "" if data.data_dir.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"{data.data_dir}: no such folder{here}; the run was trained on it; expected --data-dir, where its photos"
            f" are{_here(data.data_dir)}"
        )
    try:
        require_local(data)
    except DataError as error:
        raise DataError(
            f"{error}, and data that only a checkpoint names is not downloaded; expected --data-dir, the folder that"
            f" has it, or --data {data.data}, which downloads it"
        ) from None


def open_checkpoint(folder: Path, line: Sequence[Setting]) -> Iterator[Opened]:
    """The model of a whole checkpoint, then its moving average if it has one; the line overrides its options."""
    manifest = format.verify(folder)
    options, images = images_of(folder, manifest, line)
    other = None if _is_own(options.data, manifest) else options.data.data_dir
    for stem, suffix in STEMS:
        if stem not in manifest.stems:
            continue
        model = _built(options, classes=manifest.classes)
        load_weights(model, format.model_weights(folder, manifest, stem), where=str(folder), name=options.model.model)
        yield Opened(
            name=folder.name + suffix,
            epoch=epoch_of(manifest),
            model=model,
            options=options,
            images=images,
            class_names=manifest.class_names,
            update=manifest.progress.update,
            epochs=manifest.progress.epochs,
            metrics=manifest.metrics,
            is_better=stem == manifest.better_stem,
            other_data=other,
        )


def images_of(folder: Path, manifest: Manifest, line: Sequence[Setting]) -> tuple[ValidateOptions, Dataset]:
    """The images that a checkpoint is measured on, and the options; the line overrides its run's."""
    loaded = load_options(ValidateOptions, line, manifest.config)
    options = loaded.options
    refuse_download(loaded)
    # Generated images depend on the seed and the global batch of training, whatever the micro-batch here.
    trained = load_options(TrainOptions, [], manifest.config).options
    data = options.data
    if not _is_own(data, manifest):
        # A run's list leaves out photos of its own data.
        is_listed = is_asked_for(loaded.sources.get("exclude-list"))
        data = replace(_whole(data), exclude_list=data.exclude_list if is_listed else None)
    images = open_dataset(data, model=options.model.model, global_batch=global_batch(trained), seed=trained.run.seed)
    return options, images.of_classes(manifest.class_names, where=folder.name, several=manifest.several_labels)


def _is_own(data: Data, manifest: Manifest) -> bool:
    """Whether it is the data that a checkpoint's run was trained on; a path may have several spellings."""
    trained = load_options(ValidateOptions, [], manifest.config).options.data
    if data.data not in PHOTO_KINDS or data.data_dir is None or trained.data_dir is None:
        return data.data_dir == trained.data_dir
    return os.path.realpath(data.data_dir) == os.path.realpath(trained.data_dir)  # Path's raises for a link to itself


def foreign_images(data: Data, *, model: str) -> Dataset:
    """The images that weights from elsewhere are measured on."""
    return open_dataset(_whole(data), model=model, global_batch=data.micro_batch, seed=0)


def of_imagenet(images: Dataset, class_names: tuple[str, ...], *, where: str) -> Dataset:
    """Images in some of ImageNet's folders, called by number or description, with the classes of a model of all."""
    synsets, descriptions = pretrained.imagenet_classes(pretrained.IMAGENET_CLASSES), pretrained.imagenet_descriptions()
    numbered = images.renamed(dict(zip(descriptions, synsets, strict=True)))
    if class_names not in (synsets, descriptions) or not {*numbered.class_names} <= {*synsets}:
        return images
    # By number: two classes are called crane.
    aligned = numbered.of_classes(synsets, where=where, several=False)
    return aligned.renamed(dict(zip(synsets, class_names, strict=True)))


def _whole(data: Data) -> Data:
    """All photos of a folder that is called val or test validate, not a share of each class."""
    is_part = data.data_dir is not None and validates_by_name(data.data_dir)
    return replace(data, val_fraction=1.0) if is_part else data


def epoch_of(manifest: Manifest) -> str:
    """Whole epochs trained, and images of the next one."""
    progress = manifest.progress
    return f"{progress.epoch}" + (f" + {progress.images:,} images" if progress.images else "")


def open_foreign(path: Path, line: Sequence[Setting], note: Say) -> Opened:
    """Foreign weights in the model, and on the data, that the line or the file itself names."""
    file, named = read_file(path), {setting.option: setting.values for setting in line}
    origin = find_origin(file, model=named["model"][-1] if "model" in named else None)
    given = {*named, *origin.options, *(("data",) if "data-dir" in named else ())}  # a folder implies --data folder
    missing = [f"--{name}" for name in ("model", "data") if name not in given]
    if missing:
        other = fitting_model(file.weights, where=str(path)) if "--model" in missing else None
        fits = f"; these weights fit --model {other[0]}" if other else ""
        raise ConfigError(f"{path}: holds only weights; expected {' and '.join(missing)} as well{fits}")
    loaded = load_options(ValidateOptions, line, origin.table())
    if concluded := origin.line(loaded.sources):
        note(concluded)
    refuse_download(loaded)
    options = loaded.options
    images = foreign_images(options.data, model=options.model.model)
    model = _built(options, classes=images.classes)
    load_foreign(model, file.weights, where=str(path), name=options.model.model)
    return Opened(path.name, "", model, options, images, images.class_names)


def load_initial(model: nn.Module, path: Path, *, name: str, note: Say) -> None:
    """Give a new model all weights of a file, or those that predictions use of a checkpoint, or of the best one."""
    with named_option("init_path"):
        if path.is_file():
            load_foreign(model, read_weights(path), where=str(path), name=name)
            return
        require_folder(path, or_weights=True)
        folder, manifest = format.choose(path, "best", note)
        weights = format.model_weights(folder, manifest, manifest.better_stem)
        load_weights(model, weights, where=str(folder), name=name)


def load_published(model: nn.Module, name: str, *, classes: int) -> str:
    """Give a new model its published weights, the classifier's only if the classes match; returns what they are."""
    found, numbers = initial_weights.find(name, "published"), tuple(map(str, range(classes)))
    found.load(model, name=f"this {name}", class_names=numbers)
    is_other = not found.keeps_classifier(numbers)
    return f"weights {found.source}" + (f", except the classifier's: {classes} classes here" if is_other else "")


def find_weights(name: str, asked: Asked, *, otherwise: str, fetched: bool = True) -> InitialWeights:
    """The weights that --pretrained asks for; an error says how to get them. `otherwise`: the last of the ways."""
    if asked != "published":
        with named_option("pretrained"):
            return initial_weights.find(name, asked)
    try:
        return initial_weights.find(name, asked, fetched=fetched)
    except CheckpointError as error:
        if pretrained.is_published(name):
            file = f"--pretrained {FILE} after `{pretrained.download_line(name)}` on another machine"
            expected = f"a network, {file}, {otherwise}"
        else:
            expected = f"a model of `falconet models` that has some, a file as --pretrained PATH, {otherwise}"
        raise CheckpointError(f"--pretrained: {error}; expected {expected}") from None


def fitted(loaded: Loaded[OptionsT], weights: InitialWeights) -> Loaded[OptionsT]:
    """The options with those that follow from weights, below the ones that the line states."""
    options: Any = loaded.options
    made = loaded.over({**weights.options, **weights.inputs.table(options.data)})
    sources = {name: WEIGHTS if source == CHECKPOINT else source for name, source in made.sources.items()}
    return replace(made, sources=sources)


def open_pretrained(line: Sequence[Setting]) -> Opened:
    """Published weights or those of a file, with the preparation of photos that they were trained with."""
    if not {"model", "data-dir"} <= {setting.option for setting in line}:
        raise ConfigError("--pretrained: expected --model and --data-dir as well, the photos to validate it on")
    loaded = load_options(ValidateOptions, line)
    asked = loaded.options.pretrained.pretrained
    assert asked != "none"
    found = find_weights(loaded.options.model.model, asked, otherwise="or --checkpoint-input-path")
    options = fitted(loaded, found).options
    images = foreign_images(options.data, model=options.model.model)
    images = of_imagenet(images, found.class_names, where=found.source)
    if {*images.class_names} <= {*found.class_names}:
        images = images.of_classes(found.class_names, where=found.source, several=found.several_labels)
    if not found.keeps_classifier(images.class_names):
        raise CheckpointError(
            f"--pretrained: {found.source} knows {found.classes:,} classes, the data has {images.classes:,}"
            f"{' others' if images.classes == found.classes else ''}; `falconet train {options.data.data_dir}` trains"
            " it on yours"
        )
    model = _built(options, classes=images.classes)
    found.load(model, name=options.model.model, class_names=images.class_names)
    return Opened(found.source, "", model, options, images, images.class_names)


def _built(options: ValidateOptions, *, classes: int) -> nn.Module:
    """The model on its device, with weights in the format of its training."""
    model = build_model(options.model, classes=classes, seed=0)
    return REGIMES[options.machine.precision].prepare(model, open_machine(options.machine).device)


def warn_of_misfit(opened: Opened, note: Say) -> None:
    """Note if the statistics of foreign weights do not fit the images, which loading them cannot show."""
    regime, world = REGIMES[opened.options.machine.precision], open_machine(opened.options.machine)
    warning = misfit_warning(opened.model, opened.images, opened.options.data, regime=regime, world=world)
    if warning:
        note(warning)


def measure(opened: Opened, note: Say, observe: Observe = overlook, *, among: World = ALONE) -> Evaluation:
    """The accuracy of an opened model on its validation images, which the processes of `among` share."""
    options, images = opened.options, opened.images
    world = replace(among, device=open_machine(options.machine).device)
    world.agree("the model", opened.name)
    if options.data.data == "synthetic":
        raise ConfigError("--data synthetic: has no validation images; expected data that has some")
    images.check_classes(opened.class_names, where=opened.name)
    evaluator = evaluate.evaluator(
        images,
        options.data,
        regime=REGIMES[options.machine.precision],
        world=world,
        note=note,
        observe=observe,
        tta=options.views.tta,
        capture=options.machine.capture,
    )
    try:
        found = evaluator(opened.model, never)
    except FailedTogetherError as failed:
        raise failed.error from failed.error.__cause__
    warning = found.warning(f"{opened.name}: the validation")
    if warning and world.is_first:
        note(warning)
    if found.left_out:
        note(evaluate.left_out_line(found.left_out))
    return found
