"""Aim: metrics, histograms, pictures and the confusion matrix in its own folder, .aim."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from falconet.errors import ConfigError
from falconet.report.sinks import Metrics
from falconet.report.trackers import drawings
from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.tracker import Confusion, Picture, Tracker


class Aim(Tracker):
    """A run where Aim itself would keep it: the nearest .aim in or above the current folder, else a new one there."""

    def __init__(self, folder: Path, *, options: Mapping[str, object]) -> None:
        try:
            import aim
        except ImportError as error:
            raise ConfigError("needs the package aim: pip install 'falconet[aim]'") from error
        self._aim: Any = aim
        # Not its own capture of the terminal and of the system: both act on the whole process.
        self._run: Any = aim.Run(
            experiment="falconet", system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False
        )
        self._run.name = folder.name
        self._run["options"] = dict(options)
        self._run["run_folder"] = str(folder.absolute())

    def write(self, update: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._run.track(value, name=name, step=update)

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        for name, found in histograms.items():
            drawn = self._aim.Distribution(hist=list(found.counts), bin_range=(found.edges[0], found.edges[-1]))
            self._run.track(drawn, name=f"weights/{name}", step=update)

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:
        images = [
            self._aim.Image(Image.open(io.BytesIO(each.content)).convert("RGB"), caption=each.caption)
            for each in pictures
        ]
        if images:
            self._run.track(images, name=f"pictures/{name}", step=update)

    def write_confusion(self, update: int, confusion: Confusion) -> None:
        drawn = self._aim.Image(Image.fromarray(drawings.matrix(confusion)), format="png")
        self._run.track(drawn, name="validation/confusion", step=update)

    def write_result(self, update: int, metrics: Metrics) -> None:  # noqa: ARG002
        self._run["result"] = dict(metrics)

    def close(self) -> None:
        self._run.close()
