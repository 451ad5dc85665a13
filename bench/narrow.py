"""Measure the weight gradient of dense 3 x 3 convolutions of few channels, by cuDNN and by our kernel's tilings.

Every tiling is compared with float64 first. Times are those of captured calls over buffers that the L2 cache does not
hold, in microseconds; "sums" is our kernel without the merging of its programs' sums.

PYTHONPATH=. python bench/narrow.py [SHAPE ...]                          on a GPU; about 50 s
TRITON_INTERPRET=1 PYTHONPATH=. python bench/narrow.py --device cpu      tries the tilings on few pixels; no times
"""

import argparse
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from falconet.models.fused import grouped_kernels, narrow_kernels
from falconet.models.fused.narrow import Tiling
from falconet.numerics.kernels.compilation import Compilation
from timing import microseconds

SPEED = 4.2e12  # bytes per second that an H200's memory gives
BUFFERS = 300e6  # bytes that calls take turns in, at least
AGREE = 1e-4  # relative error, at most: that of sums in fp32, far below bf16's
THEIRS = {"cuDNN": (True, False), "cuDNN, any": (False, False), "cuDNN, tried": (False, True)}  # deterministic, tried


class Shape(NamedTuple):
    """The sizes of a layer."""

    images: int
    inputs: int
    outputs: int
    side: int
    stride: int  # channels of x in memory
    tilings: Sequence[Tiling]

    @property
    def bytes(self) -> int:
        return self.images * self.side**2 * (self.stride + self.outputs) * 2


def flat(span: int, pixels: int, warps: int, stages: int, piece: int, programs: int) -> Tiling:
    return Tiling(False, span, pixels, warps, stages, piece, programs)


def crossed(span: int, pixels: int, warps: int, stages: int, piece: int, programs: int) -> Tiling:
    return Tiling(True, span, pixels, warps, stages, piece, programs)


OF_64 = (
    *(flat(192, 64, 8, 1, 8, 88), flat(192, 64, 8, 1, 8, 44), flat(192, 64, 8, 3, 8, 44), flat(192, 64, 8, 2, 4, 44)),
    *(flat(192, 32, 4, 1, 8, 88), flat(64, 64, 4, 1, 8, 58), flat(64, 64, 4, 3, 8, 58), flat(64, 128, 8, 3, 8, 29)),
    crossed(64, 64, 8, 1, 8, 44),
)
SHAPES = {
    "speednet": Shape(
        *(2000, 24, 64, 31, 32),
        (
            *(flat(216, 64, 8, 1, 8, 264), flat(216, 64, 8, 1, 8, 528), flat(216, 64, 8, 1, 8, 132)),
            *(flat(216, 32, 8, 1, 8, 264), flat(216, 32, 4, 1, 8, 264), flat(216, 128, 8, 1, 8, 132)),
            *(flat(216, 32, 8, 3, 4, 264), flat(216, 32, 8, 4, 4, 264), flat(216, 32, 4, 3, 4, 264)),
            *(flat(216, 64, 8, 2, 4, 264), flat(216, 64, 8, 3, 4, 132), flat(216, 64, 16, 3, 4, 132)),
            *(flat(216, 64, 16, 1, 8, 132), flat(216, 32, 16, 1, 8, 264), flat(216, 32, 8, 3, 8, 264)),
        ),
    ),
    "16": Shape(
        *(1024, 16, 16, 32, 16),
        (
            *(crossed(48, 64, 4, 1, 8, 528), crossed(48, 64, 4, 1, 8, 792), crossed(48, 128, 8, 1, 8, 396)),
            *(crossed(48, 64, 4, 3, 8, 528), crossed(48, 64, 4, 3, 4, 528), crossed(48, 128, 4, 1, 8, 528)),
            *(flat(144, 64, 4, 1, 8, 528), flat(144, 128, 8, 1, 8, 264)),
        ),
    ),
    "32": Shape(
        *(1024, 32, 32, 16, 32),
        (
            *(crossed(96, 64, 8, 1, 8, 264), crossed(96, 64, 8, 1, 8, 132), crossed(96, 32, 4, 1, 8, 264)),
            *(crossed(96, 64, 8, 3, 8, 264), crossed(96, 64, 8, 3, 4, 264), crossed(96, 128, 8, 1, 8, 132)),
            *(flat(96, 64, 8, 1, 8, 132), flat(96, 64, 8, 3, 8, 88), flat(144, 64, 8, 1, 8, 132)),
        ),
    ),
    "64": Shape(1024, 64, 64, 8, 64, OF_64),
    "speednet, second": Shape(2000, 64, 64, 15, 64, OF_64),
    "resnet50": Shape(256, 64, 64, 56, 64, OF_64),
    "speednet11": Shape(
        *(2000, 24, 128, 31, 32),
        (
            *(flat(216, 64, 8, 1, 8, 132), flat(216, 32, 8, 3, 4, 132), flat(216, 64, 8, 2, 4, 132)),
            *(flat(112, 64, 8, 1, 8, 132), flat(112, 64, 8, 2, 4, 132)),
        ),
    ),
}


