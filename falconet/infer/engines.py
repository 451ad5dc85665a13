"""Engines, which compute a served model's scores (torch, ONNX Runtime or OpenVINO), chosen once and timed."""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from falconet.config.commands import ServeOptions
from falconet.config.settings import Setting
from falconet.errors import CheckpointError, first_line
from falconet.infer.classifier import Classifier
from falconet.infer.conversion import (
    FILES,
    Conversion,
    ConversionError,
    Exported,
    Kind,
    cache_folder,
    converted,
    forget,
    missing,
    read_export,
)
from falconet.infer.predictor import Execute, Lanes, Pixels, Predictor, Scores, divide, gather
from falconet.models import views
from falconet.report.console import Say, counted

Compute = Callable[[npt.NDArray[np.uint8]], Scores]  # N x S x S x 3 -> N x classes, in memory of its own
NAMES: dict[Kind, str] = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
PACKAGES: dict[Kind, str] = {"onnx": "onnxruntime", "openvino": "openvino"}
TOLERANCE = 1e-4  # relative to an image's largest score, as in `falconet export`
TIMED, MOST_TIMED = 0.3, 50  # seconds and batches per size, after the first
LARGEST = 0.5  # seconds; a batch that takes longer is not timed
BY_HAND = "`falconet export --int8 --preprocessing` has --photos and other options, and its folder can be served"
GAIN = 0.8  # of a lane's time: all cores together must be at least this fast to be worth their sessions
MORE_MS = 2.0  # of computation that are worth a second thread, which needs the interpreter, as the loop does


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds from pixels to scores, both in host memory."""

    images: int
    ms: float
    other_ms: float | None = None  # the same for torch, which it is compared with


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that is ready to compute scores."""

    name: str  # with its version
    where: str  # `2 threads`, or a device
    dtype: np.dtype[Any]  # of the scores
    lanes: Lanes  # each takes a batch of up to the largest size
    latencies: tuple[Latency, ...] = ()  # for one image, and for a batch
    accuracy: str | None = None  # a line about int8

    def lines(self) -> list[str]:
        """The lines that are printed at the start."""
        own = ", ".join(f"{each.ms:.3g} ms for {_images(each.images)}" for each in self.latencies)
        other = " and ".join(f"{each.other_ms:.3g}" for each in self.latencies if each.other_ms is not None)
        line = f"engine: {self.name}, {self.where}: {own}{f' (torch {other})' if other else ''}"
        return [line, *([self.accuracy] if self.accuracy else [])]


def open_engine(
    classifier: Classifier, options: ServeOptions, line: Sequence[Setting], say: Say, *, max_batch: int
) -> Engine:
    """Open the engine that the options ask for, and report what it is and how fast.

    `auto` is torch on CUDA; on a CPU it is ONNX Runtime if that can give the model's scores. `line`: the settings with
    which the classifier was opened. A model's first conversion takes seconds, to int8 minutes; other threads go on.
    """
    asked, int8 = options.serving.engine, options.serving.int8
    if asked == "torch" or (asked == "auto" and not int8 and classifier.device.type == "cuda"):
        return _said(torch_engine(classifier, max_batch=max_batch), say)
    kind: Kind = "openvino" if asked == "openvino" else "onnx"
    try:
        _require(classifier, kind)
        if int8 and classifier.checkpoint is None:
            raise ConversionError("needs the images of a run, to measure ranges on")
        conversion = Conversion(kind, int8, options.model, line)
        cache = cache_folder(options.machine.model_cache_path)
        return _said(_converted_engine(classifier, conversion, cache, say, max_batch=max_batch), say)
    except ConversionError as error:
        if asked == "auto" and not int8:
            say(f"note: torch computes, because ONNX Runtime {error}")
            return _said(torch_engine(classifier, max_batch=max_batch), say)
        if int8:
            reason = str(error).removeprefix("--int8: ").partition("; expected --photos")[0]
            raise ConversionError(f"--int8: {reason}; {BY_HAND}") from None
        raise ConversionError(f"--engine {asked}: {error}") from None


def torch_engine(classifier: Classifier, *, max_batch: int) -> Engine:
    """PyTorch on the classifier's device, captured on CUDA."""
    predictor = Predictor(classifier, max_batch=max_batch)
    lanes = tuple(predictor.lanes())
    cuda = classifier.device.type == "cuda"
    return Engine(
        name=f"torch {version('torch')}",
        where=torch.cuda.get_device_name(classifier.device) if cuda else _threads(),
        dtype=predictor.dtype,
        lanes=Lanes(each=lanes),
        latencies=_latencies(lanes[0], side=classifier.preprocessing.image_size, max_batch=max_batch),
    )


