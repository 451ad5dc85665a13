"""Batch norm's running statistics: estimated anew, and compared with images."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from falconet.config import options
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.preprocessing import Normalise
from falconet.models.batch_statistics import misfit
from falconet.numerics.precision import Regime
from falconet.parallel.world import World

ENOUGH = 64  # images to compare statistics with


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Batch], *, normalise: Normalise, regime: Regime) -> None:
    """Replace every running mean and variance with the plain average over the batches."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's way to ask for a cumulative average
        layer.train()
    for batch in batches:
        regime.run(model, normalise(batch.images))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


def misfit_warning(
    model: nn.Module, images: Dataset, data: options.Data, *, regime: Regime, world: World
) -> str | None:
    """A warning if batch norm's running statistics do not fit one batch of the validation images."""
    if data.data in ("generated", "synthetic"):
        return None
    batch = min(data.validation_batch, ENOUGH)
    quiet = BadImages(None, note=lambda _: None)
    reading = Input(data=data, regime=regime, world=world, note=lambda _: None)
    loader = reading.evaluation_loader(images, shape=BatchShape(micro_batch=batch), bad=quiet)
    first = next(iter(loader.batches()))
    pixels = first.images.to(world.device)[first.labels.to(world.device) >= 0]  # without padding
    normalised = images.normalise(world.device)(pixels)
    found = misfit(model, lambda: regime.run(model, normalised)) if len(pixels) else None
    if found is None:
        return None
    pixels_advice = "check --normalization, --pixel-mean and --pixel-deviation"
    return f"warning: {found.text}; {f'try --shortcut-padding {found.side}' if found.side else pixels_advice}"
