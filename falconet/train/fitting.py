"""Whether a run fits into memory: a warning where it is predicted not to, and the micro-batch that does, by trying."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from falconet.checkpoint.state import TrainState
from falconet.config import commands
from falconet.config.facts import least_micro_batch
from falconet.config.load import Loaded
from falconet.config.recipes import PHOTOS_CONFIG, source_of
from falconet.config.settings import LINE
from falconet.data import mixing
from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.errors import SHORTAGES, DeviceError, ShortageError, memory_shortage
from falconet.models import views
from falconet.parallel import host
from falconet.parallel.division import Division
from falconet.parallel.grid import divide
from falconet.parallel.world import World
from falconet.report.console import Say
from falconet.train import memory, processes
from falconet.train.build import BuiltPhase, Site, open_site, phases_built
from falconet.train.capture import WARM
from falconet.train.defaults import batch_for
from falconet.train.memory import GIB
from falconet.train.preparation import Launch
from falconet.train.validation import validation_batch

SPARE = 1 / 32  # of a device's memory: what its allocator may not find in one piece in a longer run
UPDATES = 2  # of a trial: the first one creates the optimizer's state
SOURCE = "trials of --micro-batch-size auto"


def warning(built: BuiltPhase, model: nn.Module | None = None) -> str | None:
    """One line if a phase is predicted to need more than there is, with what is predicted to fit.

    `model`: as it is trained; None: for a plan, a copy of the one that would be.
    """
    device, size, asked = built.site.world.device, built.shape.micro_batch, built.options.parallel.pipeline_schedule
    have = memory.capacity(device, built.launch.division.processes)
    outlook = built.placement.outlook(model)
    if outlook is None or outlook.of(size, asked) <= have:
        return None
    total = size * _accumulation(built)
    smaller = [each for each in _sizes(built, total) if each < size]
    tried = [(each, schedule) for each in (size, *reversed(smaller)) for schedule in outlook.schedules]
    fitting = next(((each, schedule) for each, schedule in tried if outlook.of(each, schedule) <= have), None)
    helps = outlook.helps
    if fitting:
        other, schedule = fitting
        words = [f"--pipeline-schedule {schedule}"] if schedule != asked else []
        words += [_batch_options(other, total, which=built.phase.prefix)] if other != size else []
        helps = f"{' '.join(words)} is predicted to need {outlook.of(*fitting) / GIB:.2f} GiB"
    return (
        f"warning: {outlook.subject}predicted to need {outlook.of(size, asked) / GIB:.2f} GiB, but {device} has"
        f" {have / GIB:.2f} GiB{outlook.share}; {helps}"
    )


def _accumulation(built: BuiltPhase) -> int:
    """Micro-batches per update as asked for: not those of the replicas that run."""
    return built.options.training.gradient_accumulation


def _batch_options(micro_batch: int, total: int, *, which: str) -> str:
    """The options to type; `which`: how those of a later phase begin."""
    return f"--{which}micro-batch-size {micro_batch} --{which}gradient-accumulation {total // micro_batch}"


def _sizes(built: BuiltPhase, total: int) -> list[int]:
    """The micro-batches that make updates of so many images."""
    return divisors(total, least=least_micro_batch(built.options.augmentation))


def divisors(number: int, *, least: int = 1) -> list[int]:
    """The divisors of a number in ascending order, from `least`."""
    return [size for size in range(least, number + 1) if number % size == 0]


def largest(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest that fits, if all smaller ones fit too; None: not even the first. The last is tried first."""
    if candidates and fits(candidates[-1]):
        return candidates[-1]
    rest = candidates[:-1]
    too_many = bisect_left(rest, True, key=lambda size: not fits(size))
    return rest[too_many - 1] if too_many else None


