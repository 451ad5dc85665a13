"""1 x 1 convolutions that are computed together with the batch norm after them if that takes less time.

Triton has compiled such kernels to wrong results for some widths. So each one is tried on noise in every process before
it is used, which takes about a millisecond. On tensors without memory, a trial launches its kernels so that
they are compiled ahead, and decides nothing.
"""

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

if TYPE_CHECKING:
    from falconet.models.fused.batchnorm_kernels import Reached, Running

INPUTS, OUTPUTS = 256, 1024  # channels, at most: with more, cuDNN's convolution and a pass for the sums are as fast
NOISE = 1 << 24  # elements of the larger tensor that a kernel is tried on
SIDE = 32  # pixels of each of its images
AGREE = 0.02  # relative difference to the plain layers, at most: several times bf16's, a tenth of a wrong result's
SHARED = 220_000  # bytes of shared memory that a program may need; an H100 has more


def can_compute(conv: nn.Conv2d) -> bool:
    """Whether the kernels can compute the layer."""
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
    """Whether the kernels can take this input; for others, the plain layer runs."""
    dense = x.is_cuda and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.numel() > 0
    halves = x.dtype in (torch.float16, torch.bfloat16)
    same = x.dtype == (torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else conv.weight.dtype)
    if not (dense and halves and same and _has_room(x.device)):
        return False
    variant = (*conv.weight.shape[:2], x.dtype, conv.weight.dtype, x.device)
    return bool(_forward_trial(*_tensors(*variant))) if isinstance(x, FakeTensor) else _tried_forward(*variant)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether the device is a GPU for which the kernels were written."""
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.major == 9 and properties.shared_memory_per_block_optin >= SHARED)


def shape_after(weight: Tensor | None, x: Tensor) -> torch.Size:
    """The shape of the convolution's result; None: there is none."""
    return x.shape if weight is None else torch.Size((x.shape[0], weight.shape[0], *x.shape[2:]))


def backward(
    reached: "Reached", y: Tensor, found: Tensor, slopes: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    from falconet.models.fused import pointwise_kernels

    outputs, inputs = weight.shape[:2]
    if pointwise_kernels.can_go_back(inputs, outputs):
        how, variant = (reached.act, reached.dz2 is not None), (outputs, inputs, x.dtype, weight.dtype, x.device)
        fake = isinstance(x, FakeTensor)
        if _backward_trial(*_tensors(*variant), *how) if fake else _tried_backward(*how, *variant):
            both: tuple[Tensor, Tensor] = pointwise_kernels.backward(reached, y, found, slopes, x, weight)
            return both
    return _plain_backward(reached, y, found, slopes, x, weight)


def _plain_backward(
    reached: "Reached", y: Tensor, found: Tensor, slopes: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight by cuDNN, after storing the norm's gradient."""
    from falconet.models.fused import batchnorm_kernels

    dy, _ = batchnorm_kernels.spread_gradients(reached, y, found, slopes)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight.to(x.dtype), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return dx, dw.to(weight.dtype)


Pairs = list[tuple[Tensor, Tensor]]  # what our kernels compute, and what the layers do


@cache
def _tried_forward(outputs: int, inputs: int, *facts: Any) -> bool:
    """Whether the kernel gives the same result as cuDNN and a pass for the sums."""
    return _agree(*_forward_trial(*_noise(outputs, inputs, *facts)), what=f"{inputs} to {outputs} channels")


def _forward_trial(x: Tensor, weight: Tensor, _: Tensor) -> Pairs:
    from falconet.models.fused import batchnorm_kernels, pointwise_kernels

    one, zero, running = _numbers(len(weight), x.device)
    y, partial = pointwise_kernels.forward(x, weight)
    found = batchnorm_kernels.numbers(y, partial, one, zero, running, eps=1e-5)
    plain = functional.conv2d(x, weight.to(x.dtype))
    expected = batchnorm_kernels.statistics(plain, one, zero, running, eps=1e-5)
    return [(y, plain), (found[0], expected[0])]


@cache
def _tried_backward(act: str, two: bool, outputs: int, inputs: int, *facts: Any) -> bool:
    """Whether the kernel gives the same result as a pass for the norm's gradient and cuDNN."""
    pairs = _backward_trial(*_noise(outputs, inputs, *facts), act, two)
    return _agree(*pairs, what=f"the gradients of {inputs} to {outputs} channels")


def _backward_trial(x: Tensor, weight: Tensor, dz: Tensor, act: str, two: bool) -> Pairs:
    from falconet.models.fused import batchnorm_kernels, pointwise_kernels

    one, zero, running = _numbers(len(weight), x.device)
    y = functional.conv2d(x, weight.to(x.dtype))
    found = batchnorm_kernels.statistics(y, one, zero, running, eps=1e-5)
    reached, slopes, _ = batchnorm_kernels.sum_gradients(dz, y, found, act=act, dz2=dz.flip(0) if two else None)
    given = (reached, y, found, slopes.found, x, weight)
    return list(zip(pointwise_kernels.backward(*given), _plain_backward(*given), strict=True))


def _tensors(
    outputs: int, inputs: int, dtype: torch.dtype, weights: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a gradient, large enough for several tiles per program unless there are many channels."""
    images = max(8, NOISE // (SIDE * SIDE * max(inputs, outputs)))

    def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device, memory_format=torch.channels_last)

    x, dz = (made(images, channels, SIDE, SIDE) for channels in (inputs, outputs))
    return x, made(outputs, inputs, 1, 1, of=weights), dz


def _noise(*facts: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, dz = _tensors(*facts)
    noise = torch.Generator(x.device).manual_seed(0)
    return x.normal_(generator=noise), weight.normal_(generator=noise), dz.normal_(generator=noise)


def _numbers(channels: int, device: torch.device) -> "tuple[Tensor, Tensor, Running]":
    """A norm's weight, bias and running statistics, with which the kernels are the same as in an update."""
    from falconet.models.fused import batchnorm_kernels

    one, zero = torch.ones(channels, device=device), torch.zeros(channels, device=device)
    batches = torch.zeros((), dtype=torch.int64, device=device)
    return one, zero, batchnorm_kernels.Running(zero.clone(), one.clone(), batches, 0.1)


def _agree(*pairs: tuple[Tensor, Tensor], what: str) -> bool:
    errors = [((ours - plain).float().norm() / plain.float().norm()).item() for ours, plain in pairs]
    if all(error < AGREE for error in errors):  # never if one is not a number
        return True
    warnings.warn(f"this version of Triton compiles {what} to wrong results; cuDNN computes them", stacklevel=2)
    return False
