"""Stochastic rounding against numpy's float16 and float64 arithmetic."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from falconet.numerics.rounding import Nearest, Part, Rounding, Stochastic


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which noise."""

    seed: int
    update: int | torch.Tensor
    tensor: int
    slot: int = 0
    first: int = 0

    def store(self):
        return Stochastic(Rounding(self.seed), update=torch.as_tensor(self.update), tensors=self.tensor + 1)

    def part(self):
        return Part(self.tensor, self.first)


def round_stochastically(x, dtype, *, key):
    return key.store()(x, dtype, part=key.part(), slot=key.slot)


def noise(shape, *, key):
    return key.store().bits(torch.empty(shape), part=key.part(), slot=key.slot)


KEY = Key(seed=5, update=7, tensor=3)
HALVES = [torch.float16, torch.bfloat16]
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
LARGEST = {torch.float16: 65504.0, torch.bfloat16: float.fromhex("0x1.fep127")}
PRECISION = {torch.float16: 10, torch.bfloat16: 7}  # bits after the point
MINIMUM_EXPONENT = {torch.float16: -14, torch.bfloat16: -126}


def neighbours(x, dtype):
    """The numbers of `dtype` next to `x` on either side, by definition of the format, in float64."""
    exponent = max(math.frexp(x)[1] - 1 if x else -10000, MINIMUM_EXPONENT[dtype])
    spacing = 2.0 ** (exponent - PRECISION[dtype])
    return math.floor(x / spacing) * spacing, math.ceil(x / spacing) * spacing


def draws(value, dtype, count, update=0):
    x = torch.full((count,), value, dtype=torch.float32)
    return round_stochastically(x, dtype, key=Key(seed=1, update=update, tensor=0)).double()


@pytest.mark.parametrize("dtype", HALVES)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), update=st.integers(0, 2**31 - 1))
@settings(max_examples=300, deadline=None)
def test_value_becomes_one_of_its_two_neighbours(dtype, value, update):
    if abs(value) >= LARGEST[dtype]:
        return
    low, high = neighbours(value, dtype)
    found = draws(value, dtype, 8, update)
    assert ((found == low) | (found == high)).all(), (low, found, high)
    assert (torch.signbit(found) == (math.copysign(1, value) < 0)).all()


# |z| beyond 6.8 has probability 1e-11; with the 23 cases here a correct implementation fails once in 1e9 runs.
Z = 6.8
NORMAL = [1.0002, -1.003, 3.14159265, -0.1, 65500.1]
SAMPLES = {
    torch.float16: [*NORMAL, 2.0**-14 * 1.0003, 6.09e-5, -3e-6, 1e-7, 5.9e-8, 2e-8, 1e-9],
    torch.bfloat16: [*NORMAL, 1e38, -1e30, 2.0**-126 * 1.003, 1e-38, -5e-40, 3e-41],
}


@pytest.mark.parametrize(("dtype", "value"), [(dtype, value) for dtype in HALVES for value in SAMPLES[dtype]])
def test_rounding_is_unbiased(dtype, value):
    count = 200_000
    exact = float(np.float32(value))
    low, high = neighbours(exact, dtype)
    up = (exact - low) / (high - low)
    found = (draws(value, dtype, count) == high).double().mean().item()
    assert abs(found - up) <= Z * math.sqrt(up * (1 - up) / count) + 2.0**-25


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_unbiased_and_independent_across_elements(dtype):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=20_000).astype(np.float32))
    keys = [Key(seed=9, update=update, tensor=0) for update in range(4)]
    errors = torch.stack([round_stochastically(x, dtype, key=key).double() - x for key in keys])
    low, high = (torch.tensor(side).double() for side in zip(*(neighbours(float(v), dtype) for v in x), strict=True))
    usual = ((x - low) * (high - x)).sqrt()  # the standard deviation of a fair choice between the two
    standard = errors / usual.clamp_min(1e-30)
    total = math.sqrt(standard.numel())
    assert abs(standard.sum().item()) / total < Z
    assert abs((standard[:, 1:] * standard[:, :-1]).sum().item()) / total < Z  # neighbours in place
    assert abs((standard[1:] * standard[:-1]).sum().item()) / total < Z  # and in time


