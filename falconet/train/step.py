"""One update of the weights: how gradients move weights, and the step of a whole model."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from falconet.data import mixing
from falconet.data.buffers import Batch
from falconet.data.preprocessing import Normalise
from falconet.evaluation.loss import Loss, Score, total
from falconet.numerics.loss_scale import NonFinite, Offender, Scale, find_non_finite, watched
from falconet.numerics.precision import Regime
from falconet.optim.ema import Ema
from falconet.optim.half_optimizers import HalfOptimizer
from falconet.optim.optimizers import set_lr
from falconet.parallel.data_parallel import OneReplica, Replicas
from falconet.parallel.zero import ShardedReplicas
from falconet.report.throughput import HostMoments, Moments, Stopwatch

SEEDS = 1 << 63  # torch takes seeds below this


class Move(Protocol):
    """What happens to the loss before, and to the gradients after, the backward passes of an update.

    Only `at` depends on the number of the update: the rest can be captured once and replayed.
    """

    def at(self, update: int, lr: float) -> None:
        """Set what changes from update to update: the rate, the loss scale and the number that noise depends on."""

    def begin(self) -> None:
        """Clear the gradients of the update before."""

    def root(self, loss: Tensor) -> Tensor:
        """The root of the backward pass, from a micro-batch's share of the loss."""

    def passed(self) -> None:
        """Called when the backward pass of a micro-batch has added its gradients."""

    def end(self) -> Tensor:
        """Move the weights; returns 1 if the update was skipped instead, else 0, on the device."""

    def rehearse(self) -> None:
        """Launch our kernels as `end` does, without moving anything."""


class PlainMove:
    """Moves the weights without a loss scale."""

    def __init__(self, optimizer: Optimizer, *, device: torch.device, step: Callable[[], object] | None = None) -> None:
        """`step`: what moves the weights, if not the optimizer alone."""
        self.optimizer = optimizer
        self._step = step or optimizer.step
        self._moved = torch.zeros((), dtype=torch.int64, device=device)

    def at(self, update: int, lr: float) -> None:  # noqa: ARG002
        set_lr(self.optimizer, lr)

    def begin(self) -> None:
        self.optimizer.zero_grad()

    def root(self, loss: Tensor) -> Tensor:
        return loss

    def passed(self) -> None: ...

    def end(self) -> Tensor:
        self._step()
        return self._moved

    def rehearse(self) -> None:
        if isinstance(self.optimizer, HalfOptimizer):  # torch's own come compiled
            self.optimizer.rehearse()


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """How this process learns whether gradients in other processes are finite."""

    shards: ShardedReplicas | None = None  # hold the averaged gradients, instead of the model's parameters
    stages: Callable[[NonFinite], NonFinite] = lambda found: found  # combines what all stages of a pipeline found


NOWHERE = Elsewhere()


