"""Runs in a process of its own, started by test_resident: Triton's interpreter must be chosen before its import."""

import json

import torch

from falconet.data import pixel_kernels
from falconet.data.resident import picked

if __name__ == "__main__":
    noise = torch.Generator().manual_seed(0)
    found = {}
    for side in (8, 33):
        images = torch.randint(0, 256, (5, side, side, 3), dtype=torch.uint8, generator=noise)
        moves = torch.tensor([[4, 2, -3, 1], [0, 0, 0, 0], [4, -5, 4, 1], [1, side - 1, side - 1, 0]])
        for reflects in (False, True):
            out = torch.full((4, side, side, 3), 7, dtype=torch.uint8)
            pixel_kernels.pick(images, moves, reflects=reflects, out=out)
            wrong = (out != picked(images, moves, reflects=reflects)).sum().item()
            found[f"{side} pixels, {'reflected' if reflects else 'zeros'}"] = {"pixels": wrong}
    print(json.dumps(found))
