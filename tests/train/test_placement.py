"""How a model is placed: what the plan says of fused norms."""

from types import SimpleNamespace

import pytest
import torch

from falconet.config.commands import TrainOptions
from falconet.config.options import Model, Parallel
from falconet.data.loader import BatchShape
from falconet.numerics.precision import REGIMES
from falconet.train.placement import WholeModel
from falconet.train.setup import Setup
from phases import built
from tiny import TINY


def plan_lines(*, span: int = 1, joined: int = 1, **model: str) -> list[str]:
    """Of a CIFAR network for a CUDA device, whose batch norm spans some replicas, of which this one runs `joined`."""
    grid = SimpleNamespace(world=SimpleNamespace(device=torch.device("cuda", 0)))
    options = TrainOptions(model=Model(model="resnet8-cifar", **model), parallel=Parallel(batchnorm_span=span))
    images = SimpleNamespace(classes=10, training=SimpleNamespace(image_size=32))
    shape = BatchShape(micro_batch=8, joined=joined, folded=joined)
    setup = Setup(options=options, images=images, shape=shape, grid=grid, regime=REGIMES["32.32"], note=print)
    return WholeModel(setup).lines()


@pytest.mark.parametrize("joined", [1, 2])
def test_norms_over_several_processes_are_fused_too(joined):
    assert plan_lines(span=2, joined=joined) == ["norms: 7 of 7 fused with what follows them"]


def test_plan_says_if_no_norm_is_fused(monkeypatch):
    monkeypatch.setattr("falconet.models.fused.fusion.can_fuse", lambda _: False)
    assert plan_lines() == ["norms: none of 7 fused with what follows them"]
    assert plan_lines(norm_type="none") == []


@pytest.mark.parametrize("recompute", ["", "--enable-recompute"])
def test_plan_counts_fused_norms_of_recomputed_segments_too(recompute, monkeypatch):
    line = f"{TINY} --device cpu {recompute}"
    assert not any("fused" in words for words in built(line).placement.lines())
    placement = built(line).placement
    monkeypatch.setattr(Setup, "device", torch.device("cuda"))
    norms = sum(isinstance(module, torch.nn.BatchNorm2d) for module in placement.network.model.modules())
    assert f"norms: {norms} of {norms} fused with what follows them" in placement.lines()
