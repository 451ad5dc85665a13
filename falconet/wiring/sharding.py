"""Where optimizer state lies, and who saves what of it, as the options ask."""

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer

from falconet.checkpoint import disk
from falconet.checkpoint.writer import Company, SharedWriter, Writer
from falconet.config import sections
from falconet.errors import ConfigError
from falconet.numerics.rounding import Part
from falconet.optim.build import decay_groups
from falconet.optim.half import HalfLars, HalfOptimizer
from falconet.optim.lars import Lars
from falconet.optim.offload import HostedState
from falconet.parallel.processes import Processes
from falconet.parallel.replicas import AveragedReplicas, OneReplica, Replicas
from falconet.parallel.sharding import Piece, ShardedReplicas
from falconet.parallel.slices import is_channels_last
from falconet.parallel.world import World


def replicas(model: nn.Module, world: World, *, bucket: float, sharded: bool) -> Replicas:
    """The replicas of `model` in `world`; a world of one has nothing to divide. `bucket`: megabytes."""
    if not isinstance(world, Processes):
        return OneReplica()
    return (ShardedReplicas if sharded else AveragedReplicas)(model, world, bucket_megabytes=bucket)


def describe(parallel: sections.Parallel, world: World, *, replicas: int) -> str:
    """Where the optimizer's state lies, in words for the plan; nothing where nobody asked. `replicas`: that run."""
    words = ""
    if parallel.enable_optimizer_rts and replicas > 1:
        words += ", state divided over the replicas"
    if not parallel.offload_optimizer:
        return words
    if world.device.type == "cpu":
        return f"{words}, state in host memory (which it is on a CPU anyway: --offload-optimizer has no effect)"
    return f"{words}, state in host memory, on the device bucket by bucket"


def writer(world: World, *, timeout: float) -> Writer:
    """One process writes whole tensors, several write their shares of them. `timeout`: seconds."""
    if world.size == 1:
        return Writer()
    return SharedWriter(Company(rank=world.rank, size=world.size, token=world.once(disk.token), timeout=timeout))


def attach(
    optimizer: Optimizer, model: nn.Module, *, shards: ShardedReplicas | None, numbers: Mapping[str, int] | None = None
) -> None:
    """Tell the optimizer that it has pieces: rules that go layer by layer need whole norms, noise the whole's numbers.

    `numbers`: those of the weights in the whole model, where `model` is a stage of it. That updates reach the other
    processes is `step`'s business.
    """
    if shards and isinstance(optimizer, Lars | HalfLars):
        optimizer.norms = shards.norms
        adapting = {p for group in optimizer.param_groups if group["adapts"] for p in group["params"]}
        shards.adapting = [piece for piece in shards.pieces if piece.weights in adapting]
    if isinstance(optimizer, HalfOptimizer):
        numbers = numbers or numbered(model)
        whole = {p: Part(numbers[name]) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.parts = (
            {piece.weights: _part(piece, whole[piece.whole]) for piece in shards.pieces}  # type: ignore[index]
            if shards
            else whole
        )


def require_one_type(model: nn.Module, undecayed: frozenset[str] | None) -> None:
    """Of divided weights that lars scales: their norms are summed in one message, and norm layers' weights are fp32."""
    if len({p.dtype for p in decay_groups(model, undecayed)[0]}) > 1:
        raise ConfigError(
            "--lars-skip: leaves weights of two number formats to lars, which --enable-optimizer-rts cannot divide;"
            " wanted patterns that match the weights of all norm layers"
        )


def numbered(model: nn.Module) -> dict[str, int]:
    """The number of each trained weight in the update rule's order."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: number for number, p in enumerate(p for group in decay_groups(model) for p in group)}


def step(optimizer: Optimizer, shards: ShardedReplicas | None, hosted: HostedState | None = None) -> Callable[[], None]:
    """One update of all weights: those of this process, wherever their state lies, and then the others'."""
    own = hosted.step if hosted else optimizer.step

    def moved() -> None:
        own()
        if shards:
            shards.share_weights()

    return moved


def _part(piece: Piece, whole: Part) -> Part:
    """The rounding's numbers of a piece, from those of its whole."""
    if not is_channels_last(piece.whole):
        return whole._replace(first=piece.begin)
    _, channels, height, width = piece.whole.shape
    return whole._replace(first=piece.begin, channels=channels, pixels=height * width)
