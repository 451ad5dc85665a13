"""Measure group norm, forward and backward, in channels-last memory: torch's, ours, and ours of strided channels.

python bench/norms.py                              on a GPU, fp16, batch 128
python bench/norms.py --device cpu --batch 8       fp32, the time of one thread on the processor
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from falconet.models.groupnorm import FastGroupNorm, StridedGroupNorm
from timing import median_milliseconds

SHAPES = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]  # channels, side
GROUPS = 32
CALLS = 5  # on a CPU


def measure(layer: nn.Module, shape: tuple[int, ...], device: torch.device) -> float:
    """Milliseconds."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    layer = layer.to(device)
    x = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def both() -> None:
        # As in a network, where the next layer expects channels-last memory.
        layer(x).contiguous(memory_format=torch.channels_last).backward(dy)

    return median_milliseconds(both) if device.type == "cuda" else _processor_time(both)


def _processor_time(both: Callable[[], None]) -> float:
    """Milliseconds that one thread computes, whatever else the machine does."""
    times = []
    for _ in range(CALLS + 1):
        begin = time.process_time()
        both()
        times.append(1000 * (time.process_time() - begin))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    name, dtype = (torch.cuda.get_device_name(), "fp16") if args.device == "cuda" else ("CPU, one thread", "fp32")
    print(f"{name}, torch {torch.__version__}, {dtype}, batch {args.batch}, {GROUPS} groups, forward and backward")
    for channels, side in SHAPES:
        shape = (args.batch, channels, side, side)
        theirs = nn.GroupNorm(GROUPS, channels)
        base = measure(theirs.half() if args.device == "cuda" else theirs, shape, device)
        words = [f"torch {base:7.3f} ms"]
        for kind, layer in (("ours", FastGroupNorm), ("strided", StridedGroupNorm)):
            ours = measure(layer(GROUPS, channels), shape, device)
            words.append(f"{kind} {ours:7.3f} ms, x {ours / base:.2f}")
        print(f"{shape!s:22s} {'  '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
