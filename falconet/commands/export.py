"""`falconet export`: write a model in another program's format, and check that it computes the same."""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from falconet import __version__, writing
from falconet.checkpoint import format
from falconet.checkpoint.disk import aside, move_into_place, sweep
from falconet.config.commands import ExportOptions, TrainOptions
from falconet.config.load import Loaded, load_options, unused_notes
from falconet.config.options import Export
from falconet.config.settings import LINE, Setting
from falconet.errors import ConfigError, DataError, LinkError, named_option
from falconet.exits import DONE, FAILED
from falconet.export import checks, photos
from falconet.export.checks import Agreement, Parity
from falconet.export.formats import FORMATS, ONNX, Engine, quantise, torch_engine
from falconet.export.graph import INPUT, OUTPUT, Graph, Pixels, Values
from falconet.export.photos import Divided, Photos, counted_photos
from falconet.infer.classifier import Classifier, open_classifier
from falconet.models import views
from falconet.report.console import Say, Screen, counted
from falconet.report.run_files import CHECKPOINTS, EXPORT_RECORD, EXPORTS

TIMED = {"exported": "", "fp32": "in fp32 ", "falconet": "in Falconet "}  # what is timed, and how it is called


class Checked(NamedTuple):
    """What was found about a file that was written."""

    result: Parity | Agreement
    engines: dict[str, Engine]  # to time, by the names of TIMED
    pixels: Pixels  # to time them on
    also: dict[str, Any]  # for the record


Write = Callable[[Path, torch.device], Checked]  # into an empty folder


