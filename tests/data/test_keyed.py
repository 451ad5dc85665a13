"""Keyed draws follow their definition and never change."""

import hashlib

import numpy as np
import pytest

from falconet.data import keyed
from falconet.data.keyed import Purpose

MASK = (1 << 64) - 1
GOLDEN_WORDS = [[11070043127368058970, 14752447664373222721], [468958047178524250, 3808644967053500980]]
GOLDEN_PERMUTATION = "67d9868095eb36a76d19fce2e0350dc78560394819ffed8c5d663502cc1c8785"


def draw(*, seed=1, epoch=2, count=1000, purpose=Purpose.CROP, draws=1, first=0):
    indices = np.arange(count, dtype=np.int64)
    return keyed.uniform(seed=seed, epoch=epoch, indices=indices, purpose=purpose, draws=draws, first=first)


def splitmix64(state):
    """The numbers that the published generator gives from a state, in plain integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        yield word ^ (word >> 31)


def test_the_reference_gives_the_published_numbers_of_splitmix64():
    numbers = splitmix64(1234567)
    assert [next(numbers) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "epoch", "index"), [(0, 0, 0), (42, 3, 7), (-5, 90, 1281166), (2**64 - 1, 1, 2**40)])
def test_the_draws_are_the_documented_chain(seed, epoch, index):
    key = 0
    for part in (seed, epoch, int(Purpose.FLIP)):
        key = next(splitmix64(key ^ (part & MASK)))
    numbers = splitmix64(next(splitmix64(key ^ index)))
    expected = [next(numbers) for _ in range(4)]
    given = keyed.words(seed=seed, epoch=epoch, indices=np.array([index]), purpose=Purpose.FLIP, draws=4)
    assert given[0].tolist() == expected


def test_the_numbers_are_those_of_every_earlier_version():
    words = keyed.words(seed=42, epoch=1, indices=np.array([0, 1]), purpose=Purpose.CROP, draws=2)
    assert words.tolist() == GOLDEN_WORDS
    digest = hashlib.sha256(keyed.permutation(1000, seed=42, epoch=1).astype("<i8").tobytes()).hexdigest()
    assert digest == GOLDEN_PERMUTATION


def test_purposes_keep_their_numbers():
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "ORDER": 1,
        "CROP": 2,
        "FLIP": 3,
        "MIXUP": 4,
        "CUTMIX": 5,
        "GENERATE": 6,
        "SPLIT": 7,
        "OBJECT_CROP": 8,
        "VERTICAL_FLIP": 20,
        "POLICY": 21,
        "JITTER": 22,
        "ERASE": 23,
        "CUTOUT": 24,
        "BALANCE": 30,
        "CALIBRATE": 40,
    }


def test_draws_are_uniform_by_chi_square():
    counts, _ = np.histogram(draw(count=100_000, draws=4), bins=256, range=(0, 1))
    expected = 400_000 / 256
    statistic = ((counts - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6; five of them either side.
    assert 255 - 113 < statistic < 255 + 113


def test_draws_are_in_the_half_open_unit_interval():
    drawn = draw(count=100_000)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"epoch": 3}, {"purpose": Purpose.FLIP}, {"first": 1}],
    ids=["seed", "epoch", "purpose", "draw"],
)
def test_draws_for_different_purposes_are_uncorrelated(other):
    correlation = np.corrcoef(draw(count=100_000)[:, 0], draw(count=100_000, **other)[:, 0])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(100_000)


def test_neighbouring_indices_are_uncorrelated():
    drawn = draw(count=100_001)[:, 0]
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / np.sqrt(100_000)


def test_a_draw_does_not_depend_on_other_draws():
    together = draw(count=50, draws=6)
    alone = keyed.uniform(seed=1, epoch=2, indices=np.array([31]), purpose=Purpose.CROP, draws=2, first=3)
    np.testing.assert_array_equal(alone[0], together[31, 3:5])


def test_a_permutation_has_every_number_once_and_changes_with_seed_and_epoch():
    orders = [keyed.permutation(997, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(997))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_a_permutation_of_nothing_is_empty():
    assert len(keyed.permutation(0, seed=1, epoch=1)) == 0
