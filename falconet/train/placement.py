"""How a model lies on devices: here whole in each process; in `pipeline_step`, a stage in each."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from falconet.checkpoint.initial_weights import InitialWeights
from falconet.checkpoint.state import TrainState
from falconet.config import commands, rules
from falconet.config.options import resolutions
from falconet.data.crops import Crops
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.keyed import IntArray
from falconet.data.loader import BatchShape, IdleLoader, Loader, LoaderByEpoch, SyntheticLoader
from falconet.data.order import balanced, class_weights
from falconet.data.preprocessing import Normalise
from falconet.data.readers import reader_for
from falconet.errors import ConfigError, named_option
from falconet.evaluation import evaluate, saved_model
from falconet.evaluation.evaluate import Measure, Observe, overlook
from falconet.evaluation.loss import Loss, MultiLabelLoss, WeightedLoss, presence_weights
from falconet.models import splits, zoo
from falconet.models.depth import rate_shares
from falconet.models.freezing import Frozen, Hold, count_trained, frozen_before, frozen_by, trained_by
from falconet.models.fusion import Fusion, Norm, fuse, fuse_pieces
from falconet.models.speednet import WHITENED_FROM, SpeedNet
from falconet.models.zoo import build_model
from falconet.numerics.loss_scale import NonFinite, Offender
from falconet.numerics.precision import Regime
from falconet.numerics.recompute import automatic, matching, pieces, recompute
from falconet.optim.half_optimizers import HalfOptimizer
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import decay_groups
from falconet.parallel.data_parallel import Replicas
from falconet.parallel.grid import Grid, OneStage, Stages
from falconet.parallel.zero import ShardedReplicas
from falconet.report.console import Say, counted
from falconet.train.step import (
    Elsewhere,
    LocalStep,
    Move,
    Moving,
    PlainMove,
    Prepare,
    ScaledMove,
    Step,
    generators_of,
)

GIB = 2**30
WHITENED_AT_ONCE = 500  # images: their patches take 46 MB at 32 x 32
TrainingLoader = Loader | SyntheticLoader | LoaderByEpoch | IdleLoader


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a model is placed from, whole or in stages."""

    options: commands.TrainOptions
    images: Dataset
    shape: BatchShape
    grid: Grid
    regime: Regime
    note: Say
    initial: Path | None = None  # the weights to start with; None: random ones
    pretrained: InitialWeights | None = None  # or those of another training
    first_trained: str | None = None  # layers that run before it are frozen
    unfrozen_at: int | None = None  # the first update that trains everything; None: what is frozen stays so
    frozen_from: int | None = None  # the first update that does not train what is frozen; None: there is none
    prepare: Prepare | None = None  # called before the first update of each shape
    is_new: bool = False  # whether the weights are drawn here, and not read later

    def new_model(self) -> tuple[nn.Module, Frozen]:
        """The whole model in fp32, on the host, and what of it is frozen."""
        model = build_model(self.options.model, classes=self.images.classes, seed=self.options.run.seed)
        if self.initial is not None:
            saved_model.load_initial(model, self.initial, name=self.options.model.model, note=self.note)
        if self.pretrained is not None and self.pretrained.is_here:  # a plan downloads none
            with named_option("pretrained"):
                self.pretrained.load(model, name=self.options.model.model, class_names=self.images.class_names)
        frozen = self._frozen(model)
        # What is frozen for a while is held by the optimizer all the same: the step freezes it.
        if self.unfrozen_at is None and self.frozen_from is None:
            frozen.set(model)
        return model, frozen

    def whiten(self, model: nn.Module) -> None:
        """Set the first filters of a new model by the training images, if it whitens them."""
        is_read = self.initial is not None or self.pretrained is not None
        if not isinstance(model, SpeedNet) or not model.whitens or not self.is_new or is_read:
            return
        source, normalise = self.images.train, self.normalise
        crops = Crops(preprocessing=self.images.training)
        reader = reader_for(source, crops=crops, bad=BadImages(None, note=self.note))
        chosen = np.linspace(0, len(source), min(len(source), WHITENED_FROM), endpoint=False, dtype=np.int64)

        def normalised(indices: IntArray) -> Tensor:
            pixels = np.empty((len(indices), reader.size, reader.size, 3), np.uint8)
            is_good = reader.read(indices, epoch=0, out=pixels)
            values: Tensor = normalise(torch.from_numpy(pixels[is_good]).permute(0, 3, 1, 2).to(self.device))
            return values

        model.whiten(normalised(part) for part in np.array_split(chosen, -(-len(chosen) // WHITENED_AT_ONCE)))

    def _frozen(self, model: nn.Module) -> Frozen:
        training = self.options.training
        evaluates = training.frozen_batchnorm == "statistics"
        if self.first_trained is not None:
            with named_option("fine_tune_first_trainable_layer"):
                return frozen_before(model, self.first_trained)
        if training.freeze is not None:
            with named_option("freeze"):
                return frozen_by(model, training.freeze, evaluates=evaluates)
        with named_option("trainable"):
            return trained_by(model, training.trainable, evaluates=evaluates)

    @property
    def device(self) -> torch.device:
        return self.grid.world.device

    @property
    def normalise(self) -> Normalise:
        return self.images.normalise(self.device)

    def normalise_to(self, channels: int) -> Normalise:
        """In the regime's own format, unless images are mixed, which takes full precision."""
        is_mixed = rules.least_micro_batch(self.options.augmentation) > 1
        is_direct = self.device.type == "cuda" and not is_mixed
        dtype = self.regime.formats(self.device)["activations"] if is_direct else torch.float32
        return self.images.normalise(self.device, dtype=dtype, channels=channels)

    @property
    def loss(self) -> Loss:
        classes, smoothing = self.images.classes, self.options.augmentation.label_smoothing
        is_weighted, sets = self.options.training.class_weights != "none", self.images.label_sets
        if sets is not None:
            present = presence_weights(self.images.train.labels, sets) if is_weighted else None
            return MultiLabelLoss(
                classes,
                smoothing,
                sets=torch.from_numpy(sets).to(self.device),
                weights=None if present is None else torch.tensor(present, device=self.device),
            )
        if not is_weighted:
            return Loss(classes, smoothing)
        weights = torch.tensor(class_weights(self.images.train.labels, classes), device=self.device)
        return WeightedLoss(classes, smoothing, weights=weights)

    @property
    def seed(self) -> int:
        """The seed of dropout: different in every process, or in every stage but the same in all replicas."""
        alike = self.options.parallel.identical_replica_seeding
        return self.options.run.seed + ((self.grid.stages if alike else self.grid.world).rank << 40)

    @property
    def input(self) -> Input:
        return Input(data=self.options.data, regime=self.regime, world=self.grid.world, note=self.note)

    def training_loader(self) -> TrainingLoader:
        sides = resolutions(self.options.fine_tuning.resolution_schedule)
        if not sides:
            return self._loader_of(self.images)
        return LoaderByEpoch(
            {epoch - 1: self._loader_of(self.images.trained_at(side)) for epoch, side in sides.items()}
        )

    def _loader_of(self, images: Dataset) -> Loader | SyntheticLoader:
        crops = images.training_crops(self.options.augmentation, seed=self.options.run.seed)
        is_balanced = self.options.training.sampler == "balanced"
        order = balanced(images.train.labels, seed=self.options.run.seed) if is_balanced else None
        return self.input.training_loader(images, crops=crops, shape=self.shape, order=order)


class Placement(Protocol):
    """How the model lies on the devices. Only `build` touches a device, and only it changes the model."""

    setup: Setup

    @property
    def parameters(self) -> int: ...  # of the whole model

    @property
    def layers(self) -> str: ...  # of the whole model, as torch prints it

    @property
    def whole(self) -> nn.Module: ...  # only to look at, before `build`

    @property
    def trained_parameters(self) -> int: ...  # by the first update

    @property
    def weights(self) -> Sequence[str]: ...  # names of all weights of the model

    @property
    def trained(self) -> Sequence[str]: ...  # names of all trained weights, in the model's order

    @property
    def splits(self) -> Sequence[str]: ...  # the layers that start a further stage

    def lines(self) -> list[str]: ...  # for the plan

    def build(self) -> nn.Module: ...  # what this process trains, on its device; called once

    def stages(self) -> Stages: ...

    def numbers(self) -> Mapping[str, int]: ...  # of the trained weights among all of the model's

    def later(self) -> frozenset[str]: ...  # names of trained weights that are frozen at first

    def rate_shares(self, decay: float) -> Mapping[str, float]: ...  # of each weight, by depth

    def loader(self) -> TrainingLoader: ...

    def evaluator(self, observe: Observe = overlook) -> Measure: ...

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> Step: ...


class WholeModel:
    """A whole replica in each process."""

    splits: Sequence[str] = ()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def _model(self) -> tuple[nn.Module, Frozen]:
        """The model, on the host until it is built, and what of it is frozen."""
        model, frozen = self.setup.new_model()
        asked = self.setup.options.parallel.pipeline_splits
        if asked:
            with named_option("pipeline_splits"):
                splits.require(model, asked)  # stages that share a process change nothing, but must be possible
        return model, frozen

    @property
    def parameters(self) -> int:
        return zoo.count_parameters(self._model[0])

    @property
    def layers(self) -> str:
        return str(self._model[0])

    @property
    def whole(self) -> nn.Module:
        return self._model[0]

    @property
    def trained_parameters(self) -> int:
        model, later = self._model[0], self.later()
        return count_trained(model) - sum(model.get_parameter(name).numel() for name in later)

    @property
    def weights(self) -> Sequence[str]:
        return [name for name, _ in self._model[0].named_parameters()]

    @property
    def trained(self) -> Sequence[str]:
        return [name for name, weight in self._model[0].named_parameters() if weight.requires_grad]

    @cached_property
    def recomputation(self) -> "Recomputation | None":
        setup = self.setup
        return choose_recomputation(
            self._model[0],
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
        """Of the whole model, or of its segments if they are recomputed."""
        if self.setup.device.type != "cuda":
            return FusedNorms()
        model, stored = self._model[0], self.recomputation.stored if self.recomputation else ()
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
        self.setup.whiten(self._model[0])
        model = self.setup.regime.prepare(self._model[0], self.setup.device)
        if recomputation and recomputation.stored:
            if self.setup.device.type == "cuda":
                recompute(model, recomputation.stored, change=_fused_pieces)
            else:
                recompute(model, recomputation.stored)
        return model

    def copied(self) -> nn.Module:
        """A copy of the model on its device, to look at; a plan builds nothing."""
        return self.setup.regime.prepare(copy.deepcopy(self._model[0]), self.setup.device)

    def stages(self) -> Stages:
        return OneStage()

    def numbers(self) -> Mapping[str, int]:
        return numbered(self._model[0])

    def later(self) -> frozenset[str]:
        return self._model[1].weights if self.setup.unfrozen_at is not None else frozenset()

    def rate_shares(self, decay: float) -> Mapping[str, float]:
        return rate_shares(self._model[0], decay)

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

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> LocalStep:
        setup, fused = self.setup, self.fused(state.model)
        return LocalStep(
            build_moving(state, setup, self._model[1], replicas=replicas, offender=offender),
            normalise=setup.normalise_to(self.fused_norms.channels),
            loss=setup.loss,
            regime=setup.regime,
            forward=fused.model if fused else None,
            prepare=setup.prepare,
        )


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
    mode = rules.recompute_mode(numerics, options.parallel)
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


def numbered(model: nn.Module) -> dict[str, int]:
    """The number of each trained weight in the update rule's order."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: number for number, p in enumerate(p for group in decay_groups(model) for p in group)}


def training_bytes(model: nn.Module, options: commands.TrainOptions, *, regime: Regime, replicas: int) -> int:
    """Bytes of weights, gradients and the update rule's state, which the replicas may shard."""
    slots = {"adamw": 2, "rmsprop": 2, "rmsprop_tf": 2}.get(options.optimizer.optimizer, 1)
    shares = replicas if options.parallel.enable_optimizer_rts else 1
    per_weight = 2 + slots / shares + (options.optimizer.ema_half_life is not None)
    sizes = (p.numel() * (regime.update.itemsize if p.ndim > 1 else 4) for p in model.parameters())
    return int(sum(sizes) * per_weight)
