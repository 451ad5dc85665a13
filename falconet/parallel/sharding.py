"""Optimizer state divided over replicas: each updates the slice it owns, and takes the others' from them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falconet.errors import ConfigError
from falconet.parallel.processes import Processes
from falconet.parallel.replicas import AveragedReplicas, Gradients, in_memory_order, shaped_like

COUNT, UNTOUCHED = "step", "untouched"  # slots that are a number, and a mark, not tensors like the parameter
KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
T = TypeVar("T")


class Layout(Protocol):
    """Which parameters the optimizer works on, and how their state becomes that of whole parameters and back."""

    @property
    def trained(self) -> nn.Module: ...

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`slot/parameter` of what this process holds -> of whole parameters; every process calls it."""

    def scattered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse, of what this process is to hold."""


class Whole:
    """Whole parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = model

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def scattered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


class Piece(NamedTuple):
    """What this process owns of one parameter."""

    name: str
    weights: nn.Parameter  # a view of the parameter's own memory
    begin: int  # of the parameter's values, in memory order
    end: int


class ShardedReplicas(AveragedReplicas):
    """Replicas that own a slice of every bucket: of its averaged gradient, its optimizer state and its update.

    `attach` the optimizer that was built for `trained`, whose parameters are pieces: views of the model's own.
    """

    def __init__(self, model: nn.Module, world: Processes, *, bucket_megabytes: float) -> None:
        names = {p: name for name, p in model.named_parameters()}
        self._model = model

        def bucket(parameters: Sequence[Tensor]) -> "OwnedBucket":
            return OwnedBucket(parameters, [names[p] for p in parameters], world)  # type: ignore[index]

        super().__init__(model, world, bucket_megabytes=bucket_megabytes, bucket=bucket)
        self._owned = [each for each in self._buckets if isinstance(each, OwnedBucket)]
        self.trained = nn.Module()
        for each in self._owned:
            for piece in each.pieces:
                self.trained.register_parameter(_without_dots(piece.name), piece.weights)

        nothing = all(piece.weights.ndim < 2 for bucket in self._owned for piece in bucket.pieces)
        if self._world.max(torch.tensor(int(nothing))):
            raise ConfigError(
                f"--enable-optimizer-rts: the model is too small to be divided over {world.size} replicas"
            )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """After each of its updates, take over what the others updated."""

        def after(*_: object) -> None:
            for bucket in self._owned:
                bucket.share_weights()

        optimizer.register_step_post_hook(after)

    def announced(self, micro_batches: Sequence[T]) -> Iterator[T]:
        for p in self._model.parameters():
            p.grad = None  # the optimizer empties its pieces' alone
        return super().announced(micro_batches)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each whole parameter that is decayed, from the pieces of it; for rules that go layer by layer."""
        names = [piece.name for bucket in self._owned for piece in bucket.pieces if piece.weights.ndim > 1]
        every = {name: number for number, (name, _) in enumerate(self._model.named_parameters())}
        squares = tensors[0].new_zeros(len(every)) if tensors else torch.zeros(len(every), device=self._world.device)
        own = torch.tensor([every[name] for name in names], dtype=torch.int64, device=squares.device)
        if tensors:
            squares[own] = torch.stack(torch._foreach_norm(list(tensors))).to(squares.dtype) ** 2
        return self._world.sum(squares)[own].sqrt()

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = {_with_dots(name): tensor for name, tensor in tensors.items()}
        # A process without a piece has no slot to name; the first always has one.
        slots = self._world.once(lambda: " ".join(sorted({name.partition("/")[0] for name in held}))).split()
        return {name: t for slot in slots for bucket in self._owned for name, t in bucket.gathered(slot, held).items()}

    def scattered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            slot, _, parameter = name.partition("/")
            for bucket in self._owned:
                for piece in bucket.pieces:
                    if piece.name == parameter:
                        own[f"{slot}/{_without_dots(parameter)}"] = bucket.cut(piece, tensor)
        return own


class OwnedBucket(Gradients):
    """Parameters whose gradients are summed and divided among the processes in one message."""

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], world: Processes) -> None:
        super().__init__(tensors, multiple=world.size)
        self._names, self._world = names, world
        self._share = self._flat.numel() // world.size
        self._own = self._flat.new_zeros(self._share)
        self.pieces = list(self._pieces(names))

    def _pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """The parts of our slice of the bucket, by parameter; a decayed one keeps two dimensions, as `build` asks."""
        first, last, offset = self._world.rank * self._share, (self._world.rank + 1) * self._share, 0
        for name, tensor in zip(names, self._tensors, strict=True):
            begin, end = max(first - offset, 0), min(last - offset, tensor.numel())
            if begin < end:
                values = in_memory_order(tensor.detach())[begin:end]
                yield Piece(name, nn.Parameter(values[:, None] if tensor.ndim > 1 else values), begin, end)
            offset += tensor.numel()

    @torch.no_grad()
    def send(self, world: Processes) -> None:
        if self._work is None:
            self._pack(world.size)
            with world.waiting("averaging gradients"):
                self._work = dist.reduce_scatter_tensor(self._own, self._flat, group=world.group, async_op=True)

    @torch.no_grad()
    def unpack(self) -> None:
        """Our slice of the gradient, added to what the update rule keeps in its place."""
        for part, piece in zip(self._parts(self._own), self.pieces, strict=True):
            values = part.view_as(piece.weights)
            if piece.weights.grad is None:
                piece.weights.grad = values.clone()
            else:
                piece.weights.grad.add_(values)

    @torch.no_grad()
    def share_weights(self) -> None:
        for part, piece in zip(self._parts(self._own), self.pieces, strict=True):
            part.copy_(piece.weights.view(-1))
        with self._world.waiting("sharing updated weights"):
            dist.all_gather_into_tensor(self._flat, self._own, group=self._world.group)
        torch._foreach_copy_(list(self._tensors), self._views)

    @torch.no_grad()
    def gathered(self, slot: str, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One slot of all parameters of the bucket, whole; what no process has is left out.

        As float64 on its way, which holds every type of state exactly.
        """
        own, flat = (t.new_zeros(t.numel(), dtype=torch.float64) for t in (self._own, self._flat))
        facts = torch.zeros(len(self._names), 3, dtype=torch.float64)  # is there, its type, its value if a number
        for part, piece in zip(self._parts(own), self.pieces, strict=True):
            value = held.get(f"{slot}/{piece.name}")
            if value is not None:
                number = float(value) if value.ndim == 0 else 0.0
                facts[self._names.index(piece.name)] = torch.tensor((1, KINDS.index(value.dtype), number))
                if value.numel() == part.numel():
                    part.copy_(value.reshape(-1))
        facts = self._world.max(facts)
        with self._world.waiting("gathering the optimizer's state"):
            dist.all_gather_into_tensor(flat, own, group=self._world.group)
        parts = torch.split(flat, [*(t.numel() for t in self._tensors), self._padding])
        found = {}
        for name, like, part, (there, kind, number) in zip(self._names, self._tensors, parts, facts, strict=False):
            whole = {COUNT: number, UNTOUCHED: torch.empty(0)}.get(slot, shaped_like(part, like))
            if there:
                found[f"{slot}/{name}"] = whole.to(KINDS[int(kind)], copy=True)
        return found

    def cut(self, piece: Piece, tensor: Tensor) -> Tensor:
        """Our piece of a whole parameter's state."""
        like = self._tensors[self._names.index(piece.name)]
        if tensor.shape != like.shape:
            return tensor  # a number, the mark of a parameter without state, or a mistake that the loader names
        laid_out = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return in_memory_order(laid_out)[piece.begin : piece.end].reshape(piece.weights.shape)

    def _parts(self, own: Tensor) -> Sequence[Tensor]:
        """Our slice of the bucket, piece by piece."""
        sizes = [piece.end - piece.begin for piece in self.pieces]
        return torch.split(own, [*sizes, own.numel() - sum(sizes)])[: len(sizes)]


def _without_dots(name: str) -> str:
    return name.replace(".", "|")


def _with_dots(name: str) -> str:
    return name.replace("|", ".")
