"""How the model lies on the devices: whole in every process. The other way, in stages, is `pipelining`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from falconet.checkpoint.state import TrainState
from falconet.config import schema
from falconet.data.loader import BatchShape, IdleLoader, Loader, SyntheticLoader
from falconet.data.preprocessing import Normalise
from falconet.models import splits, zoo
from falconet.models.freezing import count_trained, freeze, train_only
from falconet.numerics.precision import Regime
from falconet.numerics.scaling import NonFinite, Offender
from falconet.optim.half import HalfOptimizer
from falconet.parallel.grid import Grid
from falconet.parallel.replicas import Replicas
from falconet.parallel.sharding import ShardedReplicas
from falconet.parallel.stages import OneStage, Stages
from falconet.report.screen import Say
from falconet.train.evaluate import Measure
from falconet.train.loss import Loss
from falconet.train.moving import Elsewhere, Move, Moving, PlainMove, ScaledMove
from falconet.train.step import LocalStep, Step
from falconet.wiring import evaluating, loading, numbers, opening, sharding
from falconet.wiring.building import build_model
from falconet.wiring.images import Images


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both ways are made from."""

    options: schema.TrainOptions
    images: Images
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
            opening.load_initial(model, self.initial, name=self.options.model.model, note=self.note)
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
    freeze(model, before=setup.first_trained)
    moving = count_trained(model)
    return [f"trains {moving:,} parameters, from {setup.first_trained} on; the layers before it stay as they are"]


def moving(
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
    moved = sharding.step(state.optimizer, elsewhere.shards, state.hosted)
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
            splits.require(model, asked)  # stages that share a process change nothing, but they must be possible
        model = setup.regime.prepare(model, setup.grid.world.device)
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
        return numbers.recompute_activations(
            self.model,
            setup.options,
            image_size=setup.images.training.image_size,
            regime=setup.regime,
            device=setup.grid.world.device,
        )

    def stages(self) -> Stages:
        return OneStage()

    def numbers(self) -> Mapping[str, int]:
        return sharding.numbered(self.model)

    def loader(self) -> Loader | SyntheticLoader:
        setup = self._setup
        return loading.training_loader(
            setup.images, setup.options, shape=setup.shape, world=setup.grid.world, note=setup.note
        )

    def evaluator(self) -> Measure:
        setup = self._setup
        return evaluating.evaluator(
            setup.images, setup.options.data, regime=setup.regime, world=setup.grid.world, note=setup.note
        )

    def step(self, state: TrainState, *, replicas: Replicas, offender: Offender) -> LocalStep:
        setup = self._setup
        return LocalStep(
            moving(state, setup, replicas=replicas, offender=offender),
            normalise=setup.normalise,
            loss=setup.loss,
            regime=setup.regime,
            frozen=self._built[1],
        )
