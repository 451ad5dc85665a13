"""The plan of a run in words, phase by phase."""

from typing import TYPE_CHECKING

from falconet.config.data_rules import PHOTOS
from falconet.report.words import counted
from falconet.wiring import decoding, feeding, loading, numbers, sharding
from falconet.wiring.placing import freezing_lines

if TYPE_CHECKING:
    from falconet.wiring.running import Run


def plan_lines(run: "Run") -> list[str]:
    """Everything that was decided for a phase; of a later one, what it does differently."""
    if run.phase.count == 1:
        return _lines(run)
    return [_heading(run), *(_lines(run) if run.phase.number == 1 else _changed_lines(run))]


def _heading(run: "Run") -> str:
    phase, side = run.phase, run.images.training.image_size
    first, last = run.plan.epochs_before + 1, run.plan.last_epoch
    begins = "" if phase.number == 1 else ", from the average of the checkpoints before"
    return f"phase {phase.number} of {phase.count}: epochs {first} to {last} at {side} x {side}{begins}"


def _changed_lines(run: "Run") -> list[str]:
    options = run.options
    return [
        *freezing_lines(run.setup),
        *run.plan.lines(),
        f"optimizer {options.optimizer.optimizer} with momentum {options.optimizer.momentum:g}, augment"
        f" {run.images.augment(options.augmentation.augment)}, nothing mixed",
    ]


def _lines(run: "Run") -> list[str]:
    options, world = run.options, run.world
    augment = run.images.augment(options.augmentation.augment)
    placed = sharding.describe(options.parallel, world, replicas=run.division.replicas)
    others = options.validation.validate_checkpoints
    loaders = decoding.workers(options.data, run.division.processes)
    each = " in each process" if run.division.processes > 1 else ""
    lines = [
        f"model {options.model.model}, {run.placement.parameters:,} parameters",
        f"data {options.data.data}: {run.images.describe()}, augment {augment}",
        *_decoding_lines(run),
        f"device {world.device}, {counted(run.threads, 'CPU thread')}, {counted(loaders, 'loader thread')}{each}",
        *feeding.lines(
            options.data,
            train=loading.training_reading(run.images, options),
            validation=loading.validation_reading(run.images),
            device=world.device,
        ),
        *numbers.lines(options, regime=run.regime, device=world.device),
        *numbers.workspace_lines(
            options.workspace, device=world.device, stage=run.grid.stages.rank, stages=run.grid.stages.size
        ),
        *run.placement.lines(),
        *run.plan.lines(),
        *([f"then measures each checkpoint of {others}"] if others and options.data.data != "synthetic" else []),
        f"optimizer {options.optimizer.optimizer}{placed}, seed {options.run.seed}",
    ]
    if options.data.data == "synthetic" and options.validation.validation_mode != "none":
        lines.append("note: synthetic data lives on the device only, so there is nothing to validate on")
    return lines


def _decoding_lines(run: "Run") -> list[str]:
    data = run.options.data
    if data.data not in PHOTOS:
        return []
    on_device = feeding.decode_device(data, run.images.splits.train, run.world.device) == "cuda"
    return [f"photos are decoded by {'nvJPEG on the device' if on_device else decoding.decoder()}"]
