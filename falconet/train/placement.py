"""How a network lies on devices: here whole in each process; in `pipeline_step`, a stage in each."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.optim import Optimizer

from falconet.checkpoint.state import TrainState
from falconet.config import commands, facts
from falconet.errors import ConfigError, named_option
from falconet.evaluation import evaluate
from falconet.evaluation.evaluate import Measure, Observe, overlook
from falconet.models import splits
from falconet.models.freezing import Frozen, Hold
from falconet.models.fused.fusion import Fusion, Norm, fuse, fuse_pieces
from falconet.numerics.loss_scale import NonFinite, Offender
from falconet.numerics.recompute import automatic, matching, pieces, recompute
from falconet.optim.half_optimizers import HalfOptimizer
from falconet.optim.offload import HostedState
from falconet.parallel.data_parallel import Replicas
from falconet.parallel.grid import OneStage, Stages
from falconet.parallel.zero import ShardedReplicas
from falconet.report.console import counted
from falconet.train import memory
from falconet.train.memory import GIB, Need, Outlook, training_bytes
from falconet.train.setup import Network, Setup, TrainingLoader
from falconet.train.step import (
    Elsewhere,
    LocalStep,
    Move,
    Moving,
    PlainMove,
    ScaledMove,
    Step,
    generators_of,
)

Capture = Callable[[LocalStep], Step]  # the step that captures its updates, or the same


class Placement(Protocol):
    """How the network lies on the devices. Only `build` touches a device, and only it changes the network."""

    setup: Setup
    uncaptured: str | None  # why its updates are never captured; None: they may be

    @property
    def network(self) -> Network: ...  # the whole one, in every process

    @property
    def splits(self) -> Sequence[str]: ...  # the layers that start a further stage

    def lines(self) -> list[str]: ...  # for the plan

    def outlook(self, model: nn.Module | None) -> Outlook | None: ...  # None: not predicted; see `fitting.warning`

    def build(self) -> nn.Module: ...  # what this process trains, on its device; called once

    def stages(self) -> Stages: ...

    def loader(self) -> TrainingLoader: ...

    def evaluator(self, observe: Observe = overlook) -> Measure: ...

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender, capture: Capture) -> Step: ...


class WholeModel:
    """A whole replica in each process."""

    splits: Sequence[str] = ()
    uncaptured: str | None = None

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def network(self) -> Network:
        network, asked = self.setup.new_network(), self.setup.options.parallel.pipeline_splits
        if asked:
            with named_option("pipeline_splits"):
                splits.require(network.model, asked)  # stages that share a process change nothing, but must be possible
        return network

    @cached_property
    def recomputation(self) -> "Recomputation | None":
        setup = self.setup
        return choose_recomputation(
            self.network.model,
            setup.options,
            micro_batch=setup.shape.as_run.micro_batch,
            image_size=setup.images.training.image_size,
            activations=setup.regime.formats(setup.device)["activations"],
        )

    def lines(self) -> list[str]:
        recomputed = [self.recomputation.words] if self.recomputation else []
        return [*recomputed, *self._fused_lines()]

    def _fused_lines(self) -> list[str]:
        fused, norms, _ = self.fused_norms
        return [f"norms: {fused or 'none'} of {norms} fused with what follows them"] if norms else []

    @cached_property
    def fused_norms(self) -> "FusedNorms":
        """The norms of the whole model, or of its segments if they are recomputed."""
        if self.setup.device.type != "cuda":
            return FusedNorms()
        model, stored = self.network.model, self.recomputation.stored if self.recomputation else ()
        if not stored:
            whole = self._fused(model)
            if whole is None:
                return FusedNorms(0, sum(isinstance(module, Norm) for module in model.modules()))
            return FusedNorms(whole.fused, whole.norms, whole.channels)
        parts = fuse_pieces(pieces(model, matching(model, stored)))
        return FusedNorms(sum(part.fused for part in parts), sum(part.norms for part in parts), parts[0].channels)

    def fused(self, model: nn.Module) -> Fusion | None:
        """What the step runs instead of the model; None: the model, whose recomputed segments may be fused."""
        fuses = self.setup.device.type == "cuda" and not (self.recomputation and self.recomputation.stored)
        return self._fused(model) if fuses else None

    def _fused(self, model: nn.Module) -> Fusion | None:
        """The model's training pass with fused norms; None: it cannot be traced, or has no norm to fuse."""
        try:
            found = fuse(model)
        except ConfigError:
            return None
        found.model._forward_pre_hooks = model._forward_pre_hooks  # they count micro-batches
        return found if found.fused else None

    def build(self) -> nn.Module:
        recomputation, _ = self.recomputation, self.fused_norms  # found before the model changes
        self.setup.whiten(self.network.model)
        model = self.setup.regime.prepare(self.network.model, self.setup.device)
        if recomputation and recomputation.stored:
            if self.setup.device.type == "cuda":
                recompute(model, recomputation.stored, change=_fused_pieces)
            else:
                recompute(model, recomputation.stored)
        return model

    def outlook(self, model: nn.Module | None) -> Outlook | None:
        need = self.need(self._copied() if model is None else model)
        if need is None:
            return None
        return Outlook(
            of=lambda micro_batch, _: need.of(micro_batch),
            schedules=(self.setup.options.parallel.pipeline_schedule,),
            helps="expected a smaller model or smaller images",
        )

    def _copied(self) -> nn.Module:
        """A copy of the model on its device, to look at; a plan builds nothing."""
        return self.setup.regime.prepare(copy.deepcopy(self.network.model), self.setup.device)

    def need(self, model: nn.Module) -> Need | None:
        """The memory that updates are predicted to need; None: not known, because layers are recomputed by name.

        From what the backward pass of an image needs. Convolution workspaces come on top, and what the allocator cannot
        use: rather too little than a needless warning.
        """
        if self.recomputation and self.recomputation.activations is None:
            return None
        setup, side, fused = self.setup, self.setup.images.training.image_size, self.fused(model)

        def forward(images: int, keep: memory.Keep) -> None:
            pixels = memory.black(images, side, setup.device)
            run = memory.FusedPass(fused.model, keep).run if fused else model
            setup.regime.run(run, setup.normalise(pixels))

        casts, growth = memory.kept_bytes(model, forward, micro_batch=setup.shape.micro_batch)
        activations = sum(growth)
        if self.recomputation:
            assert self.recomputation.activations is not None
            activations = self.recomputation.activations // setup.shape.as_run.micro_batch
        pixels = 3 * side * side
        weights = training_bytes(model, setup.options, regime=setup.regime, replicas=setup.shape.replicas)
        # Beside the activations: the input as float32, and the gradient of one layer.
        per_image = setup.shape.joined * (activations + 4 * pixels + max(growth, default=0))
        return Need(fixed=weights + casts + setup.images_held * pixels, per_image=per_image)

    def stages(self) -> Stages:
        return OneStage()

    def loader(self) -> TrainingLoader:
        return self.setup.training_loader()

    def evaluator(self, observe: Observe = overlook) -> Measure:
        setup = self.setup
        return evaluate.evaluator(
            setup.images,
            setup.options.data,
            regime=setup.regime,
            world=setup.grid.world,
            note=setup.note,
            observe=observe,
            tta=setup.options.views.tta,
            capture=setup.options.machine.capture,
        )

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender, capture: Capture) -> Step:
        setup, fused = self.setup, self.fused(state.model)
        step = LocalStep(
            build_moving(state, setup, self.network.frozen, replicas=replicas, offender=offender),
            normalise=setup.normalise_to(self.fused_norms.channels),
            loss=setup.loss,
            regime=setup.regime,
            forward=fused.model if fused else None,
            prepare=setup.prepare,
        )
        return capture(step)