def opened_export(folder: Path, *, max_batch: int) -> tuple[Exported, Engine]:
    """An export folder as an engine, without torch's weights; its record has the class names and preprocessing."""
    found = read_export(folder)
    if problem := missing_runtime(found.kind):
        raise CheckpointError(f"{folder}: {problem}")
    try:
        return found, exported_engine(found, max_batch=max_batch)
    except ConversionError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def exported_engine(found: Exported, *, max_batch: int, reference: Execute | None = None) -> Engine:
    """ONNX Runtime or OpenVINO on the CPU. `reference`: torch, timed for comparison; in fp32, scores must equal its."""
    side, exact = found.preprocessing.image_size, found.precision != "int8"

    def lane(compute: Compute) -> Lane:
        return Lane(compute, side=side, max_batch=max_batch)

    def latencies(lane: Execute, other: Execute | None) -> tuple[Latency, ...]:
        return _latencies(lane, side=side, max_batch=max_batch, reference=other, exact=exact)

    threads = torch.get_num_threads()
    whole = lane(open_onnx(found, threads=threads) if found.kind == "onnx" else open_openvino(found))
    if found.kind == "onnx" and threads > 1:
        compute = open_onnx(found, threads=1)  # each thread can run a batch with it
        each = tuple(lane(compute) for _ in range(threads))
        lanes = divided(each, whole, latencies(whole, each[0]))
    else:
        lanes = Lanes(each=(whole,))
    return Engine(
        name=f"{NAMES[found.kind]} {version(PACKAGES[found.kind])}{'' if exact else ' in int8'}",
        where=_threads(),
        dtype=np.dtype(np.float32),
        lanes=lanes,
        latencies=latencies(whole if lanes.whole is whole and lanes.least_whole == 1 else lanes.each[0], reference),
        accuracy=found.accuracy(),
    )


def divided(each: tuple[Execute, ...], whole: Execute, compared: Sequence[Latency]) -> Lanes:
    """Lanes with one core each, and one with all cores if that is faster; `compared`: times of `whole` and of a lane.

    One core computes more images in a second of its time than several that wait for each other after every layer:
    MobileNetV3 takes 2.8 ms on one core, and 3.1 to 5.2 ms on two. So all cores are for a request that is alone.
    """
    gains = [latency.other_ms is not None and latency.ms < GAIN * latency.other_ms for latency in compared]
    least_more = max(1, round(MORE_MS / (compared[0].other_ms or MORE_MS)))
    return Lanes(
        each=each,
        whole=whole if any(gains) else None,
        least_whole=1 if gains[0] else 2,
        share=True,
        least_more=least_more,
    )


class Lane:
    """A buffer for one batch at a time."""

    def __init__(self, compute: Compute, *, side: int, max_batch: int) -> None:
        self._compute = compute
        self._rows = np.empty((max_batch, side, side, 3), np.uint8)

    def __call__(self, portions: Sequence[Pixels]) -> list[Scores]:
        """Compute the scores of each portion, without padding: these engines take any number of images."""
        return divide(self._compute(self._rows[: gather(portions, self._rows)]), portions)


