"""The seeds of dropout in replicas and stages."""

from types import SimpleNamespace

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.options import Parallel, Run
from falconet.train.setup import Setup


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
