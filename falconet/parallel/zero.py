"""Optimizer state sharded over replicas: each updates the slice that it owns, then all share the weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falconet.errors import ConfigError
from falconet.parallel.collectives import Processes
from falconet.parallel.data_parallel import AveragedReplicas, Gradients
from falconet.parallel.slices import Slice, in_memory_order, is_channels_last

COUNT, UNTOUCHED = "step", "untouched"  # slots that hold a number and a mark, not tensors like the parameter
STEP = 8  # a piece starts at a multiple of this many values: 16 bytes of halves, which fused kernels load at once
T = TypeVar("T")


class Layout(Protocol):
    """The parameters of the optimizer, and the mapping of their state to that of whole parameters."""

    @property
    def trained(self) -> nn.Module: ...

    def slices(self, tensors: Mapping[str, Tensor]) -> list[Slice]:
        """Convert this process's `slot/parameter` tensors to slices of the state of whole parameters."""

    def scattered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the state of whole parameters to this process's part of it."""


class Piece(NamedTuple):
    """The part of one parameter that this process owns."""

    name: str
    whole: Tensor  # the parameter
    weights: nn.Parameter  # a view into the parameter's memory
    begin: int  # of the parameter's values, in memory order
    at: int  # in this process's slice of the bucket

    @property
    def values(self) -> int:
        return self.weights.numel()


class ShardedReplicas(AveragedReplicas):
    """Replicas that each own a slice of every bucket: its averaged gradient, its optimizer state and its update.

    The optimizer is built for `trained`, whose parameters are pieces: views into the model's. Call `share_weights`
    after each of its updates.
    """

    def __init__(self, model: nn.Module, world: Processes, *, bucket_megabytes: float) -> None:
        names = {p: name for name, p in model.named_parameters()}
        self._model = model

        def bucket(parameters: Sequence[Tensor]) -> "OwnedBucket":
            return OwnedBucket(parameters, [names[p] for p in parameters], world)  # type: ignore[index]

        super().__init__(model, world, bucket_megabytes=bucket_megabytes, bucket=bucket)
        self._owned = [each for each in self._buckets if isinstance(each, OwnedBucket)]
        self.pieces = [piece for each in self._owned for piece in each.pieces]
        self._piece = {piece.name: piece for piece in self.pieces}
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._number = {name: number for number, name in enumerate(trained)}
        self.trains = bool(trained)  # a stage of a pipeline may train nothing
        self._adapting: Sequence[Piece] = ()  # those whose parameters have their own learning rate
        self._uploaded: dict[tuple[int, ...], Tensor] = {}
        self.trained = nn.Module()
        for piece in self.pieces:
            self.trained.register_parameter(_without_dots(piece.name), piece.weights)

        nothing = bool(trained) and all(piece.weights.ndim < 2 for piece in self.pieces)
        if self._world.max(torch.tensor(int(nothing))):
            raise ConfigError(f"the model is too small to shard its optimizer state over {world.size} replicas")

    def share_weights(self, *_: object) -> None:
        """Exchange the updated weights; called after an update."""
        for bucket in self._owned:
            bucket.share_weights()

    def announced(self, micro_batches: Sequence[T]) -> Iterator[T]:
        for p in self._model.parameters():
            p.grad = None  # the optimizer only clears those of its pieces
        return super().announced(micro_batches)

    def adapt(self, pieces: Sequence[Piece]) -> None:
        """Let `norms` sum over the processes for these pieces; either every process has some or none has."""
        self._adapting = pieces
        some_lack, some_have = self._world.max(torch.tensor([not pieces, bool(pieces)]).int()).tolist()
        if some_lack and some_have:
            raise ConfigError(
                f"--lars-skip: leaves too few weights to lars to shard its state over {self._world.size} replicas;"
                " expected fewer patterns, or no --enable-optimizer-rts"
            )

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norms of whole adapting parameters, summed over their pieces, for layer-wise rules such as LARS."""
        adapting = [piece for piece in self._adapting if piece.weights.grad is not None]
        assert len(tensors) == len(adapting), "adapting weights have one dtype, so that all processes call this once"
        # In fp32, because fp16 would overflow.
        own = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)) ** 2
        summed = self._world.sum(self._spread(own, adapting))
        return summed[self._numbers(adapting)].sqrt()

    def flags(self, own: Tensor) -> Tensor:
        """Whether any process raised a flag, for each trained parameter; `own`: the flags of pieces with a gradient."""
        return self._world.max(self._spread(own.float(), [p for p in self.pieces if p.weights.grad is not None])) > 0

    def slices(self, tensors: Mapping[str, Tensor]) -> list[Slice]:
        return [found for name, tensor in tensors.items() if (found := self._slice(name, tensor)) is not None]

    def scattered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            slot, _, parameter = name.partition("/")
            if parameter in self._piece:
                own[f"{slot}/{_without_dots(parameter)}"] = _cut(self._piece[parameter], tensor)
        return own

    def _slice(self, name: str, tensor: Tensor) -> Slice | None:
        slot, _, parameter = name.partition("/")
        piece = self._piece[_with_dots(parameter)]
        label = f"{slot}/{piece.name}"
        if slot in (COUNT, UNTOUCHED):  # the same on all processes that own a piece
            return Slice(label, tensor.reshape(-1), tuple(tensor.shape)) if piece.begin == 0 else None
        order = is_channels_last(piece.whole)
        return Slice(label, tensor.reshape(-1), tuple(piece.whole.shape), piece.begin, order)

    def _spread(self, values: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Spread one value per piece to one per trained parameter, 0 for those without a piece here."""
        everyone = values.new_zeros(len(self._number))
        return everyone.index_copy_(0, self._numbers(pieces), values)

    def _numbers(self, pieces: Sequence[Piece]) -> Tensor:
        numbers = tuple(self._number[piece.name] for piece in pieces)
        if numbers not in self._uploaded:  # kept, because uploading them synchronises
            self._uploaded[numbers] = torch.tensor(numbers, dtype=torch.int64, device=self._world.device)
        return self._uploaded[numbers]


