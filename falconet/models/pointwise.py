"""1 x 1 convolutions that are computed together with the batch norm after them, where that takes less time."""

from functools import cache

import torch
from torch import Tensor, nn

INPUTS, OUTPUTS = 256, 1024  # channels, at most: with more, cuDNN's convolution and a pass for the sums are as fast
SHARED = 220_000  # bytes of shared memory that a program may need: an H100 has more, other GPUs have half of it


def can_compute(conv: nn.Conv2d) -> bool:
    """Whether the kernels compute what the layer does."""
    return (
        type(conv) is nn.Conv2d  # a subclass may compute something else
        and conv.kernel_size == (1, 1)
        and conv.stride == (1, 1)
        and conv.padding in ((0, 0), "valid")
        and conv.groups == 1
        and conv.bias is None
        and conv.in_channels % 8 == conv.out_channels % 8 == 0
        and conv.in_channels <= INPUTS
        and conv.out_channels <= OUTPUTS
        and not conv._forward_hooks
        and not conv._forward_pre_hooks
    )


def fits(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels can take this input; others go through the layer itself."""
    dense = x.is_cuda and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.numel() > 0
    halves = x.dtype in (torch.float16, torch.bfloat16)
    same = x.dtype == (torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else conv.weight.dtype)
    return dense and halves and same and _has_room(x.device)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether it is a GPU that the kernels were written for."""
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.major == 9 and properties.shared_memory_per_block_optin >= SHARED)


def shape_after(weight: Tensor | None, x: Tensor) -> torch.Size:
    """The shape of the convolution's result; None: there is none."""
    return x.shape if weight is None else torch.Size((x.shape[0], weight.shape[0], *x.shape[2:]))


def plain_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight by cuDNN."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight.to(x.dtype), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return dx, dw.to(weight.dtype)
