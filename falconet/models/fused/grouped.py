"""Grouped 3 x 3 convolutions by our own kernels, for passes in which they are faster than cuDNN's."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falconet.models.fused.own_convolution import OwnConv, is_bare

if TYPE_CHECKING:
    from falconet.models.fused.grouped_kernels import Geometry


class _Ours(NamedTuple):
    """The passes that our kernels compute; the gradient of the input is always one of them."""

    forward: bool
    weight: bool


# By channels of a group and stride. Microseconds on an H200, ours against cuDNN's (9.19, deterministic), fp16, for the
# layers of ResNeXt-50 32x4d at batch 256: forward, gradient of the input, gradient of the weight. ResNeXt-101 at batch
# 128 has the same winners. Groups of 32 with stride 1 are cuDNN's: 46, 46, 88 against 43, 40, 41.
_FASTER = {
    (4, 1): _Ours(forward=True, weight=True),  # 196, 196, 271 against 312, 344, 489
    (8, 1): _Ours(forward=True, weight=False),  # 101, 101, 145 against 181, 189, 138
    (16, 1): _Ours(forward=True, weight=True),  # 56, 56, 86 against 70, 76, 96
    (8, 2): _Ours(forward=False, weight=False),  # 184, 197, 218 against 188, 491, 197; 2 % are not worth a kernel
    (16, 2): _Ours(forward=False, weight=False),  # 97, 96, 127 against 71, 254, 99
    (32, 2): _Ours(forward=False, weight=False),  # 65, 63, 133 against 44, 150, 58
}
_CHANNELS = 16  # a multiple of them: the width of a tensor core's product


def can_compute(conv: nn.Conv2d) -> bool:
    """Whether the kernels can compute the layer, and at least one is faster."""
    return (
        type(conv) is nn.Conv2d  # a subclass may compute something else
        and conv.in_channels == conv.out_channels
        and conv.in_channels % _CHANNELS == 0
        and (conv.in_channels // conv.groups, conv.stride[0]) in _FASTER
        and conv.stride[0] == conv.stride[1]
        and conv.kernel_size == (3, 3)
        and conv.padding == (1, 1)
        and is_bare(conv)
    )


class GroupedConv(OwnConv):
    """A grouped convolution that `can_compute` accepts."""

    formats = (torch.float16, torch.bfloat16)

    def convolved(self, x: Tensor) -> Tensor:
        found: Tensor = _Grouped.apply(x, self.conv.weight, _geometry(self.conv, x))
        return found


def _geometry(conv: nn.Conv2d, x: Tensor) -> "Geometry":
    from falconet.models.fused.grouped_kernels import Geometry  # Triton comes with CUDA only

    images, channels, height, width = x.shape
    return Geometry(images, channels, height, width, group=channels // conv.groups, stride=conv.stride[0])


class _Grouped(torch.autograd.Function):
    """The weight may be in fp32 while the images are in half precision; its gradient is then in fp32, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: "Geometry") -> Tensor:
        from falconet.models.fused import grouped_kernels

        ctx.sizes, ctx.ours = sizes, _FASTER[sizes.group, sizes.stride]
        packed = grouped_kernels.pack(weight, x.dtype)
        ctx.save_for_backward(x, weight, packed)
        if ctx.ours.forward:
            y: Tensor = grouped_kernels.forward(x, packed, sizes)
            return y
        groups = sizes.channels // sizes.group
        return functional.conv2d(x, weight.to(x.dtype), stride=sizes.stride, padding=1, groups=groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from falconet.models.fused import grouped_kernels

        x, weight, packed = ctx.saved_tensors
        dy, sizes = dy.contiguous(memory_format=torch.channels_last), ctx.sizes
        for_input, for_weight, _ = ctx.needs_input_grad
        dx = grouped_kernels.input_gradient(dy, packed, sizes) if for_input else None
        if not for_weight:
            return dx, None, None
        if ctx.ours.weight:
            return dx, grouped_kernels.weight_gradient(x, dy, weight, sizes), None
        return dx, _plain_weight_gradient(x, dy, weight, sizes), None


def _plain_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, sizes: "Geometry") -> Tensor:
    stride, groups = [sizes.stride] * 2, sizes.channels // sizes.group
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dy, x, weight.to(x.dtype), None, stride, [1, 1], [1, 1], False, [0, 0], groups, [False, True, False]
    )
    return found[1].to(weight.dtype)
