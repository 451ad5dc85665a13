"""Dense 3 x 3 convolutions of few channels, whose weight gradient our own kernel computes faster than cuDNN."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falconet.models.fused.outer_layers import widened
from falconet.models.fused.own_convolution import OwnConv, is_bare


class Tiling(NamedTuple):
    """The kernel's division of its work; other numbers give other bits."""

    crossed: bool  # x is shifted by columns and dy by rows; else x by both
    span: int  # columns of x's operand in a program: channels of each shift
    pixels: int  # of a tile
    warps: int
    stages: int  # one more than the tiles loaded ahead; with 1, loads go through registers
    piece: int  # channels that a thread copies at a time: 8 bypass the L1 cache, 4 go through it
    programs: int  # that share the pixels


# By channels of input and result. Microseconds on an H200, ours against cuDNN's (9.19), bf16, at the sides and batches
# of SpeedNet (31 pixels, 2,000 images) and of a CIFAR ResNet (16 and 1,024). 16 channels are GroupedConv's: 50, here
# 48. 64 are cuDNN's: 21 against 24 at 8 x 8, but 99 against 78 at 15 x 15 and 172 against 129 at 56 x 56.
_TILINGS = {
    (24, 64): Tiling(crossed=False, span=216, pixels=32, warps=4, stages=3, piece=4, programs=264),  # 173 against 400
    (24, 128): Tiling(crossed=False, span=216, pixels=32, warps=8, stages=3, piece=4, programs=132),  # 284 against 454
    (32, 32): Tiling(crossed=True, span=96, pixels=64, warps=8, stages=3, piece=8, programs=264),  # 25 against 92
}


def can_compute(conv: nn.Conv2d) -> bool:
    """Whether the kernel can compute the layer's weight gradient, and is faster."""
    return (
        type(conv) is nn.Conv2d  # a subclass may compute something else
        and (conv.in_channels, conv.out_channels) in _TILINGS
        and conv.groups == 1
        and conv.kernel_size == (3, 3)
        and conv.stride == (1, 1)
        and conv.padding in ((1, 1), "same")
        and is_bare(conv)
    )


class NarrowConv(OwnConv):
    """A convolution that `can_compute` accepts; its input may have further channels, all zeros."""

    formats = (torch.float16, torch.bfloat16)

    def convolved(self, x: Tensor) -> Tensor:
        found: Tensor = _Narrow.apply(x, self.conv.weight)
        return found

    def plain(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, widened(self.conv.weight, x.shape[1]), padding=1)


class _Narrow(torch.autograd.Function):
    """The weight may be in fp32 while the images are in half precision; its gradient is then in fp32, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        used = widened(weight.to(x.dtype), x.shape[1])
        ctx.save_for_backward(x, weight, used)
        return functional.conv2d(x, used, padding=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        from falconet.models.fused import narrow_kernels

        x, weight, used = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        for_input, for_weight = ctx.needs_input_grad
        dx = _input_gradient(dy, x, used) if for_input else None
        if not for_weight:
            return dx, None
        outputs, inputs = weight.shape[:2]
        return dx, narrow_kernels.weight_gradient(x, dy, weight, _TILINGS[inputs, outputs])


def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
    )
    return found[0]
