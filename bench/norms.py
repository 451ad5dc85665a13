"""Measure group norm and what follows it, forward and backward, in channels-last memory.

Torch's separate layers against our fused one, for neighbouring and strided channels: the norm alone, with ReLU, and
with a sum and ReLU as at the end of a residual block.

python bench/norms.py                              on a GPU, fp16, batch 128, captured as in a run; 30 s
python bench/norms.py --device cpu --batch 8       fp32, the time of one thread on the processor
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from falconet.models.groupnorm import FusedGroupNorm, StridedGroupNorm
from timing import captured, median_milliseconds

SHAPES = [  # channels, side, groups
    *((64, 112, 32), (256, 56, 32), (512, 28, 32), (1024, 14, 32), (2048, 7, 32)),  # of ResNet-50
    *((96, 112, 4), (144, 56, 4), (40, 28, 4), (672, 14, 4), (1152, 7, 4)),  # of EfficientNet-B0
]
CALLS = 5  # on a CPU
COPIES = {"norm": 4, "norm, relu": 4, "norm, add, relu": 5}  # of the input, that move as much memory as the passes do


class Plain(nn.Module):
    """Torch's layers, one by one."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        z = self.norm(x)
        out: Tensor = self.act(z if shortcut is None else z + shortcut)
        # As in a network, where the next layer expects channels-last memory.
        return out.contiguous(memory_format=torch.channels_last)


def measure(layer: nn.Module, shape: tuple[int, ...], device: torch.device, *, adds: bool) -> float:
    """The milliseconds of a layer."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    layer = layer.to(device)
    given = [drawn(shape, device, dtype).requires_grad_() for _ in range(1 + adds)]
    dy = drawn(shape, device, dtype)

    def both() -> None:
        torch.autograd.grad(layer(*given), [*given, *layer.parameters()], dy)

    return median_milliseconds(captured(both)) if device.type == "cuda" else _processor_time(both)


def drawn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)


def _processor_time(both: Callable[[], object]) -> float:
    """The milliseconds that one thread computes, whatever else the machine does."""
    times = []
    for _ in range(CALLS + 1):
        begin = time.process_time()
        both()
        times.append(1000 * (time.process_time() - begin))
    return statistics.median(times[1:])


def copy_time(shape: tuple[int, ...], device: torch.device) -> float:
    """The milliseconds of a copy of the input."""
    source = drawn(shape, device, torch.float16 if device.type == "cuda" else torch.float32)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)  # noqa: E731
    return median_milliseconds(copy) if device.type == "cuda" else _processor_time(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    name, dtype = (torch.cuda.get_device_name(), "fp16") if args.device == "cuda" else ("CPU, one thread", "fp32")
    print(f"{name}, torch {torch.__version__}, {dtype}, batch {args.batch}, forward and backward", flush=True)
    for channels, side, groups in SHAPES:
        shape = (args.batch, channels, side, side)
        copy = copy_time(shape, device)
        for what, copies in COPIES.items():
            act = nn.ReLU() if "relu" in what else nn.Identity()
            adds = "add" in what
            theirs = nn.GroupNorm(groups, channels)
            theirs = theirs.half() if args.device == "cuda" else theirs
            base = measure(Plain(theirs, act), shape, device, adds=adds)
            words = [f"torch {base:7.3f} ms"]
            for kind, norm in (("ours", nn.GroupNorm), ("strided", StridedGroupNorm)):
                ours = measure(FusedGroupNorm(norm(groups, channels), act=act), shape, device, adds=adds)
                words.append(f"{kind} {ours:7.3f} ms, x {ours / base:.2f}")
            words.append(f"memory {copies * copy:7.3f} ms")
            print(f"{shape!s:22s} {groups:2d} groups  {what:15s} {'  '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
