"""Metrics on their way from the device to the sinks; reading them is the loop's only wait for the device."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from falconet.checkpoint.manifest import rank
from falconet.checkpoint.state import Progress, Totals, TrainState
from falconet.errors import DivergedError
from falconet.parallel.data_parallel import Replicas
from falconet.parallel.grid import Grid
from falconet.parallel.world import ALONE, World
from falconet.report.sinks import Sink
from falconet.train.step import Update, moments_of


class NotFiniteError(DivergedError):
    """The loss of one update is not finite, because of the weights that the update before it left."""

    def __init__(self, update: int, loss: float) -> None:
        super().__init__(f"update {update}: the loss is {loss}")
        self.update = update  # counted from 1


class _Sent(NamedTuple):
    """Numbers of some updates on their way to the host."""

    first: int  # the number of the first one, from 1
    losses: Tensor  # updates x 2: loss, the part of smoothing
    counts: Tensor  # updates x 2: correct images, all images
    skips: Tensor  # updates
    arrival: Any  # the moment when they are there


class Meter:
    """Collects updates on the device until their numbers are read, which are those of all replicas."""

    def __init__(self, progress: Progress, world: World = ALONE, *, replicas: int = 1) -> None:
        """`replicas`: how many processes of the world compute a loss; the others add 0."""
        self.progress, self._world, self._replicas = progress, world, replicas
        self._moments = moments_of(world.device)
        self._unread: list[Update] = []
        self._sent: list[_Sent] = []

    def add(self, update: Update) -> None:
        self._unread.append(update)

    def send(self) -> bool:
        """Let the numbers come to the host while the device goes on; returns whether the host would wait for them.

        A CPU has them at once. On other devices this is answered without a look, so that all processes do the same.
        """
        if self._unread:
            read, self._unread = self._unread, []
            # As few launches for many updates as for one: until the host is done, the device has nothing else to do.
            losses = torch.stack([value for each in read for value in (each.loss, each.smoothing)]).view(-1, 2)
            counts = torch.stack([value for each in read for value in (each.correct, each.images)]).view(-1, 2)
            here = _Sent(
                first=self.progress.update - len(read) + 1,
                losses=_to_host(self._world.sum(losses.double() / self._replicas)),
                counts=_to_host(self._world.sum(counts)),
                skips=_to_host(torch.stack([each.skipped for each in read])),  # the same in every process
                arrival=self._moments.mark(),
            )
            self._sent.append(here)
        return bool(self._sent) and self._world.device.type != "cpu"

    def read(self) -> None:
        """Wait for the device and add its updates to the totals, one after the other.

        The order matters, because sums of floats depend on it: a restored run logs exactly the same numbers.
        """
        self.send()
        while self._sent:
            sent = self._sent.pop(0)
            self._moments.reach(sent.arrival)
            read = zip(sent.losses.tolist(), sent.counts.tolist(), sent.skips.tolist(), strict=True)
            for number, ((loss, smoothing), (correct, images), skipped) in enumerate(read, start=sent.first):
                if not math.isfinite(loss):
                    raise NotFiniteError(number, loss)
                for totals in (self.progress.interval, self.progress.epoch):
                    totals.add(loss, correct, images, skipped, smoothing)

    def end_interval(self) -> Totals:
        """The totals since the last call."""
        self.read()
        totals, self.progress.interval = self.progress.interval, Totals()
        return totals

    def end_epoch(self) -> Totals:
        """The totals of the epoch so far."""
        self.read()
        totals, self.progress.epoch = self.progress.epoch, Totals()
        return totals


def _to_host(values: Tensor) -> Tensor:
    """Where they are when the device has come to the copy; in pinned memory, or it would be waited for."""
    return values.to("cpu", non_blocking=True)


class Best(NamedTuple):
    """The best validation so far."""

    accuracy: float  # percent
    update: int
    loss: float
    epoch: float  # the update says it only as long as the global batch stays the same


class Measurements:
    """Passes metrics on to a sink, and keeps the latest of each, those of the current update, and the best."""

    def __init__(
        self,
        sink: Sink,
        *,
        update: int = 0,
        restored: Mapping[str, float] | None = None,
        latest: Mapping[str, float] | None = None,
        best: Best | None = None,
    ) -> None:
        """`restored`: what a restored checkpoint measured at `update`, if its validation is still due.

        `latest`: the latest of each metric, as far as an earlier start of the run measured it.
        """
        self.latest = dict(latest or {})
        self.best = best
        self._sink, self._update, self._current = sink, update, dict(restored or {})

    def write(self, update: int, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        self.note(update, metrics)
        self._sink.write(update, metrics)

    def note(self, update: int, metrics: Mapping[str, float]) -> None:
        """Metrics for the checkpoint of `update` alone."""
        if self._update != update:
            self._update, self._current = update, {}
        self._current.update({name.replace("/", "_"): value for name, value in metrics.items()})

    def score(self, update: int, accuracy: float, loss: float, *, epoch: float) -> bool:
        """Note what checkpoints are compared by, accuracy in percent and then loss; whether it is the best so far."""
        self._current |= {"score": accuracy, "score_loss": loss}
        if self.best is not None and rank(accuracy, loss) <= rank(self.best.accuracy, self.best.loss):
            return False
        self.best = Best(accuracy, update, loss, epoch)
        return True

    def for_checkpoint(self, update: int) -> dict[str, object]:
        """What a checkpoint of `update` stores: metrics of that very update, and the best so far."""
        return {"metrics": self._current if self._update == update else {}, "best": self.best}


@dataclass(frozen=True)
class Held:
    """Bytes in the memory of the device and of the host; on a CPU all are the host's."""

    device: int
    host: int

    @property
    def both(self) -> int:
        return self.device + self.host


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one process holds between two updates."""

    weights: Held  # parameters and buffers
    gradients: Held
    optimizer_state: Held  # with the buffers that offloaded state is copied to
    messages: Held  # buffers for what replicas send each other
    whole_state: int  # bytes of the optimizer's state of all processes together

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        held: dict[str, Any] = {
            name: Held(**value) if isinstance(value, dict) else value for name, value in content.items()
        }
        return cls(**held)

    def told(self) -> dict[str, str]:
        """For the summary: what sharding and offloading save, where there is any."""
        state, lines = self.optimizer_state, {}
        if state.both < self.whole_state or (state.host and self.weights.device):
            lines["weights"] = f"{_megabytes(self.weights.both)}, gradients {_megabytes(self.gradients.both)}"
            lines["optimizer state"] = self.state_in_words()
        if state.both < self.whole_state:
            lines["optimizer state"] += f" of this process, {_megabytes(self.whole_state)} in total"
        return lines

    def state_in_words(self) -> str:
        """Where the optimizer's state of this process is."""
        state = self.optimizer_state
        where = f"{_megabytes(state.device)} on the device, " if state.device else ""
        return f"{where}{_megabytes(state.host)} on the host"


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one stage of the first replica; a model in one piece is one stage."""

    peak: int  # bytes, the most of its replicas
    held: Memory

    def to_json(self) -> dict[str, object]:
        return {"peak_memory_bytes": self.peak, "memory_bytes": self.held.to_json()}


def told(stages: Sequence[StageMemory], *, replicas: int) -> dict[str, str]:
    """For the summary: the peak, and what dividing and offloading save; of several stages, all numbers of each."""
    peaks = [f"{stage.peak / 2**30:.2f} GiB" for stage in stages]
    if len(stages) == 1:
        return {"peak memory": peaks[0] + (" per process, at most" if replicas > 1 else "")} | stages[0].held.told()
    total = f"; {_megabytes(stages[0].held.whole_state)} in total"
    return {
        "peak memory": _by_stage(peaks),
        "weights": _by_stage([_megabytes(stage.held.weights.both) for stage in stages]),
        "gradients": _by_stage([_megabytes(stage.held.gradients.both) for stage in stages]),
        "optimizer state": _by_stage([stage.held.state_in_words() for stage in stages]) + total,
    }


def _by_stage(texts: Sequence[str]) -> str:
    return "; ".join(f"stage {number}: {text}" for number, text in enumerate(texts))


def measure_stages(state: TrainState, replicas: Replicas, grid: Grid) -> list[StageMemory]:
    """The memory of each stage of this replica after an update; a collective."""
    held, peak = measure_memory(state, replicas, grid), torch.tensor(grid.world.peak_memory())
    mine = StageMemory(peak=int(grid.replicas.max(peak)), held=held)
    found = [json.loads(text) for text in grid.stages.texts(json.dumps(mine.to_json()), "the summary")]
    return [StageMemory(peak=each["peak_memory_bytes"], held=Memory.from_json(each["memory_bytes"])) for each in found]


def measure_memory(state: TrainState, replicas: Replicas, grid: Grid) -> Memory:
    """What this process holds after an update, gradients and state included; a collective."""
    kept = optimizer_tensors(state)
    dividing = grid.world if state.shards else grid.stages  # processes that all hold different state
    everywhere = int(dividing.sum(torch.tensor(bytes_of(kept))))
    trained = [*state.model.parameters(), *(state.shards.trained.parameters() if state.shards else ())]
    own = [] if state.hosted is None else state.hosted.tensors()
    return Memory(
        weights=_held([*state.model.parameters(), *state.model.buffers()]),
        gradients=_held(p.grad for p in trained if p.grad is not None),
        optimizer_state=_held([*kept, *own]),
        messages=_held(replicas.buffers()),
        whole_state=everywhere,
    )


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    """The state in this process, without what is a gradient as well: sgd_combined's velocity."""
    trained = [p for group in state.optimizer.param_groups for p in group["params"]]
    gradients = {p.grad.data_ptr() for p in trained if p.grad is not None}
    slots = (value for each in state.optimizer.state.values() for value in each.values())
    return [value for value in slots if isinstance(value, Tensor) and value.data_ptr() not in gradients]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory, counted once where several tensors are views of it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def _held(tensors: Iterable[Tensor]) -> Held:
    tensors = list(tensors)
    return Held(
        device=bytes_of(t for t in tensors if t.device.type != "cpu"),
        host=bytes_of(t for t in tensors if t.device.type == "cpu"),
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
