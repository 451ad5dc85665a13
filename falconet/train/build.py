"""Number formats, loss scale and recomputation of a run: options in, parts and plan lines out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from falconet.checkpoint import disk
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Company, SharedWriter, Writer
from falconet.config import commands, options, rules
from falconet.config.options import Workspace, share_of
from falconet.data.crops import Crops
from falconet.data.dataset import Dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape, IdleLoader, Loader, SyntheticLoader
from falconet.data.preprocessing import Normalise
from falconet.errors import ConfigError, named_option
from falconet.models import splits, zoo
from falconet.models.freezing import count_trained, freeze, train_only
from falconet.models.zoo import build_model
from falconet.numerics.loss_scale import AutomaticScale, FixedScale, NonFinite, Offender, Scale, SteppedScale, doublings
from falconet.numerics.precision import (
    Regime,
    allow_half_partials,
    describe_half_partials,
    describe_workspace,
    limit_workspace,
)
from falconet.numerics.recompute import automatic, recompute
from falconet.numerics.rounding import Part, Rounding
from falconet.optim.half_optimizers import HalfLars, HalfOptimizer
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import Lars, decay_groups
from falconet.parallel.collectives import Processes
from falconet.parallel.data_parallel import AveragedReplicas, OneReplica, Replicas
from falconet.parallel.grid import Grid, OneStage, Stages
from falconet.parallel.slices import is_channels_last
from falconet.parallel.world import World
from falconet.parallel.zero import Piece, ShardedReplicas
from falconet.report.console import Say, counted
from falconet.train import evaluate, saved_model
from falconet.train.evaluate import Measure
from falconet.train.step import Elsewhere, LocalStep, Loss, Move, Moving, PlainMove, ScaledMove, Step

GIB = 2**30


def loss_scale(options: commands.TrainOptions, *, updates_per_epoch: int, regime: Regime, world: World) -> Scale | None:
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
        with named_option("initial_loss_scaling"):
            return SteppedScale(initial, final, epochs=epochs, updates_per_epoch=updates_per_epoch, device=world.device)
    return FixedScale(final, device=world.device)


def rounding(options: commands.TrainOptions, *, regime: Regime) -> Rounding | None:
    return Rounding(options.run.seed) if options.numerics.enable_stochastic_rounding and regime.is_half else None


def numerics_lines(options: commands.TrainOptions, *, regime: Regime, device: torch.device) -> list[str]:
    """What was decided about numbers, in words."""
    written = "stochastically" if rounding(options, regime=regime) else "to the nearest"
    lines = [f"precision {regime.describe(device)}" + (f", rounded {written}" if regime.is_half else "")]
    if rules.is_scaled(options):
        lines.append(f"loss scale {_describe_scale(options)}")
    if options.numerics.half_partial:
        allow_half_partials(device)
        lines.append(describe_half_partials(device))
    return lines


def workspace_lines(workspace: Workspace, *, device: torch.device, stage: int = 0, stages: int = 1) -> list[str]:
    """Bound what convolutions take beside their data, if that was asked for; what it is, in words."""
    share = share_of(workspace.available_memory_proportion, stage=stage, stages=stages)
    if share is None:
        return []
    limit_workspace(share, device)
    return [describe_workspace(share, device)]


def training_bytes(model: nn.Module, options: commands.TrainOptions, *, regime: Regime, replicas: int) -> int:
    """Of weights, gradients, and the update rule's state of them, of which the replicas that run may share one."""
    slots = {"adamw": 2, "rmsprop": 2, "rmsprop_tf": 2}.get(options.optimizer.optimizer, 1)
    shares = replicas if options.parallel.enable_optimizer_rts else 1
    per_weight = 2 + slots / shares + (options.optimizer.ema_half_life is not None)
    sizes = (p.numel() * (regime.update.itemsize if p.ndim > 1 else 4) for p in model.parameters())
    return int(sum(sizes) * per_weight)


