"""Precision regimes, and settings of the CUDA libraries: sums in half precision, limits of workspace."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from falconet.errors import DeviceError

Kind = Literal[
    "weights", "norm weights", "norm statistics", "activations", "gradients", "optimizer state", "arithmetic", "loss"
]
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Regime:
    """A pair of precisions, compute.update."""

    name: str
    compute: torch.dtype
    update: torch.dtype

    def formats(self, device: torch.device) -> dict[Kind, torch.dtype]:
        """The format of every kind of tensor.

        Norms keep fp32 weights and statistics: they are few, their sums need the range, and cuDNN's all-half batch norm
        is slower. Gradients and optimizer state have the format of their weight.
        """
        return {
            "weights": self.update,
            "norm weights": torch.float32,
            "norm statistics": torch.float32,
            "activations": torch.float32 if self._is_emulated(device) else self.compute,
            "gradients": self.update,
            "optimizer state": self.update,
            "arithmetic": torch.float32,
            "loss": torch.float32,
        }

    @property
    def is_half(self) -> bool:
        """Whether updates are written in 16 bits."""
        return self.update != torch.float32

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to the device, in place, with its weights in the regime's format."""
        for layer in model.modules():
            if not isinstance(layer, _NORMS):
                parameters = list(layer.parameters(recurse=False))
                for parameter in parameters:
                    parameter.data = parameter.data.to(self.update)
                if parameters and self._is_emulated(device):
                    layer.forward = MethodType(_in_fp32, layer)
                elif self._is_bfloat16_on_cpu(device) and _is_depthwise(layer):
                    layer.forward = MethodType(_widened, layer)
                elif self._is_bfloat16_on_cpu(device) and _strides(layer):
                    layer.forward = MethodType(_widened_if_narrow, layer)
        return model.to(device)

    def run(self, model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """The logits of normalised images."""
        with self.computing(images.device):
            logits = model(images)
        return logits.float()

    def computing(self, device: torch.device) -> torch.autocast:
        """The context in which forward passes compute in the regime's format."""
        # Half weights are used directly, others are cast on the way.
        return torch.autocast(device.type, self.compute, enabled=self._uses_autocast(device))

    def describe(self, device: torch.device) -> str:
        """One line for the plan."""
        if self._is_emulated(device):
            faster = f"--precision {automatic('cpu')} is faster"
            return f"{self.name} (this CPU computes in fp32 and rounds weights to fp16 each time: {faster})"
        if self._is_bfloat16_on_cpu(device) and not _has_bfloat16(device):
            return f"{self.name} (this CPU has no bf16 instructions: --precision 32.32 is faster)"
        if self.compute == torch.float32 and automatic(device.type) != self.name:
            return f"{self.name} (--precision auto, here {automatic(device.type)}, is usually faster)"
        return self.name

    def require(self, device: torch.device) -> None:
        """Refuse a device that cannot run the regime."""
        if torch.bfloat16 in (self.compute, self.update) and device.type == "cuda" and not _has_bfloat16(device):
            raise DeviceError(f"got {self.name}, expected 16.32: {torch.cuda.get_device_name(device)} has no bf16")

    def _is_emulated(self, device: torch.device) -> bool:
        """Whether fp16 is computed in fp32, as on a CPU, where an fp16 convolution takes twenty times as long."""
        return device.type == "cpu" and self.compute == torch.float16

    def _is_bfloat16_on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.compute == torch.bfloat16

    def _uses_autocast(self, device: torch.device) -> bool:
        return self.compute != torch.float32 and not self._is_emulated(device)


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("32.32", torch.float32, torch.float32),
        Regime("16.32", torch.float16, torch.float32),
        Regime("16.16", torch.float16, torch.float16),
        Regime("bf16.32", torch.bfloat16, torch.float32),
        Regime("bf16.bf16", torch.bfloat16, torch.bfloat16),
    )
}


