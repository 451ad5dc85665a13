"""What the processes of tests/parallel/test_pipeline.py do: build a real run, without its launcher."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from falconet.checkpoint import format
from falconet.config.commands import RestoreOptions, TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load_options
from falconet.config.settings import from_line
from falconet.data.buffers import Batch
from falconet.errors import Interrupted
from falconet.evaluation.evaluate import never
from falconet.numerics.loss_scale import NonFinite
from falconet.parallel.grid import divide
from falconet.parallel.pipeline import Pipeline, StagePlace
from falconet.parallel.world import World
from falconet.train import build, plan_text, preparation
from falconet.train.metrics import Meter
from falconet.train.phase import begin
from falconet.train.pipeline_step import non_finite_of_stages
from falconet.train.save import identity_of

VARIABLES = ("RANK", "WORLD_SIZE")


def run_of(world, line, checkpoint=None):
    """The first phase of a run in `world`, instead of one that it opens itself."""
    if world.size > 1:
        os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    kind = RestoreOptions if checkpoint else TrainOptions
    folder = Path(checkpoint) if checkpoint else None
    restored = format.Checkpoint(folder, format.read_manifest(folder)) if folder else None
    settings = from_line(line.split(), options_of(kind))
    loaded = load_options(kind, settings, *([restored.manifest.config] if restored else []))
    real = build.open_world
    try:
        launch = preparation.prepare(loaded, restored)
        build.open_world = lambda *_, **__: world
        return build.BuiltPhase(launch, build.open_site(launch))
    finally:
        build.open_world = real
        for name in VARIABLES:
            os.environ.pop(name, None)


def trained(world, line, *, updates=3, checkpoint=None, save=None):
    """The whole state after some updates, their losses, and an evaluation."""
    run = run_of(world, line, checkpoint)
    lines = plan_text.describe(run)
    state = begin(run)
    step, loader = run.step(state), run.placement.loader()
    return _result(run, state, step, loader.updates(0, skip=state.progress.update), updates) | {
        "lines": lines,
        "saved": save and _saved(run, state, Path(save)),
    }


def together(line, *, replicas, updates=3):
    """One process whose micro-batches are those of several replicas side by side, as a batch-norm span sees them."""
    world = World(device=torch.device("cpu"))
    run = run_of(world, line)
    state = begin(run)
    step, size = run.step(state), run.shape.micro_batch // replicas
    loaders = []
    for replica in range(replicas):
        shape = replace(run.shape, micro_batch=size, replicas=replicas, replica=replica)
        loaders.append(replace(run.placement.setup, shape=shape).training_loader())
    merged = (
        [_beside(batches) for batches in zip(*micro_batches, strict=True)]
        for micro_batches in zip(*(loader.updates(0) for loader in loaders), strict=True)
    )
    return _result(run, state, step, merged, updates)


def _beside(batches):
    return Batch(torch.cat([each.images for each in batches]), torch.cat([each.labels for each in batches]), None)


def _result(run, state, step, feed, updates):
    losses, meter = [], Meter(state.progress, run.site.world, replicas=run.plan.replicas)
    for micro_batches, _ in zip(feed, range(updates), strict=False):
        meter.add(step(micro_batches, update=state.progress.update, lr=0.05))
        state.progress.update += 1
        losses.append(meter.end_interval())
    evaluate = run.placement.evaluator()
    found = evaluate(state.model, never)
    averaged = evaluate(state.ema.model, never) if state.ema else None
    folder = Path(run.site.world.once(tempfile.mkdtemp))
    _saved(run, state, folder / "c")
    tensors = _read(folder / "c") if run.site.world.is_first else {}
    if run.site.world.is_first:
        shutil.rmtree(folder)
    return {
        "tensors": tensors,
        "losses": [totals.loss for totals in losses],
        "counts": [(totals.correct, totals.images, totals.skipped) for totals in losses],
        "evaluation": found,
        "averaged": averaged,
        "read": type(run.placement.loader()).__name__,
    }


def _saved(run, state, folder):
    update = state.progress.update
    content = {
        "model": run.options.model.model,
        "classes": run.images.classes,
        "progress": {"epoch": 0, "images": update * run.plan.global_batch, "update": update},
        "meter": state.progress.to_json(),
        "metrics": {},
        **identity_of(run, folder.parent).content,
    }
    with build.checkpoint_writer(run.site.world, timeout=60.0) as writer:
        writer.save_state(folder, state, content)
    run.site.world.barrier("saving")
    return str(folder)


def _read(folder):
    """Every tensor of a checkpoint, whole."""
    manifest = format.verify(folder)
    return {
        f"{stem}:{name}": t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy()
        for stem in manifest.stems
        for name, t in format.read_tensors(folder, stem, verified=manifest).items()
    }


def several(world, lines, updates=3):
    return [trained(world, line, updates=updates) for line in lines]


def alone(line, **how):
    return trained(World(device=torch.device("cpu")), line, **how)


def flights(world, kind, micro_batches):
    """The most micro-batches that this stage has run forward and not yet backward, and its gradient."""
    layer, under_way, most = torch.nn.Linear(4, 4, bias=False), 0, 0
    torch.nn.init.constant_(layer.weight, 0.1 * (world.rank + 1))

    def run(values):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        result = layer(values).sin()
        return result if place.is_last else (result,)

    def ended(_):
        nonlocal under_way
        under_way -= 1

    layer.weight.register_post_accumulate_grad_hook(ended)
    edge = [torch.empty(2, 4, device="meta")]
    place = StagePlace(world=world, entering=[] if world.is_first else edge, leaving=edge)
    pipeline = Pipeline(run, place, kind=kind, micro_batches=micro_batches, loss=lambda logits, _: logits.sum())
    images = torch.linspace(-1, 1, 8 * micro_batches).view(-1, 4)
    for _ in range(2):  # a second update finds nothing left of the first
        pipeline([images] if world.is_first else [], torch.zeros(2 * micro_batches))
    return most, under_way, layer.weight.grad.numpy()


def non_finite(world):
    """What each stage learns when none, the second, or both found something; their places are 0, 2 and 1, 4."""
    everywhere = non_finite_of_stages(divide(world, stages=2), [[0, 2], [1, 4]][world.rank])
    cases = [(-1, -1), (-1, 1), (1, 0)]
    reports = [
        everywhere(NonFinite(torch.tensor(case[world.rank] >= 0), torch.tensor(case[world.rank]))) for case in cases
    ]
    return [(bool(each.found), int(each.first)) for each in reports]


def saving(world, line, updates, checkpoint, save):
    return trained(world, line, updates=updates, checkpoint=checkpoint, save=save)


def left(world, line, *, rank, after):
    """How often each process was asked whether to stop, and the outcome; one answers yes after some batches."""
    run = run_of(world, line)
    state, asked = begin(run), []

    def stopping():
        asked.append(None)
        return world.rank == rank and len(asked) > after

    measure = run.placement.evaluator()
    try:
        outcome = measure(state.model, stopping).images
    except Interrupted:
        outcome = "left"
    # The processes still agree: another validation completes.
    return outcome, len(asked), measure(state.model, never).images
