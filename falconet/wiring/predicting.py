"""A checkpoint, foreign weights or a model by name, opened to predict; the data it was trained on is not needed."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from falconet.checkpoint import files
from falconet.checkpoint.foreign import load_weights, read_weights
from falconet.checkpoint.manifest import Manifest
from falconet.config.ranges import value_or
from falconet.config.schema import ServeOptions
from falconet.config.settings import Setting
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, short_side
from falconet.errors import ConfigError
from falconet.infer.predictor import Classifier
from falconet.models import zoo
from falconet.numerics.partials import half_partials
from falconet.numerics.precision import REGIMES
from falconet.parallel import resources
from falconet.report.screen import Say
from falconet.wiring.building import build_model
from falconet.wiring.reading import load_options


def open_classifier(line: Sequence[Setting], note: Say) -> tuple[Classifier, ServeOptions]:
    """What the line names, and the options with those of its checkpoint below them."""
    options = load_options(ServeOptions, line).options
    path = options.input.checkpoint_input_path
    if path is None or path.is_file():
        return _fresh(options, path, line, note), options
    folder = files.newest_whole(path, note)
    manifest = files.verify(folder)
    note(f"weights of {folder}, after epoch {manifest.progress.epoch}")
    options = load_options(ServeOptions, line, manifest.config).options
    return _trained(options, folder, manifest, note), options


def _fresh(options: ServeOptions, path: Path | None, line: Sequence[Setting], note: Say) -> Classifier:
    """A model by name, with random weights or those of a file."""
    if not any(setting.option == "model" for setting in line):
        where = f"{path}: holds weights alone; wanted --model beside it" if path else None
        raise ConfigError(where or "--checkpoint-input-path: is needed, or --model NAME to measure with random weights")
    name = options.model.model
    size = value_or(options.fresh.image_size, zoo.image_size(name))
    zoo.check_image_size(name, size)
    classes = value_or(options.fresh.classes, 10 if name.endswith("-cifar") else 1000)
    preprocessing = Preprocessing(image_size=size, resize=short_side(size), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    model = build_model(options.model, classes=classes, seed=0)
    if path is not None:
        load_weights(model, read_weights(path), where=str(path), name=name)
    else:
        note(f"note: {name} has random weights, always the same ones: for measuring")
    return _classifier(options, model, preprocessing, tuple(map(str, range(classes))), note)


def _trained(options: ServeOptions, folder: Path, manifest: Manifest, note: Say) -> Classifier:
    model = build_model(options.model, classes=manifest.classes, seed=0)
    weights = files.read_tensors(folder, "model", verified=manifest)
    load_weights(model, weights, where=str(folder), name=options.model.model)
    preprocessing = Preprocessing.from_json(manifest.preprocessing)
    return _classifier(options, model, preprocessing, manifest.class_names, note)


def _classifier(
    options: ServeOptions,
    model: nn.Module,
    preprocessing: Preprocessing,
    class_names: tuple[str, ...],
    note: Say,
) -> Classifier:
    device, regime = resources.open_machine(options.machine).device, REGIMES[options.machine.precision]
    regime.require(device)
    if options.serving.half_partial:
        note(half_partials(True, device))
    return Classifier(
        name=options.model.model.replace("/", "-").replace(":", "-"),  # a part of the server's addresses
        model=regime.prepare(model, device),
        preprocessing=preprocessing,
        class_names=class_names,
        regime=regime,
        device=device,
    )
