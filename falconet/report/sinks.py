"""Sinks: where metrics go."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from falconet import writing
from falconet.errors import ConfigError

if TYPE_CHECKING:
    from falconet.report.histograms import Histogram  # which imports torch

Metrics = Mapping[str, float]


class Sink(Protocol):
    """Takes the metrics of a moment; names are like `train/loss` and `validation/accuracy`."""

    def write(self, update: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


class WeightSink(Protocol):
    """Takes histograms of the weights as well, by the names of the weights."""

    def write_weights(self, update: int, histograms: Mapping[str, "Histogram"]) -> None: ...


class JsonLines:
    """metrics.jsonl: one JSON object a line. A restored run appends; of two lines for one update the later counts."""

    def __init__(self, path: Path) -> None:
        self._file = _appended(path)

    def write(self, update: int, metrics: Metrics) -> None:
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps({"update": update, **plain}) + "\n")

    def close(self) -> None:
        self._file.close()


class UpdateTimes:
    """updates.jsonl: at each log point the milliseconds of the updates since the one before, `update` being the last.

    A restored run appends; an update that it made again stands in two lines, of which the later counts.
    """

    def __init__(self, path: Path) -> None:
        self._file = _appended(path)

    def write(self, update: int, seconds: Sequence[float]) -> None:
        times = [round(1000 * one, 3) for one in seconds]
        self._file.write(json.dumps({"update": update, "milliseconds": times}) + "\n")

    def close(self) -> None:
        self._file.close()


def _appended(path: Path) -> TextIO:
    """The file, to add lines to; without one that a killed process left half written, whose update comes again."""
    handle = writing.growing(path.parent, path.name)
    with os.fdopen(handle, "rb", closefd=False) as file:
        os.ftruncate(handle, file.read().rfind(b"\n") + 1)
    return os.fdopen(handle, "a", encoding="utf-8", buffering=1)


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--tensorboard: needs the package tensorboard: pip install falconet[tensorboard]"
            ) from error
        self._writer: Any = SummaryWriter(str(writing.subfolder(folder.parent, folder.name)))

    def write(self, update: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)

    def write_weights(self, update: int, histograms: Mapping[str, "Histogram"]) -> None:
        for name, found in histograms.items():
            self._writer.add_histogram_raw(
                f"weights/{name}",
                min=found.smallest,
                max=found.largest,
                num=found.count,
                sum=found.sum,
                sum_squares=found.squares,
                bucket_limits=found.edges[1:],
                bucket_counts=list(found.counts),
                global_step=update,
            )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases; WANDB_MODE=offline keeps everything in the run folder."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, object]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb: needs the package wandb: pip install falconet[wandb]") from error
        writing.subfolder(folder, "wandb")  # into which it writes
        try:
            self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(config))
        except wandb.Error as error:  # no key, or no way to the server
            problem = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"Weights & Biases: {problem}; WANDB_MODE=offline needs neither key nor network"
            ) from error
        self._histogram: Any = wandb.Histogram

    def write(self, update: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=update)

    def write_weights(self, update: int, histograms: Mapping[str, "Histogram"]) -> None:
        drawn = {
            f"weights/{name}": self._histogram(np_histogram=(list(found.counts), found.edges))
            for name, found in histograms.items()
        }
        self._run.log(drawn, step=update)

    def close(self) -> None:
        self._run.finish()


class Several:
    """Each metric to each of several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, update: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.write(update, metrics)

    def close(self) -> None:
        """All of them, whatever one raises."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
