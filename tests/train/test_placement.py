"""What a process is made from: the seed of what it drops."""

from types import SimpleNamespace

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.options import Parallel, Run
from falconet.train.placement import Setup


def seed(replica: int, stage: int, *, alike: bool) -> int:
    """Of one process of replicas of two stages."""
    grid = SimpleNamespace(world=SimpleNamespace(rank=2 * replica + stage), stages=SimpleNamespace(rank=stage))
    options = TrainOptions(run=Run(seed=7), parallel=Parallel(identical_replica_seeding=alike))
    return Setup(options=options, images=None, shape=None, grid=grid, regime=None, note=print).seed


def test_every_process_drops_other_units():
    assert len({seed(replica, stage, alike=False) for replica in range(3) for stage in range(2)}) == 6


@pytest.mark.parametrize("replica", [1, 2])
def test_seeded_alike_every_replica_drops_the_same_and_every_stage_others(replica):
    assert seed(replica, 0, alike=True) == seed(0, 0, alike=True) == seed(0, 0, alike=False)
    assert seed(replica, 1, alike=True) == seed(0, 1, alike=True) != seed(0, 0, alike=True)
