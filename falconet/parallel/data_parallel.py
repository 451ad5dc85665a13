"""Average gradients over replicas: once per update, in buckets, while the last backward pass still runs."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falconet.parallel.collectives import Processes
from falconet.parallel.slices import shaped_like

MEGABYTE = 1 << 20
RUNNING = ("running_mean", "running_var")  # statistics of batch norm
T = TypeVar("T")


class Replicas(Protocol):
    """The interface for combining the gradients of replicas."""

    def announced(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """Pass the micro-batches through and notice the last one."""

    def average(self) -> None:
        """Replace every gradient by the mean over the replicas; called after the last backward pass."""

    def look_again(self) -> None:
        """Exchange only the weights that are trained now; called after layers were frozen or unfrozen."""

    def buffers(self) -> list[Tensor]:
        """The tensors that hold messages."""


class OneReplica:
    """A single replica, whose gradients need no averaging."""

    def announced(self, micro_batches: Sequence[T]) -> Iterator[T]:
        return iter(micro_batches)

    def average(self) -> None:
        """Do nothing."""

    def look_again(self) -> None:
        """Do nothing."""

    def buffers(self) -> list[Tensor]:
        return []


class AveragedReplicas:
    """Averages `p.grad` in place, whatever the update rule keeps there (for sgd_combined the velocity, equal on all).

    A bucket is sent once its last gradient has arrived and every bucket before it has been sent, so that all processes
    send in the same order. Running statistics of batch norm are averaged as well: they are linear in the statistics of
    the batches, so their mean is what one replica with all batches would keep, and all replicas have the same state.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Processes,
        *,
        bucket_megabytes: float,
        bucket: Callable[[Sequence[Tensor]], "Bucket"] | None = None,
    ) -> None:
        self._model, self._world = model, world
        # In reverse, as gradients arrive; the order of parameters is the same in every process.
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        groups = divided(trained, int(bucket_megabytes * MEGABYTE))
        self._buckets = [(bucket or Gradients)(group) for group in groups]
        self._armed, self._sent = False, 0
        self._missing: list[int] = []
        self.look_again()
        for number, group in enumerate(groups):
            for p in group:
                p.register_post_accumulate_grad_hook(self._arrived(number))  # type: ignore[no-untyped-call]

    def announced(self, micro_batches: Sequence[T]) -> Iterator[T]:
        self._forget()
        for number, batch in enumerate(micro_batches):
            if number == len(micro_batches) - 1:
                self._missing = list(self._trained)
                self._armed = True
            yield batch

    def _forget(self) -> None:
        """Drop the messages of an unfinished earlier update, such as one whose capture failed."""
        self._armed, self._sent = False, 0
        for each in (self._statistics, *self._buckets):
            each.forget()

    def average(self) -> None:
        assert self._armed, "the last micro-batch was not announced"
        self._armed = False
        self._statistics.send(self._world)
        for bucket in self._buckets[self._sent :]:  # those with a parameter that had no part in the loss
            self._send(bucket)
        with self._world.waiting("averaging gradients"):
            for each in (self._statistics, *self._buckets):
                each.wait()
        for each in (self._statistics, *self._buckets):
            each.unpack()

    def look_again(self) -> None:
        self._statistics = Bucket(running_statistics(self._model))
        self._trained = [bucket.count_trained() for bucket in self._buckets]

    def buffers(self) -> list[Tensor]:
        return [buffer for each in (self._statistics, *self._buckets) for buffer in each.buffers()]

    def _arrived(self, number: int) -> Any:
        def hook(_parameter: Tensor) -> None:
            if not self._armed:
                return
            self._statistics.send(self._world)  # the last forward pass is over
            self._missing[number] -= 1
            while self._sent < len(self._buckets) and self._missing[self._sent] == 0:
                self._send(self._buckets[self._sent])

        return hook

    def _send(self, bucket: "Bucket") -> None:
        if self._trained[self._sent]:  # else all of it is frozen, in every process
            bucket.send(self._world)
        self._sent += 1


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Running statistics of batch norm, except frozen ones, which a mean over replicas would round."""
    moving = [m for m in model.modules() if getattr(m, "track_running_stats", True)]
    return [b for m in moving for name, b in m.named_buffers(recurse=False) if name in RUNNING]


class Bucket:
    """Tensors of one dtype that are averaged together, side by side in memory."""

    def __init__(self, tensors: Sequence[Tensor], *, multiple: int = 1, step: int = 1) -> None:
        """`multiple`: the number of values is padded to one of it; `step`: every tensor starts at a multiple of it."""
        self._tensors = tensors
        self._begins = list(accumulate((t.numel() + -t.numel() % step for t in tensors), initial=0))
        count = self._begins[-1]
        self._flat = tensors[0].new_zeros(count + -count % multiple) if tensors else torch.empty(0)
        # In each tensor's memory order, so that packing is a plain copy for channels-last weights too.
        self._views = [
            shaped_like(self._flat[begin : begin + t.numel()], t)
            for begin, t in zip(self._begins, tensors, strict=False)
        ]
        self._work: dist.Work | None = None

    def count_trained(self) -> int:
        return sum(tensor.requires_grad for tensor in self._tensors)

    def buffers(self) -> list[Tensor]:
        """The tensors that hold messages."""
        return [self._flat]

    @torch.no_grad()
    def send(self, world: Processes) -> None:
        """Start sending, unless it has started."""
        if self._work is None and self._tensors:
            self._pack(world.size)
            with world.waiting("averaging gradients"):
                self._work = dist.all_reduce(self._flat, group=world.group, async_op=True)

    def _pack(self, replicas: int) -> None:
        """Copy the tensors side by side, divided before the sum so that half precision does not overflow."""
        pairs = self._pairs()
        if len(pairs) < len(self._tensors):
            self._flat.zero_()
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [values for _, values in pairs])
        self._flat.div_(replicas)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self.forget()

    def forget(self) -> None:
        self._work = None

    @torch.no_grad()
    def unpack(self) -> None:
        pairs = self._pairs()
        if pairs:
            torch._foreach_copy_([values for _, values in pairs], [view for view, _ in pairs])

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (view, values)
            for view, t in zip(self._views, self._tensors, strict=True)
            if (values := self._of(t)) is not None
        ]

    def _of(self, tensor: Tensor) -> Tensor | None:
        return tensor


class Gradients(Bucket):
    """The gradients of some parameters; one without a gradient had no part in the loss on any replica."""

    def _of(self, tensor: Tensor) -> Tensor | None:
        return tensor.grad


def digest(model: nn.Module) -> str:
    """A hash of the parameters and buffers, which must be equal on all replicas."""
    mixed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        mixed.update(name.encode())
        mixed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return mixed.hexdigest()[:16]


def divided(parameters: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Group the parameters, in order, by dtype up to `size` bytes; a larger one gets its own group."""
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for p in parameters:
        kind, own = (p.dtype, p.device), p.numel() * p.element_size()
        group, held = open_groups.get(kind, ([], size))
        if held + own > size:
            group, held = [], 0
            groups.append(group)
        group.append(p)
        open_groups[kind] = (group, held + own)
    return groups
