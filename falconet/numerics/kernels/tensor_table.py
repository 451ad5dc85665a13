"""Tables of many tensors for one kernel launch: their addresses, and the chunks into which they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from falconet.numerics.rounding import Part, Rounding

CHUNK = 1024  # elements per program
# A row: weight, gradient, two states, elements, number, channels, pixels; multiplier and shift that divide by
# channels x pixels, and by channels; first element.
COLUMNS = 13
MOST_STATES = 2
ALIGNMENT = 16  # bytes; torch's allocations have 64 or more
KEPT = 64  # sets of addresses; gradients use the same few places update after update


@dataclass(frozen=True)
class Group:
    """Tensors of one type for one launch; states and gradients have the memory layout of the weights."""

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # per weight
    parts: Sequence[Part]  # per weight, for rounding


@dataclass(frozen=True, kw_only=True)
class Control:
    """Numbers shared by all tensors of an update, 0-d on the device so that a captured graph sees changes."""

    lr: Tensor  # fp32
    scale: Tensor  # fp32: gradients are divided by it
    found: Tensor  # bool: change nothing
    update: Tensor  # int32
    rounding: Rounding | None


class Upload(NamedTuple):
    """Both ends of an asynchronous copy; the host's must exist until the copy is done."""

    here: Tensor
    there: Tensor


@dataclass
class Tables:
    """Tables on the device, one for each set of addresses."""

    chunk: int = CHUNK
    _chunks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _firsts: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _rows: dict[tuple[int, ...], Upload] = field(default_factory=dict)
    _now: dict[tuple[int, ...], Upload | None] = field(default_factory=dict)  # of this update; None: not in a graph
    _captured: list[Upload] = field(default_factory=list)  # every replay of their graph copies them again
    _spare: dict[int, list[Tensor]] = field(default_factory=dict)  # by size; a capture cannot allocate pinned memory

    def begin(self) -> None:
        """Start an update. A graph has its own tables, because other graphs may write to the same memory."""
        self._now.clear()

    def chunks(self, group: Group) -> Tensor:
        """The row, and the chunk of that row, for each program, int32."""
        sizes = tuple(w.numel() for w in group.weights)
        if sizes not in self._chunks:
            pairs = [(row, part) for row, size in enumerate(sizes) for part in range(-(-size // self.chunk))]
            self._chunks[sizes] = _upload(torch.tensor(pairs, dtype=torch.int32), group.weights[0].device).there
        return self._chunks[sizes]

    def firsts(self, group: Group) -> Tensor:
        """The number of each weight's first program, and the number of all programs, int32."""
        sizes = tuple(w.numel() for w in group.weights)
        if sizes not in self._firsts:
            counts = accumulate((-(-size // self.chunk) for size in sizes), initial=0)
            self._firsts[sizes] = _upload(torch.tensor(list(counts), dtype=torch.int32), group.weights[0].device).there
        return self._firsts[sizes]

    def rows(self, group: Group) -> Tensor:
        """The table with one row per weight, int64; the host does not wait."""
        flat, device = tuple(value for row in _rows(group) for value in row), group.weights[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._in_graph(flat, device).there
        self._now[flat] = None
        if device.type == "cuda":
            self._spare_one_each(len(flat))
        if flat not in self._rows:
            if len(self._rows) == KEPT:
                del self._rows[next(iter(self._rows))]
            self._rows[flat] = _upload(_table(flat), device)
        return self._rows[flat].there

    def _in_graph(self, flat: tuple[int, ...], device: torch.device) -> Upload:
        made = self._now.get(flat)
        if made is None:
            assert self._spare.get(len(flat)), "run one update before the capture, which allocates the tables' memory"
            pinned = self._spare[len(flat)].pop().copy_(_table(flat))
            made = self._now[flat] = Upload(pinned, pinned.to(device, non_blocking=True))
            self._captured.append(made)
        return made

    def _spare_one_each(self, size: int) -> None:
        """Keep host memory for as many tables of this size as the update has had so far."""
        spare, needed = self._spare.setdefault(size, []), sum(len(each) == size for each in self._now)
        while len(spare) < needed:
            spare.append(torch.empty(size // COLUMNS, COLUMNS, dtype=torch.int64).pin_memory())


def _table(flat: tuple[int, ...]) -> Tensor:
    return torch.tensor(flat, dtype=torch.int64).view(-1, COLUMNS)


def same_layout(grad: Tensor, *, like: Tensor) -> Tensor:
    """`grad` in the memory layout of `like`, aligned for the kernels.

    It is a copy only if a backward pass broke autograd's layout contract, or gave a part of a larger tensor: a fused
    norm's gradients of weight and bias are two rows of one.
    """
    if grad.stride() == like.stride() and grad.data_ptr() % ALIGNMENT == 0:
        return grad
    return torch.empty_like(like, dtype=grad.dtype).copy_(grad)


def is_dense(weight: Tensor) -> bool:
    """Whether the memory is row-major or channels-last, so that the kernels can number the elements."""
    return weight.is_contiguous() or (weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last))


def _rows(group: Group) -> list[list[int]]:
    rows = []
    for w, g, states, part in zip(group.weights, group.grads, group.states, group.parts, strict=True):
        assert w.numel() < 2**31
        pointers = [t.data_ptr() for t in states] + [0] * (MOST_STATES - len(states))
        # Row-major order needs no renumbering: one pixel. A flat piece has the shape of its whole tensor.
        whole = (part.channels, part.pixels)
        channels, pixels = whole if w.is_contiguous() else (w.shape[1], w.shape[2] * w.shape[3])
        pointers = [w.data_ptr(), g.data_ptr(), *pointers]
        assert all(pointer % ALIGNMENT == 0 for pointer in pointers), "the kernels load 16 bytes at a time"
        divisions = [*_division(channels * pixels), *_division(channels)]
        rows.append([*pointers, w.numel(), part.tensor, channels, pixels, *divisions, part.first])
    return rows


def _division(by: int) -> tuple[int, int]:
    """A multiplier and a shift: n // by is the upper half of the 64-bit n * multiplier, shifted, for any n below 2^31.

    GPUs emulate division; twice per element, that would take as long as all of the noise.
    """
    shift = (by - 1).bit_length()
    return -(-(1 << (31 + shift)) // by), shift - 1


def _upload(host: Tensor, device: torch.device) -> Upload:
    if device.type != "cuda":
        return Upload(host, host)
    pinned = host.pin_memory()
    return Upload(pinned, pinned.to(device, non_blocking=True))
