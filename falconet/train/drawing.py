"""Histograms of the trained weights, drawn at log points."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from falconet.parallel.world import World
from falconet.report import histograms
from falconet.report.sinks import WeightSink

Draw = Callable[[int], None]  # takes the number of updates so far


def no_drawing(update: int) -> None:
    """Draws nothing."""


def drawing(
    model: nn.Module,
    names: Sequence[str],
    *,
    stages: World,
    sinks: Sequence[WeightSink],
    pause: Callable[[], AbstractContextManager[None]],
) -> Draw:
    """Draws every weight of a replica, whose stages each count their own and add them up in one message.

    `names`: of all trained weights, in every stage. To be called in every process of one replica, of which the first
    has the sinks. Replicas are alike, and weights are whole in each even where the optimizer's state is divided.
    `pause`: in which the training's clock stands.
    """
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def draw(update: int) -> None:
        with pause():
            rows = [
                histograms.counted(own[name]) if name in own else histograms.nothing(stages.device) for name in names
            ]
            found = histograms.read(stages.sum(torch.stack(rows)))
            for sink in sinks:
                sink.write_weights(update, dict(zip(names, found, strict=True)))

    return draw
