"""Measure proxy norm on a GPU, forward and backward, channels-last, captured as in a run: our kernels and plain torch.

python bench/proxynorm.py
"""

from typing import cast

import torch
from torch import Tensor, nn

from falconet.models.proxynorm import ProxyNorm, Recomputed
from timing import captured, median_milliseconds

SHAPES = [(128, 32, 112, 112), (128, 96, 112, 112), (128, 144, 56, 56), (128, 480, 14, 14), (128, 1152, 7, 7)]


class Unfused(ProxyNorm):
    """Proxy norm without our kernels: torch's functions, saving only the input."""

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.stack((self.weight, self.bias, self.proxy_scale, self.proxy_shift))
        y: Tensor = Recomputed.apply(x, factors, self.samples, self.activation, self.eps)
        return y


def measure(layer: nn.Module, shape: tuple[int, ...]) -> float:
    x = torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def both() -> None:  # `backward` would add to gradients that are there: three passes more
        torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)

    return median_milliseconds(captured(both))


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fp16, silu, forward and backward", flush=True)
    for shape in SHAPES:
        layers = {
            "silu alone": nn.SiLU(),
            "kernels": ProxyNorm(shape[1], activation="silu").cuda(),
            "plain": Unfused(shape[1], activation="silu").cuda(),
            "compiled": cast(nn.Module, torch.compile(ProxyNorm(shape[1], activation="silu").cuda())),
            "kept": ProxyNorm(shape[1], activation="silu", recompute=False).cuda(),
        }
        times = "  ".join(f"{name} {measure(layer, shape):.3f} ms" for name, layer in layers.items())
        least = 1000 * 5 * 2 * torch.Size(shape).numel() / 4.3e12  # 5 passes of 2 bytes at 4.3 TB/s
        print(f"{shape!s:22s} {times}  ({least:.3f} ms of memory)", flush=True)


if __name__ == "__main__":
    main()
