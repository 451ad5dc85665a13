"""Depthwise convolutions by our own kernels, which are faster than cuDNN's."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from falconet.models.fused.own_convolution import OwnConv, is_bare
from falconet.models.padding import pads_same, same_padding

if TYPE_CHECKING:
    from falconet.models.fused.depthwise_kernels import Geometry

_KERNELS = (3, 5)
_STRIDES = (1, 2)
_CHANNELS = 8  # a multiple of them: threads read 4 to 16 bytes at once


def can_compute(conv: nn.Conv2d) -> bool:
    """Whether the kernels can compute the layer."""
    if type(conv) is not nn.Conv2d and not pads_same(conv):  # another subclass may compute something else
        return False
    (down, right), (high, wide) = conv.stride, conv.kernel_size
    padded = pads_same(conv) or (not isinstance(conv.padding, str) and max(conv.padding) < high)
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and conv.in_channels % _CHANNELS == 0
        and high == wide in _KERNELS
        and down == right in _STRIDES
        and padded
        and is_bare(conv)
    )


class DepthwiseConv(OwnConv):
    """A depthwise convolution that `can_compute` accepts."""

    formats = (torch.float16, torch.bfloat16)  # those in which cuDNN was measured to be slower

    def convolved(self, x: Tensor) -> Tensor:
        found: Tensor = _Depthwise.apply(x, self.conv.weight, _geometry(self.conv, x))
        return found


def _geometry(conv: nn.Conv2d, x: Tensor) -> "Geometry":
    from falconet.models.fused.depthwise_kernels import Geometry  # Triton comes with CUDA only

    (images, channels, height, width), kernel, stride = x.shape, conv.kernel_size[0], conv.stride[0]
    if pads_same(conv):
        (above, below), (left, right) = (same_padding(side, kernel=kernel, stride=stride) for side in (height, width))
    else:
        assert not isinstance(conv.padding, str)
        above, left = below, right = conv.padding
    out_height = (height + above + below - kernel) // stride + 1
    out_width = (width + left + right - kernel) // stride + 1
    return Geometry(images, channels, height, width, kernel, stride, above, left, out_height, out_width)


class _Depthwise(torch.autograd.Function):
    """The weight may be in fp32 while the images are in half precision; its gradient is then in fp32, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: "Geometry") -> Tensor:
        from falconet.models.fused import depthwise_kernels

        taps = depthwise_kernels.transposed(weight, x.dtype)
        ctx.save_for_backward(x, taps)
        ctx.geometry, ctx.dtype = geometry, weight.dtype
        y: Tensor = depthwise_kernels.forward(x, taps, geometry)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from falconet.models.fused import depthwise_kernels

        x, taps = ctx.saved_tensors
        dy, shape = dy.contiguous(memory_format=torch.channels_last), ctx.geometry
        for_input, for_weight, _ = ctx.needs_input_grad
        if for_input and for_weight and depthwise_kernels.gains_at_once(shape):
            return (*depthwise_kernels.gradients(x, dy, taps, shape, dtype=ctx.dtype), None)
        dx = depthwise_kernels.input_gradient(dy, taps, shape) if for_input else None
        dweight = depthwise_kernels.weight_gradient(x, dy, shape, dtype=ctx.dtype) if for_weight else None
        return dx, dweight, None
