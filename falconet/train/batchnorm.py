"""Batch norm's statistics, measured anew for weights that were not trained with them."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.data.loader import Batch
from falconet.data.preprocessing import Normalise
from falconet.numerics.precision import Regime


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Batch], *, normalise: Normalise, regime: Regime) -> None:
    """Replace every running mean and variance by the plain average over the batches."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's word for a cumulative average
        layer.train()
    for batch in batches:
        regime.run(model, normalise(batch.images))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()
