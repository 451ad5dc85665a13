"""Runs in a process of its own, started by test_augment: Triton's interpreter must be chosen before its import."""

import json

import numpy as np
import torch

from falconet.config.options import Augmentation
from falconet.data import augment, augment_kernels
from falconet.data.augment import NUMBERS, OPERATIONS, Chain, PixelChanges

STRENGTHS = (0.0, 0.31, -0.87, 0.99)
STRONG = {"TranslateX": 13.7, "TranslateY": -9.2, "Rotate": 127.0, "Posterize": 3.0, "Erase": 0.0}


def images(side):
    """Noise, a narrow range of levels, one colour each, and few levels; 4 x 3 x S x S."""
    drawn = np.random.default_rng(side).integers(0, 256, (4, side, side, 3), dtype=np.uint8)
    drawn[1] = 90 + drawn[1] // 8
    drawn[2] = (7, 0, 255)
    drawn[3] = drawn[3] // 100 * 100
    return torch.from_numpy(drawn).permute(0, 3, 1, 2)


def of_one_operation(name, side):
    """A chain with one operation on all images, each with its own strength."""
    operations = np.full(4, NUMBERS[name], np.int32)
    strengths = np.array(STRENGTHS) if name not in STRONG else np.linspace(0, STRONG[name], 4)
    if name == "Posterize":
        strengths = np.array([8, 5, 3, 2])
    if name == "Erase":
        strengths = np.array(
            [[0, 3, 1, 5, 9, 8, 7], [0, 0, 0, 0, 9, 8, 7], [2, side, 0, side, 1, 2, 3], [1, 2, 1, 2, 0, 0, 255]]
        )
    values = augment._values(operations, strengths, side)
    return Chain(torch.from_numpy(operations)[None], torch.from_numpy(values)[None])


def wrong(chain, side):
    expected = augment.applied(images(side), chain)
    return {"pixels": (augment_kernels.apply(images(side), chain) != expected).sum().item()}


if __name__ == "__main__":
    found = {}
    for side in (9, 40):  # less than a program's pixels, and more
        for name in OPERATIONS:
            found[f"{name}, {side} pixels"] = wrong(of_one_operation(name, side), side)
        for policy in ("trivialaugment", "randaugment", "autoaugment"):
            asked = Augmentation(auto_augment=policy, color_jitter=0.4, random_erasing=0.5, vertical_flip=0.5)
            chain = PixelChanges(augmentation=asked, fill=(0.5, 0.25, 1.0)).draw(np.arange(4), epoch=1, side=side)
            found[f"{policy}, {side} pixels"] = wrong(chain, side)
    print(json.dumps(found))
