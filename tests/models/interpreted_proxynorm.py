"""Run by test_proxynorm in a separate process, because Triton must be imported with its interpreter from the start."""

import json

import torch

from falconet.models.fused import proxynorm_kernels
from falconet.models.proxynorm import plain_proxy_norm, quantiles

CASES = {  # N, C, H, W, activation
    "few channels": (2, 6, 5, 7, "silu"),
    "several tiles": (2, 8, 70, 70, "silu"),
    "several programs of several tiles": (1, 3, 130, 130, "relu"),
    "channels beyond a tile": (1, 130, 3, 3, "silu"),
    "single pixels": (2, 4, 1, 1, "relu"),
    "one channel": (3, 1, 4, 4, "silu"),
}


def errors(n: int, c: int, h: int, w: int, activation: str) -> list[float]:
    """Of output and gradients of input and factors, against autograd in float64, each over the largest value."""
    noise = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(n, c, h, w, generator=noise) for _ in range(2))
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    factors = torch.randn(4, c, generator=noise)
    samples = torch.tensor(quantiles())
    y, moments = proxynorm_kernels.forward(x, factors, samples, activation, 0.03)
    found = [y, *proxynorm_kernels.backward(x, dy, factors, samples, moments, activation)]
    leaves = [t.double().requires_grad_() for t in (x, factors)]
    exact = plain_proxy_norm(*leaves, samples.double(), activation=activation, eps=0.03)
    exact.backward(dy.double())
    expected = [exact.detach(), *(t.grad for t in leaves)]
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: errors(*case) for name, case in CASES.items()}))
