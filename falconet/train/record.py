"""What a run records for its report: the answers of its best validation, pictures, memory; and the report itself."""

import base64
import contextlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

import falconet
from falconet import writing
from falconet.data import input, mixing
from falconet.data.buffers import Batch
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.keyed import IntArray
from falconet.data.loader import stretch
from falconet.data.readers import reader_for
from falconet.data.storage import ArraySource, PixelArray
from falconet.errors import UserError
from falconet.evaluation import breakdown
from falconet.evaluation.breakdown import Answers, Breakdown, Collected, Precisions
from falconet.evaluation.evaluate import Evaluation
from falconet.parallel import host
from falconet.parallel.grid import Grid
from falconet.parallel.world import World, cores
from falconet.report import plots, run_files
from falconet.report.console import Say
from falconet.report.pages import run_page
from falconet.report.run_files import ANSWERS, ENVIRONMENT, LAYERS, MEMORY, REPORT, SEEN, MemoryPoint, State
from falconet.report.styles import Validated
from falconet.report.throughput import Stopwatch
from falconet.report.trackers.tracker import Confusion, Picture, Tracker
from falconet.train.layer_table import Row
from falconet.train.step import Step, Update
from falconet.train.validation import NoRecord, Record, Which

EXAMPLES = 24  # mistakes, and as many hits
SEEN_IMAGES = 32  # of the first batch
SIDE, QUALITY = 112, 80  # of pictures of photos, in pixels, and of their JPEG
PIXELATED = 40  # pixels: images up to this side are kept as they are
# Times as long as it took to write the report, until it is written again: it costs a hundredth of the time at most.
RARELY = 100
Pictured = dict[str, str]


class Recorder(Record, Protocol):
    """What a phase tells of itself for the report, beside what its validations answer."""

    def watched(self, step: Step) -> Step: ...  # the step, whose first batch is kept
    def epoch_ended(self, update: int) -> None: ...
    def stopped(self) -> None: ...  # before the end
    def phase_ended(self, update: int) -> None: ...  # and another one follows
    def ended(self, update: int) -> Path | None: ...  # the run; returns the report, if there is one


class Unreported(NoRecord):
    """Records nothing."""

    def watched(self, step: Step) -> Step:
        return step

    def epoch_ended(self, update: int) -> None: ...
    def phase_ended(self, update: int) -> None: ...
    def stopped(self) -> None: ...

    def ended(self, update: int) -> Path | None:  # noqa: ARG002
        return None


class Reported:
    """Records in the first process; the others take part in gathering the answers."""

    def __init__(
        self, folder: Path, *, images: Dataset, grid: Grid, update: int, stopwatch: Stopwatch, say: Say, page: "Page"
    ) -> None:
        """`update`: where the phase begins."""
        self._folder, self._images, self._world, self._update = folder, images, grid.world, update
        self._stopwatch, self._say, self._page = stopwatch, say, page
        own = stretch(len(images.validation), replicas=grid.replicas.size, replica=grid.replicas.rank)
        self._begin = own.start
        self._collected: dict[Which, Collected] = {}
        self._which: Which = "other"
        self._answers: tuple[Answers | None, dict[str, Any]] | None = None  # not written yet
        self._first: Batch | None = None  # on the host, not written yet
        earlier = run_files.read_memory(folder) if grid.world.is_first and update else []
        self._memory = {each.update: each for each in earlier if each.update <= update}
        self._is_broken = False

    def begin(self, which: Which) -> None:
        self._which, self._collected[which] = which, Collected(self._begin)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        if self._images.label_sets is None:
            self._collected[self._which].add(logits, labels)

    def best(self, which: Which, found: Evaluation, validated: Validated) -> None:
        """Gather the answers; a collective."""
        is_one = self._images.label_sets is None
        answers = self._collected[which].read(self._world) if is_one else None
        self._collected.clear()
        if not self._world.is_first:
            return
        names = self._images.class_names
        parts = Breakdown.of(answers, names) if answers else Precisions(names, found.by_class)
        content = breakdown.measured_json(validated.name, f"{validated.epoch:g}", found, parts)
        self._answers = answers, {"update": validated.update, "weights": which, **content}

    def watched(self, step: Step) -> Step:
        is_new = self._update == 0 or not (self._folder / SEEN).exists()
        return SeenStep(step, self._see) if self._world.is_first and is_new else step

    def _see(self, batch: Batch) -> None:
        self._first = batch

    def epoch_ended(self, update: int) -> None:
        """Write the report, unless it was just written."""
        if self._world.is_first and update > self._update:
            self._memory[update] = _memory(update, self._world)
            if self._page.is_due():
                self._write("going")

    def phase_ended(self, update: int) -> None:
        if self._world.is_first:
            self._memory[update] = _memory(update, self._world)
            self._write("going")

    def stopped(self) -> None:
        if self._world.is_first:
            self._write("stopped")

    def ended(self, update: int) -> Path | None:
        if not self._world.is_first:
            return None
        self._memory[update] = _memory(update, self._world)
        self._write("done")
        return None if self._is_broken else self._folder / REPORT

    def _write(self, state: State) -> None:
        say = (lambda _: None) if self._is_broken else self._say  # one line is enough
        self._is_broken = True
        with self._stopwatch.standing(), warned(say):
            self._write_records()
            self._page.write(self._folder, state)
            self._is_broken = False

    def _write_records(self) -> None:
        if self._first is not None:
            pictures = _seen(self._first, self._images)
            writing.replace(self._folder, SEEN, json.dumps({"update": self._update + 1, "pictures": pictures}))
            self._first = None
            self._page.show_seen(self._update + 1, pictures)
        if self._answers is not None:
            answers, content = self._answers
            examples = _examples(answers, self._images) if answers else {}
            writing.replace(self._folder, ANSWERS, json.dumps(content | examples))
            self._answers = None
            if answers:
                self._page.show_answers(content | examples, self._images.class_names)
        lines = [json.dumps(vars(each)) for each in self._memory.values()]
        writing.replace(self._folder, MEMORY, "".join(f"{line}\n" for line in lines))


