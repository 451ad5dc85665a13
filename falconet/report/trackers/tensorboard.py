"""TensorBoard: event files with scalars, histograms, pictures, the confusion matrix, the model and hyperparameters."""

import contextlib
import copy
import io
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from falconet import writing
from falconet.errors import ConfigError
from falconet.report.console import Say
from falconet.report.sinks import Metrics
from falconet.report.trackers import drawings
from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.tracker import Confusion, Picture, Tracker, in_words

Option = int | float | str | bool


class TensorBoard(Tracker):
    """An event file.

    torch's SummaryWriter is not used: it writes in its own thread, which prints a traceback when the disk is full.
    """

    def __init__(self, folder: Path, *, options: Mapping[str, object] | None = None, after: int | None = None) -> None:
        """`options` are shown as hyperparameters beside the result.

        `after`: the update that a run continues from; later numbers of an earlier start are hidden.
        """
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise ConfigError("needs the package tensorboard: pip install 'falconet[tensorboard]'") from error
        self._protocol: Any = event_pb2
        self._summary: Any = summary
        self._options = {name: _option(value) for name, value in (options or {}).items()}
        home = writing.subfolder(folder.parent, folder.name)
        # Files are read in the order of their names: of equal length, with the time first.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.falconet.{os.getpid()}"
        handle = writing.growing(home, name)
        self._records: Any = RecordWriter(os.fdopen(handle, "ab"))
        self._add(0, file_version="brain.Event:2")
        if after is not None:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.SessionStatus.START)
            self._add(after + 1, session_log=restart)
        self._flush()

    def _add(self, update: int, **content: object) -> None:
        event = self._protocol.Event(wall_time=time.time(), step=update, **content)
        self._records.write(event.SerializeToString())

    def _flush(self) -> None:
        self._records.flush()

    def write(self, update: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._add(update, summary=self._summary.scalar(name, value))
        self._flush()

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        for name, found in histograms.items():
            drawn = self._summary.histogram_raw(
                f"weights/{name}",
                min=found.smallest,
                max=found.largest,
                num=found.count,
                sum=found.sum,
                sum_squares=found.squares,
                bucket_limits=found.edges[1:],
                bucket_counts=list(found.counts),
            )
            self._add(update, summary=drawn)
        self._flush()

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:
        if pictures:
            self._write_image(update, f"pictures/{name}", drawings.sheet(pictures))

    def write_confusion(self, update: int, confusion: Confusion) -> None:
        self._write_image(update, "validation/confusion", drawings.matrix(confusion))

    def _write_image(self, update: int, name: str, pixels: drawings.Pixels) -> None:
        self._add(update, summary=self._summary.image(name, pixels, dataformats="HWC"))
        self._flush()

    def write_graph(self, graph: Any) -> None:
        self._add(0, graph_def=graph.SerializeToString())
        self._flush()

    def write_result(self, update: int, metrics: Metrics) -> None:
        for part in self._summary.hparams(self._options, dict(metrics)):
            self._add(update, summary=part)
        self.write(update, metrics)

    def close(self) -> None:
        self._records.close()


def _option(value: object) -> Option:
    """An option as a hyperparameter's value."""
    if isinstance(value, Option):
        return value
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Errors that tracing a model may raise: the model's code gets something that is not quite a tensor.
UNTRACEABLE = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError)


def graph_of(model: nn.Module, *, image_size: int, say: Say) -> Any:
    """The operations of a model for one image, as a GraphDef; None, and a line, if it cannot be traced.

    A copy is traced, because tracing changes the mode of every layer. Call this in the thread that trains: Python's
    filters of warnings are shared by all threads.
    """
    from torch.jit import TracingCheckError  # type: ignore[attr-defined]

    try:
        from torch.utils.tensorboard._pytorch_graph import graph

        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing is deprecated, but TensorBoard's graph has no other source
            copied = copy.deepcopy(model).cpu().eval()
            return graph(copied, torch.zeros(1, 3, image_size, image_size))[0]  # type: ignore[no-untyped-call]
    except (*UNTRACEABLE, TracingCheckError) as error:
        say(f"note: TensorBoard: no graph of the model, which cannot be traced: {in_words(error)}")
        return None
