"""1,797 handwritten digits, 8 x 8 pixels, shipped with the package (see digits.md)."""

from pathlib import Path

import numpy as np

from falconet.data.keyed import Purpose, permutation
from falconet.data.source import ArraySource, Splits

FILE = Path(__file__).with_name("digits.npz")
SPLIT_SEED = 1797  # with TRAIN_SHARE, part of every published digits result: never changes
TRAIN_SHARE = 0.8
# Of the training part's pixels in 0..1.
MEAN, STD = 0.3058, 0.3763


def load() -> Splits:
    """Four fifths to train on, the rest to validate, the same ones always."""
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
