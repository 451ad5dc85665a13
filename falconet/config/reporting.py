"""What is reported of a run: the options of its sinks, and of the command that uploads a finished one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from falconet.config.ranges import AtLeast, local, portable


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is reported."""

    logs_per_epoch: Annotated[int, AtLeast(1)] = 1
    """Log points in each epoch."""
    tensorboard: bool = local(False, again="continue the TensorBoard files")
    """Also write TensorBoard files into the run folder."""
    wandb: bool = local(False, again="continue uploading")
    """Also log to Weights & Biases (WANDB_MODE=offline works)."""
    profile: bool = local(False, again="trace updates")
    """Trace three updates with torch.profiler: profile.json (chrome://tracing) and profile.txt in the run folder."""
    wandb_project: str = local("falconet", again="upload to the same project")
    """Weights & Biases project."""
    weight_histogram: bool = local(False, again="continue the histograms")
    """At every log point, histograms of all trained weights to --wandb and --tensorboard (--wandb-weight-histogram)."""
    mlperf_logging: bool = portable(False)  # a file in the run folder, written like the others there
    """Also write result_<seed>.txt into the run folder, the log of MLPerf Training 1.1 (image classification)."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Which run is uploaded, and as what."""

    source: Path | None = local(None)
    """The run folder, of Falconet or of an original; also the first word of the command."""
    name: str | None = None
    """The name that the run gets; without it, that of its folder."""
    wandb_project: str = local("falconet")
    """Weights & Biases project."""


def missing(options: Logging) -> str | None:
    """Where histograms would go."""
    if options.weight_histogram and not (options.wandb or options.tensorboard):
        return "--weight-histogram: needs --wandb or --tensorboard, where histograms go"
    return None
