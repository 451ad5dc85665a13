"""Sinks, where the metrics of a run go; here the files that every run writes."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from falconet import writing

Metrics = Mapping[str, float]


class Sink(Protocol):
    """Takes the metrics of one update, with names such as `train/loss` and `validation/accuracy`."""

    def write(self, update: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


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
    """updates.jsonl: at each log point, the milliseconds of each update since the previous one."""

    def __init__(self, path: Path) -> None:
        self._lines = writing.GrowingFile(path)

    def write(self, update: int, seconds: Sequence[float]) -> None:
        times = [round(1000 * one, 3) for one in seconds]
        self._lines.add(json.dumps({"update": update, "milliseconds": times}))

    def close(self) -> None:
        self._lines.close()


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
