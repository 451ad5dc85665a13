"""Measure group norm on a GPU, forward and backward, in channels-last memory: ours and torch's.

python bench/norms.py
"""

import torch
from torch import nn

from falconet.models.groupnorm import FastGroupNorm
from timing import median_milliseconds

SHAPES = [(128, 64, 112, 112), (128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7)]
GROUPS = 32


def measure(layer: nn.Module, shape: tuple[int, ...]) -> float:
    x = torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def both() -> None:
        # As in a network, where the next layer expects channels-last memory.
        layer(x).contiguous(memory_format=torch.channels_last).backward(dy)

    return median_milliseconds(both)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fp16, {GROUPS} groups, forward and backward")
    for shape in SHAPES:
        theirs = measure(nn.GroupNorm(GROUPS, shape[1]).cuda().half(), shape)
        ours = measure(FastGroupNorm(GROUPS, shape[1]).cuda(), shape)
        least = 1000 * 8 * 2 * torch.Size(shape).numel() / 4.3e12  # 8 passes of 2 bytes at 4.3 TB/s
        times = f"torch {theirs:7.3f} ms  ours {ours:7.3f} ms  x {ours / theirs:.2f}"
        print(f"{shape!s:22s} {times}  ({least:.3f} ms of memory)")


if __name__ == "__main__":
    main()
