"""Options of the commands that measure, and of how a run is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.ranges import AtLeast, Auto, MoreThan, local


@dataclass(frozen=True, kw_only=True)
class LogStyle:
    """Whose lines, CSV files and folder names a run leaves."""

    log_style: Literal["falconet", "pytorch", "tensorflow", "popart"] = "falconet"
    """Ours, or those of one of the originals, for tools that read them; docs/benchmarking.md lists them."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, how often, and what it is compared with."""

    spec: tuple[str, ...] = ()
    """Spec files in the format of the originals, or names of built-in ones; none: ./benchmarks.yml."""
    benchmark: tuple[str, ...] = ()
    """Names of the benchmarks to run; none: all, but those that end in _conv."""
    repeat: Annotated[int, AtLeast(1)] = 3
    """Runs of each; the spread between them is what a difference is judged by."""
    log_dir: Path | Auto = local("auto")
    """Where results and logs go; auto: bench-results/<time>."""
    compare: Path | None = local(None)
    """A results.json of an earlier run; exit code 3 when a benchmark is slower by more than --margin."""
    margin: Annotated[float, AtLeast(0)] = 5.0
    """Percent of throughput that may be lost before --compare fails."""
    timeout: Annotated[float, MoreThan(0)] | None = None
    """Seconds that one run may take; then it is stopped, told as failed, and the next one begins."""
    include_convergence: bool = False
    """Also run the benchmarks that train to an accuracy, whose names end in _conv."""
    stop_on_error: bool = False
    """Run nothing more after the first failure."""
    allow_wandb: bool = local(False)
    """Keep the --wandb options of the commands, which are taken out otherwise."""
    profile: bool = local(False)
    """Give --profile to commands that train; what they measure is marked as profiled."""
    show_output: bool = False
    """Also print what the commands print."""
    csv_metrics: tuple[str, ...] = ()
    """Further metrics of the spec that results.csv gets as columns."""
    additional_metrics: bool = False
    """Every metric of the spec as a column of results.csv."""
    plan: bool = local(False)
    """Say what would run, and what each needs, and exit."""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How predictions are measured."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file of options; the command line overrides it."""
    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Processes that predict side by side, one a device; auto: as many as a launcher started, else 1."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""
    weights: Literal["random", "pretrained", "auto"] = local("random")
    """pretrained: timm's, by the Hugging Face cache or network; auto: those if they can be had, else random ones."""
    half_partial: bool = False
    """Let matrix products add up in half precision, where the device can."""
    profile: bool = local(False)
    """Instead, trace three batches with torch.profiler: profile/profile.json (chrome://tracing) and profile.txt."""
    plan: bool = local(False)
    """Say what would be measured, and exit."""
