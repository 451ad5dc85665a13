"""Histograms of all trained weights, in any stage, while the stopwatch is paused."""

import contextlib
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from falconet.parallel.world import World
from falconet.report.trackers.histograms import count_histograms, read_histograms
from falconet.train.log import weight_drawing


class Drawn(dict):
    """A sink of histograms."""

    def write_weights(self, update, histograms):
        self[update] = histograms


@dataclass(frozen=True, kw_only=True)
class Stages(World):
    """Stages that add up their rows, one after the other."""

    handed: list = field(default_factory=list)

    def sum(self, values):
        self.handed.append(values)
        return torch.stack(self.handed).sum(0)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


def expected(whole):
    return {
        name: read_histograms(count_histograms(weight)[None])[0]
        for name, weight in whole.named_parameters()
        if weight.requires_grad
    }


CPU = torch.device("cpu")


def test_every_trained_weight_is_drawn_under_its_name_and_a_frozen_one_is_not():
    whole, sink = model(), Drawn()
    whole[2].bias.requires_grad_(False)
    names = [name for name, weight in whole.named_parameters() if weight.requires_grad]
    weight_drawing(whole, names, stages=World(device=CPU), sinks=[sink], pause=contextlib.nullcontext)(5)
    assert sink == {5: expected(whole)}
    assert "2.bias" not in sink[5]


def test_stages_draw_the_weights_of_the_whole_model():
    whole, sink = model(), Drawn()
    names = [name for name, _ in whole.named_parameters()]
    stages = Stages(device=CPU, size=2)
    last = nn.Sequential(nn.Identity(), nn.Identity(), whole[2])
    weight_drawing(last, names, stages=replace(stages, rank=1), sinks=[], pause=contextlib.nullcontext)(3)
    first = nn.Sequential(whole[0], whole[1])
    weight_drawing(first, names, stages=stages, sinks=[sink], pause=contextlib.nullcontext)(3)
    assert sink == {3: expected(whole)}


def test_the_stopwatch_pauses_while_weights_are_drawn():
    moments = []

    @contextlib.contextmanager
    def pause():
        moments.append("stands")
        yield
        moments.append("runs")

    class Sink:
        def write_weights(self, update, histograms):
            moments.append(update)

    weight_drawing(model(), ["0.weight"], stages=World(device=CPU), sinks=[Sink()], pause=pause)(9)
    assert moments == ["stands", 9, "runs"]