@dataclass(frozen=True)
class Trials:
    """Updates and validations of other sizes than a run's, with its options and images, in this process alone."""

    launch: Launch
    site: Site
    total: int  # images of an update on each replica
    phase: int = 1  # the one that gets other sizes

    def fits(self, micro_batch: int) -> bool:
        """Whether this phase and those after it make their updates and validate; leaves nothing on the device."""
        self.site.screen.line(f"trying a micro-batch of {micro_batch}")
        try:
            self._make(micro_batch)
        except SHORTAGES as error:
            if memory_shortage(error) is None:
                raise
            return False
        finally:  # by now nothing refers to the trial
            release(self.site.world.device)
        return True

    def _make(self, micro_batch: int) -> None:
        for built in phases_built(self._launch(micro_batch), self._site)[self.phase - 1 :]:
            _try(built, messages=self.launch.division.replicas > 1)

    @property
    def _site(self) -> Site:
        alone = World(device=self.site.world.device)
        return replace(self.site, world=alone, grid=divide(alone, stages=1), note=_silent)

    def _launch(self, micro_batch: int) -> Launch:
        """A run of one replica, which starts anew with any weights."""
        options = self.launch.loaded.options
        joined = processes.joined(options.parallel, self.launch.division)  # as one, by batch norm over folded replicas
        options = with_batch(options, micro_batch=joined * micro_batch, total=joined * self.total, phase=self.phase)
        parallel = replace(options.parallel, replicas=1, batchnorm_span=1, enable_optimizer_rts=False)
        options = replace(options, parallel=parallel, training=replace(options.training, init_path=None))
        return replace(
            self.launch,
            loaded=replace(self.launch.loaded, options=options),
            restored=None,
            initial=None,
            division=Division(1, self.total // micro_batch),
        )


def _silent(_: str) -> None: ...


def _try(built: BuiltPhase, *, messages: bool) -> None:
    """Make updates of at most two micro-batches, and validate one batch, with black images.

    The second micro-batch is there because the first one's gradients stay beside all of its activations.
    """
    device, shape, side = built.site.world.device, built.shape, built.images.training.image_size
    state = built.new_state()
    step = built.step(state)
    held = [memory.black(built.placement.setup.images_held, side, device)]
    if device.type == "cuda":
        held += [torch.empty(int(SPARE * memory.capacity(device)), dtype=torch.uint8, device=device)]
    if messages:  # replicas send copies of the gradients
        held += [torch.empty_like(weight) for weight in state.model.parameters()]
    mix = None
    if mixing.mixes_or_cuts(built.options.augmentation):
        mix = Mix(torch.ones(shape.micro_batch, device=device), torch.zeros(4, dtype=torch.int64, device=device))
    labels = torch.zeros(shape.micro_batch, dtype=torch.int64, device=device)
    for update in range(UPDATES if built.uncaptured else WARM + 1):  # with a graph, which has memory of its own
        batch = Batch(memory.black(shape.micro_batch, side, device), labels, mix)
        step([batch] * min(2, shape.accumulation), update=update, lr=0.0)
    if built.plan.validation_mode != "none":
        _validate(built, state, validation_batch(built.options))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _validate(built: BuiltPhase, state: TrainState, batch: int) -> None:
    side, setup = built.images.preprocessing.image_size, built.placement.setup
    images = setup.normalise(memory.black(batch, side, setup.device))
    setup.regime.run(views.averaged(state.model.eval(), built.options.views.tta), images)


def release(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()  # hooks on gradients keep a model in a reference cycle
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that a captured step ever had: up to 2 GiB
        torch.cuda.empty_cache()
    host.return_freed_memory()


def with_batch(
    options: commands.TrainOptions, *, micro_batch: int, total: int, phase: int = 1
) -> commands.TrainOptions:
    """The options with another micro-batch in a phase and the same number of images in an update."""
    accumulation = total // micro_batch
    if phase == 1:
        return replace(
            options,
            data=replace(options.data, micro_batch_size=micro_batch),
            training=replace(options.training, gradient_accumulation=accumulation),
        )
    tuning = replace(
        options.fine_tuning,
        fine_tune_micro_batch_size=micro_batch,
        fine_tune_gradient_accumulation=accumulation,
    )
    return replace(options, fine_tuning=tuning)


def with_micro_batch(launch: Launch, site: Site) -> Launch:
    """The launch with a number for `--micro-batch-size auto`, and with its images, which trials need.

    An update keeps its images: those of the checkpoint that a run continues from, or of the config, else 64 per
    micro-batch that was asked for. All processes take what fits on each of them.
    """
    options = launch.loaded.options
    if options.data.micro_batch_size != "auto":
        return launch
    stored = launch.restored.manifest.number("micro-batch-size") if launch.restored else None
    if launch.restored and stored and launch.again:  # the same run, which has found its own
        total = stored * launch.restored.manifest.number("gradient-accumulation")
        return _launched(launch, micro_batch=stored, total=total)
    given = [each for each in launch.loaded.line if each.bare == "micro-batch-size" and each.source != LINE]
    config = [each.values[0] for each in given]
    base = stored or (options.data.micro_batch if config in ([], ["auto"]) else int(config[-1]))
    if not stored and launch.images is not None and given and given[-1].source == source_of(PHOTOS_CONFIG):
        base = min(base, batch_for(len(launch.images.train)))
    total = base * options.training.gradient_accumulation
    first = with_batch(options, micro_batch=base, total=total)
    (built, *_) = phases_built(replace(launch, loaded=replace(launch.loaded, options=first)), site)
    launch = replace(launch, images=built.full_size)
    trials = Trials(launch, site, total)
    sizes = divisors(total, least=least_micro_batch(options.augmentation))
    own = largest(sizes, trials.fits) or 0
    found_by_all = -int(site.world.max(torch.tensor(-own, device=site.world.device)))
    if not found_by_all:
        raise DeviceError(f"--micro-batch-size auto: not even {sizes[0]} fits on {site.world.device}")
    return _launched(launch, micro_batch=found_by_all, total=total)


def _launched(launch: Launch, *, micro_batch: int, total: int) -> Launch:
    loaded: Loaded[Any] = launch.loaded
    options = with_batch(loaded.options, micro_batch=micro_batch, total=total)
    sources = {**loaded.sources, "micro-batch-size": SOURCE, "gradient-accumulation": SOURCE}
    note = f"--micro-batch-size auto: {micro_batch}, the largest that fits, for updates of {total} images per replica"
    return replace(launch, loaded=replace(loaded, options=options, sources=sources), notes=(*launch.notes, note))


def answer(error: ShortageError, launch: Launch) -> DeviceError:
    """What to say about memory that ran out in a run, which is over: with the batch that fits, if one is found.

    Call it where nothing of the run is referred to any more, the error's traceback included.
    """
    options, tuning = launch.loaded.options, launch.loaded.options.fine_tuning
    # The other processes of a run do not wait for a search, and a plan tries nothing.
    if options.data.micro_batch_size == "auto" or launch.place is not None or options.run.plan:
        return error
    follows = [each == "auto" for each in (tuning.fine_tune_micro_batch_size, tuning.fine_tune_gradient_accumulation)]
    if tuning.half_res_training and error.phase == 1 and len(set(follows)) > 1:
        return error  # one alone would change the fine-tuning's global batch
    site = open_site(launch)
    release(site.world.device)
    if ("the device" in error.short) != (site.world.device.type != "cpu"):
        return error
    say: Say = site.screen.line
    say(f"{error.short}; looking for a micro-batch that fits")
    built = phases_built(launch, site)[error.phase - 1]
    size, total = built.options.data.micro_batch, built.options.data.micro_batch * _accumulation(built)
    trials = Trials(replace(launch, images=built.full_size), site, total, phase=error.phase)
    smaller = [other for other in _sizes(built, total) if other < size]
    found = largest(smaller, trials.fits)
    if found is None:
        return error
    asked = _batch_options(found, total, which=built.phase.prefix)
    return DeviceError(f"{error.short}; {asked} fits here, with the same updates of {total} images; {error.after}")
