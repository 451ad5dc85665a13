"""Replicas with whole or divided optimizer state, as the options ask."""

from torch import nn
from torch.optim import Optimizer

from falconet.optim.lars import Lars
from falconet.parallel.processes import Processes
from falconet.parallel.replicas import AveragedReplicas, OneReplica, Replicas
from falconet.parallel.sharding import ShardedReplicas
from falconet.parallel.world import World


def replicas(model: nn.Module, world: World, *, bucket: float, sharded: bool) -> Replicas:
    """The replicas of `model` in `world`; a world of one has nothing to divide. `bucket`: megabytes."""
    if not isinstance(world, Processes):
        return OneReplica()
    return (ShardedReplicas if sharded else AveragedReplicas)(model, world, bucket_megabytes=bucket)


def attach(shards: ShardedReplicas, optimizer: Optimizer) -> None:
    """Let the optimizer's updates reach the other processes; a rule that goes layer by layer needs whole norms."""
    shards.attach(optimizer)
    if isinstance(optimizer, Lars):
        optimizer.norms = shards.norms