@pytest.mark.parametrize("dtype", HALVES)
def test_representable_numbers_are_unchanged(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = round_stochastically(every.float(), dtype, key=KEY)
    assert torch.equal(found.isnan(), every.isnan())
    numbers = ~every.isnan()
    assert torch.equal(found[numbers].view(torch.int16), every[numbers].view(torch.int16))  # infinities, -0


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_beyond_the_largest_number_is_ieee_nearest(dtype):
    largest = LARGEST[dtype]
    step = largest - neighbours(math.nextafter(largest, 0.0), dtype)[0]
    x = torch.tensor([largest, largest + 0.4 * step, largest + 0.6 * step, 3.4e38, math.inf]).float()
    x = torch.cat([x, -x])
    for update in range(20):
        found = round_stochastically(x, dtype, key=Key(seed=0, update=update, tensor=0))
        assert torch.equal(found, x.to(dtype))


@pytest.mark.parametrize("payload", [1, 0x2000, 0x400000, 0x7FFFFF])
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_nan(dtype, payload):
    patterns = torch.tensor([0x7F800000 + payload, 0x7F800000 + payload - 2**31], dtype=torch.int64).to(torch.int32)
    assert round_stochastically(patterns.view(torch.float32), dtype, key=KEY).isnan().all()


def test_noise_depends_only_on_its_key():
    same = Key(seed=3, update=4, tensor=5)
    first = noise(1000, key=same)
    assert torch.equal(first, noise((10, 100), key=same).flatten())
    assert torch.equal(first[:10], noise(10, key=same))
    assert torch.equal(first[10:], noise(990, key=replace(same, first=10)))
    assert torch.equal(first, noise(1000, key=replace(same, update=torch.tensor(4))))
    for changed in ({"seed": 4}, {"update": 5}, {"tensor": 6}, {"slot": 1}, {"slot": 2}, {"seed": 3 + 2**32}):
        other = noise(1000, key=replace(same, **changed))
        assert (first == other).float().mean() < 0.01, changed


def test_noise_is_the_published_hash():
    """lowbias32 in Python's unbounded integers, mixed as the module's docstrings say."""

    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) % 2**32
        return x ^ (x >> 16)

    seed, update, tensor, slot = 0x123456789AB, 1000, 7, 2
    base = mix((mix((mix(seed % 2**32) + (seed >> 32)) % 2**32) + update * 0x9E3779B1) % 2**32)
    stream = mix((base + tensor * 0x85EBCA77) % 2**32)
    expected = [mix((mix(element ^ stream) + stream + slot * 0xC2B2AE3D) % 2**32) for element in range(50)]
    found = noise(50, key=Key(seed=seed, update=update, tensor=tensor, slot=slot))
    assert [int(number) % 2**32 for number in found] == expected


def test_every_bit_of_noise_is_a_fair_coin():
    bits = noise(1 << 16, key=Key(seed=0, update=0, tensor=0))
    for bit in range(32):
        ones = ((bits >> bit) & 1).sum().item()
        assert abs(ones - 2**15) < Z * 2**7, bit


def test_weight_and_states_have_independent_noise():
    """They share the first half of the hash; bits and their sums must not show it."""
    keys = [Key(seed=0, update=0, tensor=3, slot=slot) for slot in range(3)]
    drawn = [noise(1 << 16, key=key) for key in keys]
    for one, other in itertools.combinations(drawn, 2):
        for shift in (0, 1, 7, 13, 16, 31):
            turned = (other >> shift) | (other << (32 - shift)) if shift else other
            for bit in range(0, 32, 3):
                alike = (((one ^ turned) >> bit) & 1).sum().item()
                assert abs(alike - 2**15) < Z * 2**7, (shift, bit)


@pytest.mark.parametrize("dtype", HALVES)
def test_memory_format_does_not_change_rounding(dtype):
    x = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    last = x.contiguous(memory_format=torch.channels_last)
    found = round_stochastically(last, dtype, key=KEY)
    assert found.stride() == last.stride()
    assert torch.equal(found, round_stochastically(x, dtype, key=KEY))


def test_piece_is_rounded_like_the_whole():
    x = torch.randn(300)
    whole = round_stochastically(x, torch.float16, key=KEY)
    piece = Key(seed=KEY.seed, update=KEY.update, tensor=KEY.tensor, first=100)
    assert torch.equal(round_stochastically(x[100:], torch.float16, key=piece), whole[100:])


def test_nearest_rounding_is_torchs_and_fp32_is_unchanged():
    x = torch.randn(100)
    for dtype in HALVES:
        assert torch.equal(Nearest()(x, dtype, part=Part(3), slot=0), x.to(dtype))
    for store in (KEY.store(), Nearest()):
        assert torch.equal(store(x, torch.float32, part=Part(3), slot=0), x)


def test_small_steps_are_lost_to_nearest_but_not_to_stochastic_rounding():
    """1 - 1000 x 1e-4 in fp16, whose spacing below 1 is 4.9e-4."""
    stochastic = nearest = torch.ones(1000, dtype=torch.float16)
    for update in range(1000):
        key = Key(seed=0, update=update, tensor=0)
        stochastic = round_stochastically(stochastic.float() - 1e-4, torch.float16, key=key)
        nearest = (nearest.float() - 1e-4).half()
    assert (nearest == 1.0).all()
    assert stochastic.double().mean().item() == pytest.approx(0.9, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_rounds_like_the_cpu(dtype):
    exponents = torch.arange(2**20, dtype=torch.int64) * 4093 - 2**31
    x = exponents.to(torch.int32).view(torch.float32)  # every sign and exponent, NaN too
    here, there = (round_stochastically(x.to(device), dtype, key=KEY).cpu() for device in ("cpu", "cuda"))
    assert torch.equal(here.view(torch.int16)[~x.isnan()], there.view(torch.int16)[~x.isnan()])
    assert there[x.isnan()].isnan().all()
