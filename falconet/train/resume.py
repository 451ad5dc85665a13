"""What a checkpoint decides of a run that continues from it: the options it may have, and the phase it starts in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falconet.checkpoint import format
from falconet.checkpoint.manifest import Checkpoint, Manifest
from falconet.checkpoint.state import TrainState
from falconet.config import commands
from falconet.config.fields import options_of
from falconet.config.load import INVOCATION, LoadedTraining, unsettled
from falconet.config.settings import WEIGHTS, is_asked_for
from falconet.errors import CheckpointError, ConfigError
from falconet.numerics.precision import REGIMES
from falconet.report.styles import FALCONET, Conventions
from falconet.train import run_folder
from falconet.train.plan import Phase

# Settled by every start, from the launcher: the checkpoint's are kept unless the line names others.
SETTLED = ("replicas", "gradient-accumulation")
FITTED = ("micro-batch-size", "gradient-accumulation")  # by --micro-batch-size auto; the checkpoint's are kept


def newest(options: commands.TrainOptions, conventions: Conventions = FALCONET) -> Checkpoint | None:
    """What an earlier attempt at this run saved last."""
    saved = run_folder.checkpoints(run_folder.choose(options, conventions), options)
    if not saved.is_dir() or not format.checkpoints_in(saved):
        return None  # nothing saved yet
    try:
        folder = format.newest_whole(saved, note=lambda _: None)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; expected another --run-dir, to start a new run") from None
    return Checkpoint(folder, format.read_manifest(folder))


def earlier(loaded: LoadedTraining, conventions: Conventions = FALCONET) -> Checkpoint | None:
    """What --resume continues from: the run folder's newest checkpoint, refused if its options were different."""
    found = newest(loaded.options, conventions)
    if found is None:
        return None
    folder, manifest = found
    asked, stored = _values(loaded.rooted().table()), _values(manifest.config)
    if isinstance(place := stored.get("data-dir"), str):  # relative in older checkpoints
        stored["data-dir"] = str(Path(place).absolute())
    for name in options_of(type(loaded.options)):
        is_open = not is_asked_for(loaded.sources.get(name)) and (name in SETTLED or name not in stored)
        is_open = is_open or name in unsettled(loaded.line) or _is_of_weights(name, loaded, manifest)
        is_open = is_open or (asked["micro-batch-size"] == "auto" and name in FITTED)
        if name not in INVOCATION and not is_open and asked.get(name) != stored.get(name):
            raise ConfigError(
                f"--resume: {folder} was trained with --{name} {_shown(stored.get(name))}, but this command line has"
                f" {_shown(asked.get(name))}; expected the same options, another --run-dir, or `falconet restore`"
            )
    return found


def _is_of_weights(name: str, loaded: LoadedTraining, manifest: Manifest) -> bool:
    """Whether the weights that a run started with decided an option."""
    is_theirs = manifest.config.get(name, {}).get("source") == WEIGHTS
    return is_theirs and not loaded.chooses(name)


def _values(table: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    return {name: entry["value"] for name, entry in table.items()}


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def current_phase(phases: Sequence[Phase], loaded: LoadedTraining, restored: Checkpoint | None) -> int:
    """The number of the phase that a run starts in."""
    if restored is None:
        return 1
    folder, manifest = restored
    number = manifest.progress.phase
    if number > len(phases):
        raise ConfigError(
            f"--no-half-res-training: {folder} is from the fine-tuning after it; expected an earlier checkpoint"
        )
    if number > 1 and loaded.options.training.epochs != (epochs := manifest.number("epoch")):
        raise ConfigError(
            f"--epoch: got {loaded.options.training.epochs}, expected {epochs}: {folder} is from the fine-tuning after"
            " them, which a larger --fine-tune-epoch makes longer"
        )
    return number


def require_same_state(options: commands.TrainOptions, restored: Checkpoint) -> None:
    """Refuse options that change what the state means: another update rule, other formats, other trained weights."""
    folder, manifest = restored
    trained, asked = manifest.option("optimizer"), options.optimizer.optimizer
    if trained != asked:
        raise ConfigError(f"--optimizer: got '{asked}', expected '{trained}', whose state {folder} holds")
    training = options.training
    for name, patterns in (("trainable", training.trainable), ("freeze", (training.freeze or "",))):
        value: str | list[str] = manifest.config.get(name, {"value": ""})["value"]  # older checkpoints trained all
        got, expected = " ".join(patterns), value if isinstance(value, str) else " ".join(value)
        if got != expected:
            raise ConfigError(
                f"--{name}: got '{got}', expected '{expected}', whose state {folder} holds; `falconet train"
                " --init-path` starts a new run with its weights"
            )
    for name, epochs in (("unfreeze-after", training.unfreeze_after), ("freeze-after", training.freeze_after)):
        if (epochs is None) == (name in manifest.config):
            expected = "a number of epochs" if epochs is None else "none"
            raise ConfigError(f"--{name}: expected {expected}, because {folder} holds the state of such a run")
    before, now = REGIMES.get(manifest.option("precision")), REGIMES[options.machine.precision]
    if before is None:
        raise CheckpointError(f"{folder}: its precision is '{manifest.option('precision')}', which is none of ours")
    if before.update != now.update:
        raise ConfigError(
            f"--precision: got '{now.name}', expected one that updates in the same format as '{before.name}', whose"
            f" state {folder} holds"
        )


def require_parts(options: commands.TrainOptions, restored: Checkpoint, state: TrainState) -> None:
    """Refuse options that ask for a part of the state that not every run has, if the checkpoint lacks it."""
    folder, manifest = restored
    lacks = f"but {folder} is of a run without one; `falconet train --init-path` starts a new run with its weights"
    if state.ema and "ema" not in manifest.stems:
        raise ConfigError(f"--ema-half-life: asks for a moving average, {lacks}")
    if state.scale and "scale" not in manifest.stems:
        raise ConfigError(f"--{_scaled_by(options)}: asks for a loss scale, {lacks}")
    if state.scale and options.numerics.auto_loss_scaling and not _was_automatic(manifest):
        raise ConfigError(
            f"--auto-loss-scaling: asks for an automatic loss scale, but {folder} is of a run with a fixed or stepped"
            " one; expected --loss-scaling N, which may change, or a new run with its weights: `falconet train"
            f" --auto-loss-scaling --init-path {folder}`"
        )


def _was_automatic(manifest: Manifest) -> bool:
    return manifest.config.get("auto-loss-scaling", {}).get("value") is True


def _scaled_by(options: commands.TrainOptions) -> str:
    """The option because of which a run has a loss scale."""
    numerics = options.numerics
    asked = {
        "auto-loss-scaling": numerics.auto_loss_scaling,
        "initial-loss-scaling": numerics.initial_loss_scaling is not None,
        "loss-scaling": numerics.loss_scaling != 1.0,
    }
    return next((name for name, is_asked in asked.items() if is_asked), "precision")
