"""Data without files: the digits shipped with the package (see digits.md), and random images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from falconet.data.keyed import IntArray, Purpose, permutation, words
from falconet.data.storage import ArraySource, PixelArray, Splits

FILE = Path(__file__).with_name("digits.npz")
SPLIT_SEED = 1797  # published results on the digits depend on it and TRAIN_SHARE: never changes
TRAIN_SHARE = 0.8
# The training part's mean and deviation, pixels in 0..1.
MEAN, STD = 0.3058, 0.3763


def load_digits() -> Splits:
    """1,797 handwritten digits of 8 x 8 pixels: always the same four fifths to train on, the rest to validate."""
    with np.load(FILE, allow_pickle=False) as stored:
        grey, labels = stored["images"], stored["labels"].astype(np.int64)
    levels = ((grey.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)  # 0..16 to 0..255, rounded
    images = np.repeat(levels[..., None], 3, axis=3)  # N x 8 x 8 x 3
    order = permutation(len(labels), seed=SPLIT_SEED, epoch=0, purpose=Purpose.SPLIT)
    cut = int(len(order) * TRAIN_SHARE)
    train, validation = np.sort(order[:cut]), np.sort(order[cut:])
    names = tuple("0123456789")
    return Splits(
        train=ArraySource(images[train], labels[train], names),
        validation=ArraySource(images[validation], labels[validation], names),
        native_size=8,
        mean=(MEAN, MEAN, MEAN),
        std=(STD, STD, STD),
    )


BLOCK = 1 << 20  # bytes of noise beyond one image, so that a million images can start at different bytes
UNIFORM_STD = 0.2887  # the deviation of a uniform number in 0..1: 1 / sqrt(12)


@dataclass(frozen=True, eq=False)
class Noise:
    """Images cut from one block of random bytes, each at its keyed offset, which costs a copy, not a hash."""

    block: PixelArray  # one dimension
    count: int
    side: int
    seed: int
    first: int  # the global number of the first image: validation follows training

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, self.side, self.side, 3)

    def __getitem__(self, indices: IntArray, /) -> PixelArray:
        size = self.side * self.side * 3
        drawn = words(
            seed=self.seed, epoch=0, indices=np.asarray(indices) + self.first, purpose=Purpose.GENERATE, draws=1
        )
        begins = (drawn[:, 0] % np.uint64(len(self.block) - size + 1)).astype(np.int64)
        images = np.empty((len(begins), self.side, self.side, 3), dtype=np.uint8)
        for image, begin in zip(images.reshape(len(begins), size), begins, strict=True):
            image[:] = self.block[begin : begin + size]
        return images


def generate(*, images: int, validated: int, image_size: int, classes: int, seed: int) -> Splits:
    """Random images, `images` to train on and `validated` others; labels are their numbers modulo `classes`."""
    names = tuple(str(label) for label in range(classes))
    size = BLOCK + image_size * image_size * 3
    drawn = words(
        seed=seed, epoch=1, indices=np.arange(-(-size // 8), dtype=np.int64), purpose=Purpose.GENERATE, draws=1
    )
    block = drawn[:, 0].astype("<u8").view(np.uint8)[:size]

    def part(count: int, first: int) -> ArraySource:
        labels = (np.arange(count, dtype=np.int64) + first) % classes
        return ArraySource(Noise(block, count, image_size, seed, first), labels, names)

    return Splits(
        train=part(images, 0),
        validation=part(validated, images),
        native_size=image_size,
        mean=(0.5, 0.5, 0.5),
        std=(UNIFORM_STD, UNIFORM_STD, UNIFORM_STD),
    )