class FusedNorms(NamedTuple):
    """How many norms run fused with what follows them, and how many there are."""

    fused: int = 0
    norms: int = 0
    channels: int = 3  # of the images that the first layer is fastest with


def _fused_pieces(pieces: Sequence[fx.GraphModule]) -> list[fx.GraphModule]:
    return [piece.model for piece in fuse_pieces(pieces)]


@dataclass(frozen=True)
class Recomputation:
    """Which outputs are stored for the backward pass; everything between them is computed again."""

    stored: tuple[str, ...]  # regular expressions of layers; none: nothing is recomputed
    words: str  # for the plan
    activations: int | None = None  # bytes of a micro-batch; None: not predicted


def choose_recomputation(
    model: nn.Module, options: commands.TrainOptions, *, micro_batch: int, image_size: int, activations: torch.dtype
) -> Recomputation | None:
    """What the options ask for; None: they do not ask. The model is only looked at."""
    numerics = options.numerics
    mode = facts.recompute_mode(numerics, options.parallel)
    if mode == "none":
        return None
    if mode == "manual":
        with named_option("recompute_checkpoints"):
            kept = matching(model, numerics.recompute_checkpoints)
        words = f"recomputes everything but the outputs of {counted(len(kept), 'layer')}: {_some(kept)}"
        return Recomputation(tuple(numerics.recompute_checkpoints), words)
    shape = (micro_batch, 3, image_size, image_size)
    budget = None if numerics.memory_budget is None else int(numerics.memory_budget * GIB)
    with named_option("recompute_mode" if budget is None else "memory_budget"):
        choice = automatic(model, example=torch.empty(shape, dtype=activations, device="meta"), budget_bytes=budget)
    without = f"{choice.without_bytes / GIB:.3f} GiB"
    if not choice.patterns:
        words = f"recomputes nothing: activations of {without} fit into the memory budget"
        return Recomputation((), words, choice.without_bytes)
    words = (
        f"recomputes {counted(len(choice.blocks), 'block')}, ending in {_some(choice.blocks)}: predicted activations"
        f" of {choice.predicted_bytes / GIB:.3f} GiB instead of {without}"
    )
    return Recomputation(choice.patterns, words, choice.predicted_bytes)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def build_moving(
    state: TrainState,
    setup: Setup,
    frozen: Frozen,
    *,
    replicas: Replicas,
    offender: Offender,
    stages: Callable[[NonFinite], NonFinite] = lambda found: found,
) -> Moving:
    """The model of a state, and how its weights move. `stages`: combines what all stages of a pipeline found."""
    shards = replicas if isinstance(replicas, ShardedReplicas) else None
    step = sharded_step(state.optimizer, shards, state.hosted)
    move: Move
    if state.scale is None:
        move = PlainMove(state.optimizer, device=setup.device, step=step)
    else:
        assert isinstance(state.optimizer, HalfOptimizer)
        elsewhere = Elsewhere(shards=shards, stages=stages)
        move = ScaledMove(state.model, state.optimizer, state.scale, offender=offender, step=step, elsewhere=elsewhere)
    averages = [state.ema] if state.ema else []
    state.model.train()  # all layers of it; from here on the mode of the whole model tells that of each
    hold = Hold(state.model, frozen, since=setup.frozen_from, until=setup.unfrozen_at, changed=replicas.look_again)
    return Moving(
        model=state.model,
        move=move,
        hold=hold.at,
        seed=setup.seed,
        generators=generators_of(setup.device),
        averages=averages,
        replicas=replicas,
        uploads=shards is not None or (isinstance(state.optimizer, HalfOptimizer) and state.optimizer.uploads),
    )


def sharded_step(
    optimizer: Optimizer, shards: ShardedReplicas | None, hosted: HostedState | None = None
) -> Callable[[], None]:
    """One update of all weights: this process's, wherever their state lies, then those of the other replicas."""
    own = hosted.step if hosted else optimizer.step

    def moved() -> None:
        own()
        if shards:
            shards.share_weights()

    return moved
