"""Regimes: the number formats of compute and of weights and their update."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Regime:
    """A pair of precisions, compute.update."""

    name: str
    compute: torch.dtype
    update: torch.dtype

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which the model runs: its matrix products and convolutions in the compute type."""
        return torch.autocast(device.type, self.compute, enabled=self.compute != self.update)


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("32.32", torch.float32, torch.float32),
        Regime("bf16.32", torch.bfloat16, torch.float32),
    )
}
