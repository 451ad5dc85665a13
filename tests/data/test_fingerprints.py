"""Fingerprints of near copies are near and those of different photos far; the search finds all near pairs."""

import math

import numpy as np
import pytest
from PIL import Image

import layouts
import odd_photos
from falconet.data.fingerprints import FLAT, NEAR, SIDE, Fingerprints, fingerprints, groups, near_pairs

SAMPLES = ("astronaut", "brick", "camera", "chelsea", "coffee", "galaxies", "rocket")


def printed(*images):
    reduced = [image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in images]
    return fingerprints(np.stack([np.asarray(image) for image in reduced]))


def bits(found, first, second):
    return int(np.bitwise_count(found.prints[first] ^ found.prints[second]).sum())


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "brick"])
def test_near_copies_of_a_photo_are_near(name):
    image = odd_photos.sample(name)
    copies = odd_photos.near_copies(image)
    found = printed(image, *copies.values())
    distances = {copy: bits(found, 0, number) for number, copy in enumerate(copies, start=1)}
    assert max(distances.values()) <= NEAR, distances
    assert groups(near_pairs(found)) == [list(range(len(copies) + 1))]


def test_a_regular_texture_is_recognised_unless_it_is_cropped():
    """A wall of bricks differs in 80 bits from itself moved by two percent."""
    copies = odd_photos.near_copies(odd_photos.sample("brick"))
    found = printed(odd_photos.sample("brick"), *copies.values())
    near = [name for number, name in enumerate(copies, start=1) if bits(found, 0, number) <= NEAR]
    assert near == ["half", "recompressed", "brighter", "grey"]


def test_different_photos_are_far_apart():
    found = printed(*map(odd_photos.sample, SAMPLES), *(layouts.photo(seed) for seed in range(60)))
    distances = [bits(found, a, b) for a in range(67) for b in range(a)]
    assert min(distances) > NEAR + 10
    assert len(near_pairs(found)) == 0


def test_bits_are_those_of_the_cosine_transform_by_its_definition():
    pixels = np.asarray(layouts.photo(3, width=SIDE, height=SIDE))
    grey = pixels.astype(np.float64) @ [0.299, 0.587, 0.114]

    def frequency(row, column):
        return sum(
            grey[y, x]
            * math.cos(math.pi * row * (2 * y + 1) / (2 * SIDE))
            * math.cos(math.pi * column * (2 * x + 1) / (2 * SIDE))
            for y in range(SIDE)
            for x in range(SIDE)
        )

    low = np.array([[frequency(row, column) for column in range(8)] for row in range(8)])
    expected = (low > np.median(low)).ravel()
    key = fingerprints(pixels[None]).keys.view(np.uint8)
    assert np.unpackbits(key).astype(bool).tolist() == expected.tolist()


def test_photos_of_one_colour_have_no_fingerprint():
    noise = np.random.default_rng(0).integers(0, 2, (SIDE, SIDE, 3), dtype=np.uint8)
    assert noise.std() < FLAT
    found = fingerprints(np.stack([noise, noise + 200, np.asarray(layouts.photo(1, width=SIDE, height=SIDE))]))
    assert found.is_flat.tolist() == [True, True, False]
    assert len(near_pairs(found)) == 0


def near_ones(rng, count):
    """Fingerprints, many of which are near others, also in their keys."""
    keys = rng.integers(0, 2**63, count, dtype=np.uint64)
    prints = rng.integers(0, 2**63, (count, 4), dtype=np.uint64)
    for number in range(count // 2, count):
        other = int(rng.integers(0, count // 2))
        keys[number], prints[number] = keys[other], prints[other]
        for bit in rng.choice(64, int(rng.integers(0, 8)), replace=False).tolist():
            keys[number] ^= np.uint64(1 << bit)
        for bit in rng.choice(256, int(rng.integers(0, 100)), replace=False).tolist():
            prints[number, bit // 64] ^= np.uint64(1 << bit % 64)
    return Fingerprints(keys, prints, np.zeros(count, np.bool_))


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_pairs_that_comparing_all_finds(seed):
    found = near_ones(np.random.default_rng(seed), 300)
    keys = np.bitwise_count(found.keys[:, None] ^ found.keys)
    apart = np.bitwise_count(found.prints[:, None] ^ found.prints).sum(axis=2)
    first, second = np.nonzero((apart <= NEAR) & (keys <= 7))
    expected = {(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True) if a < b}
    assert len(expected) > 50
    pairs = {tuple(pair) for pair in near_pairs(found).tolist()}
    assert pairs >= expected
    assert all(apart[pair] <= NEAR for pair in pairs)


def test_a_thousand_equal_photos_are_a_group_without_half_a_million_pairs():
    one = near_ones(np.random.default_rng(1), 10)
    found = Fingerprints(
        np.concatenate([np.full(1000, one.keys[0]), one.keys[1:3]]),
        np.concatenate([np.tile(one.prints[0], (1000, 1)), one.prints[1:3]]),
        np.zeros(1002, np.bool_),
    )
    pairs = near_pairs(found)
    assert len(pairs) == 999
    assert groups(pairs) == [list(range(1000))]


def test_groups_join_through_others():
    assert groups(np.array([[5, 6], [1, 2], [2, 9], [9, 4]])) == [[1, 2, 4, 9], [5, 6]]
