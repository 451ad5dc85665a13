"""1 x 1 convolutions that are computed together with the batch norm after them, where that takes less time.

Triton was seen to compile such kernels to wrong results for some widths. So each one is tried in every process before
it is used, on noise, which takes about a millisecond.
"""

import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

if TYPE_CHECKING:
    from falconet.models.batchnorm_kernels import Reached

INPUTS, OUTPUTS = 256, 1024  # channels, at most: with more, cuDNN's convolution and a pass for the sums are as fast
NOISE = 1 << 24  # elements of the larger tensor that a kernel is tried on
AGREE = 0.02  # relative difference to the plain layers, at most: several times bf16's, a tenth of a wrong result's
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
    usable = dense and halves and same and _has_room(x.device)
    return usable and (isinstance(x, FakeTensor) or _tried_forward(*conv.weight.shape[:2], x.dtype, x.device))


@cache
def _has_room(device: torch.device) -> bool:
    """Whether it is a GPU that the kernels were written for."""
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.major == 9 and properties.shared_memory_per_block_optin >= SHARED)


def shape_after(weight: Tensor | None, x: Tensor) -> torch.Size:
    """The shape of the convolution's result; None: there is none."""
    return x.shape if weight is None else torch.Size((x.shape[0], weight.shape[0], *x.shape[2:]))


def backward(
    reached: "Reached", y: Tensor, found: Tensor, slopes: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    from falconet.models import pointwise_kernels

    outputs, inputs = weight.shape[:2]
    variant = (outputs, inputs, reached.act, reached.dz2 is not None, x.dtype, x.device)
    if pointwise_kernels.can_go_back(inputs, outputs) and (isinstance(x, FakeTensor) or _tried_backward(*variant)):
        both: tuple[Tensor, Tensor] = pointwise_kernels.backward(reached, y, found, slopes, x, weight)
        return both
    return _plain_backward(reached, y, found, slopes, x, weight)


def _plain_backward(
    reached: "Reached", y: Tensor, found: Tensor, slopes: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm's gradient stored, and then cuDNN's two."""
    from falconet.models import batchnorm_kernels

    dy, _ = batchnorm_kernels.spread_gradients(reached, y, found, slopes)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight.to(x.dtype), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return dx, dw.to(weight.dtype)


@cache
def _tried_forward(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes what cuDNN and a pass for the sums do."""
    from falconet.models import batchnorm_kernels, pointwise_kernels

    x, weight, _ = _noise(outputs, inputs, dtype, device)
    one, zero = torch.ones(outputs, device=device), torch.zeros(outputs, device=device)
    y, partial = pointwise_kernels.forward(x, weight)
    found = batchnorm_kernels.numbers(y, partial, one, zero, None, eps=1e-5)
    plain = functional.conv2d(x, weight)
    expected = batchnorm_kernels.statistics(plain, one, zero, None, eps=1e-5)
    return _agree((y, plain), (found[0], expected[0]), what=f"{inputs} to {outputs} channels")


@cache
def _tried_backward(outputs: int, inputs: int, act: str, two: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes what a pass for the norm's gradient and cuDNN do."""
    from falconet.models import batchnorm_kernels, pointwise_kernels

    x, weight, dz = _noise(outputs, inputs, dtype, device)
    one, zero = torch.ones(outputs, device=device), torch.zeros(outputs, device=device)
    y = functional.conv2d(x, weight)
    found = batchnorm_kernels.statistics(y, one, zero, None, eps=1e-5)
    reached, slopes, _ = batchnorm_kernels.sum_gradients(dz, y, found, act=act, dz2=dz.flip(0) if two else None)
    given = (reached, y, found, slopes.found, x, weight)
    pairs = zip(pointwise_kernels.backward(*given), _plain_backward(*given), strict=True)
    return _agree(*pairs, what=f"the gradients of {inputs} to {outputs} channels")


def _noise(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a gradient, so large that every program has several tiles, except of many channels."""
    noise = torch.Generator(device).manual_seed(0)
    images = max(8, NOISE // (1024 * max(inputs, outputs)))

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=noise, device=device)
        return values.to(dtype, memory_format=torch.channels_last)

    return drawn(images, inputs, 32, 32), drawn(outputs, inputs, 1, 1), drawn(images, outputs, 32, 32)


def _agree(*pairs: tuple[Tensor, Tensor], what: str) -> bool:
    errors = [((ours - plain).float().norm() / plain.float().norm()).item() for ours, plain in pairs]
    if max(errors) < AGREE:
        return True
    warnings.warn(f"this version of Triton compiles {what} to wrong results; cuDNN computes them", stacklevel=2)
    return False