class ScaledMove:
    """Moves the weights with a loss scale; an update with non-finite gradients is skipped on the device."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: HalfOptimizer,
        scale: Scale,
        *,
        offender: Offender,
        step: Callable[[], object] | None = None,
        elsewhere: Elsewhere = NOWHERE,
    ) -> None:
        self.optimizer, self.scale, self.offender = optimizer, scale, offender
        self._step = step or optimizer.step
        shards = elsewhere.shards
        self._trained = [p for p in (shards.trained if shards else model).parameters() if p.requires_grad]
        self._everywhere = shards.flags if shards and shards.trains else _same
        self._stages = elsewhere.stages
        self._watched = watched(model)
        device = scale.value.device
        self._places = torch.arange(len(self._trained), device=device).unbind()
        self._nothing = NonFinite(
            torch.zeros((), dtype=torch.bool, device=device), torch.full_like(scale.value, -1).long()
        )

    def at(self, update: int, lr: float) -> None:
        self.scale.before(update)
        self.optimizer.at(update)
        set_lr(self.optimizer, lr)

    def begin(self) -> None:
        self.optimizer.zero_grad()

    def root(self, loss: Tensor) -> Tensor:
        return loss * self.scale.value

    def passed(self) -> None:
        self.scale.watch(_gradients(self._watched))

    def end(self) -> Tensor:
        non_finite = self._stages(self._found())
        self.offender.note(non_finite)
        self.optimizer.scale, self.optimizer.found = self.scale.value, non_finite.found
        self._step()
        self.scale.after(non_finite.found)
        return non_finite.found.long()

    def rehearse(self) -> None:
        if self._everywhere is _same:  # else norms are summed over processes, of the weights' own pieces
            self.optimizer.rehearse()

    def _found(self) -> NonFinite:
        """Non-finite gradients in this process, or in replicas that divide them; a stage may train nothing."""
        grads = _gradients(self._trained)
        if not grads and self._everywhere is _same:
            return self._nothing  # of replicas that divide them, the others wait for the flags of this one
        found = find_non_finite(grads, everywhere=self._everywhere, device=self._nothing.found.device)
        # Sharded replicas give the place among all trained parameters themselves.
        is_placed = len(grads) == len(self._trained) or self._everywhere is not _same
        return found if is_placed else self._placed(found)

    def _placed(self, found: NonFinite) -> NonFinite:
        """The place among all trained parameters, where some are frozen for now and have no gradient."""
        # Of places that are on the device: uploading others synchronises, which no capture can.
        places = torch.stack(
            [place for place, p in zip(self._places, self._trained, strict=True) if p.grad is not None]
        )
        place = places.index_select(0, found.first.clamp_min(0).view(1))[0]
        return found._replace(first=torch.where(found.found, place, -1))


@dataclass(frozen=True, kw_only=True)
class Moving:
    """A model and how its weights move: what both kinds of step do around their passes."""

    model: nn.Module
    move: Move
    hold: Callable[[int], None] = lambda _: None  # keeps frozen layers as they are; called with each update
    seed: int = 0  # of dropout
    generators: Sequence[torch.Generator] = (torch.default_generator,)  # that dropout draws from
    averages: Sequence[Ema] = ()
    replicas: Replicas = field(default_factory=OneReplica)
    uploads: bool = True  # whether moving other weights than before begins with an upload, which no capture can do

    def at(self, update: int, lr: float) -> None:
        """Set what changes from update to update."""
        # Seeded for each update, a generator has no state to save. `torch.manual_seed` would take 0.35 ms of the host:
        # it formats the stack for every kind of device that is not there.
        for generator in self.generators:
            generator.manual_seed((self.seed * 1_000_003 + update) % SEEDS)
        if not self.model.training:  # after a validation: going through all layers takes as long as a small update
            self.model.train()
        self.hold(update)
        self.move.at(update, lr)
        for average in self.averages:
            average.next()

    def end(self) -> Tensor:
        """Move the weights by the replicas' mean, after the last pass; returns 1 if the update was skipped, else 0."""
        self.replicas.average()
        skipped = self.move.end()
        for average in self.averages:
            average.add(self.model)
        return skipped


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that layers on the device draw from."""
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[device.index or 0]


def _same(flags: Tensor) -> Tensor:
    return flags


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Update(NamedTuple):
    """What one update did. The tensors stay on the device, because reading them waits for it."""

    loss: Tensor  # mean over the images
    smoothing: Tensor  # the part of it that label smoothing adds
    correct: Tensor  # images with the right top class, or with exactly the right labels
    images: Tensor  # images that counted
    skipped: Tensor  # 1 if a gradient was not finite and the weights did not move, else 0


class Step(Protocol):
    """Turns the micro-batches of one update into moved weights."""

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update: ...


Prepare = Callable[[Callable[[], None]], None]  # gets a rehearsal of an update, which launches its kernels only


class LocalStep:
    """The whole model on this device."""

    def __init__(
        self,
        moving: Moving,
        *,
        normalise: Normalise,
        loss: Loss,
        regime: Regime,
        forward: nn.Module | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        """`forward`: what computes the model's outputs from its weights, if not the model itself.

        `prepare`: called before the first update of each shape.
        """
        self.moving, self.normalise, self.loss, self.regime = moving, normalise, loss, regime
        self.forward, self._prepare = forward or moving.model, prepare
        self._weights = list(moving.model.parameters())  # listed once: to find them takes as long as a small update
        self._prepared: set[Hashable] = set()

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        self.moving.at(update, lr)
        return self.make(micro_batches)

    def make(self, micro_batches: Sequence[Batch]) -> Update:
        """The work of an update on the device, which is the same for every update of this shape."""
        self.prepare_for(micro_batches[0])
        self.moving.move.begin()
        images = sum(len(batch.labels) for batch in micro_batches)
        scores = [self._backward(batch, images) for batch in self.moving.replicas.announced(micro_batches)]
        skipped = self.moving.end()
        return Update(*total(scores), skipped)

    def prepare_for(self, batch: Batch) -> None:
        """Do what comes before the first update with such micro-batches."""
        shape = (batch.images.shape, *(p.requires_grad for p in self._weights))
        if self._prepare is not None and shape not in self._prepared:
            self._prepared.add(shape)
            self._prepare(lambda: self.rehearse(batch))

    def rehearse(self, batch: Batch) -> None:
        """Launch the kernels of an update with such micro-batches on tensors without memory: nothing changes."""
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, replaced(self.forward, fake.from_tensor):
            mix = batch.mix and mixing.Mix(*map(fake.from_tensor, batch.mix))
            images, labels = self.normalise(fake.from_tensor(batch.images)), fake.from_tensor(batch.labels)
            self._score(images, labels, mix, len(labels)).loss.backward()  # type: ignore[no-untyped-call]
        self.moving.move.rehearse()

    def _backward(self, batch: Batch, images: int) -> Score:
        """Add the gradient of one micro-batch, in which each image has the weight `1 / images`."""
        score = self._score(self.normalise(batch.images), batch.labels, batch.mix, images)
        self.moving.move.root(score.loss).backward()  # type: ignore[no-untyped-call]
        self.moving.move.passed()
        return score._replace(loss=score.loss.detach())

    def _score(self, images: Tensor, labels: Tensor, mix: mixing.Mix | None, count: int) -> Score:
        """The score of normalised images, by the forward pass."""
        logits = self.regime.run(self.forward, mixing.mixed_images(images, mix))
        return self.loss.scored(logits, labels, mix, side=images.shape[-1], images=count)


@contextmanager
def replaced(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The model with other weights and statistics for a while: what is added to them, and their hooks, are left out.

    `torch.func.functional_call` restores wrong tensors where a module has several names, as in a fused model.
    """
    stored = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        for module, parameters, buffers in stored:
            for name, parameter in parameters.items():
                module._parameters[name] = None if parameter is None else make(parameter)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else make(buffer)
        yield
    finally:
        for module, parameters, buffers in stored:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