def given(shape: Shape, *, images: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """An input, and a gradient of the result."""
    sizes = (images, shape.stride, shape.side, shape.side), (images, shape.outputs, shape.side, shape.side)
    x, dy = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    x[:, shape.inputs :] = 0
    return x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)


def weight_of(shape: Shape, device: torch.device, *, channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.zeros(shape.outputs, channels, 3, 3, device=device, dtype=dtype)
    return weight.contiguous(memory_format=torch.channels_last)


def exact(x: Tensor, dy: Tensor, inputs: int) -> Tensor:
    """The weight gradient in float64, tap by tap."""
    height, width = x.shape[2:]
    framed, dy = functional.pad(x[:, :inputs].double(), (1, 1, 1, 1)), dy.double()
    taps = [(row, column) for row in range(3) for column in range(3)]
    shifted = [framed[:, :, row : row + height, column : column + width] for row, column in taps]
    products = [torch.einsum("nohw,nihw->oi", dy, each) for each in shifted]
    return torch.stack(products, -1).view(dy.shape[1], inputs, 3, 3)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def cudnn(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    return found


def grouped(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The weight gradient by the kernel for grouped convolutions, with 16 channels as one group."""
    images, channels, height, width = x.shape
    sizes = grouped_kernels.Geometry(images, channels, height, width, channels, 1)
    return grouped_kernels.weight_gradient(x, dy, weight, sizes)


def line(name: str, words: str) -> None:
    print(f"{time.perf_counter() - START:5.1f} s  {name:40s} {words}", flush=True)


def named(tiling: Tiling) -> str:
    kind = "crossed" if tiling.crossed else "flat"
    return f"{kind}({', '.join(str(number) for number in tiling[1:])})"


def their_times(shape: Shape, weight: Tensor, buffers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """cuDNN's microseconds by its way of choosing; with 16 channels, also those of the grouped kernel."""
    times = {}
    for name, (deterministic, benchmark) in THEIRS.items():
        with torch.backends.cudnn.flags(enabled=True, deterministic=deterministic, benchmark=benchmark):
            times[name] = microseconds(lambda x, dy: cudnn(x, dy, weight), buffers)
        line(name, f"{times[name]:7.1f}")
    if shape.inputs == shape.outputs == 16:
        times["grouped"] = microseconds(lambda x, dy: grouped(x, dy, weight), buffers)
        line("grouped", f"{times['grouped']:7.1f}")
    return times


def fault(tiling: Tiling, weight: Tensor, few: tuple[Tensor, Tensor], expected: Tensor) -> str:
    """The fault of the result, if any."""
    found, again = (narrow_kernels.weight_gradient(*few, weight, tiling) for _ in range(2))
    error = relative(found, expected)
    if not error < AGREE:
        return f"WRONG by {error:.1e}"
    return "" if torch.equal(found, again) else "WRONG: does not repeat"


def measure(shape: Shape, dtype: torch.dtype, *, small: bool, limit: float) -> dict[str, float]:
    """Microseconds by what was timed, without failures and without what would start after `limit` seconds."""
    device = torch.device("cpu" if small else "cuda")
    few = given(shape, images=2 if small else 64, dtype=dtype, device=device)
    expected, weight = exact(*few, shape.inputs), weight_of(shape, device, channels=shape.inputs)
    buffers, times = [], dict[str, float]()
    if not small:
        copies = max(2, int(BUFFERS // shape.bytes))
        buffers = [given(shape, images=shape.images, dtype=dtype, device=device) for _ in range(copies)]
        times = their_times(shape, weight_of(shape, device, channels=shape.stride, dtype=dtype), buffers)
    for tiling in shape.tilings:
        name = named(tiling)
        if time.perf_counter() - START > limit:
            line(name, "no time left")
            continue
        try:
            words = fault(tiling, weight, few, expected)
            if not words and not small:
                times[name] = microseconds(lambda x, dy: narrow_kernels.weight_gradient(x, dy, weight, tiling), buffers)  # noqa: B023
                sums = microseconds(lambda x, dy: narrow_kernels.sum_products(x, dy, shape.inputs, tiling), buffers)  # noqa: B023
                words = f"{times[name]:7.1f}, sums {sums:7.1f}"
            line(name, words or "right")
        except Exception as error:  # noqa: BLE001  # one tiling that does not compile or run is a result
            line(name, f"FAILED: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}")
    return times


def compile_ahead(shapes: Sequence[Shape], dtype: torch.dtype) -> None:
    def rehearse() -> None:
        for shape in shapes:
            x, dy = given(shape, images=2, dtype=dtype, device=torch.device("cuda"))
            for tiling in shape.tilings:
                narrow_kernels.weight_gradient(x, dy, weight_of(shape, x.device, channels=shape.inputs), tiling)

    Compilation(workers=os.cpu_count() or 1, report=lambda _: None, note=print).ahead(rehearse)
    line(f"compiled for {dtype}", "")


def fastest(shape: Shape, times: dict[str, float]) -> Shape:
    """The shape with only the two best tilings."""
    return shape._replace(tilings=sorted(shape.tilings, key=lambda tiling: times.get(named(tiling), torch.inf))[:2])


def summary(name: str, shape: Shape, times: dict[str, float]) -> str:
    theirs = [times.get(kind, torch.nan) for kind in THEIRS]
    ours = {kind: each for kind, each in times.items() if kind not in THEIRS}
    best, memory = min(ours, key=lambda kind: ours[kind], default="none"), 1e6 * shape.bytes / SPEED
    words = "".join(f"{each:8.1f}" for each in (memory, *theirs, ours.get(best, torch.nan)))
    return f"{name:34s} {words}   {memory / ours.get(best, torch.nan):4.0%}; {best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=55, help="nothing is started after them")
    args = parser.parse_args()
    shapes, small = {name: SHAPES[name] for name in args.shapes or SHAPES}, args.device == "cpu"
    torch.manual_seed(0)
    print(f"{'CPU' if small else torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    rows = []
    # In fp16, which should take as long, only the two tilings that were fastest: compiling counts.
    for dtype in (torch.float16,) if small else (torch.bfloat16, torch.float16):
        if not small:
            compile_ahead([*shapes.values()], dtype)
        for name, shape in shapes.items():
            if time.perf_counter() - START > args.seconds:
                continue
            layer = f"{shape.inputs} to {shape.outputs} channels, {shape.side} x {shape.side}, {shape.images} images"
            print(f"{name}: {layer}, {dtype}", flush=True)
            times = measure(shape, dtype, small=small, limit=args.seconds)
            rows.append(summary(f"{name}, {dtype}", shape, times))
            shapes[name] = fastest(shape, times)
    print(
        "",
        f"{'microseconds':34s}   memory   cuDNN     any   tried    ours   of memory's speed; tiling",
        *rows,
        sep="\n",
    )


START = time.perf_counter()

if __name__ == "__main__":
    main()
