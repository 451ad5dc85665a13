"""Scores of batches, from a model whose owner may still change its weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from falconet.numerics.cuda_graphs import Compute, captured
from falconet.report.console import Say


class Scorer:
    """A function of images that is built from a model's weights, and built again once they have changed."""

    def __init__(
        self, model: nn.Module, build: Callable[[], Compute], device: torch.device, *, note: Say, capture: bool
    ) -> None:
        """`capture`: replay batches as graphs on CUDA; `note` gets a line if that fails."""
        self._model, self._build, self._device = model, build, device
        self._note, self._captures = note, capture
        self._versions: list[tuple[int, int]] = []

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:  # N x 3 x S x S, anywhere -> N x classes, fp32, on the device
        """Replayed on CUDA from the second batch of a size on."""
        self._renew()
        return self._captured(images.to(self._device, non_blocking=True))

    @torch.inference_mode()
    def uncaptured(self, images: Tensor) -> Tensor:
        """The same, computed layer by layer, so that hooks are called."""
        self._renew()
        return self._compute(images.to(self._device, non_blocking=True))

    def _renew(self) -> None:
        versions = [_version(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())]
        if versions != self._versions:
            self._versions, self._compute = versions, self._build()
            self._captured = captured(self._compute, self._device, note=self._note, wanted=self._captures)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Where it lies and how often it was written to, as autograd counts it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
