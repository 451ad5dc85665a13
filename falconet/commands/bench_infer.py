"""`falconet bench infer`: measure the throughput and latency of a model that predicts."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from falconet.bench import model_speed
from falconet.bench.model_speed import Subject
from falconet.checkpoint import format
from falconet.config import facts
from falconet.config.commands import InferOptions, ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, of_command, typed, unused_notes
from falconet.config.options import Machine
from falconet.config.settings import LINE, Setting
from falconet.config.values import share_of
from falconet.data.dataset import open_to_measure
from falconet.errors import CheckpointError, named_option
from falconet.evaluation import saved_model
from falconet.models import splits
from falconet.models.zoo import build_model
from falconet.numerics.cuda_graphs import Captured
from falconet.numerics.precision import (
    REGIMES,
    allow_half_partials,
    describe_half_partials,
    describe_workspace,
    limit_workspace,
)
from falconet.parallel import environment
from falconet.parallel.division import PROCESSES_PER_CORE, processes_of
from falconet.parallel.world import World, cores, device_kind, open_machine
from falconet.report import console
from falconet.report.console import Say, are
from falconet.report.folders import RUNS
from falconet.report.profile import trace
from falconet.report.profile.kernel_times import brief, kernel_times
from falconet.report.styles import FALCONET, Conventions


def run(loaded: Loaded[InferOptions], conventions: Conventions = FALCONET) -> int:
    options, line, place = loaded.options, loaded.line, environment.find_place(os.environ)
    asked, stages = value_or(options.inference.replicas, place.size if place else 1), _stages(options)
    here = max(1, devices_here(options.machine) // stages)
    if place is None and min(asked, here) > 1:
        from falconet.parallel.launch import Workers, launch

        workers = Workers(
            argv=["bench", "infer", *typed(line)], program=conventions.program, processes=min(asked, here), restarts=0
        )
        return launch(workers, progress=lambda: None, say=console.spoken())
    with open_machine(options.machine, place=place) as world:
        screen = console.screen_of(world, words=conventions.words)
        if asked > world.size:
            screen.line(f"note: {folding(asked, place=place, here=here)}")
        requested = facts.stages_of(options.inference)
        if requested > stages:
            what = _in_words(device_kind(options.machine.device))
            screen.line(f"note: {requested} stages requested, {what}: the whole model predicts on one")
        subject = opened(options, line, world, devices=stage_devices(stages, place, world))
        for note in unused_notes(subject.options, line):
            screen.line(note)
        _carry_out(subject, world, conventions)
    return 0


def _carry_out(subject: Subject, world: World, conventions: Conventions) -> None:
    """Measure the model, trace it, or only print what would be measured."""
    options, screen = subject.options, console.screen_of(world, words=conventions.words)
    for text in _limited(options, world):
        screen.line(text)
    if options.inference.plan:
        screen.line(_plan(options, world))
    elif options.inference.profile:
        _trace(subject, world)
    else:
        model_speed.measure(subject, world, conventions)


def _limited(options: InferOptions, world: World) -> list[str]:
    """Allow sums in half precision and limit the workspace, if asked; returns a line about each."""
    decided = []
    if options.inference.half_partial:
        allow_half_partials(world.device)
        decided.append(describe_half_partials(REGIMES[options.machine.precision], world.device))
    share = share_of(options.workspace.available_memory_proportion, stage=0, stages=1)
    if share is not None:
        limit_workspace(share, world.device)
        decided.append(describe_workspace(share, world.device))
    return decided


def _plan(options: InferOptions, world: World) -> str:
    data, asked = options.data, options.inference
    times = f"{asked.repeat} x " if asked.repeat > 1 else ""
    limit = f", at most about {asked.seconds:g} s each" if asked.seconds else ""
    return (
        f"would measure {options.model.model} in {options.machine.precision} on {world.device}:"
        f" {times}{min(data.iterations, model_speed.MOST):,} batches of {data.micro_batch}{limit}, --data {data.data}"
    )


def _trace(subject: Subject, world: World) -> None:
    """Trace a few batches on the first process."""
    folder = Path(os.environ.get(RUNS) or "profile")
    predict = model_speed.predictor(subject, world, console.spoken(world))
    images = [batch.images.to(world.device) for batch in model_speed.batches(subject, world)]
    if world.is_first:
        traced = trace.trace_calls(lambda number: predict(images[number % len(images)]), device=world.device)
        times = kernel_times(traced, calls=trace.TRACED)
        facts = {"captured": isinstance(predict, Captured), "processes": world.size, "batch": len(images[0])}
        trace.write(traced, {**facts, "what": "batch", "traced": trace.TRACED, **times}, folder)
        named = ", ".join(trace.FILES)
        screen = console.screen_of(world)
        screen.line(f"traced {trace.TRACED} batches into {folder}: {named}; nothing measured")
        screen.line(f"a batch takes {brief(times)}")


# Devices.


def folding(asked: int, *, place: environment.Place | None, here: int) -> str:
    """A note on more replicas than there are processes for, in the trainer's words."""
    what = processes_of(place.launcher, place.size) if place else f"{are(here, 'device')} available"
    runs = "1 runs" if place is None or place.size == 1 else f"{place.size} run"
    return f"{asked} replicas requested, {what}: {runs}, with a batch each"


