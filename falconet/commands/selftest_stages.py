"""A pipeline with a stage for each process, checked against one process: for `falconet doctor --distributed`."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from falconet.config.options import Optimizer
from falconet.data.buffers import Batch
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocessing
from falconet.models import splits
from falconet.numerics.precision import REGIMES
from falconet.optim.optimizers import build_optimizer
from falconet.parallel.collectives import Processes
from falconet.parallel.grid import Grid, divide
from falconet.parallel.pipeline import Kind, Place
from falconet.parallel.world import World
from falconet.train.evaluate import evaluate
from falconet.train.pipeline_step import Feeding, Forward, PipelinedStep, boundaries, evaluate_stages
from falconet.train.step import LocalStep, Loss, Moving, PlainMove

IMAGES, SIZE, CLASSES = 4, 8, 3
TOLERANCE = 1e-4  # relative
REGIME = REGIMES["32.32"]
Check = Callable[[World], tuple[bool, str]]


def check(kind: Kind) -> Check:
    """Two updates and an evaluation by one schedule."""

    def pipeline(world: World) -> tuple[bool, str]:
        if world.size == 1:
            return True, "one process has nothing to pass on"
        return _compared(divide(world, stages=world.size), kind)

    return pipeline


def _compared(grid: Grid, kind: Kind) -> tuple[bool, str]:
    world, device = grid.world, grid.world.device
    whole = _network(world.size)
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
    place = Place(world=grid.stages, entering=edges[world.rank], leaving=edges[world.rank + 1])
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


def _network(blocks: int) -> nn.Module:
    """A block a stage; batch norm in each shows activations that went astray."""
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
    wanted = expected.double().cpu()
    return float((found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-12))
