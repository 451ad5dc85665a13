"""The speed of a training run and its parts: reading, decoding, copying and computing, alone and together."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat

import numpy as np
import torch

from falconet.config import commands
from falconet.config.load import LoadedTraining
from falconet.data import measure, mixing
from falconet.data.buffers import Batch
from falconet.data.input import Input
from falconet.data.loader import FOREVER
from falconet.data.measure import Pipeline
from falconet.data.mixing import Mix
from falconet.data.storage import ArraySource, FileSource, Source
from falconet.errors import SHORTAGES, memory_shortage
from falconet.numerics.precision import REGIMES, automatic
from falconet.train import fitting, preparation
from falconet.train.build import BuiltPhase, Site, open_site, with_images
from falconet.train.capture import WARM
from falconet.train.preparation import Launch
from falconet.train.setup import TrainingLoader

READ, DECODE, LOAD, AUGMENT, COPY, COMPUTE = "read", "decode", "load", "augment", "copy", "compute"
READING, LOADING, COMPUTING, TRAINING = 1.0, 2.0, 3.0, 3.0  # seconds for each measurement
TRYING = 2.0  # seconds for updates with other options
SLOW = 1.0  # seconds: a micro-batch that takes longer is measured by a smaller one
FIRST = 8  # images of the first, small micro-batch on a CPU
MOST_ACCUMULATED = 4  # micro-batches of an update
AT_ONCE = 8  # updates that are launched before the device is waited for
LEAST = 0.1  # of the time of loading: smaller shares are noise
SAMPLED = 200  # files whose size is looked up


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The speed of updates as the training loop makes them, in images per second."""

    computed: float  # with random images that are on the device
    trained: float | None  # with those of the loader, which works at the same time; None: there is none
    micro_batch: int  # that was measured, perhaps smaller than the run's
    number: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Images per second of each part alone; None: the part does not exist."""

    read: float | None  # from the disk
    kept: float | None  # read again, when the system has the files in memory
    decode: float | None  # also None if reading is so slow that it cannot be separated
    augment: float | None  # images in memory, which are cropped, mirrored and put into batches; of files, in `decode`
    copy: float | None
    load: float | None  # by the whole input pipeline, from files in memory
    updates: Updates

    def alone(self) -> dict[str, float | None]:
        """The rate of each part by name, in the order in which an image passes them."""
        augment = {} if self.augment is None else {AUGMENT: self.augment}
        return {READ: self.read, DECODE: self.decode, **augment, COPY: self.copy, COMPUTE: self.updates.computed}

    def together(self, *, from_disk: bool) -> float:
        """Images per second of all parts at once, never more than the slowest part."""
        bounds = self.overlapping(from_disk=from_disk).values()
        return min(self.updates.trained or self.updates.computed, *bounds)

    def overlapping(self, *, from_disk: bool) -> dict[str, float]:
        """The rates of the parts that run at the same time: loading, copying and computing."""
        rates = {LOAD: self.loading(from_disk=from_disk), COPY: self.copy, COMPUTE: self.updates.computed}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def loading(self, *, from_disk: bool) -> float | None:
        """The rate of threads that read an image and then decode it, slower than either; None: nothing is loaded."""
        if self.load is None:
            return None
        longer = 0.0  # seconds per image, of the disk
        if from_disk and self.read is not None and self.kept is not None:
            longer = max(0.0, 1 / self.read - 1 / self.kept)
        parts = self._of_loading(from_disk=from_disk).values()
        return min(self.load, 1 / (1 / self.load + longer), *parts)

    def limit(self, *, from_disk: bool) -> str:
        """The part to make faster: the slowest of those that overlap; for loading, the part that takes most of it."""
        overlapping, parts = self.overlapping(from_disk=from_disk), self._of_loading(from_disk=from_disk)
        slowest = min(overlapping, key=lambda name: overlapping[name])
        return min(parts, key=lambda name: parts[name]) if slowest == LOAD else slowest

    def share(self, part: str, *, from_disk: bool) -> float | None:
        """The part's share of the time of loading; None unless it is reading or decoding and both happen."""
        parts, whole = self._of_loading(from_disk=from_disk), self.loading(from_disk=from_disk)
        return whole / parts[part] if whole is not None and part in parts and len(parts) > 1 else None

    def _of_loading(self, *, from_disk: bool) -> dict[str, float]:
        rates = {READ: self.read if from_disk else self.kept, DECODE: self.decode, AUGMENT: self.augment}
        return {name: rate for name, rate in rates.items() if rate is not None}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The measurements of one configuration."""

    parts: Parts
    options: commands.TrainOptions  # with automatic ones settled
    device: torch.device
    images: int  # of an epoch
    stored: int | None  # bytes of their files; None: they are in memory
    packed: bool  # in shards
    described: str  # the data
    tried: dict[str, float]  # images per second of computing with other options, by option; if computing is the limit


def find(loaded: LoadedTraining, *, free: int) -> Finding:
    """Measure a training run in one process, on its device and data, in about twelve seconds.

    `free`: the bytes in which the system can keep files after the first epoch.
    """
    launch = preparation.prepare(_alone(loaded))
    site = open_site(launch)
    with site.world:
        launch = with_images(launch)
        options = launch.loaded.options
        REGIMES[options.machine.precision].require(site.world.device)
        updates = _updates(launch, site)
        built = BuiltPhase(launch, site)
        source, parts = built.images.train, _parts(built, updates)
        stored = _stored(source)
        is_compute = parts.limit(from_disk=stored is not None and stored > free) == COMPUTE
        return Finding(
            parts=parts,
            options=options,
            device=site.world.device,
            images=built.plan.updates_per_epoch * built.plan.global_batch,
            stored=stored,
            packed=not isinstance(source, FileSource),
            described=f"{options.model.model} on {options.data.data}: {built.images.describe()}",
            tried=_tried(launch, site, micro_batch=updates.micro_batch) if is_compute else {},
        )


def _alone(loaded: LoadedTraining) -> LoadedTraining:
    """The options of one process that trains; no weights are downloaded, and photos are not checked one by one."""
    options = loaded.options
    weights = options.training.pretrained
    parallel = replace(options.parallel, replicas=1, batchnorm_span=1, pipeline_splits=(), enable_optimizer_rts=False)
    options = replace(
        options,
        training=replace(options.training, pretrained="none" if isinstance(weights, str) else weights),
        data=replace(options.data, check_images="no", micro_batch_size=options.data.micro_batch),
        parallel=parallel,
    )
    return replace(loaded, options=options)


def _parts(built: BuiltPhase, updates: Updates) -> Parts:
    options, world = built.options, built.site.world
    if options.data.data == "synthetic":
        return Parts(read=None, kept=None, decode=None, augment=None, copy=None, load=None, updates=updates)
    source, cold = built.images.train, None
    crops = built.images.training_crops(options.augmentation, seed=options.run.seed)
    reading = Input(data=options.data, regime=built.regime, world=world, note=built.site.note)
    resources = reading.resources(source)
    if not isinstance(source, ArraySource):
        cold = measure.cold_reads(source, threads=max(1, resources.workers), seconds=READING)
        # Now in memory; of others, it is not known. Some are repeated, if need be, for a pass that is not too short.
        source = source.subset(np.resize(cold.read, min(len(source), measure.MOST_COLD)))
    pipeline = Pipeline(
        source=source,
        reader=reading.row_reader(source, crops, reading.bad_images("training", images=len(source))),
        resources=resources,
        micro_batch=min(updates.micro_batch, len(source)),
        training=True,
        augmentation=options.augmentation,
        world=world,
    )
    kept = measure.read_rate(pipeline, seconds=READING / 2)
    load = measure.loader_rate(pipeline, seconds=LOADING)
    return Parts(
        read=None if cold is None else cold.images_per_second,
        kept=kept,
        decode=None if kept is None else _rest(load, kept),
        augment=load if kept is None else None,
        copy=measure.copy_rate(pipeline, seconds=READING / 2),
        load=load,
        updates=updates,
    )


def _rest(load: float, kept: float) -> float | None:
    """The rate of decoding alone: the time of loading minus that of reading."""
    seconds = 1 / load - 1 / kept
    return 1 / seconds if seconds > LEAST / load else None


def _updates(launch: Launch, site: Site) -> Updates:
    """Measure updates with the run's micro-batch or, on a CPU, a smaller one if that would take too long."""
    asked = launch.loaded.options.data.micro_batch
    if site.world.device.type != "cpu" or asked <= FIRST:
        return _measured(launch, site, micro_batch=asked, seconds=COMPUTING, loads=True)
    first, fitting = _measured(launch, site, micro_batch=FIRST, seconds=0.0), asked
    while fitting // 2 >= FIRST and fitting / first.computed > SLOW:
        fitting //= 2
    return _measured(launch, site, micro_batch=fitting, seconds=COMPUTING, loads=True)


