"""`falconet export`: write a model in another program's format, and check that it computes the same."""

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from falconet import __version__, writing
from falconet.checkpoint import format
from falconet.config.commands import ExportOptions, TrainOptions
from falconet.config.load import Loaded, load_options, unused_notes
from falconet.config.settings import LINE, Setting
from falconet.config.tool_options import Export
from falconet.errors import ConfigError, DataError, named_option
from falconet.exits import DONE, FAILED
from falconet.export import checks, photos, target_folder
from falconet.export.checks import Agreement, Parity
from falconet.export.formats import FORMATS, ONNX, OPENVINO, Engine, Format, quantise, torch_engine
from falconet.export.graph import INPUT, OUTPUT, Graph, Pixels, Values
from falconet.export.photos import Divided, Photos, Sample, counted_photos
from falconet.infer.classifier import Classifier, open_classifier
from falconet.models import views
from falconet.report.console import Say, Screen, counted
from falconet.report.run_files import CHECKPOINTS, EXPORT_RECORD, EXPORTS

TIMED = {"exported": "", "fp32": "in fp32 ", "falconet": "in Falconet "}  # engines, and their names in the output


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to export, and the options of the export."""

    asked: Export
    classifier: Classifier
    graph: Graph

    @property
    def kind(self) -> Format:
        return FORMATS[self.asked.format]

    @property
    def device(self) -> torch.device:
        """The device for which the file is written, and on which it is checked."""
        return self.classifier.device if self.kind.on_device else torch.device("cpu")

    def ours(self) -> Engine:
        """An engine of the model, with whose scores those of the file are compared."""
        return torch_engine(self.graph.module().to(self.device), self.device)

    def write(self, folder: Path) -> None:
        with named_option("format"):
            self.kind.write(self.graph, folder, self.device)

    def open(self, folder: Path) -> Engine:
        return self.kind.open(self.graph, folder, self.device)


class Checked(NamedTuple):
    """The findings about a file that was written."""

    result: Parity | Agreement
    engines: dict[str, Engine]  # to time, by the names of TIMED
    pixels: Pixels  # to time them on
    also: dict[str, Any]  # for the record


Times = dict[int, dict[str, float]]  # milliseconds by batch size and engine


def run(loaded: Loaded[ExportOptions]) -> int:
    screen, asked = Screen(), loaded.options.export
    for note in unused_notes(loaded.options, loaded.line):
        screen.line(note)
    home = _home(loaded.options.input.checkpoint_input_path)
    target = asked.output or home / EXPORTS / (f"{asked.format}-int8" if asked.int8 else asked.format)
    target_folder.require_free(target, overwrite=asked.overwrite)
    task = _task(loaded, screen.line)
    images = (_divided if asked.int8 else _photos)(loaded.options, task, screen.line)
    if asked.output is None:
        writing.subfolder(home, EXPORTS)  # not through a link: a run folder may come from another person
    with target_folder.opened(target) as folder:
        checked = _written(task, images, folder, screen.line)
        screen.line(f"input: {task.graph.describe_input()}")
        screen.line(f"output: {task.graph.describe_output()}")
        screen.line(checked.result.line())
        if not checked.result.passed:
            screen.line(f"nothing is written to {target}: {checked.result.advice()}")
            return FAILED
        times = _times(task, checked)
        for line in _time_lines(times, task.device):
            screen.line(line)
        files = target_folder.finish(folder, target, _facts(task, checked, times))
    largest = max(files, key=lambda name: files[name]["bytes"])
    shown = f"{OPENVINO} with {largest}" if OPENVINO in files else largest  # the first is the one to open
    plain = f" ({checked.also['bytes_in_fp32'] / 1e6:,.1f} MB in fp32)" if asked.int8 else ""
    screen.line(f"written to {target}: {shown}, {files[largest]['bytes'] / 1e6:,.1f} MB{plain}, and {EXPORT_RECORD}")
    return DONE


def _task(loaded: Loaded[ExportOptions], say: Say) -> Task:
    """Open the model of the line in fp32.

    The file is for machines of any kind, and widening half-precision weights does not change them.
    """
    asked = loaded.options.export
    line = [*loaded.line, Setting("precision", ("32.32",), LINE)]
    classifier, options = open_classifier(ExportOptions, line, say)
    for text in classifier.loaded():
        say(text)
    if classifier.tta != "none":
        say(f"note: the run's validations average {views.describe(classifier.tta)}; the export computes one")
    takes_pixels = FORMATS[asked.format].takes_pixels
    graph = Graph(
        name=classifier.served_name,
        options=replace(options.model, model=classifier.name),  # which may follow from a weights file
        model=classifier.model.cpu().eval(),
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        activation=classifier.activation,
        takes_pixels=asked.preprocessing if takes_pixels is None else takes_pixels,
        half=asked.half,
    )
    return Task(asked=asked, classifier=classifier, graph=graph)


def _home(path: Path | None) -> Path:
    """The folder for exports: the run folder, the folder of the weights file, or this one."""
    if path is None:
        return Path()
    inside = path.is_file() or format.checkpoints_in(path) == [path]
    home = path.parent if inside else path
    return home.parent if home.name == CHECKPOINTS else home


# The images on which a file is checked, which are read before it is written.


def _photos(options: ExportOptions, task: Task, note: Say) -> Photos:
    """The images on which scores are compared: named photos, the run's validation images, or noise."""
    if options.export.photos is not None:
        with named_option("photos"):
            return photos.photos_in(options.export.photos, task.graph, note)
    checkpoint = task.classifier.checkpoint
    if checkpoint is None:
        return photos.noise(task.graph)
    found = photos.validation_photos(task.classifier.data, task.graph, note, seed=_seed(checkpoint))
    return found or photos.noise(task.graph)


