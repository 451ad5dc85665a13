"""Slices of named tensors that a process holds, and its fair share of those that all processes hold."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Slice(NamedTuple):
    """Consecutive values of a named tensor, from `begin`, in the memory order of the whole tensor."""

    name: str
    values: Tensor  # flat
    shape: tuple[int, ...]  # of the whole tensor
    begin: int = 0
    channels_last: bool = False  # memory order; otherwise row-major

    @property
    def end(self) -> int:
        return self.begin + self.values.numel()


def fair_share(tensors: Mapping[str, Tensor], *, rank: int, size: int) -> list[Slice]:
    """The share of process `rank` in tensors that `size` processes all hold.

    The tensors are laid end to end in order of name, and each process gets an equal stretch of the bytes. A value
    belongs to the process in whose stretch it starts, an empty tensor to the first process.
    """
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    first, last = (total * number // size for number in (rank, rank + 1))
    share, offset = [], 0
    for name, tensor in sorted(tensors.items()):
        width, count = tensor.element_size(), tensor.numel()
        begin, end = (min(max(-((offset - edge) // width), 0), count) for edge in (first, last))
        if begin < end or (count == 0 and rank == 0):
            share.append(cut(name, tensor, begin, end))
        offset += count * width
    return share


def cut(name: str, tensor: Tensor, begin: int, end: int) -> Slice:
    """A slice of a whole tensor; a view if the tensor is dense."""
    last = is_channels_last(tensor)
    flat = in_memory_order(tensor.detach() if last else tensor.detach().contiguous())
    return Slice(name, flat[begin:end], tuple(tensor.shape), begin, last)


def joined(slices: Iterator[Slice] | list[Slice]) -> Tensor:
    """Join slices that cover a tensor into the whole, row-major."""
    slices = list(slices)
    shape, last = slices[0].shape, slices[0].channels_last
    flat = torch.empty(torch.Size(shape).numel(), dtype=slices[0].values.dtype)
    for each in slices:
        flat[each.begin : each.end] = each.values
    if not last:
        return flat.view(shape)
    images, channels, height, width = shape
    return flat.view(images, height, width, channels).permute(0, 3, 1, 2).contiguous()


def shaped_like(part: Tensor, p: Tensor) -> Tensor:
    """View a flat tensor in the shape and memory order of `p`."""
    return part.as_strided(p.size(), p.stride(), part.storage_offset()) if is_dense(p) else part.view(p.shape)


def in_memory_order(p: Tensor) -> Tensor:
    """A flat view of a tensor in memory order."""
    assert is_dense(p), "a tensor with gaps in memory"
    return p.as_strided((p.numel(),), (1,), p.storage_offset())


def is_channels_last(p: Tensor) -> bool:
    """Whether the memory order is channels-last and not also row-major."""
    return p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)


def is_dense(p: Tensor) -> bool:
    return p.is_contiguous() or is_channels_last(p)
