"""Stochastic rounding of fp32 to half precision, with noise that depends on where and when and on nothing else."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A 32-bit mixing function (lowbias32 of Wellons); CUDA and Triton repeat it from these numbers.
MIX = (0x7FEB352D, 0x846CA68B)
UPDATE_STRIDE = 0x9E3779B1  # odd, so that no two updates (or tensors) meet within 2^32
TENSOR_STRIDE = 0x85EBCA77
SLOT_STRIDE = 0xC2B2AE3D

SMALLEST = 2.0**-24  # positive number of fp16, and its spacing below 2^-14

_MAGNITUDE = 0x7FFFFFFF  # of an fp32 number's bits; the last bit is the sign
_LARGEST = {torch.float16: 0x477FE000, torch.bfloat16: 0x7F7F0000}  # the largest finite numbers, as fp32 bits
_SMALLEST = 0x33800000  # 2^-24 as fp32 bits


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding, with noise drawn from `seed`."""

    seed: int


class Part(NamedTuple):
    """Which numbered values: those of a whole tensor from element `first` on, or a flat piece of one's memory.

    `channels` and `pixels` are those of a channels-last whole that a flat piece was cut from, whose order in memory is
    not that of the numbers; 1 and 1: the same order.
    """

    tensor: int
    first: int = 0
    channels: int = 1
    pixels: int = 1


class Store(Protocol):
    """How a computed fp32 value becomes what is stored in `dtype`."""

    def __call__(self, value: Tensor, dtype: torch.dtype, *, part: Part, slot: int) -> Tensor: ...


class Nearest:
    """IEEE: to the nearest, ties to even."""

    def __call__(self, value: Tensor, dtype: torch.dtype, *, part: Part, slot: int) -> Tensor:  # noqa: ARG002
        return value.to(dtype)


class Stochastic:
    """Up with probability equal to how far up the value lies; of one update, for tensors numbered below `tensors`.

    A value that the format has stays as it is, infinities and NaN too. Beyond the largest finite number there is no
    neighbour above to be fair to: there it is IEEE's nearest, which overflows to infinity halfway to the next step.
    Probabilities are exact, but for fp16 values below 2^-24, where they are right to 2^-25. Equal seeds and numbers
    give equal noise on every replica and device, so there is no state to save.

    Elements are numbered by their logical index, so the result does not depend on the memory format. For a
    channels-last tensor that costs a strided copy of the numbers here, two integer divisions in the Triton kernel.
    """

    def __init__(self, rounding: Rounding, *, update: Tensor, tensors: int) -> None:
        numbers = torch.arange(tensors, dtype=torch.int32, device=update.device)
        self._streams = _streams(rounding.seed, update, numbers)

    def __call__(self, value: Tensor, dtype: torch.dtype, *, part: Part, slot: int) -> Tensor:
        return value if dtype == torch.float32 else _round(value, dtype, self.bits(value, part=part, slot=slot))

    def bits(self, value: Tensor, *, part: Part, slot: int) -> Tensor:
        """The noise of each element, 32 bits as int32: a hash of (seed, update, tensor, slot, element)."""
        numbers = _logical(_numbered(value, part.first), part.channels, part.pixels)
        return _hash(numbers, self._streams[part.tensor], slot)


def seed_bits(seed: int) -> int:
    """A seed of up to 64 bits folded into a signed 32-bit number."""
    low, high = (torch.tensor(_signed(word), dtype=torch.int32) for word in (seed, seed >> 32))
    return int(_mix(_mix(low) + high))


def _streams(seed: int, update: Tensor, tensors: Tensor) -> Tensor:
    """One 32-bit number a tensor, which the elements' numbers are mixed with."""
    base = _mix(update.to(torch.int32) * _signed(UPDATE_STRIDE) + seed_bits(seed))
    return _mix(tensors * _signed(TENSOR_STRIDE) + base)


def _hash(elements: Tensor, stream: Tensor, slot: int) -> Tensor:
    # The stream is mixed in twice: once alone, two streams would be the same numbers in another order. The slot comes
    # in between, so that a kernel mixes a parameter and its states once more each, not twice.
    return _mix(_mix(elements ^ stream) + (stream + _signed(slot * SLOT_STRIDE)))


def _mix(x: Tensor) -> Tensor:
    """int32 to int32, one to one, every bit of the result depending on every bit of `x`; products wrap around."""
    x = x ^ ((x >> 16) & 0xFFFF)  # the mask makes an arithmetic shift a logical one
    x = x * _signed(MIX[0])
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(MIX[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _numbered(x: Tensor, first: int) -> Tensor:
    """Each element's number, in the memory layout of `x`."""
    numbers = torch.arange(first, first + x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    if x.is_contiguous():
        return numbers
    return torch.empty_like(x, dtype=torch.int32).copy_(numbers)


def _logical(places: Tensor, channels: int, pixels: int) -> Tensor:
    """From places in channels-last memory to the numbers of the elements there."""
    if pixels == 1:
        return places
    image = places // (channels * pixels)
    within = places - image * (channels * pixels)
    pixel = within // channels
    return image * (channels * pixels) + (within - pixel * channels) * pixels + pixel


def _round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """`x` rounded by 32 random bits an element."""
    assert x.dtype == torch.float32
    pattern = x.view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    rounded = _round_bfloat16(magnitude, bits) if dtype == torch.bfloat16 else _round_float16(magnitude, bits)
    rounded = torch.where(magnitude < _LARGEST[dtype], rounded, magnitude)  # the rest is the cast's business
    rounded |= pattern & ~_MAGNITUDE
    return rounded.view(torch.float32).to(dtype)


def _round_bfloat16(magnitude: Tensor, bits: Tensor) -> Tensor:
    """bf16 is fp32 without its last 16 bits, down to the smallest number: noise below, then cut."""
    return (magnitude + (bits & 0xFFFF)) & ~0xFFFF


def _round_float16(magnitude: Tensor, bits: Tensor) -> Tensor:
    # 13 bits more than fp16 has; below 2^-14, where its spacing is 2^-24 throughout, one more with every halving.
    dropped = (126 - (magnitude >> 23)).clamp_(13, 23)
    below = (1 << dropped) - 1
    rounded = (magnitude + (bits & below)) & ~below
    # Below 2^-24 there is no bit left to round to: 2^-24 itself, or 0.
    up = (bits & 0x3FFFFFFF).float() * 2.0**-54 < magnitude.view(torch.float32)
    return torch.where(magnitude < _SMALLEST, up.int() * _SMALLEST, rounded)


def _signed(number: int) -> int:
    """The low 32 bits as the int32 of the same bits."""
    return ((number + 2**31) & 0xFFFFFFFF) - 2**31