def devices_here(machine: Machine) -> int:
    """The number of processes that may run at once: one per CUDA device, or several per core of a CPU."""
    cuda = device_kind(machine.device) == "cuda"
    return max(1, torch.cuda.device_count()) if cuda else PROCESSES_PER_CORE * cores()


def _stages(options: InferOptions) -> int:
    """The number of stages of a model, each on a device of its own; 1 if there are too few devices."""
    stages = facts.stages_of(options.inference)
    return stages if device_kind(options.machine.device) == "cuda" and torch.cuda.device_count() >= stages else 1


def stage_devices(stages: int, place: environment.Place | None, world: World) -> list[torch.device]:
    """The devices of this process, one per stage: neighbours, after those of the processes before it."""
    first = (place.local_rank if place else 0) * stages
    return [torch.device("cuda", first + stage) for stage in range(stages)] if stages > 1 else [world.device]


def _in_words(kind: str) -> str:
    return f"{are(torch.cuda.device_count(), 'CUDA device')} available" if kind == "cuda" else "a CPU is one device"


# The model.


def opened(options: InferOptions, line: Sequence[Setting], world: World, *, devices: Sequence[torch.device]) -> Subject:
    """The model with a checkpoint's weights and options, or with random or published weights, on its devices."""
    if options.input.checkpoint_input_path is None:
        return _fresh(options, world, devices=devices)
    saved = _saved(options, line, world, devices=devices)
    merged = replace(options, model=saved.options.model, data=saved.options.data, machine=saved.options.machine)
    if len(devices) == 1:
        _check_splits(saved.model, options)
        return Subject(options=merged, model=saved.model.to(world.device).eval(), images=saved.images)
    model = build_model(merged.model, classes=len(saved.class_names), seed=0)  # one that is on no device yet
    model.load_state_dict(saved.model.state_dict())
    side = saved.images.preprocessing.image_size
    model = placed(model.eval(), merged, side=side, devices=devices)
    return Subject(options=merged, model=model.eval(), images=saved.images)


def _fresh(options: InferOptions, world: World, *, devices: Sequence[torch.device]) -> Subject:
    data = options.data
    images = open_to_measure(data, model=options.model.model, global_batch=data.micro_batch, seed=0)
    model = build_model(options.model, classes=images.classes, seed=0)
    _give_weights(model, options, classes=images.classes, note=console.screen_of(world).line)
    with named_option("precision"):
        REGIMES[options.machine.precision].require(world.device)
    side = images.preprocessing.image_size
    model = placed(model.eval(), options, side=side, devices=devices)
    return Subject(options=options, model=model.eval(), images=images)


def _saved(
    options: InferOptions, line: Sequence[Setting], world: World, *, devices: Sequence[torch.device]
) -> saved_model.Opened:
    """Open the model of a checkpoint or of a weights file."""
    path = options.input.checkpoint_input_path
    assert path is not None
    # `validate` has an --output, too, which names a table.
    shared = [setting for setting in of_command(ValidateOptions, line) if setting.bare != "output"]
    if len(devices) > 1:
        shared.append(Setting("device", ("cpu",), LINE))  # one device may not hold it
    if path.is_file():
        return saved_model.open_foreign(path, shared, console.screen_of(world).line)
    chosen = format.choose(path, options.choice.checkpoint, console.spoken(world))
    return next(saved_model.open_checkpoint(chosen.folder, shared))


def _give_weights(model: nn.Module, options: InferOptions, *, classes: int, note: Say) -> None:
    """Load published weights if --weights asks for them; for a plan, nothing is downloaded."""
    asked = options.inference.weights
    if asked == "random" or options.inference.plan:
        return
    try:
        note(saved_model.load_published(model, options.model.model, classes=classes))
    except CheckpointError as error:
        if asked == "pretrained":
            raise CheckpointError(
                f"--weights pretrained: {error}; expected --weights random, or a file with --checkpoint-input-path"
            ) from error
        note(f"note: random weights, because {error}")


def placed(model: nn.Module, options: InferOptions, *, side: int, devices: Sequence[torch.device]) -> nn.Module:
    """Move a model from the host to its device, or a stage to each of several; `side`: pixels of an image."""
    regime, names = REGIMES[options.machine.precision], options.inference.pipeline_splits
    if len(devices) == 1:
        _check_splits(model, options)
        return regime.prepare(model, devices[0])
    with named_option("pipeline_splits"):
        if names[0].startswith("auto:"):  # measured on the host, because one device may not hold the model
            names = tuple(splits.balance(model, len(devices), example=torch.rand(1, 3, side, side)))
        stages = splits.split(model, names)
    moved = [regime.prepare(stage.module, device) for stage, device in zip(stages, devices, strict=True)]
    return splits.OverDevices(moved, devices)


def _check_splits(model: nn.Module, options: InferOptions) -> None:
    """Refuse stages that the model cannot have, even if it is whole on one device."""
    if options.inference.pipeline_splits:
        with named_option("pipeline_splits"):
            splits.require(model, options.inference.pipeline_splits)