def open_onnx(found: Exported, *, threads: int) -> Compute:
    """Open a model in ONNX Runtime, whose threads sleep while there is nothing to compute."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # no messages: errors are raised too, and warnings are about its optimisations
    (name,) = FILES["onnx"]
    # Their only base class is Exception.
    failures = (errors.Fail, errors.InvalidArgument, errors.InvalidGraph, errors.InvalidProtobuf, errors.NotImplemented)
    try:
        # From memory, so that it is the content whose digest was checked, and cannot refer to other files.
        session = onnxruntime.InferenceSession(found.files[name], options, providers=["CPUExecutionProvider"])
        (taken,), (given,) = session.get_inputs(), session.get_outputs()

        def compute(rows: npt.NDArray[np.uint8]) -> Scores:
            (logits,) = session.run([given.name], {taken.name: rows})
            scores: Scores = logits
            return scores

        return _tried(compute, found)
    except (*failures, errors.RuntimeException, ValueError) as error:
        raise ConversionError(f"ONNX Runtime cannot compute {name}: {first_line(error)}") from error


def open_openvino(found: Exported) -> Compute:
    """Open a model in OpenVINO, in fp32: on a processor with bf16, it would otherwise compute in that."""
    openvino = import_openvino()
    how = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",  # one batch at a time, by all threads
    }
    described, weights = FILES["openvino"]
    core = openvino.Core()
    try:
        model = core.read_model(model=found.files[described], weights=found.files[weights])
        request = core.compile_model(model, "CPU", how).create_infer_request()

        def compute(rows: npt.NDArray[np.uint8]) -> Scores:
            scores: Scores = request.infer({0: rows}, share_inputs=True)[0]
            return scores

        return _tried(compute, found)
    except (RuntimeError, ValueError) as error:
        raise ConversionError(f"OpenVINO cannot compute {described}: {first_line(error)}") from error


def _tried(compute: Compute, found: Exported) -> Compute:
    """Return a function after checking that it takes an image and gives a score for each class."""
    side, classes = found.preprocessing.image_size, len(found.class_names)
    shape = compute(np.zeros((1, side, side, 3), np.uint8)).shape
    if shape != (1, classes):
        raise ValueError(f"its scores have shape {shape}, expected {(1, classes)}")
    return compute


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would tell Intel of the import and of what is converted."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # makes its import fail
    return importlib.import_module("openvino")


def missing_runtime(kind: Kind) -> str | None:
    """What is missing to compute with a kind of file, in words."""
    name = PACKAGES[kind]
    return f"{NAMES[kind]} is not installed: pip install {name}" if find_spec(name) is None else None


def _converted_engine(
    classifier: Classifier, conversion: Conversion, cache: Path | None, say: Say, *, max_batch: int
) -> Engine:
    predictor = Predictor(classifier, max_batch=max_batch)

    def reference(portions: Sequence[Pixels]) -> list[Scores]:
        return [predictor.logits(torch.from_numpy(portion)).numpy() for portion in portions]

    def opened() -> Engine:
        found = converted(classifier, conversion, cache, say)
        return exported_engine(found, max_batch=max_batch, reference=reference)

    try:
        return opened()
    except UnequalError:  # a file in the cache that is another model's
        forget(classifier, conversion, cache)
        return opened()


def _require(classifier: Classifier, kind: Kind) -> None:
    """Refuse a classifier whose scores an engine on the CPU cannot give."""
    if classifier.device.type != "cpu":
        raise ConversionError(
            f"computes on a CPU, and the device is {classifier.device}; expected --device cpu as well"
        )
    if classifier.regime.compute != torch.float32:
        name = classifier.regime.name
        raise ConversionError(f"computes in fp32, and the precision is {name}; --precision 32.32 allows it")
    if classifier.tta != "none":
        found = views.describe(classifier.tta)
        raise ConversionError(f"computes one view, and the scores are the mean of {found}; --tta none allows it")
    if package := missing(kind):
        extra = "openvino" if kind == "openvino" else "'falconet[serve]'"
        raise ConversionError(f"needs {package}, which is not installed: pip install {extra}")


class UnequalError(ConversionError):
    """An engine whose scores differ from the model's."""


def _latencies(
    lane: Execute, *, side: int, max_batch: int, reference: Execute | None = None, exact: bool = True
) -> tuple[Latency, ...]:
    """Latencies of one image and of a batch: the largest, or one that does not take long. `exact`: compare scores."""
    found: list[Latency] = []
    for size in (1, max_batch):
        size = min(size, _soon(found[0].ms, max_batch)) if found else size
        if found and size == 1:
            break
        images = np.random.default_rng(size).integers(0, 256, (size, side, side, 3), np.uint8).transpose(0, 3, 1, 2)
        ms, scores = _timed(lane, images)
        other = None
        if reference is not None:
            other, expected = _timed(reference, images)
            if exact:
                _require_equal(scores, expected)
        found.append(Latency(images=size, ms=ms, other_ms=other))
    return tuple(found)


def _soon(ms: float, most: int) -> int:
    """The largest batch to time, or the largest power of two images that is worth waiting for."""
    images = int(1000 * LARGEST / ms)
    return most if images >= most else 1 << max(images.bit_length() - 1, 0)


def _timed(execute: Execute, images: Pixels) -> tuple[float, Scores]:
    """The milliseconds that a batch takes, a median, and its scores."""
    (scores,) = execute([images])
    times: list[float] = []
    while not times or (sum(times) < TIMED and len(times) < MOST_TIMED):
        start = time.perf_counter()
        execute([images])
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times), scores


def _require_equal(found: Scores, expected: Scores) -> None:
    differences = np.abs(found.astype(np.float64) - expected).max(axis=1)
    scale = np.maximum(np.abs(expected).max(axis=1), np.finfo(np.float32).tiny)
    worst = float((differences / scale).max())
    if not worst <= TOLERANCE:  # true for nan
        raise UnequalError(f"its scores differ from torch's by {worst:.1e} of an image's largest, above {TOLERANCE:g}")


def _said(engine: Engine, say: Say) -> Engine:
    for line in engine.lines():
        say(line)
    return engine


def _threads() -> str:
    return counted(torch.get_num_threads(), "thread")


def _images(number: int) -> str:
    return "one image" if number == 1 else f"{number:,}"
