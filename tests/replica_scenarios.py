"""What the processes in tests/parallel run; in a module, because they are started elsewhere and import it."""

import contextlib
import copy
import io
import math
import os
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

import gloo
from falconet import cli
from falconet.checkpoint import format
from falconet.checkpoint.state import TrainState
from falconet.commands import validate
from falconet.config.options import Optimizer
from falconet.data.buffers import Batch, PixelRows
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader, Resources
from falconet.data.measure import Pipeline, passes
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.data.storage import ArraySource
from falconet.doctor import selftest
from falconet.errors import DataError
from falconet.evaluation.evaluate import evaluate
from falconet.evaluation.loss import Loss
from falconet.models import zoo
from falconet.numerics.loss_scale import AutomaticScale, FixedScale, Offender
from falconet.numerics.precision import REGIMES
from falconet.numerics.rounding import Rounding
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import Treatment, build_optimizer, build_scaled_optimizer
from falconet.parallel import collectives
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.data_parallel import digest
from falconet.parallel.grid import divide
from falconet.parallel.world import World
from falconet.parallel.zero import ShardedReplicas
from falconet.train.build import attach_pieces, build_replicas, checkpoint_writer
from falconet.train.placement import sharded_step
from falconet.train.step import Elsewhere, LocalStep, Moving, PlainMove, ScaledMove

