"""result_<seed>.txt: the MLPerf Training 1.1 log, in the format that github.com/mlcommons/logging checks."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from falconet import writing
from falconet.report.sinks import Metrics

TARGET = 75.9  # percent validation accuracy at which a run of ResNet-50 is a success
TOKEN = ":::MLLOG "
Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The facts that are known before the first update."""

    values: Mapping[str, object]  # by the keys of MLPerf
    tensors: Sequence[str]  # names of the weights in MLPerf
    epochs: int
    began: float  # when the program started, in seconds since 1970


class MlperfLog:
    """A sink that turns metrics into MLPerf events."""

    def __init__(self, path: Path, submission: Submission, *, done: int = 0) -> None:
        """`done`: epochs that a restored run has finished; later events in its file are dropped."""
        kept = [line for line in _lines(path) if _is_before(line, done)]
        self._epochs, self._epoch, self._best = submission.epochs, done, _best(kept)
        writing.replace(path.parent, path.name, "".join(f"{line}\n" for line in kept))
        self._file = writing.GrowingFile(path)
        if not kept:
            self._begin(submission)
        if done < self._epochs:
            self._event("epoch_start", kind="INTERVAL_START", epoch_num=done + 1)

    def write(self, update: int, metrics: Metrics) -> None:  # noqa: ARG002
        if "validation/accuracy" in metrics:
            self._validated(metrics["validation/accuracy"], metrics.get("validation/seconds", 0.0))
        elif float(metrics.get("epoch", 0.5)).is_integer():
            self._epoch = int(metrics["epoch"])
            self._event("epoch_stop", kind="INTERVAL_END", epoch_num=self._epoch)
            if self._epoch < self._epochs:
                self._event("epoch_start", kind="INTERVAL_START", epoch_num=self._epoch + 1)

    def close(self) -> None:
        success = self._best >= TARGET
        self._event("block_stop", kind="INTERVAL_END", first_epoch_num=1)
        status = "success" if success else "aborted"
        self._event("run_stop", {"success": success}, kind="INTERVAL_END", epoch_num=self._epoch, status=status)
        self._file.close()

    def _begin(self, submission: Submission) -> None:
        self._event("cache_clear", value=False)  # clearing caches is up to the caller
        self._event("init_start", kind="INTERVAL_START", at=submission.began)
        for key, value in submission.values.items():
            self._event(key, value)
        for tensor in submission.tensors:
            self._event("weights_initialization", tensor=tensor)
        self._event("init_stop", kind="INTERVAL_END")
        self._event("run_start", kind="INTERVAL_START")
        self._event("block_start", kind="INTERVAL_START", first_epoch_num=1, epoch_count=self._epochs)

    def _validated(self, accuracy: float, seconds: float) -> None:
        self._best = max(self._best, accuracy)
        self._event("eval_start", kind="INTERVAL_START", at=time.time() - seconds, epoch_num=self._epoch)
        self._event("eval_stop", kind="INTERVAL_END", epoch_num=self._epoch)
        self._event("eval_accuracy", accuracy / 100, epoch_num=self._epoch)

    def _event(
        self, key: str, value: object = None, *, kind: Kind = "POINT_IN_TIME", at: float | None = None, **more: object
    ) -> None:
        content = {
            "namespace": "resnet",
            "time_ms": int(1000 * (time.time() if at is None else at)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "falconet", "lineno": 0, **more},
        }
        self._file.add(TOKEN + json.dumps(content))


def tensor_name(name: str) -> str:
    """MLPerf's name for a weight of ResNet-50; weights of other models keep their name."""
    layer, _, kind = name.rpartition(".")
    kind = {"weight": "gamma", "bias": "beta"}.get(kind, kind) if _is_norm(layer) else kind
    match layer.split("."):
        case ["conv1"]:
            return f"conv0_{kind}"
        case ["bn1"]:
            return f"bn0_{kind}"
        case ["fc"]:
            return f"fc1_{kind}"
        case [stage, unit, *inner] if stage.startswith("layer") and unit.isdigit():
            place = {"downsample.0": "conv1sc", "downsample.1": "bnsc"}.get(".".join(inner), ".".join(inner))
            return f"stage{stage[5:]}_unit{int(unit) + 1}_{place}_{kind}"
    return name


def _is_norm(layer: str) -> bool:
    return layer.rpartition(".")[2].startswith("bn") or layer.endswith("downsample.1")


def _lines(path: Path) -> list[str]:
    """Complete lines of earlier parts of the run, without one that a killed process left unfinished."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _is_before(line: str, done: int) -> bool:
    event = _parsed(line)
    if event["key"] in ("block_stop", "run_stop"):
        return False
    return int(event["metadata"].get("epoch_num", 0)) <= done


def _best(lines: Sequence[str]) -> float:
    """The best accuracy so far, in percent."""
    found = [event["value"] for event in map(_parsed, lines) if event["key"] == "eval_accuracy"]
    return 100 * max(found, default=0.0)


def _parsed(line: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.removeprefix(TOKEN))
    return event
