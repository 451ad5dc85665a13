"""Scores of batches, from a model whose owner may still change its weights."""

from collections.abc import Callable
from typing import NamedTuple

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
        self._built: _Built | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:  # N x 3 x S x S, anywhere -> N x classes, fp32, on the device
        """Replayed on CUDA from the second batch of a size on."""
        return self._newest().replayed(images.to(self._device, non_blocking=True))

    @torch.inference_mode()
    def uncaptured(self, images: Tensor) -> Tensor:
        """The same, computed layer by layer, so that hooks are called."""
        return self._newest().compute(images.to(self._device, non_blocking=True))

    def _newest(self) -> "_Built":
        """Threads may build it twice, but never see a part of it."""
        versions, built = (
            [_version(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())],
            self._built,
        )
        if built is None or versions != built.versions:
            compute = self._build()
            replayed = captured(compute, self._device, note=self._note, wanted=self._captures)
            built = self._built = _Built(versions, compute, replayed)
        return built


class _Built(NamedTuple):
    """The function of one moment's weights."""

    versions: list[tuple[int, int]]
    compute: Compute
    replayed: Compute


def _version(tensor: Tensor) -> tuple[int, int]:
    """Where it lies and how often it was written to, as autograd counts it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
