"""Checks that compare several processes with one, for `falconet doctor --distributed`."""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from falconet.checkpoint.state import TrainState
from falconet.config.options import Optimizer
from falconet.data.buffers import Batch
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing
from falconet.errors import CheckpointError, DeviceError
from falconet.evaluation.evaluate import evaluate
from falconet.evaluation.loss import Loss
from falconet.models import splits
from falconet.models.fused.fusion import fuse
from falconet.numerics.precision import REGIMES
from falconet.optim.optimizers import build_optimizer, set_lr
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.collectives import Processes
from falconet.parallel.data_parallel import Replicas, digest
from falconet.parallel.grid import Grid, divide
from falconet.parallel.pipeline import Kind, StagePlace
from falconet.parallel.world import World
from falconet.parallel.zero import ShardedReplicas
from falconet.train.build import build_replicas, checkpoint_writer
from falconet.train.capture import WARM, CapturedStep
from falconet.train.pipeline_step import Feeding, Forward, PipelinedStep, boundaries, evaluate_stages
from falconet.train.placement import sharded_step
from falconet.train.step import LocalStep, Moving, PlainMove

IMAGES, SIZE, CLASSES = 4, 8, 3  # of a micro-batch
TOLERANCE = 1e-4  # relative; TF32 and the order of summation stay well below, a wrong sum does not
SAVING = 60.0  # seconds to wait for another process's part of a tiny checkpoint
REGIME = REGIMES["32.32"]
MESSAGE = 64 << 20  # bytes of the timed message


Check = Callable[[World], tuple[bool, str]]


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    held: bool
    words: str


def findings(world: World) -> Iterator[Finding]:
    """The results of all checks; each process runs every one, whatever it finds."""
    for name, check in CHECKS.items():
        world.at(name)
        start = time.perf_counter()
        held, words = check(world)
        everywhere = bool(world.sum(torch.tensor(int(held))) == world.size)
        yield Finding(name, everywhere, words or f"{1000 * (time.perf_counter() - start):.0f} ms")


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
    world.sum(values)  # the first sum also opens connections
    start = time.perf_counter()
    total = world.sum(values)
    held = float(total[-1]) == world.size  # reading a number waits for the device
    seconds = time.perf_counter() - start
    return held, f"{MESSAGE >> 20} MB summed over {world.size} processes in {1000 * seconds:.0f} ms"


def _replicas(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.GroupNorm(2, 8), span=1, sharded=False)


def _batchnorm(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.BatchNorm2d(8), span=world.size, sharded=False)


def _sharded(world: World) -> tuple[bool, str]:
    return _same_update(world, norm=nn.GroupNorm(2, 8), span=1, sharded=True)


def _same_update(world: World, *, norm: nn.Module, span: int, sharded: bool) -> tuple[bool, str]:
    """Compare two updates of all processes together with those of this one alone on all of their images."""
    alone, together = _network(norm).to(world.device), _network(norm).to(world.device)
    span_batchnorm(together, divide(world, stages=1), span=span)
    exchange = build_replicas(together, world, bucket=0.001, sharded=sharded)
    _update(_state(alone, None, world), _images(world, everyone=True))
    _update(_state(together, exchange, world), _images(world, everyone=False), exchange)
    error = max(_relative(a, b) for a, b in zip(together.parameters(), alone.parameters(), strict=True))
    world.agree("the weights after an update", digest(together))
    return error < TOLERANCE, f"off by {error:.1e}"


def _captured(world: World) -> tuple[bool, str]:
    """Compare replayed updates with others; the words say whether they could be captured."""
    if world.device.type != "cuda":
        return True, "on CUDA only"
    plain, notes = _local_step(world), list[str]()
    own = _local_step(world)
    captured = CapturedStep(own, world, note=notes.append)
    batches = [_micro_batches(world.size, world.device)[world.rank]]
    for update in range(WARM + 3):
        plain(batches, update=update, lr=0.1)
        captured(batches, update=update, lr=0.1)
    pairs = zip(own.moving.model.parameters(), plain.moving.model.parameters(), strict=True)
    error = max(_relative(found, expected) for found, expected in pairs)
    world.agree("the weights after captured updates", digest(own.moving.model))
    return error < TOLERANCE, notes[0] if notes else f"off by {error:.1e}"


def _local_step(world: World) -> LocalStep:
    model = _network(nn.BatchNorm2d(8)).to(world.device)
    moving = Moving(
        model=model,
        move=PlainMove(build_optimizer(model, Optimizer()), device=world.device),
        replicas=build_replicas(model, world, bucket=0.001, sharded=False),
    )
    return LocalStep(moving, normalise=_normalise(world.device), loss=Loss(CLASSES), regime=REGIME)


