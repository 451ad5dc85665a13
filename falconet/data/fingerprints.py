"""Fingerprints of photos, nearly equal for near copies and far apart for different photos, and the search for pairs.

A photo becomes 64 x 64 levels of grey, then the low frequencies of their cosine transform. A bit says whether a
frequency is above the median of its block, so that brightness, contrast, size and compression hardly matter: 64 bits
from the lowest 8 x 8 (the well-known pHash) find candidates, and 256 bits from the lowest 16 x 16 without the mean, as
in PDQ, decide. docs/using/data.md has the measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from falconet.data.keyed import IntArray
from falconet.data.storage import BoolArray, PixelArray

KeyArray = npt.NDArray[np.uint64]

SIDE = 64  # pixels that a photo is reduced to
LOW, HIGH = 8, 16  # frequencies per direction in the key and in the print
BANDS = 4  # parts of a key; candidates differ in at most one bit of one part: complete for keys that differ in 7 bits
BAND = 16  # bits
NEAR = 60  # of 256 bits: true for 99 % of 2 % crops, and for none of 3 million pairs of different photos (docs)
FAR = 16  # of the key's 64 bits: photos that differ in more are not compared further
FLAT = 2.0  # levels of 0 to 255; below this deviation there is only noise to compare
PAIRS = 1 << 20  # candidates compared at once: 100 MB
LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """The fingerprints of N photos."""

    keys: KeyArray  # N
    prints: KeyArray  # N x 4
    is_flat: BoolArray  # N; these photos have one colour, and no meaningful fingerprint

    @classmethod
    def none(cls, count: int) -> "Fingerprints":
        return cls(np.zeros(count, np.uint64), np.zeros((count, 4), np.uint64), np.ones(count, np.bool_))


def _cosines() -> npt.NDArray[np.float32]:  # frequencies x pixels
    places, frequencies = 2 * np.arange(SIDE) + 1, np.arange(HIGH + 1)
    return np.asarray(np.cos(np.pi / (2 * SIDE) * frequencies[:, None] * places), np.float32)


COSINES = _cosines()


def fingerprints(pixels: PixelArray) -> Fingerprints:  # N x 64 x 64 x 3
    grey = pixels.astype(np.float32) @ LUMA
    waves = COSINES @ grey @ COSINES.T  # N x 17 x 17
    keys = _bits(waves[:, :LOW, :LOW])
    prints = _bits(waves[:, 1 : HIGH + 1, 1 : HIGH + 1])
    return Fingerprints(keys[:, 0], prints, grey.std(axis=(1, 2)) < FLAT)


def _bits(block: npt.NDArray[np.float32]) -> KeyArray:  # N x B x B -> N x words
    flat = block.reshape(len(block), -1)
    above = flat > np.median(flat, axis=1, keepdims=True)
    return np.packbits(above, axis=1).view(np.uint64)


def near_pairs(found: Fingerprints, *, most: int = NEAR) -> IntArray:  # M x 2, first < second
    """Pairs of photos whose prints differ in at most `most` bits; of photos with equal prints, only neighbours.

    Complete for pairs whose keys differ in up to 7 bits, nearly so beyond. The work grows with the square of the number
    of photos over 65,536: half a second for 13,394, under a minute for a million (docs/using/data.md).
    """
    own = np.flatnonzero(~found.is_flat)
    if not len(own):
        return np.zeros((0, 2), np.int64)
    rows = np.column_stack([found.keys[own], found.prints[own]])
    # Each fingerprint once: a thousand copies would be half a million pairs.
    _, first, which = np.unique(_as_items(rows), return_index=True, return_inverse=True)
    by_print = np.argsort(which, kind="stable")
    ordered = which[by_print]
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    pairs = [np.column_stack([by_print[equal], by_print[equal + 1]])]
    keys, prints = found.keys[own][first], found.prints[own][first]
    pairs += [first[near] for near in _near(keys, prints, most)]
    joined = np.sort(own[np.concatenate(pairs)], axis=1)
    return np.unique(joined, axis=0) if len(joined) else np.zeros((0, 2), np.int64)


def _as_items(rows: KeyArray) -> npt.NDArray[np.void]:
    """Each row as one item, which numpy can sort."""
    return np.ascontiguousarray(rows).view([("", np.uint64)] * rows.shape[1]).ravel()


def _near(keys: KeyArray, prints: KeyArray, most: int) -> Iterator[IntArray]:
    for band in _bands(keys):
        order = np.argsort(band, kind="stable")
        placed, numbers = band[order], np.arange(len(band))
        own = keys[order]  # so that the keys of a range are neighbours in memory
        for flip in (0, *(1 << bit for bit in range(BAND))):
            # Each pair once: photos of the same value behind a photo, and photos of the larger value for the smaller.
            asking = np.flatnonzero(placed & flip == 0)
            begins = numbers + 1 if flip == 0 else np.searchsorted(placed, placed[asking] ^ flip)
            ends = np.searchsorted(placed, placed[asking] ^ flip, side="right")
            for left, right in _candidates(begins, ends):
                left = asking[left]
                alike = np.flatnonzero(np.bitwise_count(own[left] ^ own[right]) <= FAR)
                first, second = order[left[alike]], order[right[alike]]
                near = np.bitwise_count(prints[first] ^ prints[second]).sum(axis=1, dtype=np.int64) <= most
                yield np.column_stack([first[near], second[near]])


def _bands(keys: KeyArray) -> Iterator[IntArray]:
    """The keys' bands: every fourth bit, from each of four starts, to spread the lowest frequencies over all bands."""
    bits = np.unpackbits(keys[:, None].view(np.uint8), axis=1)
    for start in range(BANDS):
        yield np.packbits(bits[:, start::BANDS], axis=1).view(np.uint16)[:, 0].astype(np.int64)


def _candidates(begins: IntArray, ends: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Pair each place with every place in its range, in portions."""
    counts = ends - begins
    totals = np.cumsum(counts)
    at = 0
    while at < len(counts):
        done = totals[at - 1] if at else 0
        stop = max(at + 1, int(np.searchsorted(totals, done + PAIRS, side="right")))
        own = counts[at:stop]
        left = np.repeat(np.arange(at, stop), own)
        within = np.arange(len(left)) - np.repeat(np.cumsum(own) - own, own)
        yield left, np.repeat(begins[at:stop], own) + within
        at = stop


def groups(pairs: IntArray) -> list[list[int]]:
    """Groups joined by pairs, directly or through others; each is sorted, all are ordered by their first members."""
    leaders: dict[int, int] = {}

    def leader(number: int) -> int:
        while leaders.setdefault(number, number) != number:
            leaders[number] = leaders[leaders[number]]
            number = leaders[number]
        return number

    for first, second in pairs.tolist():
        one, other = leader(first), leader(second)
        leaders[max(one, other)] = min(one, other)
    members: dict[int, list[int]] = {}
    for number in sorted(leaders):
        members.setdefault(leader(number), []).append(number)
    return list(members.values())