CLASSES, GLOBAL, UPDATES = 4, 24, 3
PREPROCESSING = Preprocessing(image_size=8, resize=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def model_of(kind):
    if kind == "group":
        return zoo.build("resnet8-cifar", classes=CLASSES, seed=0, norm_type="group", norm_num_groups=4)
    if kind == "batch":
        return zoo.build("resnet8-cifar", classes=CLASSES, seed=0)
    if kind == "unused":  # a parameter that has no part in the loss
        model = model_of("group")
        model.register_parameter("idle", nn.Parameter(torch.ones(3)))
        return model
    raise AssertionError(kind)


def images(seed):
    noise = np.random.default_rng(seed)
    pixels = torch.from_numpy(noise.integers(0, 256, (GLOBAL, 8, 8, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
    return Batch(pixels, torch.from_numpy(noise.integers(0, CLASSES, GLOBAL)), None)


def own_part(batch, world, accumulation):
    """This replica's micro-batches."""
    size = GLOBAL // world.size // accumulation
    parts = [Batch(*part, None) for part in zip(batch.images.split(size), batch.labels.split(size), strict=True)]
    return parts[world.rank * accumulation : (world.rank + 1) * accumulation]


RATES = {"adamw": 0.001, "rmsprop_tf": 0.005, "lars": 1.0}  # as used in practice; 0.05 for the others


def train(world, kind, rule, accumulation=1, bucket=0.05, updates=UPDATES):
    """The state after some updates on the same global batches, and the mean loss of each."""
    model = model_of(kind)
    step = stepper(model, rule, build_replicas(model, world, bucket=bucket, sharded=False))
    losses = []
    for update in range(updates):
        found = step(own_part(images(update), world, accumulation), update=update, lr=RATES.get(rule, 0.05))
        losses.append((world.sum(found.loss) / world.size).item())
    return {name: t.detach().clone().numpy() for name, t in model.state_dict().items()}, losses, digest(model)


def spanning(world, name, span, updates=2):
    """The state after some updates of a model whose batch norm spans replicas."""
    model = zoo.build(name, classes=CLASSES, seed=0).float()
    span_batchnorm(model, divide(world, stages=1), span=span)
    copied = copy.deepcopy(model)
    step = stepper(model, "sgd", build_replicas(model, world, bucket=0.05, sharded=False))
    for update in range(updates):
        step(own_part(images(update), world, 1), update=update, lr=0.05)
    return {name: t.numpy() for name, t in model.state_dict().items()}, digest(model), type(copied).__name__


def one_layer(world, span, kind):
    """Output, gradients and statistics of one layer on this replica's part of a batch."""
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(5) if kind == "plain" else BatchNormAct2d(5)
    layer.momentum = None if kind == "cumulative" else 0.1
    nn.init.uniform_(layer.weight, 0.5, 2)
    nn.init.uniform_(layer.bias, -1, 1)
    whole = torch.randn(8, 5, 3, 3) * 3 + 100
    weights = torch.randn(8, 5, 3, 3)
    span_batchnorm(layer_in(layer), divide(world, stages=1), span=span)
    part = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
    x = whole[part].clone().requires_grad_()
    out = layer(x)
    (out * weights[part]).sum().backward()
    grads = [world.sum(layer.weight.grad), world.sum(layer.bias.grad)]
    return [t.detach().numpy() for t in (out, x.grad, *grads, layer.running_mean, layer.running_var)]


def groups_made(world, stages, span):
    """The ranks of every group that this process creates, in order, and of the one it uses."""
    grid, made, plain = divide(world, stages=stages), [], dist.new_group
    dist.new_group = lambda ranks, **kept: made.append(ranks) or plain(ranks, **kept)
    layer = nn.BatchNorm2d(5) if grid.stages.rank == 0 else nn.Identity()  # a stage may have no batch norm at all
    span_batchnorm(layer_in(layer), grid, span=span)
    return made, dist.get_process_group_ranks(layer.span.group) if hasattr(layer, "span") else None


def layer_in(layer):
    return nn.Sequential(layer)


def late(world, timeout):
    """The second process misses a barrier; the short timeout only starts once both have met."""
    world = replace(world, host=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)), timeout=timeout)
    collectives.SILENCE, collectives.PATIENCE = 6.0, 60.0  # seconds; longer, for a busy machine
    world.at("update 7")
    if world.rank == 1:
        world.at("update 6, reading images")
        time.sleep(gloo.LIMIT)
    world.barrier("waiting for everybody")


def stepper(model, rule, exchange, optimizer=None):
    optimizer = optimizer or build_optimizer(model, Optimizer(optimizer=rule, weight_decay=1e-3, optimizer_eps=1e-3))
    return LocalStep(
        Moving(model=model, move=PlainMove(optimizer, device=torch.device("cpu")), replicas=exchange),
        normalise=Normalise(PREPROCESSING),
        loss=Loss(CLASSES, 0.1),
        regime=REGIMES["32.32"],
    )


class Case(NamedTuple):
    """A run to compare; `scale` is None for automatic, 0 for none."""

    rule: str = "sgd"
    regime: str = "32.32"
    sharded: bool = False
    stochastic: bool = False
    scale: float | None = 0.0
    accumulation: int = 1
    bucket: float = 0.05
    kind: str = "group"
    spoiled: int | None = None  # update whose gradient is not finite, on the last replica only
    offloaded: bool = False
    decays_all: bool = False  # vectors too, so that LARS adapts their rates


def build_case(world, case):
    """The state of a case before its first update, and its step."""
    model = REGIMES[case.regime].prepare(model_of(case.kind), world.device).to(memory_format=torch.channels_last)
    exchange = build_replicas(model, world, bucket=case.bucket, sharded=case.sharded)
    shards = exchange if isinstance(exchange, ShardedReplicas) else None
    trained = shards.trained if shards else model
    spared = frozenset() if case.decays_all else None
    rule = Optimizer(optimizer=case.rule, weight_decay=1e-3, optimizer_eps=1e-3)
    scale = None
    if case.scale is None:
        kind = REGIMES[case.regime].compute
        scale = AutomaticScale(dtype=kind, device=world.device, initial=1024.0, period=2, sum=world.sum)
    elif case.scale:
        scale = FixedScale(case.scale, device=world.device)
    rounding = Rounding(7) if case.stochastic else None
    optimizer = (
        build_scaled_optimizer(trained, rule, rounding=rounding, treatment=Treatment(undecayed=spared))
        if scale
        else build_optimizer(trained, rule, treatment=Treatment(undecayed=spared))
    )
    state = TrainState(model, optimizer, scale=scale, shards=shards, rank=world.rank, copies=world.size)
    if shards:
        attach_pieces(optimizer, model, shards=shards)
    if case.offloaded:
        state.hosted = HostedState(optimizer, bucket_megabytes=case.bucket, device=world.device)
    moved = sharded_step(optimizer, shards, state.hosted)
    offender = Offender(world.device)
    move = (
        ScaledMove(model, optimizer, scale, offender=offender, step=moved, elsewhere=Elsewhere(shards=shards))
        if scale
        else PlainMove(optimizer, device=world.device, step=moved)
    )
    step = LocalStep(
        Moving(model=model, move=move, replicas=exchange),
        normalise=Normalise(PREPROCESSING),
        loss=Loss(CLASSES, 0.1),
        regime=REGIMES[case.regime],
    )
    return state, step, offender


def run_case(world, case, folder, updates=4):
    """Save after the first update and restore into another run; return the final states."""
    first = build_case(world, case)
    one_update(first, world, case, 0)
    save(world, first[0], Path(f"{folder}-first"))
    second = build_case(world, case)
    second[0].load(Path(f"{folder}-first"), name="m")
    for each in (first, second):
        for update in range(1, updates):
            one_update(each, world, case, update)
    assert digest(first[0].model) == digest(second[0].model), f"a restored run is another run: {case}"
    state, _, offender = first
    save(world, state, Path(folder))
    slots = [t for each in state.optimizer.state.values() for t in each.values()]
    return {
        "held": sum(t.numel() for t in slots if isinstance(t, torch.Tensor) and t.ndim),
        "digest": digest(state.model),
        "scales": state.scale.history[:updates].tolist() if state.scale else [],
        "skipped": int(state.scale.skipped) if state.scale else 0,
        "offender": offender.read([name for name, _ in state.model.named_parameters()]),
    }


def one_update(built, world, case, update):
    state, step, _ = built
    micro_batches = own_part(images(update), world, case.accumulation)
    if update == case.spoiled and world.rank == world.size - 1:
        hook = dict(state.model.named_parameters())["fc.bias"].register_hook(lambda grad: grad * math.inf)
        step(micro_batches, update=update, lr=0.05)
        hook.remove()
    else:
        step(micro_batches, update=update, lr=0.05)


def save(world, state, folder):
    content = {"model": "m", "classes": 4, "progress": {"epoch": 0, "images": 0, "update": 2}}
    with checkpoint_writer(world, timeout=30.0) as each:
        each.save_state(folder, state, content)
    world.barrier("saving")


def tensors(folder):
    """Every tensor of a checkpoint."""
    manifest = format.verify(Path(folder))
    return {
        f"{stem}:{name}": tensor
        for stem in manifest.stems
        for name, tensor in format.read_tensors(Path(folder), stem, verified=manifest).items()
    }


def furthest(found, expected):
    """The name and size of the largest difference between two states, relative to its tensor's largest value."""
    assert found.keys() == expected.keys()
    off = {}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if tensor.numel():
            size = tensor.double().abs().max().clamp(min=1e-6)
            off[name] = float((found[name].double() - tensor.double()).abs().max() / size)
    return max(off.items(), key=lambda item: item[1])


def run_cases(world, cases, home):
    return [run_case(world, case, f"{home}/{number}") for number, case in enumerate(cases)]


def messages(world, accumulation):
    """The messages of one update, and how many were sent before its last backward pass ended."""
    model = model_of("batch")
    exchange = build_replicas(model, world, bucket=0.05, sharded=False)
    sent, before = [], []
    real = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    average = exchange.average
    exchange.average = lambda: (before.append(len(sent)), average())
    dist.all_reduce = counted
    try:
        stepper(model, "sgd", exchange)(own_part(images(0), world, accumulation), update=0, lr=0.1)
    finally:
        dist.all_reduce = real
    return sent, before


def several(world, calls):
    """Several runs in one set of processes."""
    return [train(world, *call) for call in calls]


class Rows:
    """A reader whose image number i is filled with i."""

    size, rows = 8, 4

    def read(self, indices, *, epoch, out):
        out[:] = indices[:, None, None, None]
        return np.ones(len(indices), dtype=np.bool_)


def measure(world, count, batch):
    labels = np.arange(count) % CLASSES
    shape = BatchShape(micro_batch=batch, replicas=world.size, replica=world.rank)
    loader = EvaluationLoader(PixelRows(Rows()), labels=labels, shape=shape)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES))
    seen = [label for each in loader.batches() for label in each.labels.tolist()]
    found = evaluate(model, loader.batches(), normalise=Normalise(PREPROCESSING), regime=REGIMES["32.32"], world=world)
    return found, [label for label in seen if label >= 0]


