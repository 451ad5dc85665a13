"""The common base of convolutions by our own kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn


class OwnConv(nn.Module, ABC):
    """A convolution that shares the weight of a plain one, which runs when the kernels cannot."""

    formats: ClassVar[Sequence[torch.dtype]]

    def __init__(self, conv: nn.Conv2d) -> None:
        """`conv`: a convolution that the kernels can compute."""
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W
        casts = x.is_cuda and torch.is_autocast_enabled("cuda")
        if casts:
            x = x.to(torch.get_autocast_dtype("cuda"))
        if self._fits(x) and (casts or x.dtype == self.conv.weight.dtype):
            return self.convolved(x)
        return self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """The convolution as torch computes it."""
        found: Tensor = self.conv(x)
        return found

    @abstractmethod
    def convolved(self, x: Tensor) -> Tensor:
        """The convolution by our kernels; the weight may be in fp32 while x is in half precision."""

    def _fits(self, x: Tensor) -> bool:
        """Whether the kernels can take this input; they count an image's elements in 32 bits."""
        dense = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return x.is_cuda and dense and x.dtype in self.formats and 0 < x.numel() < 2**31 * x.shape[0]


def is_bare(conv: nn.Conv2d) -> bool:
    """Whether the layer computes a plain convolution and nothing else, such as in hooks."""
    return (
        conv.dilation == (1, 1)
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and not conv._forward_hooks
        and not conv._forward_pre_hooks
    )
