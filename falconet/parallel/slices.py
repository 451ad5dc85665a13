"""What of which tensor a process holds: any set of named slices, and a fair share of what all processes hold alike."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Slice(NamedTuple):
    """Values `begin` and on of a named tensor, in the order in which the whole lies in memory."""

    name: str
    values: Tensor  # flat
    shape: tuple[int, ...]  # of the whole
    begin: int = 0
    channels_last: bool = False  # the order in memory; else row-major

    @property
    def end(self) -> int:
        return self.begin + self.values.numel()


def fair_share(tensors: Mapping[str, Tensor], *, rank: int, size: int) -> list[Slice]:
    """The part of tensors that `size` processes hold alike which process `rank` answers for.

    The tensors lie end to end in the order of their names; each process has an equal stretch of the bytes. A value
    belongs to the process in whose stretch it begins, a tensor without values to the first.
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
    """A slice of a whole tensor; a view of it where its memory has no gaps."""
    last = is_channels_last(tensor)
    flat = in_memory_order(tensor.detach() if last else tensor.detach().contiguous())
    return Slice(name, flat[begin:end], tuple(tensor.shape), begin, last)


def joined(slices: Iterator[Slice] | list[Slice]) -> Tensor:
    """The whole, row-major, of slices that cover it and lie in the same order."""
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
    """The values of a flat tensor in the shape and the memory order of `p`."""
    return part.as_strided(p.size(), p.stride(), part.storage_offset()) if is_dense(p) else part.view(p.shape)


def in_memory_order(p: Tensor) -> Tensor:
    """A flat view of a tensor's values as they lie in memory."""
    assert is_dense(p), "a tensor with gaps in memory"
    return p.as_strided((p.numel(),), (1,), p.storage_offset())


def is_channels_last(p: Tensor) -> bool:
    """Whether the memory order is another one than row-major."""
    return p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)


def is_dense(p: Tensor) -> bool:
    return p.is_contiguous() or is_channels_last(p)