class Unpictured(Reported):
    """Records no images and no answers: those of synthetic data mean nothing."""

    def begin(self, which: Which) -> None: ...
    def add(self, logits: Tensor, labels: Tensor) -> None: ...
    def best(self, which: Which, found: Evaluation, validated: Validated) -> None: ...

    def watched(self, step: Step) -> Step:
        return step


@contextlib.contextmanager
def warned(say: Say) -> Iterator[None]:
    """A report that cannot be written takes a line, and never ends the training."""
    try:
        yield
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        say(f"note: the report cannot be written: {reason}; training is not affected")


class Page:
    """Writes report.html and results.csv from the files of the run, not too often; trackers get the pictures too."""

    def __init__(
        self, *, draws: bool, trackers: Sequence[Tracker] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`draws`: plots too, at the end."""
        self._draws, self._trackers, self._clock = draws, trackers, clock
        self._next = -float("inf")

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def write(self, folder: Path, state: State) -> None:
        begun = self._clock()
        run = run_page.write_own(folder, state=state)
        if self._draws and state != "going":
            plots.save([run], folder)
        self._next = self._clock() + RARELY * (self._clock() - begun)

    def show_seen(self, update: int, pictures: Sequence[Pictured]) -> None:
        shown = [_shown(each["label"], each) for each in pictures]
        for tracker in self._trackers:
            tracker.write_pictures(update, "first_batch", shown)

    def show_answers(self, content: Mapping[str, Any], class_names: Sequence[str]) -> None:
        """Give trackers what the best validation answered, as it is written for the report."""
        update: int = content["update"]
        confusion = Confusion(class_names, content["confusion"]["cells"])
        mistakes = [
            _shown(f"{each['label']} taken for {each['predicted']}, {100 * each['probability']:.0f} %", each["picture"])
            for each in content["mistakes"]
        ]
        for tracker in self._trackers:
            tracker.write_confusion(update, confusion)
            tracker.write_pictures(update, "mistakes", mistakes)


def _shown(caption: str, picture: Pictured) -> Picture:
    return Picture(caption, base64.b64decode(picture["data"]))


class NoPage(Page):
    """The page in a run folder that is removed at the end: written only if the folder stays."""

    def is_due(self) -> bool:
        return False

    def write(self, folder: Path, state: State) -> None:
        if state == "stopped":
            super().write(folder, state)


class SeenStep:
    """A step that hands over its first batch, as the network is about to get it."""

    def __init__(self, step: Step, see: Callable[[Batch], None]) -> None:
        self._step, self._see = step, see
        self._is_first = True

    def __call__(self, micro_batches: Sequence[Batch], *, update: int, lr: float) -> Update:
        if self._is_first:
            self._is_first = False
            self._see(_excerpt(micro_batches[0]))
        return self._step(micro_batches, update=update, lr=lr)


MIXED = 3  # images before the first one that are mixed into it


def _excerpt(batch: Batch) -> Batch:
    """The first images of a batch on the host, after the last ones, which are mixed into them."""
    images, labels, mix = batch.images, batch.labels, batch.mix
    if mix is not None and mix.box.ndim == 2:  # the first of several parts, which are mixed by themselves
        part = len(labels) // len(mix.box)
        images, labels, mix = images[:part], labels[:part], mix.parts()[0]
    before, after = slice(len(labels) - MIXED, None), slice(SEEN_IMAGES)
    if len(labels) <= SEEN_IMAGES:
        before, after = slice(0, 0), slice(None)

    def rows(values: Tensor) -> Tensor:
        return torch.cat((values[before].cpu(), values[after].cpu()))

    return Batch(rows(images), rows(labels), mix and mixing.Mix(rows(mix.mixup), mix.box.cpu()))


def _seen(batch: Batch, images: Dataset) -> list[Pictured]:
    """The images of an excerpt as the network got them, with their labels in words."""
    first = MIXED if len(batch.labels) > SEEN_IMAGES else 0
    pixels = mixing.mixed_images(_pixels(batch.images, images), batch.mix)[first:]
    sets = None if images.label_sets is None else torch.from_numpy(images.label_sets).float()

    def targets(labels: Tensor) -> Tensor:
        rows = functional.one_hot(labels.clamp_min(0), images.classes).float() if sets is None else sets[labels]
        return rows * (labels >= 0)[:, None]

    shares = mixing.mixed_targets(batch.labels, batch.mix, targets=targets, side=pixels.shape[-1])[first:]
    shown = pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    rows = zip(shown, shares.tolist(), strict=True)
    return [{"label": _in_words(row, images.class_names), **picture(each)} for each, row in rows][:SEEN_IMAGES]


def _pixels(values: Tensor, images: Dataset) -> Tensor:
    """Values of a batch as pixels from 0 to 255."""
    found, training = values.float(), images.training
    if values.dtype == torch.uint8 or not images.on_host:
        return found
    if training.standardised:  # each by its own mean and deviation, which are gone
        low, high = found.amin((1, 2, 3), keepdim=True), found.amax((1, 2, 3), keepdim=True)
        return 255 * (found - low) / (high - low).clamp_min(1e-6)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (training.mean, training.std))
    return 255 * (found * std + mean)


def _in_words(shares: Sequence[float], names: Sequence[str]) -> str:
    """`cat`, or `cat 63 % + dog 37 %` of a mixed image."""
    there = sorted(((share, name) for share, name in zip(shares, names, strict=True) if share >= 0.005), reverse=True)
    if all(share > 0.995 for share, _ in there):
        return ", ".join(name for _, name in there)
    return " + ".join(f"{name} {100 * share:.0f} %" for share, name in there)


def _examples(answers: Answers, images: Dataset) -> dict[str, object]:
    """The most confident mistakes and the least confident hits, with pictures."""
    return {
        "mistakes": _pictured(answers, answers.mistakes(EXAMPLES), images),
        "hits": _pictured(answers, answers.hits(EXAMPLES), images),
    }


def _pictured(answers: Answers, places: IntArray, images: Dataset) -> list[dict[str, object]]:
    source, names, numbers = images.validation, images.class_names, answers.numbers[places]
    crops = images.validation_crops()
    pixels = np.zeros((len(places), crops.size, crops.size, 3), np.uint8)
    if len(places):
        reader_for(source, crops=crops, bad=BadImages(None, note=lambda _: None)).read(numbers, epoch=0, out=pixels)
    is_array = isinstance(source, ArraySource)
    return [
        {
            "path": f"validation image {number}" if is_array else source.where(number),  # type: ignore[union-attr]
            "label": names[int(answers.labels[place])],
            "predicted": names[int(answers.predicted[place])],
            "probability": round(float(answers.confidence[place]), 6),
            "picture": picture(shown),
        }
        for place, number, shown in zip(places.tolist(), numbers.tolist(), pixels, strict=True)
    ]


def picture(pixels: PixelArray) -> Pictured:  # H x W x 3
    """A small picture as text; tiny images stay as they are."""
    image, file, is_tiny = Image.fromarray(pixels), io.BytesIO(), max(pixels.shape[:2]) <= PIXELATED
    if not is_tiny:
        image.thumbnail((SIDE, SIDE))
    image.save(file, "PNG" if is_tiny else "JPEG", **({"optimize": True} if is_tiny else {"quality": QUALITY}))
    return {"kind": "png" if is_tiny else "jpeg", "data": base64.b64encode(file.getvalue()).decode()}


def _memory(update: int, world: World) -> MemoryPoint:
    device = world.peak_memory() if world.device.type == "cuda" else None
    return MemoryPoint(update=update, device=device, host=_resident())


def _resident() -> int | None:
    """Bytes of this process in the host's memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def write_facts(folder: Path, layers: Sequence[Row], environment: Mapping[str, str]) -> None:
    """What is known before the first update."""
    writing.replace(folder, LAYERS, json.dumps({"layers": layers}))
    writing.replace(folder, ENVIRONMENT, json.dumps(environment, indent=1) + "\n")


def environment_of(world: World, *, threads: int) -> dict[str, str]:
    """Versions and hardware of a run; nothing that names a person, a host or a repository."""
    found = {
        "Falconet": falconet.__version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{host.processor()}, {cores()} cores for this process, {threads} threads",
        "JPEG decoder": input.decoder(),
        "processes": str(world.size),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    if world.device.type == "cuda":
        about = torch.cuda.get_device_properties(world.device)
        found["device"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    else:
        found["device"] = "CPU"
    return found
