"""Sinks: where the metrics of a run go, and histograms of its weights."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from falconet import writing
from falconet.errors import ConfigError

BINS = 64
_FACTS = 5  # numbers before the counts: minimum, maximum, number of values, sum, sum of squares
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite values between neighbouring edges."""

    smallest: float
    largest: float
    count: int
    sum: float
    squares: float  # sum of the squares
    counts: Sequence[int]

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are counts."""
        low, high = _around(self.smallest, self.largest)
        return [*(low + (high - low) * place / len(self.counts) for place in range(len(self.counts))), high]


class Sink(Protocol):
    """Takes the metrics of one update, with names such as `train/loss` and `validation/accuracy`."""

    def write(self, update: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


class WeightSink(Protocol):
    """Also takes histograms of the weights, by name."""

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None: ...


class JsonLines:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._lines = writing.GrowingFile(path)

    def write(self, update: int, metrics: Metrics) -> None:
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._lines.add(json.dumps({"update": update, **plain}))

    def close(self) -> None:
        self._lines.close()


class UpdateTimes:
    """updates.jsonl: at each log point, the milliseconds of the updates since the previous one, up to `update`."""

    def __init__(self, path: Path) -> None:
        self._lines = writing.GrowingFile(path)

    def write(self, update: int, seconds: Sequence[float]) -> None:
        times = [round(1000 * one, 3) for one in seconds]
        self._lines.add(json.dumps({"update": update, "milliseconds": times}))

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """TensorBoard event files."""

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        """`after`: the update that a run continues from; what an earlier start wrote beyond it is hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("needs the package tensorboard: pip install 'falconet[tensorboard]'") from error
        home = writing.subfolder(folder.parent, folder.name)
        self._writer: Any = SummaryWriter(str(home), purge_step=None if after is None else after + 1)

    def write(self, update: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
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
    """Weights & Biases; offline, everything stays in the run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, object],
        offline: Callable[[str], None] | None = None,
    ) -> None:
        """`offline`: called with the reason if it has to log offline; None: refuse to."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("needs the package wandb: pip install 'falconet[wandb]'") from error
        place = writing.subfolder(folder, "wandb")  # it writes there
        about: dict[str, Any] = {"project": project, "name": name, "dir": str(folder), "config": dict(config)}
        try:
            self._run: Any = wandb.init(**about)
        except wandb.Error as error:  # no key, or no connection to the server
            problem = " ".join(str(error).split()).rstrip(".")
            if offline is None:
                raise ConfigError(
                    f"Weights & Biases: {problem}; WANDB_MODE=offline needs neither a key nor a network"
                ) from error
            offline(f"{problem}; logging offline to {place}, which `wandb sync` uploads")
            self._run = wandb.init(**about, mode="offline")
        self._histogram: Any = wandb.Histogram

    def write(self, update: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=update)

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        drawn = {
            f"weights/{name}": self._histogram(np_histogram=(list(found.counts), found.edges))
            for name, found in histograms.items()
        }
        self._run.log(drawn, step=update)

    def close(self) -> None:
        self._run.finish()


class Several:
    """Passes every metric to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, update: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.write(update, metrics)

    def close(self) -> None:
        """Close all of them, even if one raises."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


@torch.no_grad()
def count_histograms(values: Tensor) -> Tensor:  # any shape -> BINS + 5, float64, on the device
    """Compute the numbers of a histogram without synchronising with the device.

    Not torch.histc, which synchronises to learn the range, and is not deterministic on CUDA.
    """
    flat = values.detach().reshape(-1).float()
    finite = flat.isfinite()
    low, high = torch.where(finite, flat, torch.inf).amin(), torch.where(finite, flat, -torch.inf).amax()
    flat = torch.where(finite, flat, low)
    wide = torch.where(high > low, high - low, 1.0)  # a single value goes into the middle bin, as in numpy
    share = torch.where(high > low, (flat - low) / wide, 0.5)
    bins = (share * BINS).nan_to_num(0.0).clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device).scatter_add_(0, bins, finite.long())
    exact = torch.where(finite, flat, 0.0).double()
    facts = torch.stack([low.double(), high.double(), finite.sum().double(), exact.sum(), exact.square().sum()])
    return torch.cat([facts, counts.double()])


def read_histograms(rows: Tensor) -> list[Histogram]:  # N x (BINS + 5)
    """Synchronise with the device and read all rows; rows without a finite value are empty histograms around 0."""
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
    """A row of zeros, to which another process adds its own."""
    return torch.zeros(BINS + _FACTS, dtype=torch.float64, device=device)


def _around(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