def _divided(options: ExportOptions, task: Task, note: Say) -> Divided:
    """The images that calibrate int8, and those that measure it, from a named folder or from the run."""
    folder, count = options.export.photos, options.export.calibration_images
    if folder is not None:
        with named_option("photos"):
            share = options.fresh.val_fraction
            return photos.divided_folder(folder, task.graph, note, share=share, calibration=count)
    checkpoint = task.classifier.checkpoint
    if checkpoint is None:
        raise ConfigError("--int8: needs photos to measure ranges on; expected --photos DIR as well")
    data, seed = task.classifier.data, _seed(checkpoint)
    try:
        return photos.divided_run(data, task.graph, note, seed=seed, calibration=count)
    except DataError as error:
        raise DataError(f"--int8: {error}; expected --photos DIR, a folder of photos to measure ranges on") from None


def _seed(checkpoint: Path) -> int:
    """The seed of a checkpoint's run, by which its photos were divided."""
    return load_options(TrainOptions, [], format.read_manifest(checkpoint).config).options.run.seed


# The file.


def _written(task: Task, images: Photos | Divided, folder: Path, note: Say) -> Checked:
    """Write the file into an empty folder, and check it on the images."""
    return _in_int8(task, images, folder, note) if isinstance(images, Divided) else _in_floats(task, images, folder)


def _in_floats(task: Task, compared: Photos, folder: Path) -> Checked:
    """Write the file in floating point, and compare its scores with the model's."""
    asked = task.asked
    task.write(folder)
    ours, exported = task.ours(), task.open(folder)
    tolerance = _tolerance(asked)
    parity = checks.compare(task.graph, ours, exported, compared, tolerance=tolerance, batch=asked.latency_batch)
    return Checked(parity, {"exported": exported, "falconet": ours}, compared.pixels, {"parity": parity.to_json()})


def _in_int8(task: Task, images: Divided, folder: Path, note: Say) -> Checked:
    """Write the file in int8, calibrated on some of the images, and measure its accuracy on the others."""
    asked, batch = task.asked, task.asked.latency_batch
    calibration = Calibration(task.graph, images.calibration)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        task.write(scratch)
        quantise(scratch / ONNX, folder / ONNX, calibration.batches(batch), reduce_range=asked.reduce_range)
        plain, size = task.open(scratch), (scratch / ONNX).stat().st_size
    ours, exported = task.ours(), task.open(folder)
    read, (what, _) = calibration.read, images.what
    note(f"calibrated on {counted_photos(read, what)}; accuracy is measured on others")
    tolerance = None if asked.tolerance == "auto" else asked.tolerance
    found = checks.measure(task.graph, ours, exported, images, tolerance=tolerance, batch=batch)
    also = {
        "int8": found.to_json(),
        "calibration": {"images": read, "photos": what, "reduce_range": asked.reduce_range},
        "bytes_in_fp32": size,
    }
    _, pixels = next(images.measured.batches(batch))
    return Checked(found, {"exported": exported, "fp32": plain, "falconet": ours}, pixels, also)


class Calibration:
    """The inputs that calibrate, and the number of images that could be read."""

    def __init__(self, graph: Graph, images: Sample) -> None:
        self._graph, self._images, self.read = graph, images, 0

    def batches(self, size: int) -> Iterator[Values]:
        for numbers, pixels in self._images.batches(size):
            self.read += len(numbers)
            yield self._graph.feed(pixels)
        if not self.read:
            raise DataError("--int8: none of the images to calibrate with can be read")


def _tolerance(asked: Export) -> float:
    if asked.tolerance == "auto":
        return checks.HALF_TOLERANCE if asked.half else checks.TOLERANCE
    return asked.tolerance


# Its speed, and the facts for its record.


def _times(task: Task, checked: Checked) -> Times:
    """The latency of one image, and of a batch."""
    times = {}
    for size in sorted({1, task.asked.latency_batch}):
        images = task.graph.feed(checked.pixels[np.arange(size) % len(checked.pixels)])
        times[size] = {name: checks.latency(engine, images) for name, engine in checked.engines.items()}
    return times


def _time_lines(times: Times, device: torch.device) -> Iterator[str]:
    for size, each in times.items():
        shown = ", ".join(f"{TIMED[name]}{time:.2f} ms" for name, time in each.items())
        yield f"latency of a batch of {size}: {shown} ({_machine(device)})"


def _facts(task: Task, checked: Checked, times: Times) -> dict[str, Any]:
    """The model, the libraries that exported it, and the findings about the file, for the record."""
    asked, graph = task.asked, task.graph
    libraries = ("torch", *task.kind.libraries)
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
        "machine": f"{platform.machine()}, {_machine(task.device)}",
        "versions": {"falconet": __version__, **{name: version(name) for name in libraries}},
        "preprocessing": graph.preprocessing.to_json(),
        "class_names": list(graph.class_names),
        "validated_with_tta": task.classifier.tta,  # which the export does not do
        **checked.also,
        "latency_ms": {f"batch of {size}": each for size, each in times.items()},
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}"
