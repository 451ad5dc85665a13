"""Run by test_groupnorm in a separate process, because Triton must be imported with its interpreter from the start."""

import json

import torch
from torch.nn import functional

from falconet.models import groupnorm_kernels

CASES = {  # N, C, H, W, groups, mean of the input
    "few channels": (2, 6, 5, 7, 3, 0.0),
    "several tiles": (2, 8, 70, 70, 2, 0.0),
    "channels beyond a tile": (1, 130, 3, 3, 13, 0.0),
    "single pixels": (2, 4, 1, 1, 1, 0.0),
    "many groups": (1, 256, 2, 3, 32, 0.0),
    "far from zero": (3, 40, 9, 9, 4, 1000.0),
}


def errors(n: int, c: int, h: int, w: int, groups: int, mean: float, *, strided: bool) -> list[float]:
    """Of output and gradients of input, weight and bias, against float64, each over the largest value."""
    noise = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(n, c, h, w, generator=noise) + shift for shift in (mean, 0.0))
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    weight, bias = (torch.randn(c, generator=noise) for _ in range(2))
    y, middle, rstd = groupnorm_kernels.forward(x, groups, weight, bias, 1e-5, strided=strided)
    found = [y, *groupnorm_kernels.backward(x, dy, groups, weight, middle, rstd, strided=strided)]
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    order = sorted(range(c), key=lambda channel: channel % groups if strided else channel)
    exact = functional.group_norm(leaves[0][:, order], groups, leaves[1][order], leaves[2][order], 1e-5)
    exact = exact[:, sorted(range(c), key=order.__getitem__)]
    exact.backward(dy.double())
    expected = [exact.detach(), *(t.grad for t in leaves)]
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"neighbours": False, "strided": True}
    print(json.dumps({k: {n: errors(*case, strided=s) for n, case in CASES.items()} for k, s in kinds.items()}))