def _tried(launch: Launch, site: Site, *, micro_batch: int) -> dict[str, float]:
    """Images per second with each option that may compute faster on this device."""
    options, device = launch.loaded.options, site.world.device
    best, found = automatic("cuda" if device.type == "cuda" else "cpu"), {}
    # A CPU that has bf16 instructions may still be slower with them.
    other = best if options.machine.precision == "32.32" else "32.32" if device.type == "cpu" else None
    if other is not None and other != options.machine.precision:
        changed = replace(options, machine=replace(options.machine, precision=other))
        trial = replace(launch, loaded=replace(launch.loaded, options=changed))
        found[f"--precision {other}"] = _measured(trial, site, micro_batch=micro_batch, seconds=TRYING)
    if device.type == "cuda" and _can_double(launch):  # a CPU has no use for larger ones
        twice = 2 * micro_batch
        try:
            found[f"--micro-batch-size {twice}"] = _measured(launch, site, micro_batch=twice, seconds=TRYING)
        except SHORTAGES as error:
            if memory_shortage(error) is None:
                raise
    return {option: each.computed for option, each in found.items()}


def _can_double(launch: Launch) -> bool:
    """Whether there are images for updates twice as large; generated images are as many as an update takes."""
    options, images = launch.loaded.options, launch.images
    return images is None or 2 * options.data.micro_batch * options.training.gradient_accumulation <= len(images.train)


