"""Measure a model that predicts: batches from host memory and back, and on the device alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from falconet.bench.measurements import Measured, leave, settled
from falconet.bench.timing import Predict, Series, measure_resident, measure_with_copy, try_out
from falconet.config.commands import InferOptions
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.input import Input
from falconet.data.loader import BatchShape, SyntheticLoader
from falconet.errors import DataError, named_option
from falconet.models import splits
from falconet.models.folding import Folding, fold
from falconet.numerics.cuda_graphs import Captured, captured
from falconet.numerics.precision import REGIMES
from falconet.parallel.world import World
from falconet.report import console
from falconet.report import inference as lines
from falconet.report.console import Say
from falconet.report.styles import Conventions

HELD = 8  # different batches that take turns, prepared before the clock starts
MOST = 2000  # batches of a series: enough for the 99th percentile, and minutes shorter than an epoch of single images


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure, and the images to measure it on."""

    options: InferOptions
    model: nn.Module
    images: Dataset


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of all repetitions."""

    resident: Series  # on the device
    copied: Series | None  # from host memory and back; None: not measured apart
    images: int  # of all processes, in one batch or in the several that a call of the host takes

    @property
    def main(self) -> Series:
        """The times that a program would see, copies included."""
        return self.copied or self.resident


def measure(subject: Subject, world: World, conventions: Conventions) -> None:
    """Time the model, then print and write the times."""
    times = _timed(subject, world, conventions)
    screen, peak = console.screen_of(world), world.peak_memory()
    for text in _lines(times, subject.options, world, conventions):
        screen.line(text)
    screen.line(f"peak memory  {peak / 2**30:.2f} GiB")
    if world.is_first:
        _write(times, subject.options, peak=peak)


def _timed(subject: Subject, world: World, conventions: Conventions) -> Times:
    """Time every repetition, and print its line."""
    options, screen = subject.options, console.screen_of(world)
    at_once, repeat = options.inference.device_iterations, options.inference.repeat
    predict, every = predictor(subject, world, screen.line), joined(batches(subject, world), at_once)
    if isinstance(predict, Captured):
        predict.prepare(every[0].images.to(world.device))
    trial = try_out(predict, every[0], world=world)
    count = -(-_count(options, trial.seconds / at_once, screen.line) // at_once)
    images = options.data.micro_batch * world.size * at_once
    on_host = options.data.data != "synthetic" and world.device.type == "cuda"
    copied: list[Series] = []
    resident: list[Series] = []
    for number in range(1, repeat + 1):
        resident.append(measure_resident(predict, every, count=count, world=world))
        copied += [measure_with_copy(predict, every, count=count, world=world)] if on_host else []
        one = (copied or resident)[-1]
        repetition = lines.Repetition(
            model=options.model.model,
            number=number,
            of=repeat,
            images=images * count,
            seconds=sum(one.throughput),
            latencies=[1000 * seconds for seconds in one.latency],
            accuracy=trial.accuracy,
        )
        for text in conventions.repetition(repetition):
            screen.line(text)
    return Times(resident=Series.joined(resident), copied=Series.joined(copied) if copied else None, images=images)


def _count(options: InferOptions, seconds: float, say: Say) -> int:
    """The number of batches in a repetition; `seconds`: an estimate for one of them."""
    asked, limit = options.data.iterations, options.inference.seconds
    count = min(asked, MOST)
    fitting = count if limit is None else min(count, max(1, int(limit / max(seconds, 1e-9))))
    per = " per repetition" if options.inference.repeat > 1 else ""
    if fitting < count:
        say(f"note: {fitting:,} of {asked:,} batches are measured{per}, in about {limit:g} s (--seconds)")
    elif count < asked:
        say(f"note: {count:,} of {asked:,} batches are measured{per}, which is enough")
    return fitting


def predictor(subject: Subject, world: World, note: Say) -> Predict:
    """The model as every command predicts with it: norms folded, batches captured."""
    regime, model = REGIMES[subject.options.machine.precision], subject.model
    is_whole = not isinstance(model, splits.OverDevices)  # a graph, and so its capture, is of one device
    found = fold(model, regime.formats(world.device)["activations"]) if is_whole else Folding(model, 0, 0)
    normalise = subject.images.normalise(world.device, dtype=found.dtype, channels=found.channels)

    def predict(images: Tensor) -> Tensor:
        batches = images.unbind() if images.dim() > 4 else (images,)
        return torch.cat([regime.run(found.model, normalise(batch)) for batch in batches])

    return captured(predict, world.device, note=note, capture=is_whole and subject.options.machine.capture)


def batches(subject: Subject, world: World) -> list[Batch]:
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
    """Join every `count` batches into one of count x N x 3 x S x S images, which one call of the host computes."""
    if count == 1:
        return list(batches)
    endless = cycle(batches)
    taken = [list(islice(endless, count)) for _ in range(-(-len(batches) // count))]
    return [
        Batch(_stacked([one.images for one in some]), torch.cat([one.labels for one in some]), None) for some in taken
    ]


def _stacked(images: Sequence[Tensor]) -> Tensor:
    """Stack images that stay channels-last; in pinned memory if they were."""
    together = torch.stack([one.permute(0, 2, 3, 1) for one in images])
    return (together.pin_memory() if images[0].is_pinned() else together).permute(0, 1, 4, 2, 3)


def _held(images: Tensor, device: torch.device) -> Tensor:
    """A lasting copy in host memory: channels-last, and pinned if it is copied to a device."""
    kept = images.permute(0, 2, 3, 1).contiguous().clone().cpu()
    return (kept.pin_memory() if device.type == "cuda" else kept).permute(0, 3, 1, 2)


# What is printed and written.


def _lines(times: Times, options: InferOptions, world: World, conventions: Conventions) -> Iterator[str]:
    """The figures of each batch and of all of them in the program's conventions, then ours."""
    main = settled(times.main.throughput, times.main.latency, images=times.images)
    inner = settled(times.resident.throughput, times.resident.latency, images=times.images)
    if conventions.batch:
        for seconds in times.main.throughput:
            rate = times.images / seconds
            yield conventions.batch(lines.TimedBatch(rate, 1000 * seconds, instance=world.rank, instances=world.size))
    found = lines.Predictions(
        model=options.model.model,
        micro_batch=options.data.micro_batch,
        data=options.data.data,
        dtype=str(REGIMES[options.machine.precision].formats(world.device)["activations"]),
        devices=world.size,
        rates=main.rates,
        latencies=main.latencies,
    )
    yield from conventions.predictions(found)
    yield from _own_lines(main, inner, copied=times.copied is not None, at_once=options.inference.device_iterations)


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


def _write(times: Times, options: InferOptions, *, peak: int) -> None:
    """Write the seconds of every batch, for `falconet bench` and --output."""
    content = {
        "images_per_batch": times.images,
        "peak_memory_bytes": peak,
        "model": options.model.model,
        "throughput_seconds": times.main.throughput,
        "latency_seconds": times.main.latency,
        "resident_throughput_seconds": times.resident.throughput,
        "resident_latency_seconds": times.resident.latency,
    }
    with named_option("output"):
        leave(content, output=options.inference.output)
