"""What is reported of a run: the options of its sinks, and of the command that uploads a finished one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from falconet.config.ranges import AtLeast


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is reported."""

    logs_per_epoch: Annotated[int, AtLeast(1)] = 1
    """Log points in each epoch."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder."""
    wandb: bool = False
    """Also log to Weights & Biases (WANDB_MODE=offline works)."""
    profile: bool = False
    """Trace three updates with torch.profiler: profile.json (chrome://tracing) and profile.txt in the run folder."""
    wandb_project: str = "falconet"
    """Weights & Biases project."""
    weight_histogram: bool = False
    """At every log point, histograms of all trained weights to --wandb and --tensorboard (--wandb-weight-histogram)."""
    mlperf_logging: bool = False
    """Also write result_<seed>.txt into the run folder, the log of MLPerf Training 1.1 (image classification)."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Which run is uploaded, and as what."""

    source: Path | None = None
    """The run folder, of Falconet or of an original; also the first word of the command."""
    name: str | None = None
    """The name that the run gets; without it, that of its folder."""
    wandb_project: str = "falconet"
    """Weights & Biases project."""


def missing(options: Logging) -> str | None:
    """Where histograms would go."""
    if options.weight_histogram and not (options.wandb or options.tensorboard):
        return "--weight-histogram: needs --wandb or --tensorboard, where histograms go"
    return None