class OwnedBucket(Gradients):
    """Parameters whose gradients are summed and scattered over the processes in one message."""

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], world: Processes) -> None:
        super().__init__(tensors, multiple=STEP * world.size, step=STEP)
        self._world = world
        self._share = self._flat.numel() // world.size
        self._own = self._flat.new_zeros(self._share)
        self.pieces = list(self._pieces(names))

    def buffers(self) -> list[Tensor]:
        return [self._flat, self._own]

    def _pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """This process's slice of the bucket by parameter; weights keep two dimensions, for which decay tests."""
        first, last = self._world.rank * self._share, (self._world.rank + 1) * self._share
        for name, tensor, offset in zip(names, self._tensors, self._begins, strict=False):
            begin, end = max(first - offset, 0), min(last - offset, tensor.numel())
            if begin < end:
                values = in_memory_order(tensor.detach())[begin:end]
                weights = nn.Parameter(values[:, None] if tensor.ndim > 1 else values)
                yield Piece(name, tensor, weights, begin, at=offset + begin - first)

    @torch.no_grad()
    def send(self, world: Processes) -> None:
        if self._work is None:
            self._pack(world.size)
            with world.waiting("averaging gradients"):
                self._work = dist.reduce_scatter_tensor(self._own, self._flat, group=world.group, async_op=True)

    @torch.no_grad()
    def unpack(self) -> None:
        """Add this process's slice of the gradient to what the update rule keeps in `grad`."""
        for part, piece in self._parts():
            if piece.whole.grad is None:  # no part in the loss on any replica, so no update
                continue
            values = part.view_as(piece.weights)
            if piece.weights.grad is None:
                piece.weights.grad = values.clone()
            else:
                piece.weights.grad.add_(values)

    @torch.no_grad()
    def share_weights(self) -> None:
        for part, piece in self._parts():
            part.copy_(piece.weights.view(-1))
        with self._world.waiting("sharing updated weights"):
            dist.all_gather_into_tensor(self._flat, self._own, group=self._world.group)
        torch._foreach_copy_(list(self._tensors), self._views)

    def _parts(self) -> Iterator[tuple[Tensor, Piece]]:
        """This process's slice of the bucket, piece by piece."""
        for piece in self.pieces:
            yield self._own[piece.at : piece.at + piece.values], piece


def _cut(piece: Piece, tensor: Tensor) -> Tensor:
    """This process's piece of a whole parameter's state."""
    if tensor.shape != piece.whole.shape:
        return tensor  # a number, the mark of a parameter without state, or an error that the loader reports
    laid_out = torch.empty_like(piece.whole, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return in_memory_order(laid_out)[piece.begin : piece.begin + piece.values].reshape(piece.weights.shape)


def _without_dots(name: str) -> str:
    return name.replace(".", "|")


def _with_dots(name: str) -> str:
    return name.replace("|", ".")