def interfaces(world):
    return [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]


def reductions(world):
    values = torch.tensor([1.0, float(world.rank)])
    votes = world.vote()
    return {
        "sum": world.sum(values).tolist(),
        "max": world.max(values).tolist(),
        "broadcast": world.broadcast(values).tolist(),
        "own": values.tolist(),
        "once": world.once(lambda: f"made by {world.rank}"),
        "empty": world.once(lambda: ""),
        "no UTF-8": world.once(lambda: os.fsdecode(b"caf\xe9")),
        "votes": [votes(world.rank == 1 and turn == 2) for turn in range(5)],
    }


def doctor(world, folder):
    os.chdir(folder)
    return list(selftest.findings(world))


def mistaken(world, ranks):
    """An error that some of the processes raise; what each would print."""
    world.barrier("meeting")
    if len(ranks) == world.size:  # all raise it: wait for them, however slow they are
        collectives.SAYING = collectives.STAYING = float(gloo.LIMIT)
    if world.rank in ranks:
        raise DataError("the photo is torn")
    world.barrier("waiting for everybody")


def disagree(world):
    world.agree("the colour", "blue" if world.rank == 1 else "red")


def alone(scenario, *args):
    """In this process, with one thread like the others: the number of threads changes bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return scenario(World(device=torch.device("cpu")), *args)
    finally:
        torch.set_num_threads(threads)


def bad_images(world, allowed):
    """Each process finds one bad image that the others do not have, and one that all have; returns its notes."""
    notes = []
    bad = BadImages(allowed, note=notes.append, count=world.counter("bad images"))
    for name in (os.fsdecode(b"own-%d-caf\xe9.png" % world.rank), "shared.png"):
        bad.add(name, "truncated")
        world.barrier("the next image")
    return notes


def validated(world, line):
    """`falconet validate` as a launcher's process runs it: its exit code and output."""
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.size))
    real = validate.open_machine
    validate.open_machine = lambda *_, **__: contextlib.nullcontext(world)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main(["validate", *line.split()])
    finally:
        validate.open_machine = real
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    return code, out.getvalue(), err.getvalue()


def read(world, images):
    """A pass over data that the processes share: how many images each has read, and the rate of all."""
    source, seen = ArraySource(np.zeros((images, 4, 4, 3), np.uint8), np.zeros(images, np.int64), ("a",)), []

    class Slow:
        size, rows, dtype = 4, 1024, torch.uint8

        def read(self, indices, *, epoch, out):
            seen.extend(indices.tolist())
            time.sleep(0.2 * (world.rank + 1))
            return np.ones(len(indices), np.bool_)

    pipeline = Pipeline(
        source=source, reader=Slow(), resources=Resources(), micro_batch=64, training=False, world=world
    )
    (rate,) = passes(pipeline, 1)
    return sorted(seen), rate


def validated_apart(world):
    """Each process in a folder of its own, as if the hosts did not share one."""
    with tempfile.TemporaryDirectory() as home:
        saved = Path(home, "r", f"c{world.rank}")
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        return validated(world, f"{home}/r")
