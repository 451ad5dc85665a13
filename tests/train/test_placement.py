"""How a model is placed: the seeds of dropout in replicas and stages, and what the plan says of fused norms."""

from types import SimpleNamespace

import pytest
import torch

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.options import Model, Parallel, Run
from falconet.config.settings import from_line
from falconet.data.loader import BatchShape
from falconet.numerics.precision import REGIMES
from falconet.train import build
from falconet.train.placement import Setup, WholeModel
from falconet.train.preparation import prepare
from tiny import TINY


def seed(replica: int, stage: int, *, alike: bool) -> int:
    """The seed in one process of replicas with two stages each."""
    grid = SimpleNamespace(world=SimpleNamespace(rank=2 * replica + stage), stages=SimpleNamespace(rank=stage))
    options = TrainOptions(run=Run(seed=7), parallel=Parallel(identical_replica_seeding=alike))
    return Setup(options=options, images=None, shape=None, grid=grid, regime=None, note=print).seed


def test_every_process_drops_different_units():
    assert len({seed(replica, stage, alike=False) for replica in range(3) for stage in range(2)}) == 6


@pytest.mark.parametrize("replica", [1, 2])
def test_with_identical_seeding_replicas_drop_the_same_and_stages_different_units(replica):
    assert seed(replica, 0, alike=True) == seed(0, 0, alike=True) == seed(0, 0, alike=False)
    assert seed(replica, 1, alike=True) == seed(0, 1, alike=True) != seed(0, 0, alike=True)


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
    monkeypatch.setattr("falconet.models.fusion.can_fuse", lambda _: False)
    assert plan_lines() == ["norms: none of 7 fused with what follows them"]
    assert plan_lines(norm_type="none") == []


@pytest.mark.parametrize("recompute", ["", "--enable-recompute"])
def test_plan_counts_fused_norms_of_recomputed_segments_too(recompute, monkeypatch):
    line = f"{TINY} --device cpu {recompute}"
    launch = prepare(load(TrainOptions, from_line(line.split(), options_of(TrainOptions))))
    placement = build.BuiltPhase(launch, build.open_site(launch)).placement
    assert not any("fused" in words for words in placement.lines())
    placement = build.BuiltPhase(launch, build.open_site(launch)).placement
    monkeypatch.setattr(Setup, "device", torch.device("cuda"))
    norms = sum(isinstance(module, torch.nn.BatchNorm2d) for module in placement._model[0].modules())
    assert f"norms: {norms} of {norms} fused with what follows them" in placement.lines()
