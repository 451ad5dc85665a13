"""Measure SpeedNet's first layer and its pools: our kernels in several tilings, for the batch of cifar10-speedrun.

Each is compared with float64 first. Times are those of captured calls over buffers that the L2 cache does not hold, in
microseconds, with the time that memory alone would take.

PYTHONPATH=. python bench/pooled.py                                      on a GPU; about 30 s
TRITON_INTERPRET=1 PYTHONPATH=. python bench/pooled.py --device cpu      tries the tilings on few images; no times
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falconet.models.fused import batchnorm_kernels, pool_kernels, stem_kernels
from falconet.models.fused.batchnorm_kernels import Reached
from falconet.models.fused.channel_tables import WIDTHS
from falconet.models.fused.pool_kernels import Spreading
from falconet.models.fused.stem_kernels import Tiling
from falconet.numerics.kernels.compilation import Compilation
from timing import microseconds

SPEED = 4.2e12  # bytes per second that an H200's memory gives
BUFFERS = 300e6  # bytes that calls take turns in, at least
IMAGES, SIDE = 2000, 32
POOLS = ((64, 31), (256, 15), (256, 7))  # channels and side before each
ACT = "gelu"
SPREADINGS = (
    Spreading(elements=1024, widths=(*WIDTHS, 256), warps=4, stages=3, share=8),
    Spreading(elements=1024, widths=WIDTHS, warps=4, stages=3, share=8),
    Spreading(elements=1024, widths=(*WIDTHS, 256), warps=4, stages=3, share=4),
    Spreading(elements=2048, widths=(*WIDTHS, 256), warps=8, stages=3, share=8),
)
SUMS = (Tiling(128, 528, 4, 3), Tiling(64, 1056, 4, 3), Tiling(128, 396, 8, 3), Tiling(128, 528, 4, 2))
FORWARDS = (Tiling(128, 1848, 4, 3), Tiling(64, 2640, 4, 3), Tiling(64, 5280, 4, 3), Tiling(128, 3696, 4, 2))
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Work:
    """The work of a kernel in an update, and its possible tilings."""

    name: str
    bytes: int  # that are read and written
    given: Callable[[int], Tensors]  # buffers for so many images
    call: Callable[..., Tensor]
    exact: Callable[..., Tensor]  # of the same buffers, in float64
    error: float  # relative, at most
    constant: tuple[Any, str] | None  # that holds the tiling: its module and its name
    tilings: Sequence[Any]

    def divided(self, tiling: object) -> Callable[..., Tensor]:
        """A call that first sets the tiling."""

        def call(*buffers: Tensor) -> Tensor:
            if self.constant is not None:
                setattr(*self.constant, tiling)
            return self.call(*buffers)

        return call


def normal(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)


def pooled(y: Tensor) -> Tensor:
    return functional.max_pool2d(y, 2)


def halving(channels: int, side: int, device: torch.device, dtype: torch.dtype) -> Work:
    """The forward pass of the pool before a norm."""
    values = IMAGES * channels
    return Work(
        name=f"_halve {channels} x {side} x {side}",
        bytes=values * (2 * side**2 + 3 * (side // 2) ** 2),
        given=lambda images: (normal(images, channels, side, side, device=device, dtype=dtype),),
        call=lambda y: pool_kernels.halve(y)[0],
        exact=lambda y: pooled(y.double()),
        error=1e-9,
        constant=None,
        tilings=[None],
    )


def spreading(channels: int, side: int, device: torch.device, dtype: torch.dtype) -> Work:
    """The gradient of the pool before a norm, once the norm's sums are known."""
    weight, bias = torch.rand(channels, device=device) + 0.5, torch.randn(channels, device=device)

    def given(images: int) -> Tensors:
        y = normal(images, channels, side, side, device=device, dtype=dtype)
        values, winners, partial = pool_kernels.halve(y)
        found = batchnorm_kernels.numbers(values, partial, weight, bias, None, eps=1e-5)
        dz = normal(*values.shape, device=device, dtype=dtype)
        _, slopes, _ = batchnorm_kernels.sum_gradients(dz, values, found, act=ACT)
        return (dz, values, winners, found, slopes.found, *([y] if images < IMAGES else []))  # y: for the comparison

    def call(dz: Tensor, values: Tensor, winners: Tensor, found: Tensor, slopes: Tensor, *_: Tensor) -> Tensor:
        shape = torch.Size((len(dz), channels, side, side))
        return pool_kernels.spread_halved(Reached(dz, act=ACT), values, found, slopes, winners, shape=shape)

    def exact(dz: Tensor, *others: Tensor) -> Tensor:
        leaf = others[-1].double().requires_grad_()
        normed = functional.batch_norm(pooled(leaf), None, None, weight.double(), bias.double(), True, 0.1, 1e-5)
        return torch.autograd.grad(functional.gelu(normed), leaf, dz.double())[0]

    return Work(
        name=f"_spread_halved {channels} x {side} x {side}",
        bytes=IMAGES * channels * (2 * side**2 + 5 * (side // 2) ** 2),
        given=given,
        call=call,
        exact=exact,
        error=4e-3,
        constant=(pool_kernels, "SPREADING"),
        tilings=SPREADINGS,
    )


def stem(device: torch.device, dtype: torch.dtype) -> list[Work]:
    """The first layer, with 24 channels in memory for 32, and the gradient of its bias."""
    conv, values = nn.Conv2d(3, 24, 2).to(device), (SIDE - 1) ** 2 * 32
    exactly = nn.Conv2d(3, 24, 2, dtype=torch.float64).to(device)
    exactly.load_state_dict({"weight": conv.weight.to(dtype), "bias": conv.bias})  # as tensor cores take it

    def images(count: int) -> Tensor:
        return normal(count, stem_kernels.CHANNELS, SIDE, SIDE, device=device, dtype=dtype)

    def activated(x: Tensor) -> Tensor:
        return functional.gelu(exactly(x[:, :3].double()))

    def bias_gradient(x: Tensor, dz: Tensor) -> Tensor:
        assert exactly.bias is not None
        return torch.autograd.grad(activated(x), exactly.bias, dz[:, :24].double())[0]

    def padded(x: Tensor) -> Tensor:
        return functional.pad(activated(x), (0, 0, 0, 0, 0, 8))

    moved = IMAGES * 2 * (values + stem_kernels.CHANNELS * SIDE**2)
    return [
        Work(
            name="_convolve, the first layer",
            bytes=moved,
            given=lambda count: (images(count),),
            call=lambda x: stem_kernels.forward(x, conv, act=ACT, outputs=32),
            exact=lambda x: padded(x).detach(),
            error=4e-3,
            constant=(stem_kernels, "FORWARD"),
            tilings=FORWARDS,
        ),
        Work(
            name="_sum_bias, its gradient",
            bytes=moved,
            given=lambda count: (images(count), normal(count, 32, SIDE - 1, SIDE - 1, device=device, dtype=dtype)),
            call=lambda x, dz: stem_kernels.bias_gradient(dz, x, conv, act=ACT),
            exact=bias_gradient,
            error=1e-5,
            constant=(stem_kernels, "BACKWARD"),
            tilings=SUMS,
        ),
    ]


def fault(call: Callable[..., Tensor], buffers: Tensors, expected: Tensor, allowed: float) -> str:
    """The fault of the result, if any."""
    found, again = call(*buffers), call(*buffers)
    error = ((found.double() - expected).norm() / expected.norm()).item()
    if not error <= allowed:
        return f"WRONG by {error:.1e}"
    return "" if torch.equal(found, again) else "WRONG: does not repeat"


def measure(work: Work, *, images: int, small: bool) -> dict[object, float]:
    """Microseconds by tiling, without failed ones."""
    few, times = work.given(images), dict[object, float]()
    expected, buffers = work.exact(*few), list[Tensors]()
    if not small:
        buffers = [work.given(IMAGES) for _ in range(max(2, int(BUFFERS // work.bytes)))]
    for tiling in work.tilings:
        try:
            words = fault(work.divided(tiling), few, expected, work.error)
            if not words and not small:
                times[tiling] = microseconds(work.divided(tiling), buffers)
                words = f"{times[tiling]:7.1f}"
            line(f"{work.name}: {tuple(tiling or ())}", words or "right")
        except Exception as error:  # noqa: BLE001  # one tiling that does not compile or run is a result
            line(f"{work.name}: {tuple(tiling or ())}", f"FAILED: {str(error).strip().partition(chr(10))[0][:150]}")
    return times


def line(name: str, words: str) -> None:
    print(f"{time.perf_counter() - START:5.1f} s  {name:80s} {words}", flush=True)


def compile_ahead(works: Sequence[Work]) -> None:
    def rehearse() -> None:
        for work in works:
            for tiling in work.tilings:
                work.divided(tiling)(*work.given(2))

    Compilation(workers=os.cpu_count() or 1, report=lambda _: None, note=print).ahead(rehearse)
    line("compiled", "")


def summary(work: Work, times: dict[object, float]) -> str:
    memory, best = 1e6 * work.bytes / SPEED, min(times.values(), default=torch.nan)
    columns = "".join(f"{times.get(tiling, torch.nan):8.1f}" for tiling in work.tilings)
    return f"{work.name:32s}{memory:8.1f}{memory / best:7.0%}  {columns}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    device, small = torch.device(args.device), args.device == "cpu"
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter knows no products of bf16
    torch.manual_seed(0)
    print(f"{'CPU' if small else torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    pools = [kind(*pool, device, dtype) for kind in (spreading, halving) for pool in POOLS]
    works = [*pools, *stem(device, dtype)]
    if not small:
        compile_ahead(works)
    rows = [summary(work, measure(work, images=3 if small else 64, small=small)) for work in works]
    print("", f"{'microseconds':32s}  memory   best  by tiling, in the order of the lists above", *rows, sep="\n")


START = time.perf_counter()

if __name__ == "__main__":
    main()
