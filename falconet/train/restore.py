"""What a checkpoint means to the run that goes on from it: the same state, and its place in the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from falconet.checkpoint.manifest import Manifest
from falconet.checkpoint.state import Progress
from falconet.config import commands
from falconet.config.fields import options_of
from falconet.config.load import INVOCATION
from falconet.config.settings import is_asked_for
from falconet.errors import ConfigError
from falconet.numerics.precision import REGIMES
from falconet.report.styles import FALCONET, Conventions
from falconet.train import processes
from falconet.train.plan import Plan
from falconet.train.processes import Options, Restored


def require_same_state(options: commands.TrainOptions, manifest: Manifest, *, folder: Path) -> None:
    """State of one update rule means nothing to another, even where the tensors would fit; so do its formats."""
    trained, asked = manifest.config["optimizer"]["value"], options.optimizer.optimizer
    if trained != asked:
        raise ConfigError(f"--optimizer: got '{asked}', wanted '{trained}', whose state {folder} holds")
    patterns, wanted = (" ".join(each) for each in (options.training.trainable, _trainable(manifest)))
    if patterns != wanted:
        raise ConfigError(
            f"--trainable: got '{patterns}', wanted '{wanted}', whose state {folder} holds; `falconet train"
            " --init-path` begins anew with its weights"
        )
    stored, regime = REGIMES[manifest.config["precision"]["value"]], REGIMES[options.machine.precision]
    if stored.update != regime.update:
        raise ConfigError(
            f"--precision: got '{regime.name}', wanted one that updates as '{stored.name}' does, whose state"
            f" {folder} holds"
        )


def progress_in(plan: Plan, manifest: Manifest) -> Progress:
    """The checkpoint's place in a plan, whose global batch may be another one."""
    progress = Progress.from_json(manifest.meter)
    updates, rest = divmod(manifest.progress.images, plan.global_batch)
    if rest:
        raise ConfigError(
            f"--micro-batch-size: the checkpoint stands {manifest.progress.images:,} images into an epoch, which a"
            f" global batch of {plan.global_batch} does not divide; wanted the one it was trained with"
        )
    return replace(progress, update=plan.update_at(manifest.progress.epoch, updates))


def _trainable(manifest: Manifest) -> list[str]:
    """The patterns of the weights that a checkpoint was trained in; older ones trained all."""
    patterns: list[str] = manifest.config.get("trainable", {"value": []})["value"]
    return patterns


# Settled anew by every start, from what the launcher says: the checkpoint's are kept unless the line names others.
SETTLED = ("replicas", "gradient-accumulation")


def earlier(loaded: Options, conventions: Conventions = FALCONET) -> Restored:
    """The newest whole checkpoint of the run folder, if it has one; refused where it was trained with other options."""
    found = processes.newest(loaded.options, None, conventions)
    if found is None:
        return None
    folder, manifest = found
    asked, stored = _values(loaded.table()), _values(manifest.config)
    for name in options_of(type(loaded.options)):
        open_here = not is_asked_for(loaded.sources.get(name)) and (name in SETTLED or name not in stored)
        if name not in INVOCATION and not open_here and asked.get(name) != stored.get(name):
            raise ConfigError(
                f"--resume: {folder} was trained with --{name} {_shown(stored.get(name))}, this line has"
                f" {_shown(asked.get(name))}; wanted the same options, another --run-dir, or `falconet restore`"
            )
    return found


def _values(table: Any) -> dict[str, object]:
    return {name: entry["value"] for name, entry in table.items()}


def _shown(value: object) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
