"""`falconet data bench`: measure each step of the input pipeline, alone and together, and name the slowest."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

import falconet
from falconet.config.commands import DataBenchOptions
from falconet.config.facts import boxes_used
from falconet.config.load import Loaded, unused_notes
from falconet.data import input, measure
from falconet.data.dataset import Dataset, open_to_measure
from falconet.data.input import Input
from falconet.data.measure import Pipeline, Stage
from falconet.data.sources import folder
from falconet.data.storage import FileSource, Source
from falconet.errors import ConfigError
from falconet.exits import DONE, MISTAKE
from falconet.numerics.precision import REGIMES
from falconet.parallel import environment
from falconet.parallel.world import World, cores, open_machine
from falconet.report import console
from falconet.report.console import Say


def run(loaded: Loaded[DataBenchOptions]) -> int:
    options, place = loaded.options, environment.find_place(os.environ)
    if options.data.data == "synthetic":
        raise ConfigError("--data synthetic: exists only on the device; expected data that is read")
    if options.bench.md5 and place and place.rank:
        return DONE  # of several processes, one compares
    with open_machine(options.machine, place=None if options.bench.md5 else place) as world:
        return _measured(loaded, world)


def _measured(loaded: Loaded[DataBenchOptions], world: World) -> int:
    options, say = loaded.options, console.screen_of(world).line
    for note in unused_notes(options, loaded.line):
        say(note)
    images = open_to_measure(
        options.data,
        model=options.model.model,
        global_batch=options.data.micro_batch,
        seed=0,
        use_objects=boxes_used(options.data, options.augmentation),
    )
    if options.bench.md5:
        return _compare_md5(images, options, say)
    pipeline = _pipeline(images, options, world, say)
    say(f"data {options.data.data}: {images.describe()}; the {options.bench.split} images")
    threads, decoding = pipeline.resources.workers, _decoding(options, pipeline.source, world)
    each = f" in each of {world.size} processes" if world.size > 1 else ""
    say(f"{threads} loader threads{each}, device {world.device}, {decoding}")
    stages = measure.stage_rates(pipeline, seconds=options.bench.seconds)
    _show(stages, say)
    rates = []
    for rate in measure.passes(pipeline, options.bench.passes):
        say(f"Throughput of the iteration:{rate:.1f} img/sec")
        rates.append(rate)
    if rates:
        say(f"mean throughput: {fmean(rates):.1f} imgs/sec")
    if options.bench.output is not None and world.is_first:
        _write(options.bench.output, stages, rates, options, world)
        say(f"written to {options.bench.output}")
    return 0


def _pipeline(images: Dataset, options: DataBenchOptions, world: World, say: Say) -> Pipeline:
    training = options.bench.split == "train"
    source = images.train if training else images.validation
    crops = images.training_crops(options.augmentation, seed=0) if training else images.validation_crops()
    reading = Input(data=options.data, regime=REGIMES[options.machine.precision], world=world, note=say)
    return Pipeline(
        source=source,
        reader=reading.row_reader(source, crops, reading.bad_images(options.bench.split, images=len(source))),
        resources=reading.resources(source),
        micro_batch=options.data.micro_batch,
        training=training,
        augmentation=options.augmentation,
        world=world,
    )


def _decoding(options: DataBenchOptions, source: Source, world: World) -> str:
    return f"photos are decoded by {input.decoder(input.decode_device(options.data, source, world.device))}"


def _show(stages: Sequence[Stage], say: Say) -> None:
    say(f"{'step':<18} {'images/s':>10}")
    for stage in stages:
        rate = "-" if stage.images_per_second is None else f"{stage.images_per_second:,.0f}"
        say(f"{stage.name:<18} {rate:>10}  {stage.words}")
    say(f"limited by: {measure.limiting(stages)}")


def _write(
    path: Path, stages: Sequence[Stage], passes: Sequence[float], options: DataBenchOptions, world: World
) -> None:
    content = {
        "stages": {stage.name: stage.images_per_second for stage in stages},
        "limiting": measure.limiting(stages),
        "passes": list(passes),
        "split": options.bench.split,
        "data": options.data.data,
        "micro_batch_size": options.data.micro_batch,
        "workers": input.workers(options.data),
        "processes": world.size,
        "device": str(world.device),
        "cores": cores(),
        "versions": {
            "falconet": falconet.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror or error}") from error


def _compare_md5(images: Dataset, options: DataBenchOptions, say: Say) -> int:
    """Compare the digests of class folders with those of ILSVRC 2012; exit code 2 if they differ."""
    whole = True
    for split, source in (("train", images.train), ("validation", images.validation)):
        if not isinstance(source, FileSource):
            raise ConfigError(f"--md5: needs class folders, which --data {options.data.data} is not")
        found = folder.folder_md5(source.root, workers=input.workers(options.data))
        same = folder.is_imagenet(found, split)
        say(f"{split}: md5 {found} of {source.root}: {'OK' if same else 'corrupted, or not the ILSVRC 2012 folder'}")
        whole = whole and same
    return DONE if whole else MISTAKE