class DeviceMoments:
    """Times on the device: events on the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reach(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()  # asleep, without Python's lock

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1000  # from milliseconds


def moments_of(device: torch.device) -> Moments:
    return DeviceMoments() if device.type == "cuda" else HostMoments()


class TimedStep:
    """A step whose updates a stopwatch times."""

    def __init__(self, step: Step, stopwatch: Stopwatch) -> None:
        self._step, self.stopwatch = step, stopwatch

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        made = self._step(micro_batches, update=update, lr=lr)
        self.stopwatch.updated()
        return made


GLANCE = 0.1  # seconds between losses that are shown


class ShownStep:
    """A step whose loss is shown from time to time, as soon as the device has it: nothing waits for that."""

    def __init__(
        self,
        step: Step,
        show: Callable[[float], None],
        *,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._show, self._clock = step, show, clock
        self._since = -math.inf
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._held = torch.zeros((), pin_memory=device.type == "cuda")
        self._is_due = False  # a loss is on its way

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        made = self._step(micro_batches, update=update, lr=lr)
        if self._is_due and (self._copied is None or self._copied.query()):  # type: ignore[no-untyped-call]
            self._is_due = False
            self._show(float(self._held))
        if not self._is_due and self._clock() - self._since >= GLANCE:
            self._since, self._is_due = self._clock(), True
            self._held.copy_(made.loss.detach(), non_blocking=True)
            if self._copied is not None:
                self._copied.record()
        return made