def _checkpoint(world: World) -> tuple[bool, str]:
    """Write sharded state from every process and read it back, in a folder that all must share."""
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
        if world.max(torch.tensor(int(bool(problem)))):  # also waits for the files
            return False, problem or "another process could not save"
        other = build_replicas(second, world, bucket=0.001, sharded=True)
        again = _state(second, other, world)
        try:
            again.load(folder, name="doctor")
        except CheckpointError as error:
            problem = str(error)
        if world.max(torch.tensor(int(bool(problem)))):  # all continue together, or none
            return False, problem or "another process could not load"
        # One more update of both: a wrong momentum would show in the weights.
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
    forward = fuse(state.model).model  # as it is trained
    for _ in range(2):
        state.optimizer.zero_grad()
        for batch in exchange.announced([images]) if exchange else [images]:
            forward(batch).square().mean().backward()
        if exchange:
            exchange.average()
        sharded_step(state.optimizer, exchange if isinstance(exchange, ShardedReplicas) else None)()


def _images(world: World, *, everyone: bool) -> Tensor:
    torch.manual_seed(1)
    images = torch.randn(world.size * IMAGES, 3, SIZE, SIZE).to(world.device, memory_format=torch.channels_last)
    return images if everyone else images[world.rank * IMAGES : (world.rank + 1) * IMAGES]


def _pipeline(kind: Kind) -> Check:
    """A check of two updates and an evaluation with one schedule, a stage per process."""

    def check(world: World) -> tuple[bool, str]:
        if world.size == 1:
            return True, "one process has no stages"
        return _compared(divide(world, stages=world.size), kind)

    return check


def _compared(grid: Grid, kind: Kind) -> tuple[bool, str]:
    world, device = grid.world, grid.world.device
    whole = _stage_network(world.size)
    stages = splits.split(copy.deepcopy(whole), [str(number) for number in range(1, world.size)])
    forward = Forward(
        feeding=Feeding(micro_batch=IMAGES, accumulation=world.size + 1, image_size=SIZE, mixes=False),
        normalise=_normalise(device),
        regime=REGIME,
        device=device,
    )
    inner = boundaries(
        [s.module for s in stages], forward=forward, prepare=lambda module: copy.deepcopy(module).to(device)
    )
    edges = [[], *inner, [torch.empty(IMAGES, CLASSES, device="meta")]]
    assert isinstance(grid.stages, Processes)
    place = StagePlace(world=grid.stages, entering=edges[world.rank], leaving=edges[world.rank + 1])
    own, alone = stages[world.rank].module.to(device), whole.to(device)
    batches = _micro_batches(world.size + 1, device)

    step = PipelinedStep(_moving(own, device), place, forward=forward, loss=Loss(CLASSES), kind=kind)
    local = LocalStep(_moving(alone, device), normalise=_normalise(device), loss=Loss(CLASSES), regime=REGIME)
    for update in range(2):
        found = step(batches if grid.is_first_stage else [], update=update, lr=0.1)
        expected = local(batches, update=update, lr=0.1)
    losses = world.sum(found.loss.double()), expected.loss.double()
    measured = evaluate_stages(own, batches, place, forward=forward, grid=grid)
    once = evaluate(alone, batches, normalise=_normalise(device), regime=REGIME, world=World(device=device))

    kept = alone.state_dict()
    error = max(_relative(tensor, kept[name]) for name, tensor in own.state_dict().items())
    error = max(error, _relative(*losses))
    counted = (measured.images, measured.top1) == (once.images, once.top1)
    return error < TOLERANCE and counted, f"{world.size} stages, off by {error:.1e}"


def _stage_network(blocks: int) -> nn.Module:
    """One block per stage; batch norm in each would show misplaced activations."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(blocks)]
    layers[-1].append(nn.Flatten()).append(nn.Linear(3 * SIZE * SIZE, CLASSES))
    return nn.Sequential(*layers)


def _moving(model: nn.Module, device: torch.device) -> Moving:
    return Moving(model=model, move=PlainMove(build_optimizer(model, Optimizer()), device=device))


def _normalise(device: torch.device) -> Normalise:
    return Normalise(Preprocessing(image_size=SIZE, resize=SIZE, mean=IMAGENET_MEAN, std=IMAGENET_STD)).to(device)


def _micro_batches(count: int, device: torch.device) -> list[Batch]:
    torch.manual_seed(1)
    images = torch.randint(0, 256, (count, IMAGES, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count, IMAGES))
    return [Batch(*pair, None) for pair in zip(images.to(device), labels.to(device), strict=True)]


@torch.no_grad()
def _relative(found: Tensor, expected: Tensor) -> float:
    reference = expected.double().cpu()
    return float((found.double().cpu() - reference).norm() / reference.norm().clamp_min(1e-12))


CHECKS: dict[str, Check] = {
    "sum, max, broadcast": _collectives,
    "vote": _vote,
    "gradients averaged over replicas": _replicas,
    "batch norm over all replicas": _batchnorm,
    "optimizer state sharded over replicas": _sharded,
    "updates captured as CUDA graphs": _captured,
    "checkpoint of sharded state": _checkpoint,
    "pipeline, grouped": _pipeline("grouped"),
    "pipeline, interleaved": _pipeline("interleaved"),
    "pipeline, sequential": _pipeline("sequential"),
    "a large message": _message,
}
