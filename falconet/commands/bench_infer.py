"""`falconet bench infer`: measure the throughput and latency of a model that predicts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from falconet.bench.measurements import Measured, leave, settled
from falconet.bench.timing import Predict, Series, measure_resident, measure_with_copy, try_out
from falconet.checkpoint import format
from falconet.config import facts
from falconet.config.commands import InferOptions, ValidateOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded, of_command, typed, unused_notes
from falconet.config.options import share_of
from falconet.config.settings import LINE, Setting
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset, open_to_measure
from falconet.data.input import Input
from falconet.data.loader import BatchShape, SyntheticLoader
from falconet.errors import CheckpointError, DataError, named_option
from falconet.evaluation import saved_model
from falconet.models import splits
from falconet.models.folding import Folding, fold
from falconet.models.zoo import build_model
from falconet.numerics.cuda_graphs import Captured, captured
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
from falconet.report import console, trace
from falconet.report import inference as lines
from falconet.report.console import Say, are
from falconet.report.folders import RUNS
from falconet.report.kernel_times import brief, kernel_times
from falconet.report.styles import FALCONET, Conventions

HELD = 8  # different batches that take turns, prepared before the clock starts
MOST = 2000  # batches of a series: enough for the 99th percentile, and minutes less than an epoch of single images


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured."""

    options: InferOptions
    model: nn.Module
    images: Dataset


