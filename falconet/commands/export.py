"""`falconet export`: write a model in another program's format, and check that it computes the same."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from falconet import __version__, writing
from falconet.checkpoint import format
from falconet.checkpoint.disk import aside, move_into_place, sweep
from falconet.config.commands import ExportOptions, TrainOptions
from falconet.config.load import Loaded, load_options, unused_notes
from falconet.config.options import Export
from falconet.config.settings import LINE, Setting
from falconet.errors import ConfigError, LinkError, named_option
from falconet.exits import DONE, FAILED
from falconet.export import checks
from falconet.export.checks import Photos
from falconet.export.formats import FORMATS, torch_engine
from falconet.export.graph import INPUT, OUTPUT, Graph, Pixels
from falconet.infer.classifier import Classifier, open_classifier
from falconet.models import views
from falconet.report.console import Say, Screen, counted

FOLDER = "export"  # of all formats
CHECKPOINTS = "checkpoints"  # the folder of them in a run folder
RECORD = "export.json"  # in every export: what it is, and what was measured


def run(loaded: Loaded[ExportOptions]) -> int:
    screen, asked = Screen(), loaded.options.export
    for note in unused_notes(loaded.options, loaded.line):
        screen.line(note)
    home = _home(loaded.options.input.checkpoint_input_path)
    target = asked.output or home / FOLDER / asked.format
    _require_free(target, overwrite=asked.overwrite)
    # The model in fp32: the file is for machines of any kind, and widening half-precision weights changes none.
    line = [*loaded.line, Setting("precision", ("32.32",), LINE)]
    classifier, options = open_classifier(ExportOptions, line, screen.line)
    for text in classifier.loaded():
        screen.line(text)
    if classifier.tta != "none":
        screen.line(f"note: the run's validations average {views.describe(classifier.tta)}; the export computes one")
    kind = FORMATS[asked.format]
    graph = Graph(
        name=classifier.served_name,
        options=replace(options.model, model=classifier.name),  # which may follow from a weights file
        model=classifier.model.cpu().eval(),
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        activation=classifier.activation,
        takes_pixels=asked.preprocessing if kind.takes_pixels is None else kind.takes_pixels,
        half=asked.half,
    )
    photos = _photos(loaded.options, graph, classifier, screen.line)
    device = classifier.device if kind.on_device else torch.device("cpu")
    if asked.output is None:
        writing.subfolder(home, FOLDER)  # not through a link: a run folder may come from another person
    with _temporary(target) as folder:
        with named_option("format"):
            kind.write(graph, folder, device)
        ours, exported = torch_engine(graph.module().to(device), device), kind.open(graph, folder, device)
        parity = checks.compare(graph, ours, exported, photos, tolerance=_tolerance(asked), batch=asked.latency_batch)
        screen.line(f"input: {graph.describe_input()}")
        screen.line(f"output: {graph.describe_output()}")
        screen.line(parity.line())
        if not parity.passed:
            screen.line(f"nothing is written to {target}: the difference exceeds the tolerance (--tolerance)")
            return FAILED
        times = {
            size: {"exported": checks.latency(exported, images), "falconet": checks.latency(ours, images)}
            for size in sorted({1, asked.latency_batch})
            for images in (graph.feed(_repeated(photos, size)),)
        }
        for size, each in times.items():
            screen.line(
                f"latency of a batch of {size}: {each['exported']:.2f} ms, in Falconet {each['falconet']:.2f} ms"
                f" ({_machine(device)})"
            )
        files = {str(path.relative_to(folder)): _flushed(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        record = {
            **_about(graph, asked, device),
            "validated_with_tta": classifier.tta,  # which the export does not do
            "parity": parity.to_json(),
            "latency_ms": {f"batch of {size}": each for size, each in times.items()},
            "files": files,
        }
        writing.replace(folder, RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        move_into_place(folder, target)
    largest = max(files, key=lambda name: files[name]["bytes"])
    screen.line(f"written to {target}: {largest}, {files[largest]['bytes'] / 1e6:,.1f} MB, and {RECORD}")
    return DONE


def _home(path: Path | None) -> Path:
    """Where exports go: the run folder, the folder of the weights file, or here."""
    if path is None:
        return Path()
    inside = path.is_file() or format.checkpoints_in(path) == [path]
    home = path.parent if inside else path
    return home.parent if home.name == CHECKPOINTS else home


def _require_free(target: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything that was not asked to be replaced, or is no export."""
    if target.is_symlink():
        raise LinkError(target, "--output")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / RECORD).is_file():
        raise ConfigError(f"--output: {target} exists and is not an export; expected another name")
    if not overwrite:
        raise ConfigError(f"{target} holds an export; expected --overwrite to replace it, or another --output")
    for name in _added(target):
        raise ConfigError(f"--overwrite: {target} also holds {name}, which is not the export's; expected another name")


def _added(target: Path) -> Iterator[str]:
    """The files beside those of an export."""
    try:
        own = {RECORD, *json.loads((target / RECORD).read_bytes())["files"]}
    except (ValueError, LookupError, TypeError):
        own = set()
    names = (str(path.relative_to(target)) for path in sorted(target.rglob("*")) if not path.is_dir())
    return (name for name in names if name not in own)


def _photos(options: ExportOptions, graph: Graph, classifier: Classifier, note: Say) -> Photos:
    """What the scores are compared on: the photos that are named, the run's validation images, or noise."""
    if options.export.photos is not None:
        with named_option("photos"):
            return checks.photos_in(options.export.photos, graph, note)
    if classifier.checkpoint is None:
        return checks.noise(graph)
    trained = load_options(TrainOptions, [], format.read_manifest(classifier.checkpoint).config).options
    found = checks.validation_photos(classifier.data, graph, note, seed=trained.run.seed)  # which splits the photos
    return found or checks.noise(graph)


def _repeated(photos: Photos, size: int) -> Pixels:
    """A batch of this size."""
    return photos.pixels[np.arange(size) % len(photos.pixels)]


def _tolerance(asked: Export) -> float:
    if asked.tolerance == "auto":
        return checks.HALF_TOLERANCE if asked.half else checks.TOLERANCE
    return asked.tolerance


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, gone at the end unless it was moved; what killed exports left goes too."""
    folder = aside(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"--output: cannot write {target}: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flushed(path: Path) -> dict[str, Any]:
    """The size and digest of a file, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}"


def _about(graph: Graph, asked: Export, device: torch.device) -> dict[str, Any]:
    """What is exported, by what."""
    libraries = ("torch", *FORMATS[asked.format].libraries)
    return {
        "format": asked.format,
        "model": graph.name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "input": {
            "name": INPUT,
            "type": graph.input_type,
            "shape": ["N", *graph.input_shape],
            "meaning": graph.describe_input(),
        },
        "output": {"name": OUTPUT, "type": "float32", "shape": ["N", len(graph.class_names)], "meaning": "logits"},
        "probabilities": graph.activation,
        "precision": "fp16" if graph.half else "fp32",
        "machine": f"{platform.machine()}, {_machine(device)}",
        "versions": {"falconet": __version__, **{name: version(name) for name in libraries}},
        "preprocessing": graph.preprocessing.to_json(),
        "class_names": list(graph.class_names),
    }