def _measured(launch: Launch, site: Site, *, micro_batch: int, seconds: float, loads: bool = False) -> Updates:
    """Measure updates with this micro-batch, each of a few micro-batches at most; frees the device's memory."""
    loaded = launch.loaded
    accumulated = min(loaded.options.training.gradient_accumulation, MOST_ACCUMULATED)
    options = fitting.with_batch(loaded.options, micro_batch=micro_batch, total=micro_batch * accumulated)
    try:
        built = BuiltPhase(replace(launch, loaded=replace(loaded, options=options)), site)
        return _timed(built, seconds, loads=loads and options.data.data != "synthetic")
    finally:
        fitting.release(site.world.device)


def _timed(built: BuiltPhase, seconds: float, *, loads: bool) -> Updates:
    device, size, accumulated = built.site.world.device, built.shape.micro_batch, built.shape.accumulation
    step, numbers = built.step(built.new_state()), count()
    warm = 1 if built.uncaptured else WARM + 1

    def update(micro_batches: Sequence[Batch]) -> None:
        step(micro_batches, update=next(numbers), lr=0.0)

    computed, number = _rate(update, repeat([_random_batch(built)] * accumulated), device, warm=warm, seconds=seconds)
    trained = None
    if loads:
        loader = built.placement.loader()
        try:
            trained, _ = _rate(update, _endless(loader), device, warm=1, seconds=TRAINING)
        finally:
            loader.close()
    images = size * accumulated
    return Updates(
        computed=images * computed,
        trained=None if trained is None else images * trained,
        micro_batch=size,
        number=number,
    )


def _rate(
    update: Callable[[Sequence[Batch]], None],
    batches: Iterator[Sequence[Batch]],
    device: torch.device,
    *,
    warm: int,
    seconds: float,
) -> tuple[float, int]:
    """Updates per second, and the number of updates, at least one; `warm`: updates before the clock starts."""
    for _ in range(warm):
        update(next(batches))
    _settle(device)
    begin, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - begin < seconds:
        update(next(batches))
        done += 1
        if done % AT_ONCE == 0:
            _settle(device)
    _settle(device)
    return done / (time.perf_counter() - begin), done


def _endless(loader: TrainingLoader) -> Iterator[Sequence[Batch]]:
    return (each for epoch in count() for each in loader.updates(epoch, until=FOREVER))


def _random_batch(built: BuiltPhase) -> Batch:
    """Random pixels and labels on the device; the weights do not learn them, because the rate is 0."""
    device, size, side = built.site.world.device, built.shape.micro_batch, built.images.training.image_size
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (size, side, side, 3), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, built.images.classes, (size,), generator=draw)
    mix = None
    if mixing.mixes_or_cuts(built.options.augmentation):
        mix = Mix(torch.ones(size, device=device), torch.zeros(4, dtype=torch.int64, device=device))
    return Batch(pixels.to(device).permute(0, 3, 1, 2), labels.to(device), mix)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stored(source: Source) -> int | None:
    """The bytes of the files, estimated from a sample if there are many; None: the images are in memory."""
    if isinstance(source, ArraySource):
        return None
    if not isinstance(source, FileSource):
        return int(source.places.sizes.sum())
    every = max(1, len(source) // SAMPLED)
    sizes = []
    for index in range(0, len(source), every):
        with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
            sizes.append(source.path(index).stat().st_size)
    return int(sum(sizes) / max(1, len(sizes)) * len(source))
