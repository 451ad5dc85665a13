"""Stochastic rounding of fp32 to half precision, with noise that is a hash of seed, update, tensor and element."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Constants of a 32-bit mixing function (Wellons' lowbias32), which the Triton kernels use too.
MIX = (0x7FEB352D, 0x846CA68B)
UPDATE_STRIDE = 0x9E3779B1  # odd, so that no two updates (or tensors) collide within 2^32
TENSOR_STRIDE = 0x85EBCA77
SLOT_STRIDE = 0xC2B2AE3D

SMALLEST = 2.0**-24  # the smallest positive fp16 number, and the spacing below 2^-14

_MAGNITUDE = 0x7FFFFFFF  # an fp32 number's bits without the sign
_LARGEST = {torch.float16: 0x477FE000, torch.bfloat16: 0x7F7F0000}  # the largest finite numbers, as fp32 bits
_SMALLEST = 0x33800000  # 2^-24 as fp32 bits


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding, with noise drawn from `seed`."""

    seed: int


class Part(NamedTuple):
    """The elements for the noise: those of tensor number `tensor` from `first` on, or a flat piece of its memory.

    `channels` and `pixels` describe a channels-last tensor that a flat piece was cut from, whose order in memory is
    not that of its elements; 1 and 1: the same order.
    """

    tensor: int
    first: int = 0
    channels: int = 1
    pixels: int = 1


class Store(Protocol):
    """A way to round a computed fp32 value to the stored `dtype`."""

    def __call__(self, value: Tensor, dtype: torch.dtype, *, part: Part, slot: int) -> Tensor: ...


class Nearest:
    """IEEE rounding: to the nearest, ties to even."""

    def __call__(self, value: Tensor, dtype: torch.dtype, *, part: Part, slot: int) -> Tensor:  # noqa: ARG002
        return value.to(dtype)


class Stochastic:
    """Round up with a probability equal to the distance from the lower neighbour, in one update of some tensors.

    A value that the format can represent does not change, nor do infinities and NaN. Beyond the largest finite number
    it is IEEE rounding, which overflows to infinity halfway to the next step. Probabilities are exact, except for fp16
    values below 2^-24, where they are correct to 2^-25. Equal seeds and numbers give equal noise on every replica and
    device, so there is no state to save.

    Elements are numbered by their logical index, so the result does not depend on the memory format. For a
    channels-last tensor that costs a strided copy of the numbers here, and two integer divisions in the Triton kernel.
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
    """Fold a seed of up to 64 bits into a signed 32-bit number."""
    low, high = (torch.tensor(_signed(word), dtype=torch.int32) for word in (seed, seed >> 32))
    return int(_mix(_mix(low) + high))


def _streams(seed: int, update: Tensor, tensors: Tensor) -> Tensor:
    """One 32-bit number per tensor, to mix with the numbers of its elements."""
    base = _mix(update.to(torch.int32) * _signed(UPDATE_STRIDE) + seed_bits(seed))
    return _mix(tensors * _signed(TENSOR_STRIDE) + base)


def _hash(elements: Tensor, stream: Tensor, slot: int) -> Tensor:
    # The stream is mixed in twice: with once, two streams would be the same numbers in another order. The slot comes
    # in between, so that a kernel needs one more mix for a parameter and each of its states, not two.
    return _mix(_mix(elements ^ stream) + (stream + _signed(slot * SLOT_STRIDE)))


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every bit of the result depends on every bit of `x`; products wrap around."""
    x = x ^ ((x >> 16) & 0xFFFF)  # the mask makes an arithmetic shift a logical one
    x = x * _signed(MIX[0])
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(MIX[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _numbered(x: Tensor, first: int) -> Tensor:
    """The number of each element, in the memory layout of `x`."""
    numbers = torch.arange(first, first + x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    if x.is_contiguous():
        return numbers
    return torch.empty_like(x, dtype=torch.int32).copy_(numbers)


def _logical(places: Tensor, channels: int, pixels: int) -> Tensor:
    """The numbers of the elements at positions in channels-last memory."""
    if pixels == 1:
        return places
    image = places // (channels * pixels)
    within = places - image * (channels * pixels)
    pixel = within // channels
    return image * (channels * pixels) + (within - pixel * channels) * pixels + pixel


def _round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round `x` with 32 random bits per element."""
    assert x.dtype == torch.float32
    pattern = x.view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    rounded = _round_bfloat16(magnitude, bits) if dtype == torch.bfloat16 else _round_float16(magnitude, bits)
    rounded = torch.where(magnitude < _LARGEST[dtype], rounded, magnitude)  # the cast handles the rest
    rounded |= pattern & ~_MAGNITUDE
    return rounded.view(torch.float32).to(dtype)


def _round_bfloat16(magnitude: Tensor, bits: Tensor) -> Tensor:
    """Add noise to the last 16 bits, then cut them off: bf16 is fp32 without them, down to the smallest number."""
    return (magnitude + (bits & 0xFFFF)) & ~0xFFFF


def _round_float16(magnitude: Tensor, bits: Tensor) -> Tensor:
    # fp32 has 13 more bits; below 2^-14, where fp16's spacing stays at 2^-24, one more with every halving.
    dropped = (126 - (magnitude >> 23)).clamp_(13, 23)
    below = (1 << dropped) - 1
    rounded = (magnitude + (bits & below)) & ~below
    # Below 2^-24 there is no bit left: round to 2^-24 or 0.
    up = (bits & 0x3FFFFFFF).float() * 2.0**-54 < magnitude.view(torch.float32)
    return torch.where(magnitude < _SMALLEST, up.int() * _SMALLEST, rounded)


def _signed(number: int) -> int:
    """The low 32 bits of a number, as an int32."""
    return ((number + 2**31) & 0xFFFFFFFF) - 2**31
