"""What processes do together, checked against what one does alone: for `falconet doctor --distributed`."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from falconet.checkpoint.state import TrainState
from falconet.commands import selftest_stages
from falconet.config.options import Optimizer
from falconet.errors import CheckpointError, DeviceError
from falconet.optim.optimizers import build_optimizer, set_lr
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.data_parallel import Replicas, digest
from falconet.parallel.grid import divide
from falconet.parallel.world import World
from falconet.parallel.zero import ShardedReplicas
from falconet.train.build import build_replicas, checkpoint_writer, sharded_step

IMAGES, SIZE = 4, 8  # a replica's micro-batch
TOLERANCE = 1e-4  # relative; TF32 and other orders of summation stay well below, a wrong sum does not
SAVING = 60.0  # seconds to wait for another process's part of a tiny checkpoint
MESSAGE = 64 << 20  # bytes of the message that is timed


class Finding(NamedTuple):
    """One check: what was checked, whether it held, and a few words."""

    name: str
    held: bool
    words: str


def findings(world: World) -> Iterator[Finding]:
    """Every check in turn; all processes go through all of them, whatever each finds."""
    for name, check in CHECKS.items():
        world.at(name)
        begun = time.perf_counter()
        held, words = check(world)
        everywhere = bool(world.sum(torch.tensor(int(held))) == world.size)
        yield Finding(name, everywhere, words or f"{1000 * (time.perf_counter() - begun):.0f} ms")


def _collectives(world: World) -> tuple[bool, str]:
    own = torch.tensor([1.0, world.rank], device=world.device)
    sums, largest, first = world.sum(own).tolist(), world.max(own).tolist(), world.broadcast(own).tolist()
    held = sums == [world.size, sum(range(world.size))] and largest == [1, world.size - 1] and first == [1, 0]
    return held and world.once(lambda: str(world.rank)) == "0", ""


def _vote(world: World) -> tuple[bool, str]:
    vote = world.vote()
    answers = [vote(world.rank == world.size - 1 and turn == 1) for turn in range(4)]
    return any(answers) and not answers[0], ""


def _message(world: World) -> tuple[bool, str]:
    values = torch.ones(MESSAGE // 4, device=world.device)
    world.sum(values)  # the first one also opens connections
    begun = time.perf_counter()
    total = world.sum(values)
    held = float(total[-1]) == world.size  # reads a number, so waits for the device
    seconds = time.perf_counter() - begun
    return held, f"{MESSAGE >> 20} MB summed over {world.size} processes in {1000 * seconds:.0f} ms"


def _replicas(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.GroupNorm(2, 8), span=1, sharded=False)


def _batchnorm(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.BatchNorm2d(8), span=world.size, sharded=False)


def _sharded(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.GroupNorm(2, 8), span=1, sharded=True)


def _same_update(world: World, *, norm: nn.Module, span: int, sharded: bool) -> tuple[bool, str]:
    """Two updates of all processes together, and of this one alone on all of their images."""
    alone, together = _network(norm).to(world.device), _network(norm).to(world.device)
    span_batchnorm(together, divide(world, stages=1), span=span)
    exchange = build_replicas(together, world, bucket=0.001, sharded=sharded)
    _update(_state(alone, None, world), _images(world, everyone=True))
    _update(_state(together, exchange, world), _images(world, everyone=False), exchange)
    error = max(_relative(a, b) for a, b in zip(together.parameters(), alone.parameters(), strict=True))
    world.agree("the weights after an update", digest(together))
    return error < TOLERANCE, f"off by {error:.1e}"


def _checkpoint(world: World) -> tuple[bool, str]:
    """Divided state, written by each process, read by each, from a folder that all must see."""
    folder = Path(world.once(_shared_folder)) / "checkpoint"
    first, second = _network(nn.GroupNorm(2, 8)).to(world.device), _network(nn.GroupNorm(2, 8)).to(world.device)
    exchange = build_replicas(first, world, bucket=0.001, sharded=True)
    state = _state(first, exchange, world)
    _update(state, _images(world, everyone=False), exchange)
    try:
        content = {"model": "doctor", "classes": 3, "progress": {"epoch": 0, "images": 0, "update": 2}}
        problem = ""
        try:
            _save(state, folder, content, world)
        except CheckpointError as error:
            problem = str(error)
        if world.max(torch.tensor(int(bool(problem)))):  # also waits until it is there
            return False, problem or "another process could not save"
        other = build_replicas(second, world, bucket=0.001, sharded=True)
        again = _state(second, other, world)
        try:
            again.load(folder, name="doctor")
        except CheckpointError as error:
            problem = str(error)
        if world.max(torch.tensor(int(bool(problem)))):  # all go on together, or none
            return False, problem or "another process could not load"
        # One more update of both: a momentum that came back wrong would show in the weights.
        _update(state, _images(world, everyone=False), exchange)
        _update(again, _images(world, everyone=False), other)
        return digest(first) == digest(second), ""
    finally:
        if world.is_first:
            for path in (*folder.glob("*"), folder, folder.parent):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def _shared_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="falconet-doctor-", dir=Path.cwd())
    except OSError as error:
        raise DeviceError(f"--distributed: cannot write to {Path.cwd()}: {error.strerror or error}") from error


def _network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    fresh = type(norm)(2, 8) if isinstance(norm, nn.GroupNorm) else type(norm)(8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), fresh, nn.ReLU(), nn.Flatten(), nn.Linear(8 * (SIZE - 2) ** 2, 3))


def _state(model: nn.Module, exchange: Replicas | None, world: World) -> TrainState:
    shards = exchange if isinstance(exchange, ShardedReplicas) else None
    optimizer = build_optimizer(shards.trained if shards else model, Optimizer())
    return TrainState(model, optimizer, shards=shards, rank=world.rank, copies=world.size)


def _save(state: TrainState, folder: Path, content: dict[str, object], world: World) -> None:
    with checkpoint_writer(world, timeout=SAVING) as writer:
        writer.save_state(folder, state, content)


def _update(state: TrainState, images: Tensor, exchange: Replicas | None = None) -> None:
    set_lr(state.optimizer, 0.1)
    for _ in range(2):
        state.optimizer.zero_grad()
        for batch in exchange.announced([images]) if exchange else [images]:
            state.model(batch).square().mean().backward()
        if exchange:
            exchange.average()
        sharded_step(state.optimizer, exchange if isinstance(exchange, ShardedReplicas) else None)()


def _images(world: World, *, everyone: bool) -> Tensor:
    torch.manual_seed(1)
    images = torch.randn(world.size * IMAGES, 3, SIZE, SIZE).to(world.device)
    return images if everyone else images[world.rank * IMAGES : (world.rank + 1) * IMAGES]


@torch.no_grad()
def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


CHECKS: dict[str, Callable[[World], tuple[bool, str]]] = {
    "sum, largest, broadcast": _collectives,
    "vote": _vote,
    "gradients averaged over replicas": _replicas,
    "batch norm over all replicas": _batchnorm,
    "optimizer state divided over replicas": _sharded,
    "checkpoint of divided state": _checkpoint,
    "pipeline, grouped": selftest_stages.check("grouped"),
    "pipeline, interleaved": selftest_stages.check("interleaved"),
    "pipeline, sequential": selftest_stages.check("sequential"),
    "a large message": _message,
}
