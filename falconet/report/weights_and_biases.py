"""Weights & Biases: metrics, histograms, pictures and the confusion matrix."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from falconet import writing
from falconet.errors import ConfigError
from falconet.report import drawings
from falconet.report.histograms import Histogram
from falconet.report.sinks import Metrics
from falconet.report.trackers import Confusion, Picture, Tracker

CHARTED = 100  # classes whose confusion matrix is a chart: its table has a row for each pair, at most 10,000


class WeightsAndBiases(Tracker):
    """A run of its server, or, without a key or a connection, a folder that `wandb sync` uploads."""

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
        self._wandb: Any = wandb

    def write(self, update: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=update)

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        drawn = {
            f"weights/{name}": self._wandb.Histogram(np_histogram=(list(found.counts), found.edges))
            for name, found in histograms.items()
        }
        self._run.log(drawn, step=update)

    # What follows comes after the numbers of its update, perhaps of later ones, and a step that is over takes nothing
    # more: it joins the numbers of the latest one.

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:  # noqa: ARG002
        images = [
            self._wandb.Image(Image.open(io.BytesIO(each.content)).convert("RGB"), caption=each.caption)
            for each in pictures
        ]
        self._run.log({f"pictures/{name}": images}, commit=False)

    def write_confusion(self, update: int, confusion: Confusion) -> None:  # noqa: ARG002
        if len(confusion.class_names) > CHARTED:
            drawn = self._wandb.Image(drawings.matrix(confusion))
        else:
            labels = [label for label, _, images in confusion.cells for _ in range(images)]
            predicted = [other for _, other, images in confusion.cells for _ in range(images)]
            drawn = self._wandb.plot.confusion_matrix(
                y_true=labels, preds=predicted, class_names=list(confusion.class_names)
            )
        self._run.log({"validation/confusion": drawn}, commit=False)

    def write_result(self, update: int, metrics: Metrics) -> None:  # noqa: ARG002
        self._run.summary.update(dict(metrics))

    def close(self) -> None:
        self._run.finish()
