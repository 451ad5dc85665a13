"""One stage of a pipeline: the schedules of torch.distributed.pipelining over stages of known shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from falconet.parallel.collectives import Processes

Kind = Literal["grouped", "interleaved", "sequential"]
Run = Callable[..., Any]  # a stage's forward pass: values in, a tuple of values out (one value on the last stage)
PASSING = "passing activations between stages"


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """The position of a stage, and its inputs and outputs for one micro-batch, as tensors on `meta`.

    Without them torch would run the stage on made-up values to learn the shapes, which corrupts the statistics of batch
    norm.
    """

    world: Processes  # the stages of this replica
    entering: Sequence[Tensor]  # empty on the first stage, which takes images
    leaving: Sequence[Tensor]

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    @property
    def is_last(self) -> bool:
        return self.world.rank == self.world.size - 1


def in_flight(kind: Kind, *, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage keeps at the same time."""
    most = {"grouped": 2 * stages - stage, "interleaved": stages - stage, "sequential": 1}
    return min(most[kind], micro_batches)


class Pipeline:
    """Runs the micro-batches of an update forward and backward through this stage and its neighbours."""

    def __init__(
        self, run: Run, place: StagePlace, *, kind: Kind, micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """`loss(logits, target)` starts the backward pass of a micro-batch; it is called on the last stage only."""
        self._run, self._place, self._kind, self._loss = run, place, kind, loss
        self._micro_batches = micro_batches
        self._calls = micro_batches if kind == "sequential" else 1  # of the schedule in an update
        self._schedule: PipelineScheduleSingle | None = None

    def __call__(self, given: Sequence[Tensor], target: Tensor) -> None:
        """Add the gradients of an update; `given` (on the first stage) and `target` hold all its micro-batches."""
        for tensor in (*given, target):
            # torch does not check this, and a short batch would leave stale rows.
            assert len(tensor) % self._micro_batches == 0, "micro-batches of different sizes"
        schedule = self._schedule = self._schedule or self._opened(given)
        failed: BaseException | None = None
        with self._place.world.waiting(PASSING):
            try:
                for part, own in zip(_parts(given, self._calls), target.chunk(self._calls), strict=True):
                    schedule.step(*part, target=own if self._place.is_last else None)
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                failed = error.__cause__  # an error of the stage itself, not of the network
        if failed is not None:
            raise failed

    def _opened(self, given: Sequence[Tensor]) -> PipelineScheduleSingle:
        """Create the schedule at the first update, when the dtype of the images is known."""
        place = self._place
        images = tuple(t[: len(t) // self._micro_batches].to("meta") for t in given)
        stage = PipelineStage(
            _Ends(self._run, place),
            place.world.rank,
            place.world.size,
            place.world.device,
            input_args=images if place.is_first else tuple(_on_the_wire(t) for t in place.entering),
            output_args=tuple(_on_the_wire(t) for t in place.leaving),
            group=place.world.group,
        )
        schedule = SCHEDULES[self._kind]
        return schedule(stage, self._micro_batches // self._calls, loss_fn=self._loss, scale_grads=False)


class ScheduleGrouped(Schedule1F1B):
    """1F1B as in a pipeline of twice the stages: each stage runs that many more micro-batches forward first.

    GPipe, which runs a whole update forward first, would hold all of it. Every stage is later by the same number, so
    that the messages of neighbours stay paired; otherwise NCCL would wait forever.
    """

    def __init__(self, stage: PipelineStage, micro_batches: int, **rest: Any) -> None:
        # Without 1F1B's own check: here, an update may have fewer micro-batches than the pipeline stages.
        PipelineScheduleSingle.__init__(self, stage, micro_batches, **rest)
        self._num_stages *= 2  # decides only how many micro-batches go forward first

    def _get_pipeline_order(self) -> None:
        """Return nothing: torch only draws this order, and that of 1F1B needs more micro-batches than stages."""


SCHEDULES: dict[Kind, Callable[..., PipelineScheduleSingle]] = {
    "grouped": ScheduleGrouped,
    "interleaved": Schedule1F1B,
    "sequential": ScheduleGPipe,  # with one micro-batch at a time
}


class _Ends(nn.Module):
    """A stage with the conversions of the values that it receives and sends."""

    def __init__(self, run: Run, place: StagePlace) -> None:
        super().__init__()
        self._run, self._place = run, place
        self._root = torch.zeros((), device=place.world.device, requires_grad=True)

    def forward(self, *values: Tensor) -> Any:
        given = values if self._place.is_first else tuple(_Received.apply(value) for value in values)
        results = self._run(*given)
        return results if self._place.is_last else tuple(_Sent.apply(result, self._root) for result in results)


@torch.no_grad()
def relay(run: Run, place: StagePlace, given: Sequence[Tensor]) -> Tensor | None:
    """Run one micro-batch forward through all stages; return the result on the last one."""
    world = place.world
    with world.waiting(PASSING):
        if not place.is_first:
            buffers = [torch.empty_like(_on_the_wire(t), device=world.device) for t in place.entering]
            for buffer in buffers:
                dist.recv(buffer, group_src=world.rank - 1, group=world.group)
            given = [_from_wire(buffer) for buffer in buffers]
    results = run(*given)
    if place.is_last:
        return results  # type: ignore[no-any-return]
    with world.waiting(PASSING):
        for result in results:
            dist.send(_to_wire(result), group_dst=world.rank + 1, group=world.group)
    return None


class _Sent(torch.autograd.Function):
    """Converts a value for sending, and the gradient that comes back.

    `root` requires a gradient but gets none. It makes the value require one even if nothing in this stage is trained,
    so that the next stage can always send a gradient back.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, root: Tensor) -> Tensor:  # noqa: ARG004
        sent = _to_wire(value)
        return sent.clone() if sent is value else sent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return _from_wire(gradient), None


class _Received(torch.autograd.Function):
    """The inverse of `_Sent`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return _from_wire(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return _to_wire(gradient)


def _to_wire(value: Tensor) -> Tensor:
    """Make a value contiguous for sending; images stay channels-last in memory: N x C x H x W -> N x H x W x C."""
    return (value.permute(0, 2, 3, 1) if value.ndim == 4 else value).contiguous()


def _from_wire(value: Tensor) -> Tensor:
    return value.permute(0, 3, 1, 2) if value.ndim == 4 else value


def _on_the_wire(value: Tensor) -> Tensor:
    """A `meta` value as it is sent; since torch 2.13 its gradient is only sent back if it requires one."""
    sent = torch.empty_like(_to_wire(value), memory_format=torch.contiguous_format)
    return sent.requires_grad_(value.is_floating_point())


def _parts(given: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.chunk(count) for tensor in given), strict=True)) if given else [()] * count
