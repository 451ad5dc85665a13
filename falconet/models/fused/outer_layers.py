"""The first and the last layers of a network, as layers that take fewer passes over memory on CUDA.

Elsewhere they run unchanged. `models/fused/fusion.py` finds them in a model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from falconet.models.fused.layers import dense_gradients, kind_of
from falconet.models.padding import padded, pads_same


class PaddedConv(nn.Module):
    """A convolution whose input has zeros for further channels, with which cuDNN's kernels are faster.

    ResNet-50's first, 512 images on an H200: 2.3 ms with 3 channels, 1.6 with 4, 4.3 with 8. EfficientNet-B4's: 1.2, 1,
    0.8.
    """

    def __init__(self, conv: nn.Conv2d, *, channels: int) -> None:
        super().__init__()
        self.conv, self.channels = conv, channels

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.channels:
            plain: Tensor = self.conv(x)
            return plain
        if pads_same(self.conv):  # before the convolution, which itself has no padding then
            x = padded(x, self.conv.kernel_size, self.conv.stride)
        wide: Tensor = self.conv._conv_forward(x, widened(self.conv.weight, self.channels), self.conv.bias)
        return wide


def widened(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight with zeros for further input channels."""
    more = channels - weight.shape[1]
    return nn.functional.pad(weight, (0, 0, 0, 0, 0, more)) if more > 0 else weight


def padded_stem(conv: nn.Conv2d) -> PaddedConv:
    """A first convolution, padded to the number of channels with which it is fastest."""
    return PaddedConv(conv, channels=4 if conv.kernel_size == (7, 7) else 8)


class FusedStem(nn.Module):
    """act(conv(images)) in one pass, for a first convolution with fixed filters, such as SpeedNet's whitening ones."""

    channels = 4  # of the images that the kernel takes; the last is 0

    def __init__(self, conv: nn.Conv2d, act: nn.Module, *, outputs: int | None = None) -> None:
        """`outputs`: channels of the kernel's result; those beyond the convolution's are 0."""
        super().__init__()
        self.conv, self.act, self.outputs = conv, act, outputs or conv.out_channels
        self.kind = kind_of(act) or "none"

    def saved(self, x: Tensor) -> list[Tensor]:
        """The tensors kept for the backward pass."""
        return [x]

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or x.shape[1] != self.channels or self.conv.weight.requires_grad:
            plain: Tensor = self.act(self.conv(x[:, : self.conv.in_channels]))
            return plain
        fused: Tensor = _Stem.apply(x.contiguous(memory_format=torch.channels_last), self.conv.bias, self)
        return fused


def can_be_stem(conv: nn.Conv2d) -> bool:
    """Whether the kernel can compute the layer."""
    is_plain = type(conv) is nn.Conv2d and conv.padding == (0, 0) and conv.stride == conv.dilation == (1, 1)
    is_fixed = conv.bias is not None and not conv.weight.requires_grad and not conv._forward_hooks
    return is_plain and is_fixed and conv.kernel_size == (2, 2) and conv.in_channels == 3 and conv.out_channels <= 64


class _Stem(torch.autograd.Function):
    """The fused stem; keeps the images for the backward pass."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, bias: Tensor, layer: FusedStem) -> Tensor:  # noqa: ARG004
        from falconet.models.fused import stem_kernels

        ctx.save_for_backward(images)
        ctx.layer = layer
        z: Tensor = stem_kernels.forward(images, layer.conv, act=layer.kind, outputs=layer.outputs)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[None, Tensor, None]:
        from falconet.models.fused import stem_kernels

        (images,) = ctx.saved_tensors
        dz, _ = dense_gradients(dz, None)
        return None, stem_kernels.bias_gradient(dz, images, ctx.layer.conv, act=ctx.layer.kind), None


class Means(nn.Module):
    """The mean over each image's pixels, whose gradient stays small until the norm's pass spreads it."""

    def __init__(self, *, keeps: bool) -> None:
        """`keeps`: the pixels' dimensions stay, with size one."""
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        means: Tensor = _Means.apply(x)
        return means if self.keeps else means.flatten(1)


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        spread: Tensor = (gradient / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)
        return spread


class Peaks(nn.Module):
    """The largest value of each channel of an image; equal values share its gradient, as in torch."""

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W -> N x C
        if not x.is_cuda or not x.is_contiguous(memory_format=torch.channels_last):
            return torch.amax(x, dim=(2, 3))
        peaks: Tensor = _Peaks.apply(x)
        return peaks


class _Peaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from falconet.models.fused import pool_kernels

        peaks: Tensor = pool_kernels.peak(x)
        ctx.save_for_backward(x, peaks)
        return peaks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        from falconet.models.fused import pool_kernels

        spread: Tensor = pool_kernels.spread_peak(gradient.contiguous(), *ctx.saved_tensors)
        return spread
