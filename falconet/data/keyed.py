"""Randomness without streams: every draw is a function of its purpose.

A 64-bit word identifies the owner of a draw; its parts are hashed into it one by one:

    key = 0;  for part in (seed, epoch, purpose):  key = finalise((key ^ part) + GOLDEN)
    own = finalise((key ^ index) + GOLDEN)
    draw number d of that index = finalise(own + (d + 1) * GOLDEN)

`finalise` is the output function of splitmix64 (Steele, Lea, Flood 2014), all arithmetic modulo 2**64, so the last
line is splitmix64 started at `own`. There is no state: nothing to save, and the order of draws does not matter.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
MASK = 0xFFFFFFFFFFFFFFFF


class Purpose(IntEnum):
    """What a draw decides; the numbers never change, because runs depend on them."""

    ORDER = 1
    CROP = 2
    FLIP = 3
    MIXUP = 4
    CUTMIX = 5
    GENERATE = 6
    SPLIT = 7
    OBJECT_CROP = 8
    VERTICAL_FLIP = 20
    POLICY = 21
    JITTER = 22
    ERASE = 23
    CUTOUT = 24
    BALANCE = 30
    CALIBRATE = 40


def _finalise_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _finalise(words: WordArray) -> WordArray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def words(
    *, seed: int, epoch: int, indices: IntArray, purpose: Purpose, draws: int, first: int = 0
) -> WordArray:  # len(indices) x draws
    """Draws number `first` to `first + draws` of each index, as uniform 64-bit words."""
    key = 0
    for part in (seed, epoch, int(purpose)):
        key = _finalise_int(((key ^ (part & MASK)) + GOLDEN) & MASK)
    own = _finalise((indices.astype(np.uint64) ^ np.uint64(key)) + np.uint64(GOLDEN))
    counters = np.arange(first + 1, first + 1 + draws, dtype=np.uint64) * np.uint64(GOLDEN)
    return _finalise(own[:, None] + counters[None, :])


def uniform(
    *, seed: int, epoch: int, indices: IntArray, purpose: Purpose, draws: int, first: int = 0
) -> FloatArray:  # len(indices) x draws
    """Draws as numbers in [0, 1): the top 53 bits of each word, exact in float64."""
    drawn = words(seed=seed, epoch=epoch, indices=indices, purpose=purpose, draws=draws, first=first)
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, *, seed: int, epoch: int, purpose: Purpose = Purpose.ORDER) -> IntArray:
    """The numbers 0 to n - 1 in the order of their words; a million take about 0.1 s."""
    drawn = words(seed=seed, epoch=epoch, indices=np.arange(n, dtype=np.int64), purpose=purpose, draws=1)
    return np.argsort(drawn[:, 0], kind="stable").astype(np.int64)