def recompute_activations(
    model: nn.Module, options: commands.TrainOptions, *, image_size: int, regime: Regime, device: torch.device
) -> list[str]:
    """Change the model to recompute what the options ask for; what that is, in words."""
    numerics = options.numerics
    mode = rules.recompute_mode(numerics, options.parallel)
    if mode == "none":
        return []
    if mode == "manual":
        with named_option("recompute_checkpoints"):
            kept = recompute(model, numerics.recompute_checkpoints)
        return [f"recomputes all but the outputs of {counted(len(kept), 'layer')}: {_some(kept)}"]
    shape = (options.data.micro_batch_size, 3, image_size, image_size)
    example = torch.empty(shape, dtype=regime.formats(device)["activations"], device="meta")
    budget = None if numerics.memory_budget is None else int(numerics.memory_budget * GIB)
    with named_option("recompute_mode" if budget is None else "memory_budget"):
        choice = automatic(model, example=example, budget_bytes=budget)
    if not choice.patterns:
        return [f"recomputes nothing: activations of {choice.without_bytes / GIB:.2f} GiB fit the budget"]
    recompute(model, choice.patterns)
    return [
        f"recomputes {counted(len(choice.blocks), 'block')}, ending in {_some(choice.blocks)}: activations of"
        f" {choice.predicted_bytes / GIB:.3f} GiB predicted instead of {choice.without_bytes / GIB:.3f} GiB"
    ]


def _describe_scale(options: commands.TrainOptions) -> str:
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling:
        period = numerics.auto_loss_scaling_period
        every = "update" if period == 1 else f"{period} updates"
        return f"automatic, from {final:g}, changed every {every}"
    if initial is not None and initial != final:
        with named_option("initial_loss_scaling"):
            steps = doublings(initial, final, epochs=options.training.epoch)
        return ", ".join(f"{value:g} from epoch {epoch}" for epoch, value in steps)
    return f"{final:g}"


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def build_replicas(model: nn.Module, world: World, *, bucket: float, sharded: bool) -> Replicas:
    """The replicas of `model` in `world`; a world of one has nothing to divide. `bucket`: megabytes."""
    if not isinstance(world, Processes):
        return OneReplica()
    return (ShardedReplicas if sharded else AveragedReplicas)(model, world, bucket_megabytes=bucket)


def describe_optimizer_state(parallel: options.Parallel, world: World, *, replicas: int) -> str:
    """Where the optimizer's state lies, in words for the plan; nothing where nobody asked. `replicas`: that run."""
    words = ""
    if parallel.enable_optimizer_rts and replicas > 1:
        words += ", state divided over the replicas"
    if not parallel.offload_optimizer:
        return words
    if world.device.type == "cpu":
        return f"{words}, state in host memory (which it is on a CPU anyway: --offload-optimizer has no effect)"
    return f"{words}, state in host memory, on the device bucket by bucket"


def checkpoint_writer(world: World, *, timeout: float) -> Writer:
    """One process writes whole tensors, several write their shares of them. `timeout`: seconds."""
    if world.size == 1:
        return Writer()
    return SharedWriter(Company(rank=world.rank, size=world.size, token=world.once(disk.token), timeout=timeout))


