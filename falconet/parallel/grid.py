"""Replicas x stages: which stage of which replica each process runs. Rank = replica * stages + stage."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from falconet.parallel.collectives import Processes
from falconet.parallel.world import World


@dataclass(frozen=True)
class Grid:
    """The world, and the two smaller worlds that this process belongs to."""

    world: World
    replicas: World  # the processes with this stage; ranked by replica
    stages: World  # the processes of this replica; ranked by stage

    @property
    def is_first_stage(self) -> bool:
        return self.stages.rank == 0

    def spans(self, span: int) -> list[list[int]]:
        """The groups of `span` neighbouring replicas for every stage, by world rank, in the same order everywhere."""
        stages, replicas = self.stages.size, self.replicas.size
        return [
            [replica * stages + stage for replica in range(begin, begin + span)]
            for stage in range(stages)
            for begin in range(0, replicas, span)
        ]


def divide(world: World, *, stages: int) -> Grid:
    """Divide a world into replicas of `stages` processes each."""
    alone = World(device=world.device)
    if stages == 1:
        return Grid(world, world, alone)
    assert isinstance(world, Processes), "stages are processes"
    assert world.size % stages == 0, "a replica with fewer stages than the others"
    count = world.size // stages
    rows = [[replica * stages + stage for stage in range(stages)] for replica in range(count)]
    columns = [[replica * stages + stage for replica in range(count)] for stage in range(stages)]
    replica, stage = divmod(world.rank, stages)
    # Every process must create every group, in the same order.
    own_stages = [_part(world, ranks) for ranks in rows][replica]
    own_replicas = [_part(world, ranks) for ranks in columns][stage]
    return Grid(world, own_replicas if count > 1 else alone, own_stages)


def _part(world: Processes, ranks: list[int]) -> Processes:
    """A world of some of the processes."""
    wait = timedelta(seconds=world.timeout)
    # Created by its members only: in torch 2.11 the others would split NCCL's communicator for it and hang.
    host = dist.new_group(ranks, backend="gloo", timeout=wait, use_local_synchronization=True)
    group = dist.new_group(ranks, timeout=wait)
    own = ranks.index(world.rank) if world.rank in ranks else -1
    return replace(world, rank=own, size=len(ranks), host=host, group=group)  # type: ignore[arg-type]


class Stages(Protocol):
    """The interface that says which tensors of the model belong to this process."""

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the whole model that this process needs."""

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of this process that no other stage saves."""


class OneStage:
    """The only stage: this process has the whole model."""

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors


class SeveralStages:
    """One of several stages; tensors named `parameter` or `slot/parameter` belong to stages, others to all."""

    def __init__(self, grid: Grid, *, own: Collection[str], every: Collection[str]) -> None:
        """`own`, `every`: the names in the state of this stage, and of all stages."""
        self._own, self._others, self._is_first = set(own), set(every) - set(own), grid.is_first_stage

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t for name, t in tensors.items() if _weight(name) not in self._others}

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t for name, t in tensors.items() if self._is_first or _weight(name) in self._own}


def _weight(name: str) -> str:
    """The parameter's name; in sharded state, bars stand for dots."""
    return name.rpartition("/")[2].replace("|", ".")
