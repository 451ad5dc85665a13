"""The options of what is kept: checkpoints, and averages of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from falconet.config.ranges import AtLeast, Between, MoreThan, local


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What is saved."""

    checkpoint_output_path: Path | None = local(None)
    """Folder of the checkpoints; without it, checkpoints/ in the run folder."""
    checkpoint_save_freq: Annotated[float, MoreThan(0)] = 1.0
    """Epochs between checkpoints; 0.25 saves four times an epoch. The end of training is always saved."""
    checkpoint_first_epoch: Annotated[int, AtLeast(0)] = 0
    """Save from the end of this epoch on, then every --checkpoint-save-freq epochs; 0: after the first of those."""
    initial_checkpoint: bool = False
    """Also save before the first update. It is kept whatever --checkpoints-kept says, and in no average of the run."""
    checkpoints_kept: Annotated[int, AtLeast(1)] | Literal["auto", "all"] = local(
        "auto", again="remove older checkpoints; until then all are kept"
    )
    """Newest checkpoints to keep, beside the best validated one; auto: 3, or what the averaging needs."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The average of the checkpoints, made after training."""

    weight_avg_strategy: Literal["none", "mean", "exponential"] = "none"
    """Average the saved checkpoints, all alike or the newer ones more."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all, or -1: every one."""
    weight_avg_also: tuple[str, ...] = ()
    """Further averages, each made and validated: mean:N, mean:all or exponential:DECAY."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """How the average is made."""

    checkpoint_output_path: Path | None = local(None)
    """The averaged checkpoint; without it, <model>_<data>_<epoch>_averaged beside the others."""
    weight_avg_strategy: Literal["mean", "exponential"] = "mean"
    """All alike, or the newer ones more."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all, or -1: every one."""
    weight_avg_discard: Annotated[int, AtLeast(0)] = 0
    """Leave out this many of the newest checkpoints first."""
    batchnorm_images: Annotated[int, AtLeast(0)] = 0
    """Re-estimate batch norm's statistics on this many training images; 0: average the statistics too."""
    validate: bool = False
    """Measure the accuracy of the result."""


def temporary_elsewhere(options: Any) -> str | None:
    """What contradicts a run folder that is thrown away."""
    if not options.run.temporary:
        return None
    if hasattr(options, "input"):
        return "--temporary: is for train; what restore goes on with is there already"
    for name, place in (
        ("run-dir", None if options.run.run_dir == "auto" else options.run.run_dir),
        ("checkpoint-output-path", options.checkpoints.checkpoint_output_path),
    ):
        if place is not None:
            return f"--temporary: contradicts --{name} {place}, which is to stay; wanted one of the two"
    return None