def run(loaded: Loaded[InferOptions], conventions: Conventions = FALCONET) -> int:
    options, line, place = loaded.options, loaded.line, environment.find_place(os.environ)
    asked = value_or(options.inference.replicas, place.size if place else 1)
    here = max(1, _devices(options) // _stages(options))
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
        stages = facts.stages_of(options.inference)
        if stages > _stages(options):
            what = _in_words(device_kind(options.machine.device))
            screen.line(f"note: {stages} stages requested, {what}: the whole model predicts on one")
        subject = _open(options, line, world)
        for note in unused_notes(subject.options, line):
            screen.line(note)
        _go(subject, world, conventions)
    return 0


def _go(subject: Subject, world: World, conventions: Conventions) -> None:
    """Print what was decided, then measure, trace, or stop there."""
    options, screen = subject.options, console.screen_of(world, words=conventions.words)
    decided = []
    if options.inference.half_partial:
        allow_half_partials(world.device)
        decided.append(describe_half_partials(REGIMES[options.machine.precision], world.device))
    share = share_of(options.workspace.available_memory_proportion, stage=0, stages=1)
    if share is not None:
        limit_workspace(share, world.device)
        decided.append(describe_workspace(share, world.device))
    for text in decided:
        screen.line(text)
    if options.inference.plan:
        data = options.data
        times = f"{options.inference.repeat} x " if options.inference.repeat > 1 else ""
        limit = f", at most about {options.inference.seconds:g} s each" if options.inference.seconds else ""
        screen.line(
            f"would measure {options.model.model} in {options.machine.precision} on {world.device}:"
            f" {times}{min(data.iterations, MOST):,} batches of {data.micro_batch}{limit}, --data {data.data}"
        )
    elif options.inference.profile:
        _trace(subject, world)
    else:
        _measure(subject, world, conventions)


def _trace(subject: Subject, world: World) -> None:
    """Trace a few batches on the first process."""
    predict, folder = _predictor(subject, world, console.spoken(world)), Path(os.environ.get(RUNS) or "profile")
    images = [batch.images.to(world.device) for batch in _batches(subject, world)]
    if world.is_first:
        traced = trace.trace_calls(lambda number: predict(images[number % len(images)]), device=world.device)
        times = kernel_times(traced, calls=trace.TRACED)
        facts = {"captured": isinstance(predict, Captured), "processes": world.size, "batch": len(images[0])}
        trace.write(traced, {**facts, "what": "batch", "traced": trace.TRACED, **times}, folder)
        named = ", ".join(trace.FILES)
        screen = console.screen_of(world)
        screen.line(f"traced {trace.TRACED} batches into {folder}: {named}; nothing measured")
        screen.line(f"a batch takes {brief(times)}")


def folding(asked: int, *, place: environment.Place | None, here: int) -> str:
    """What becomes of more replicas than there are processes, in the trainer's words."""
    what = processes_of(place.launcher, place.size) if place else f"{are(here, 'device')} available"
    runs = "1 runs" if place is None or place.size == 1 else f"{place.size} run"
    return f"{asked} replicas requested, {what}: {runs}, with a batch each"


def _devices(options: InferOptions) -> int:
    cuda = device_kind(options.machine.device) == "cuda"
    return max(1, torch.cuda.device_count()) if cuda else PROCESSES_PER_CORE * cores()


def _stages(options: InferOptions) -> int:
    """Stages of a model, each on a device of its process; 1 if there are not enough devices for all of them."""
    stages = facts.stages_of(options.inference)
    return stages if device_kind(options.machine.device) == "cuda" and torch.cuda.device_count() >= stages else 1


def _in_words(kind: str) -> str:
    return f"{are(torch.cuda.device_count(), 'CUDA device')} available" if kind == "cuda" else "a CPU is one device"


def placed(model: nn.Module, options: InferOptions, *, side: int, devices: Sequence[torch.device]) -> nn.Module:
    """The model, still on the host, moved to its device, or a stage to each of several; `side`: pixels of an image."""
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
    """Refuse what could not be stages, also where one device has the whole model."""
    if options.inference.pipeline_splits:
        with named_option("pipeline_splits"):
            splits.require(model, options.inference.pipeline_splits)


def _stage_devices(options: InferOptions, world: World) -> list[torch.device]:
    """Neighbouring devices for each process, the first one's first."""
    count, place = _stages(options), environment.find_place(os.environ)
    first = (place.local_rank if place else 0) * count
    return [torch.device("cuda", first + stage) for stage in range(count)] if count > 1 else [world.device]


def _open(options: InferOptions, line: Sequence[Setting], world: World) -> Subject:
    """The model with the checkpoint's weights and options, or with random weights."""
    path = options.input.checkpoint_input_path
    if path is None:
        data = options.data
        images = open_to_measure(data, model=options.model.model, global_batch=data.micro_batch, seed=0)
        model = build_model(options.model, classes=images.classes, seed=0)
        _give_weights(model, options, classes=images.classes, note=console.screen_of(world).line)
        with named_option("precision"):
            REGIMES[options.machine.precision].require(world.device)
        side = images.preprocessing.image_size
        model = placed(model.eval(), options, side=side, devices=_stage_devices(options, world))
        return Subject(options=options, model=model.eval(), images=images)
    shared, devices = of_command(ValidateOptions, line), _stage_devices(options, world)
    if len(devices) > 1:
        shared.append(Setting("device", ("cpu",), LINE))  # one device may not hold it
    if path.is_file():
        opened = saved_model.open_foreign(path, shared, console.screen_of(world).line)
    else:
        chosen = format.choose(path, options.choice.checkpoint, console.spoken(world))
        opened = next(saved_model.open_checkpoint(chosen.folder, shared))
    merged = replace(options, model=opened.options.model, data=opened.options.data, machine=opened.options.machine)
    if len(devices) == 1:
        _check_splits(opened.model, options)
        return Subject(options=merged, model=opened.model.to(world.device).eval(), images=opened.images)
    model = build_model(merged.model, classes=len(opened.class_names), seed=0)  # as it is before it has a device
    model.load_state_dict(opened.model.state_dict())
    side = opened.images.preprocessing.image_size
    return Subject(
        options=merged, model=placed(model.eval(), merged, side=side, devices=devices).eval(), images=opened.images
    )


def _give_weights(model: nn.Module, options: InferOptions, *, classes: int, note: Say) -> None:
    """Load published weights if --weights asks for them; nothing is downloaded for a plan."""
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


def _measure(subject: Subject, world: World, conventions: Conventions) -> None:
    options, screen = subject.options, console.screen_of(world)
    at_once = options.inference.device_iterations
    predict, batches = _predictor(subject, world, screen.line), joined(_batches(subject, world), at_once)
    if isinstance(predict, Captured):
        predict.prepare(batches[0].images.to(world.device))
    trial = try_out(predict, batches[0], world=world)
    count = -(-_count(options, trial.seconds / at_once, screen.line) // at_once)
    repeat = options.inference.repeat
    on_host = options.data.data != "synthetic" and world.device.type == "cuda"
    per_batch = options.data.micro_batch * world.size * at_once  # or per several, which the host gets together
    copied: list[Series] = []
    resident: list[Series] = []
    for number in range(1, repeat + 1):
        resident.append(measure_resident(predict, batches, count=count, world=world))
        copied += [measure_with_copy(predict, batches, count=count, world=world)] if on_host else []
        one = (copied or resident)[-1]
        repetition = lines.Repetition(
            model=options.model.model,
            number=number,
            of=repeat,
            images=per_batch * count,
            seconds=sum(one.throughput),
            latencies=[1000 * seconds for seconds in one.latency],
            accuracy=trial.accuracy,
        )
        for text in conventions.repetition(repetition):
            screen.line(text)
    series, inside = Series.joined(copied or resident), Series.joined(resident)
    main, inner = (settled(each.throughput, each.latency, images=per_batch) for each in (series, inside))
    found = lines.Predictions(
        model=options.model.model,
        micro_batch=options.data.micro_batch,
        data=options.data.data,
        dtype=str(REGIMES[options.machine.precision].formats(world.device)["activations"]),
        devices=world.size,
        rates=main.rates,
        latencies=main.latencies,
    )
    if conventions.batch:
        for seconds in series.throughput:
            batch = lines.TimedBatch(per_batch / seconds, 1000 * seconds, instance=world.rank, instances=world.size)
            screen.line(conventions.batch(batch))
    peak = world.peak_memory()
    ours = [*_own_lines(main, inner, copied=on_host, at_once=at_once), f"peak memory  {peak / 2**30:.2f} GiB"]
    for text in [*conventions.predictions(found), *ours]:
        screen.line(text)
    if world.is_first:
        _write(options, series, inside, facts={"images_per_batch": per_batch, "peak_memory_bytes": peak})


def _count(options: InferOptions, seconds: float, say: Say) -> int:
    """Batches of a repetition; one batch takes about so many seconds."""
    asked, limit = options.data.iterations, options.inference.seconds
    count = min(asked, MOST)
    fitting = count if limit is None else min(count, max(1, int(limit / max(seconds, 1e-9))))
    per = " per repetition" if options.inference.repeat > 1 else ""
    if fitting < count:
        say(f"note: {fitting:,} of {asked:,} batches are measured{per}, in about {limit:g} s (--seconds)")
    elif count < asked:
        say(f"note: {count:,} of {asked:,} batches are measured{per}, which is enough")
    return fitting


def _predictor(subject: Subject, world: World, note: Say) -> Predict:
    """The model as it predicts everywhere: norms folded, batches captured."""
    regime, model = REGIMES[subject.options.machine.precision], subject.model
    is_whole = not isinstance(model, splits.OverDevices)  # a graph, and so its capture, is of one device
    found = fold(model, regime.formats(world.device)["activations"]) if is_whole else Folding(model, 0, 0)
    normalise = subject.images.normalise(world.device, dtype=found.dtype, channels=found.channels)

    def predict(images: Tensor) -> Tensor:
        batches = images.unbind() if images.dim() > 4 else (images,)
        return torch.cat([regime.run(found.model, normalise(batch)) for batch in batches])

    return captured(predict, world.device, note=note, capture=is_whole and subject.options.machine.capture)


def _batches(subject: Subject, world: World) -> list[Batch]:
    """A few batches of validation images, prepared once, or random ones on the device."""
    options, images = subject.options, subject.images
    data, shape = options.data, BatchShape(micro_batch=options.data.micro_batch)
    if data.data == "synthetic":
        size = images.preprocessing.image_size
        loader = SyntheticLoader(shape, image_size=size, classes=images.classes, images=1, seed=0, device=world.device)
        return next(loader.updates(0))
    regime = REGIMES[options.machine.precision]
    note = console.spoken(world)
    found = Input(data=data, regime=regime, world=world, note=note).evaluation_loader(images, shape=shape)
    if not len(images.validation):
        raise DataError(
            f"{images.where or images.kind}: no photo is left for validation; expected more photos, or --val-fraction 1"
        )
    held = islice(found.batches(), min(HELD, data.iterations))
    return [batch._replace(images=_held(batch.images, world.device)) for batch in held]


def joined(batches: Sequence[Batch], count: int) -> list[Batch]:
    """As many batches as one, whose images are count x N x 3 x S x S: what the device computes per call of the host."""
    if count == 1:
        return list(batches)
    endless = cycle(batches)
    taken = [list(islice(endless, count)) for _ in range(-(-len(batches) // count))]
    return [
        Batch(_stacked([one.images for one in some]), torch.cat([one.labels for one in some]), None) for some in taken
    ]


def _stacked(images: Sequence[Tensor]) -> Tensor:
    """Each channels-last, as before, and pinned if they were."""
    together = torch.stack([one.permute(0, 2, 3, 1) for one in images])
    return (together.pin_memory() if images[0].is_pinned() else together).permute(0, 1, 4, 2, 3)


def _held(images: Tensor, device: torch.device) -> Tensor:
    """A lasting copy in host memory: channels-last, and pinned if it is copied to a device."""
    kept = images.permute(0, 2, 3, 1).contiguous().clone().cpu()
    return (kept.pin_memory() if device.type == "cuda" else kept).permute(0, 3, 1, 2)


def _own_lines(main: Measured, inner: Measured, *, copied: bool, at_once: int) -> list[str]:
    texts, unit = [], "a batch" if at_once == 1 else f"{at_once} batches"
    named = (("with copies", main), ("without copies", inner)) if copied else (("on the device", inner),)
    for name, found in named:
        assert found.throughput is not None
        spread = found.spread()
        texts.append(f"{name}: {lines.rate(found.throughput, low=spread.low, high=spread.high)}")
        texts.append(f"{name}: latency of {unit} in ms: {lines.percentiles(found.latency())}")
    total = main.steady.first + len(main.samples)
    timed = "batches" if at_once == 1 else f"calls of {at_once} batches"
    texts.append(f"{main.steady.first} of {total} {timed} dropped as warm-up ({main.steady.verdict})")
    return texts


def _write(options: InferOptions, series: Series, resident: Series, *, facts: dict[str, object]) -> None:
    """Write the seconds of every batch, for `falconet bench` and --output."""
    content = facts | {
        "model": options.model.model,
        "throughput_seconds": series.throughput,
        "latency_seconds": series.latency,
        "resident_throughput_seconds": resident.throughput,
        "resident_latency_seconds": resident.latency,
    }
    with named_option("output"):
        leave(content, output=options.inference.output)
