"""Number formats, loss scale and recomputation of a run: options in, parts and plan lines out."""

import torch
from torch import nn

from falconet.config import rules, schema
from falconet.config.workspace import Workspace, share_of
from falconet.numerics.partials import half_partials
from falconet.numerics.precision import Regime
from falconet.numerics.recompute import automatic, recompute
from falconet.numerics.rounding import Rounding
from falconet.numerics.scaling import AutomaticScale, FixedScale, Scale, SteppedScale, doublings
from falconet.numerics.workspace import limit_workspace
from falconet.parallel.world import World
from falconet.report.words import counted

GIB = 2**30


def loss_scale(options: schema.TrainOptions, *, updates_per_epoch: int, regime: Regime, world: World) -> Scale | None:
    """The scale that the options ask for; None where the regime needs none and nobody asked."""
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if not rules.is_scaled(options):
        return None
    if numerics.auto_loss_scaling:
        return AutomaticScale(
            dtype=regime.compute,
            device=world.device,
            initial=final,
            period=numerics.auto_loss_scaling_period,
            sum=world.sum,
        )
    if initial is not None and initial != final:
        epochs = options.training.epoch
        return SteppedScale(initial, final, epochs=epochs, updates_per_epoch=updates_per_epoch, device=world.device)
    return FixedScale(final, device=world.device)


def rounding(options: schema.TrainOptions, *, regime: Regime) -> Rounding | None:
    return Rounding(options.run.seed) if options.numerics.enable_stochastic_rounding and regime.is_half else None


def lines(options: schema.TrainOptions, *, regime: Regime, device: torch.device) -> list[str]:
    """What was decided about numbers, in words."""
    written = "stochastically" if rounding(options, regime=regime) else "to the nearest"
    lines = [f"precision {regime.describe(device)}" + (f", rounded {written}" if regime.is_half else "")]
    if rules.is_scaled(options):
        lines.append(f"loss scale {_describe_scale(options)}")
    if options.numerics.half_partial:
        lines.append(half_partials(True, device))
    return lines


def workspace_lines(workspace: Workspace, *, device: torch.device, stage: int = 0, stages: int = 1) -> list[str]:
    """Bound what convolutions take beside their data, if that was asked for; what it is, in words."""
    share = share_of(workspace.available_memory_proportion, stage=stage, stages=stages)
    return [] if share is None else [limit_workspace(share, device)]


def training_bytes(model: nn.Module, options: schema.TrainOptions, *, regime: Regime, replicas: int) -> int:
    """Of weights, gradients, and the update rule's state of them, of which the replicas that run may share one."""
    slots = {"adamw": 2, "rmsprop": 2, "rmsprop_tf": 2}.get(options.optimizer.optimizer, 1)
    shares = replicas if options.parallel.enable_optimizer_rts else 1
    per_weight = 2 + slots / shares + (options.optimizer.ema_half_life is not None)
    sizes = (p.numel() * (regime.update.itemsize if p.ndim > 1 else 4) for p in model.parameters())
    return int(sum(sizes) * per_weight)


def recompute_activations(
    model: nn.Module, options: schema.TrainOptions, *, image_size: int, regime: Regime, device: torch.device
) -> list[str]:
    """Change the model to recompute what the options ask for; what that is, in words."""
    numerics = options.numerics
    mode = rules.recompute_mode(numerics, options.parallel)
    if mode == "none":
        return []
    if mode == "manual":
        kept = recompute(model, numerics.recompute_checkpoints)
        return [f"recomputes all but the outputs of {counted(len(kept), 'layer')}: {_some(kept)}"]
    shape = (options.data.micro_batch_size, 3, image_size, image_size)
    example = torch.empty(shape, dtype=regime.formats(device)["activations"], device="meta")
    budget = None if numerics.memory_budget is None else int(numerics.memory_budget * GIB)
    choice = automatic(model, example=example, budget_bytes=budget)
    if not choice.patterns:
        return [f"recomputes nothing: activations of {choice.without_bytes / GIB:.2f} GiB fit the budget"]
    recompute(model, choice.patterns)
    return [
        f"recomputes {counted(len(choice.blocks), 'block')}, ending in {_some(choice.blocks)}: activations of"
        f" {choice.predicted_bytes / GIB:.3f} GiB predicted instead of {choice.without_bytes / GIB:.3f} GiB"
    ]


def _describe_scale(options: schema.TrainOptions) -> str:
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling:
        period = numerics.auto_loss_scaling_period
        every = "update" if period == 1 else f"{period} updates"
        return f"automatic, from {final:g}, changed every {every}"
    if initial is not None and initial != final:
        steps = doublings(initial, final, epochs=options.training.epoch)
        return ", ".join(f"{value:g} from epoch {epoch}" for epoch, value in steps)
    return f"{final:g}"


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
