"""`falconet upload`: the metrics of a finished run to Weights & Biases."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falconet.config.schema import UploadOptions
from falconet.config.settings import Setting, read_yaml
from falconet.errors import ConfigError
from falconet.report import finished
from falconet.report.screen import Screen
from falconet.report.sinks import WeightsAndBiases
from falconet.wiring.reading import load_options

CONFIG = "config.yaml"


def run(line: Sequence[Setting]) -> int:
    options = load_options(UploadOptions, line).options.upload
    folder = options.source
    assert folder is not None
    moments = finished.moments(folder)
    if not moments:
        raise ConfigError(f"--source: {folder} has no metrics yet")
    name = options.name or folder.resolve().name
    sink = WeightsAndBiases(folder, project=options.wandb_project, name=name, config=_config(folder))
    with contextlib.closing(sink):
        for update, metrics in moments:
            sink.write(update, metrics)
    Screen().line(f"uploaded {len(moments):,} moments of {folder} as {name} to the project {options.wandb_project}")
    return 0


def _config(folder: Path) -> dict[str, Any]:
    """What the run was started with, in its own words."""
    own = read_yaml(folder / CONFIG) if (folder / CONFIG).exists() else None
    return finished.options(folder) or (own if isinstance(own, dict) else {})