def attach_pieces(
    optimizer: Optimizer, model: nn.Module, *, shards: ShardedReplicas | None, numbers: Mapping[str, int] | None = None
) -> None:
    """Tell the optimizer that it has pieces: rules that go layer by layer need whole norms, noise the whole's numbers.

    `numbers`: those of the weights in the whole model, where `model` is a stage of it. That updates reach the other
    processes is `step`'s business.
    """
    if shards and isinstance(optimizer, Lars | HalfLars):
        optimizer.norms = shards.norms
        adapting = {p for group in optimizer.param_groups if group["adapts"] for p in group["params"]}
        shards.adapting = [piece for piece in shards.pieces if piece.weights in adapting]
    if isinstance(optimizer, HalfOptimizer):
        numbers = numbers or numbered(model)
        whole = {p: Part(numbers[name]) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.parts = (
            {piece.weights: _part(piece, whole[piece.whole]) for piece in shards.pieces}  # type: ignore[index]
            if shards
            else whole
        )


def require_one_type(model: nn.Module, undecayed: frozenset[str] | None) -> None:
    """Of divided weights that lars scales: their norms are summed in one message, and norm layers' weights are fp32."""
    if len({p.dtype for p in decay_groups(model, undecayed)[0]}) > 1:
        raise ConfigError(
            "--lars-skip: leaves weights of two number formats to lars, which --enable-optimizer-rts cannot divide;"
            " wanted patterns that match the weights of all norm layers"
        )


def numbered(model: nn.Module) -> dict[str, int]:
    """The number of each trained weight in the update rule's order."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: number for number, p in enumerate(p for group in decay_groups(model) for p in group)}


def sharded_step(
    optimizer: Optimizer, shards: ShardedReplicas | None, hosted: HostedState | None = None
) -> Callable[[], None]:
    """One update of all weights: those of this process, wherever their state lies, and then the others'."""
    own = hosted.step if hosted else optimizer.step

    def moved() -> None:
        own()
        if shards:
            shards.share_weights()

    return moved


def _part(piece: Piece, whole: Part) -> Part:
    """The rounding's numbers of a piece, from those of its whole."""
    if not is_channels_last(piece.whole):
        return whole._replace(first=piece.begin)
    _, channels, height, width = piece.whole.shape
    return whole._replace(first=piece.begin, channels=channels, pixels=height * width)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both ways are made from."""

    options: commands.TrainOptions
    images: Dataset
    shape: BatchShape
    grid: Grid
    regime: Regime
    note: Say
    initial: Path | None = None  # whose weights it begins with
    first_trained: str | None = None  # layers that run before it stay as they are

    def built(self) -> nn.Module:
        """The whole model in fp32, on the host, with the weights that are not to be trained frozen."""
        model = build_model(self.options.model, classes=self.images.classes, seed=self.options.run.seed)
        if self.initial is not None:
            saved_model.load_initial(model, self.initial, name=self.options.model.model, note=self.note)
        with named_option("trainable"):
            train_only(model, self.options.training.trainable)
        return model

    def beginning(self, model: nn.Module) -> list[str]:
        """For the plan: whose weights it begins with where it is not the seed that decides, and which ones move."""
        lines = [f"begins with the weights of {self.initial}"] if self.initial else []
        patterns = self.options.training.trainable
        if patterns:
            moving, all_of_them = count_trained(model), zoo.count_parameters(model)
            lines.append(f"trains {moving:,} of {all_of_them:,} parameters: those that match {' '.join(patterns)}")
        return lines

    @property
    def input(self) -> Input:
        return Input(data=self.options.data, regime=self.regime, world=self.grid.world, note=self.note)

    @property
    def crops(self) -> Crops:
        return self.images.training_crops(self.options.augmentation, seed=self.options.run.seed)

    @property
    def normalise(self) -> Normalise:
        return self.images.normalise(self.grid.world.device)

    @property
    def loss(self) -> Loss:
        return Loss(self.images.classes, self.options.augmentation.label_smoothing)

    @property
    def seed(self) -> int:
        """Of dropout: every process drops other units, or every stage does, the same ones in all replicas."""
        alike = self.options.parallel.identical_replica_seeding
        return self.options.run.seed + ((self.grid.stages if alike else self.grid.world).rank << 40)


def freezing_lines(setup: Setup) -> list[str]:
    """What is frozen, in words; found on the host, so that a later phase takes no room on the device."""
    if setup.first_trained is None:
        return []
    model = setup.built()
    with named_option("fine_tune_first_trainable_layer"):
        freeze(model, before=setup.first_trained)
    moving = count_trained(model)
    return [f"trains {moving:,} parameters, from {setup.first_trained} on; the layers before it stay as they are"]


def build_moving(
    state: TrainState,
    setup: Setup,
    *,
    replicas: Replicas,
    offender: Offender,
    stages: Callable[[NonFinite], NonFinite] = lambda found: found,
) -> Moving:
    """The model of a state, and how its weights move. `stages`: what all stages of a pipeline found."""
    shards = replicas if isinstance(replicas, ShardedReplicas) else None
    return Moving(
        model=state.model,
        move=_move(
            state, setup.grid.world.device, offender=offender, elsewhere=Elsewhere(shards=shards, stages=stages)
        ),
        seed=setup.seed,
        averages=[state.ema] if state.ema else [],
        replicas=replicas,
    )


def _move(state: TrainState, device: torch.device, *, offender: Offender, elsewhere: Elsewhere) -> Move:
    """Scaled where there is a loss scale."""
    moved = sharded_step(state.optimizer, elsewhere.shards, state.hosted)
    if state.scale is None:
        return PlainMove(state.optimizer, device=device, step=moved)
    assert isinstance(state.optimizer, HalfOptimizer)
    return ScaledMove(state.model, state.optimizer, state.scale, offender=offender, step=moved, elsewhere=elsewhere)


class Placement(Protocol):
    """A way for the model to lie on devices."""

    @property
    def model(self) -> nn.Module: ...  # what this process trains

    @property
    def parameters(self) -> int: ...  # of the whole model

    @property
    def weights(self) -> Sequence[str]: ...  # names of all weights of the model

    @property
    def trained(self) -> Sequence[str]: ...  # names of all weights that are trained, in the model's order

    @property
    def splits(self) -> Sequence[str]: ...  # the layers that begin a further stage

    def lines(self) -> list[str]: ...  # for the plan

    def stages(self) -> Stages: ...

    def numbers(self) -> Mapping[str, int]: ...  # of the trained weights among all of the model's

    def loader(self) -> Loader | SyntheticLoader | IdleLoader: ...  # of training batches

    def evaluator(self) -> Measure: ...

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> Step: ...


class WholeModel:
    """One replica a process."""

    splits: Sequence[str] = ()

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @property
    def model(self) -> nn.Module:
        return self._built[0]

    @cached_property
    def _built(self) -> tuple[nn.Module, list[nn.Module]]:
        """The model, and the layers of it that stay as they are."""
        setup = self._setup
        model = setup.built()
        asked = setup.options.parallel.pipeline_splits
        if asked:
            with named_option("pipeline_splits"):
                splits.require(model, asked)  # stages that share a process change nothing, but they must be possible
        model = setup.regime.prepare(model, setup.grid.world.device)
        with named_option("fine_tune_first_trainable_layer"):
            return model, freeze(model, before=setup.first_trained)

    @property
    def parameters(self) -> int:
        return zoo.count_parameters(self.model)

    @property
    def weights(self) -> Sequence[str]:
        return [name for name, _ in self.model.named_parameters()]

    @property
    def trained(self) -> Sequence[str]:
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    def lines(self) -> list[str]:
        return [*self._setup.beginning(self.model), *self._recomputed]

    @cached_property
    def _recomputed(self) -> list[str]:
        """What the model recomputes, in words; the model is changed accordingly."""
        setup = self._setup
        return recompute_activations(
            self.model,
            setup.options,
            image_size=setup.images.training.image_size,
            regime=setup.regime,
            device=setup.grid.world.device,
        )

    def stages(self) -> Stages:
        return OneStage()

    def numbers(self) -> Mapping[str, int]:
        return numbered(self.model)

    def loader(self) -> Loader | SyntheticLoader:
        setup = self._setup
        return setup.input.training_loader(setup.images, crops=setup.crops, shape=setup.shape)

    def evaluator(self) -> Measure:
        setup = self._setup
        return evaluate.evaluator(
            setup.images, setup.options.data, regime=setup.regime, world=setup.grid.world, note=setup.note
        )

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> LocalStep:
        setup = self._setup
        return LocalStep(
            build_moving(state, setup, replicas=replicas, offender=offender),
            normalise=setup.normalise,
            loss=setup.loss,
            regime=setup.regime,
            frozen=self._built[1],
        )
