"""Histograms of tensors, counted on their device; reading them is one wait for all."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch
from torch import Tensor

from falconet import writing
from falconet.errors import ConfigError

if TYPE_CHECKING:
    pass  # import-gone  # which imports torch


BINS = 64
_FACTS = 5  # numbers before the counts: smallest, largest, how many, their sum, the sum of their squares


@dataclass(frozen=True)
class Histogram:
    """How often values fall between neighbouring edges; what is not finite is left out."""

    smallest: float
    largest: float
    count: int
    sum: float
    squares: float  # the sum of them
    counts: Sequence[int]

    @property
    def edges(self) -> list[float]:
        """One more than there are counts."""
        low, high = _around(self.smallest, self.largest)
        return [*(low + (high - low) * place / len(self.counts) for place in range(len(self.counts))), high]


@torch.no_grad()
def count_histograms(values: Tensor) -> Tensor:  # any shape -> BINS + 5, float64, on the device
    """The numbers of a histogram, without waiting for the device.

    Not torch.histc: it waits for every tensor's range, and is refused on CUDA where results must be reproducible.
    """
    flat = values.detach().reshape(-1).float()
    finite = flat.isfinite()
    low, high = torch.where(finite, flat, torch.inf).amin(), torch.where(finite, flat, -torch.inf).amax()
    flat = torch.where(finite, flat, low)
    wide = torch.where(high > low, high - low, 1.0)  # one value alone lies in the middle, as in numpy
    share = torch.where(high > low, (flat - low) / wide, 0.5)
    bins = (share * BINS).nan_to_num(0.0).clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device).scatter_add_(0, bins, finite.long())
    exact = torch.where(finite, flat, 0.0).double()
    facts = torch.stack([low.double(), high.double(), finite.sum().double(), exact.sum(), exact.square().sum()])
    return torch.cat([facts, counts.double()])


def read_histograms(rows: Tensor) -> list[Histogram]:  # N x (BINS + 5)
    """Wait for the device; rows without a finite value become empty histograms around 0."""
    found = []
    for row in rows.tolist():
        smallest, largest, count, total, squares = row[:_FACTS]
        empty = count == 0
        found.append(
            Histogram(
                0.0 if empty else smallest,
                0.0 if empty else largest,
                int(count),
                total,
                squares,
                [int(number) for number in row[_FACTS:]],
            )
        )
    return found


def no_histograms(device: torch.device) -> Tensor:  # BINS + 5
    """A row to which another process adds its own."""
    return torch.zeros(BINS + _FACTS, dtype=torch.float64, device=device)


def _around(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


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