def uncast(x: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, except on meta tensors (for footprints and stage shapes), which it does not support."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def automatic(kind: str) -> Literal["bf16.32", "32.32"]:
    """The regime for a kind of device: bf16.32 if it computes in bf16, for half the memory and 1.5 times the speed."""
    is_there = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    return "bf16.32" if is_there and _has_bfloat16(torch.device(kind)) else "32.32"


def _in_fp32(layer: nn.Module, *values: Tensor) -> Tensor:
    """The layer's original forward, with weights rounded to fp16 and computed with in fp32."""
    stored = dict(layer._parameters)
    try:
        for name, parameter in stored.items():
            layer._parameters[name] = None if parameter is None else parameter.half().float()  # type: ignore[assignment]
        result: Tensor = type(layer).forward(layer, *values)
    finally:
        layer._parameters.update(stored)
    return result


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1


def _strides(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and max(layer.stride) > 1


def _widened(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's original forward in fp32, with a result in bf16.

    A CPU computes the gradients of depthwise convolutions in fp32 up to six times as fast (docs/maintaining/log.md).
    """
    stored = dict(layer._parameters)
    try:
        for name, parameter in stored.items():
            layer._parameters[name] = None if parameter is None else parameter.float()  # type: ignore[assignment]
        with torch.autocast("cpu", enabled=False):
            result: Tensor = type(layer).forward(layer, x.float())
    finally:
        layer._parameters.update(stored)
    return result.bfloat16()


def _widened_if_narrow(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's original forward; in fp32 for an image narrower than the stride.

    For such images, oneDNN leaves parts of the bf16 weight gradient unwritten that should be 0 (torch 2.15).
    """
    if x.shape[-1] < layer.stride[-1] or x.shape[-2] < layer.stride[-2]:
        return _widened(layer, x)
    result: Tensor = type(layer).forward(layer, x)
    return result


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bf16; a CPU without such instructions takes longer than in fp32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cuda.get_device_capability(device) >= (8, 0)


def allow_half_partials(device: torch.device, *, allowed: bool = True) -> None:
    """Let matrix products sum in half precision, for the whole process; only CUDA can."""
    if device.type != "cuda":
        return
    matmul = torch.backends.cuda.matmul
    # Torch allows the first two by default; the third sums a whole product in fp16.
    matmul.allow_fp16_reduced_precision_reduction = allowed
    matmul.allow_bf16_reduced_precision_reduction = allowed
    matmul.allow_fp16_accumulation = allowed


def describe_half_partials(regime: Regime, device: torch.device) -> str:
    """A line for the plan about the effect of `allow_half_partials` in this regime on this device."""
    if device.type != "cuda":
        return f"half partials: no effect on {device.type}, which sums in fp32"
    if regime.compute == torch.float32:
        return f"half partials: no effect with precision {regime.name}, which has no products in half precision"
    how = "in fp16" if regime.compute == torch.float16 else "in bf16 between blocks"
    # For half values, torch gives cuDNN fp32 as the type to compute in, and has no setting for it.
    return f"half partials: matrix products, such as the classifier's, sum {how}; convolutions always sum in fp32"


CUDNN, CUBLASLT = "CUDNN_CONV_WSCAP_DBG", "CUBLASLT_WORKSPACE_SIZE"  # MiB that it stays below; KiB that it allocates
_CUBLASLT_DEFAULT = 32 * 2**20  # bytes on Hopper, less elsewhere: a higher limit would raise what it allocates


def limit_workspace(share: float, device: torch.device) -> None:
    """Limit a convolution's workspace to a share of the device's memory; only CUDA has a limit.

    The libraries read the environment at their first convolution. Variables that the user has set stay as they are.
    """
    if device.type == "cuda":
        for name, value in workspace_variables(_workspace_limit(share, device)).items():
            os.environ[name] = os.environ.get(name) or value


def describe_workspace(share: float, device: torch.device) -> str:
    """A line for the plan about the effect of `limit_workspace` on this device."""
    if device.type != "cuda":
        return f"workspace limit: no effect on {device.type}"
    limit = _workspace_limit(share, device)
    return f"workspace of a convolution: at most {limit / 2**20:,.0f} MiB, {share:g} of the device's memory"


def workspace_variables(limit: int) -> dict[str, str]:
    """The environment variables that set a limit in bytes."""
    cudnn = {CUDNN: str(limit // 2**20)}
    return cudnn | ({CUBLASLT: str(limit // 2**10)} if limit < _CUBLASLT_DEFAULT else {})


def _workspace_limit(share: float, device: torch.device) -> int:
    return int(share * torch.cuda.get_device_properties(device).total_memory)