def run(loaded: Loaded[ExportOptions]) -> int:
    screen, asked = Screen(), loaded.options.export
    for note in unused_notes(loaded.options, loaded.line):
        screen.line(note)
    home = _home(loaded.options.input.checkpoint_input_path)
    target = asked.output or home / EXPORTS / (f"{asked.format}-int8" if asked.int8 else asked.format)
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
    device = classifier.device if kind.on_device else torch.device("cpu")
    prepare = _prepare_int8 if asked.int8 else _prepare
    write = prepare(loaded.options, graph, classifier, screen.line)
    if asked.output is None:
        writing.subfolder(home, EXPORTS)  # not through a link: a run folder may come from another person
    with _temporary(target) as folder:
        result, engines, pixels, also = write(folder, device)
        screen.line(f"input: {graph.describe_input()}")
        screen.line(f"output: {graph.describe_output()}")
        screen.line(result.line())
        if not result.passed:
            screen.line(f"nothing is written to {target}: {result.advice()}")
            return FAILED
        times = {
            size: {name: checks.latency(engine, images) for name, engine in engines.items()}
            for size in sorted({1, asked.latency_batch})
            for images in (graph.feed(_repeated(pixels, size)),)
        }
        for size, each in times.items():
            shown = ", ".join(f"{TIMED[name]}{time:.2f} ms" for name, time in each.items())
            screen.line(f"latency of a batch of {size}: {shown} ({_machine(device)})")
        files = {str(path.relative_to(folder)): _flushed(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        record = {
            **_about(graph, asked, device),
            "validated_with_tta": classifier.tta,  # which the export does not do
            **also,
            "latency_ms": {f"batch of {size}": each for size, each in times.items()},
            "files": files,
        }
        content = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        # Stray bytes of a class's name become \udc.., which JSON reads back.
        writing.replace(folder, EXPORT_RECORD, content)
        move_into_place(folder, target)
    largest = max(files, key=lambda name: files[name]["bytes"])
    plain = f" ({also['bytes_in_fp32'] / 1e6:,.1f} MB in fp32)" if asked.int8 else ""
    screen.line(f"written to {target}: {largest}, {files[largest]['bytes'] / 1e6:,.1f} MB{plain}, and {EXPORT_RECORD}")
    return DONE


def _prepare(options: ExportOptions, graph: Graph, classifier: Classifier, note: Say) -> Write:
    """Read the photos; then the file is written and must have the model's scores on them."""
    asked, kind = options.export, FORMATS[options.export.format]
    compared = _photos(options, graph, classifier, note)

    def write(folder: Path, device: torch.device) -> Checked:
        with named_option("format"):
            kind.write(graph, folder, device)
        ours, exported = torch_engine(graph.module().to(device), device), kind.open(graph, folder, device)
        parity = checks.compare(graph, ours, exported, compared, tolerance=_tolerance(asked), batch=asked.latency_batch)
        return Checked(parity, {"exported": exported, "falconet": ours}, compared.pixels, {"parity": parity.to_json()})

    return write


def _prepare_int8(options: ExportOptions, graph: Graph, classifier: Classifier, note: Say) -> Write:
    """Choose the images; then the file is written, calibrated on some of them, and measured on others."""
    asked, kind = options.export, FORMATS[options.export.format]
    images, batch = _divided(options, graph, classifier, note), asked.latency_batch

    def write(folder: Path, device: torch.device) -> Checked:
        read = 0

        def calibrating() -> Iterator[Values]:
            nonlocal read
            for numbers, pixels in images.calibration.batches(batch):
                read += len(numbers)
                yield graph.feed(pixels)
            if not read:
                raise DataError("--int8: none of the images to calibrate with can be read")

        with tempfile.TemporaryDirectory() as scratch:
            with named_option("format"):
                kind.write(graph, Path(scratch), device)
            quantise(Path(scratch) / ONNX, folder / ONNX, calibrating(), reduce_range=asked.reduce_range)
            plain, size = kind.open(graph, Path(scratch), device), (Path(scratch) / ONNX).stat().st_size
        ours, exported = torch_engine(graph.module().to(device), device), kind.open(graph, folder, device)
        note(f"calibrated on {counted_photos(read, images.what[0])}, a keyed choice; none of them is measured")
        tolerance = None if asked.tolerance == "auto" else asked.tolerance
        found = checks.measure(graph, ours, exported, images, tolerance=tolerance, batch=batch)
        also = {
            "int8": found.to_json(),
            "calibration": {"images": read, "photos": images.what[0], "reduce_range": asked.reduce_range},
            "bytes_in_fp32": size,
        }
        _, pixels = next(images.measured.batches(batch))
        return Checked(found, {"exported": exported, "fp32": plain, "falconet": ours}, pixels, also)

    return write


def _divided(options: ExportOptions, graph: Graph, classifier: Classifier, note: Say) -> Divided:
    """The images of int8: of the folder that is named, or of the run."""
    folder, count = options.export.photos, options.export.calibration_images
    if folder is not None:
        with named_option("photos"):
            return photos.divided_folder(folder, graph, note, share=options.fresh.val_fraction, calibration=count)
    if classifier.checkpoint is None:
        raise ConfigError("--int8: needs photos to measure ranges on; expected --photos DIR as well")
    trained = load_options(TrainOptions, [], format.read_manifest(classifier.checkpoint).config).options
    try:
        return photos.divided_run(classifier.data, graph, note, seed=trained.run.seed, calibration=count)
    except DataError as error:
        raise DataError(f"--int8: {error}; expected --photos DIR, a folder of photos to measure ranges on") from None


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
    try:
        str(target).encode()
    except UnicodeEncodeError:
        why = "its name is not UTF-8, and the libraries that write models open no such path"
        raise ConfigError(f"--output: {target}: {why}; expected another name") from None
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / EXPORT_RECORD).is_file():
        raise ConfigError(f"--output: {target} exists and is not an export; expected another name")
    if not overwrite:
        raise ConfigError(f"{target} holds an export; expected --overwrite to replace it, or another --output")
    for name in _added(target):
        raise ConfigError(f"--overwrite: {target} also holds {name}, which is not the export's; expected another name")


def _added(target: Path) -> Iterator[str]:
    """The files beside those of an export."""
    try:
        own = {EXPORT_RECORD, *json.loads((target / EXPORT_RECORD).read_bytes())["files"]}
    except (ValueError, LookupError, TypeError):
        own = set()
    names = (str(path.relative_to(target)) for path in sorted(target.rglob("*")) if not path.is_dir())
    return (name for name in names if name not in own)


def _photos(options: ExportOptions, graph: Graph, classifier: Classifier, note: Say) -> Photos:
    """What the scores are compared on: the photos that are named, the run's validation images, or noise."""
    if options.export.photos is not None:
        with named_option("photos"):
            return photos.photos_in(options.export.photos, graph, note)
    if classifier.checkpoint is None:
        return photos.noise(graph)
    trained = load_options(TrainOptions, [], format.read_manifest(classifier.checkpoint).config).options
    found = photos.validation_photos(classifier.data, graph, note, seed=trained.run.seed)  # which splits the photos
    return found or photos.noise(graph)


def _repeated(pixels: Pixels, size: int) -> Pixels:
    """A batch of this size."""
    return pixels[np.arange(size) % len(pixels)]


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
        "precision": "int8" if asked.int8 else "fp16" if graph.half else "fp32",
        "machine": f"{platform.machine()}, {_machine(device)}",
        "versions": {"falconet": __version__, **{name: version(name) for name in libraries}},
        "preprocessing": graph.preprocessing.to_json(),
        "class_names": list(graph.class_names),
    }
