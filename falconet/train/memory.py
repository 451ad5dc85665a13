"""Memory: what a run is predicted to need, and the largest micro-batch that fits, found by trying."""

import gc
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Target

from falconet.checkpoint.state import TrainState
from falconet.config import commands
from falconet.config.load import Loaded
from falconet.config.recipes import PHOTOS_CONFIG, source_of
from falconet.config.rules import least_micro_batch
from falconet.config.settings import LINE
from falconet.data import mixing
from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.errors import SHORTAGES, DeviceError, ShortageError, memory_shortage
from falconet.models import views
from falconet.models.fused_layers import FusedExcitation, FusedHalving, FusedNorm, FusedPool
from falconet.models.groupnorm import FusedGroupNorm
from falconet.models.outer_layers import FusedStem
from falconet.parallel import host
from falconet.parallel.division import Division
from falconet.parallel.environment import find_place
from falconet.parallel.grid import divide
from falconet.parallel.world import World
from falconet.report.console import Say
from falconet.train import evaluate, processes
from falconet.train.build import BuiltPhase, Site, open_site, phases_built
from falconet.train.capture import WARM
from falconet.train.defaults import batch_for
from falconet.train.placement import GIB, WholeModel, training_bytes
from falconet.train.processes import Launch

if TYPE_CHECKING:
    from falconet.parallel.pipeline import Kind  # torch's pipelines take a second to import

SPARE = 1 / 32  # of a device's memory: what its allocator may not find in one piece in a longer run
UPDATES = 2  # of a trial: the first one creates the optimizer's state
Keep = Callable[[Tensor], None]
AHEAD = 2  # updates whose images are on the device in any case: the one in use, and the next
SOURCE = "trials of --micro-batch-size auto"


@dataclass(frozen=True, kw_only=True)
class Need:
    """Predicted bytes of training."""

    fixed: int  # weights, their casts, gradients, optimizer state, and images of this and later updates
    per_image: int  # of a micro-batch

    def of(self, micro_batch: int) -> int:
        return self.fixed + micro_batch * self.per_image


def predicted(built: BuiltPhase, model: nn.Module) -> Need | None:
    """From what the backward pass of an image needs; None: a stage of a pipeline, or recomputed layers by name.

    Convolution workspaces come on top, and what the allocator cannot use: rather too little than a needless warning.
    """
    placement, shape = built.placement, built.shape
    if not isinstance(placement, WholeModel):
        return None
    side = built.images.training.image_size
    casts, growth = _kept(built, model)
    activations = sum(growth)
    if placement.recomputation:
        if placement.recomputation.activations is None:
            return None
        activations = placement.recomputation.activations // shape.as_run.micro_batch
    pixels = 3 * side * side
    weights = training_bytes(model, built.options, regime=built.regime, replicas=built.launch.division.replicas)
    # Beside the activations: the input as float32, and the gradient of one layer.
    per_image = shape.joined * (activations + 4 * pixels + max(growth, default=0))
    return Need(fixed=weights + casts + _images(built) * pixels, per_image=per_image)


def _images(built: BuiltPhase) -> int:
    """On the device, in updates and in validations between them: delivered, or decoded there and read ahead."""
    shape, side, reading = built.shape, built.images.training.image_size, built.placement.setup.input
    ahead = reading.images_on_device(built.images.train, shape=shape, side=side)
    return AHEAD * shape.micro_batch * shape.accumulation + ahead


def _kept(built: BuiltPhase, model: nn.Module) -> tuple[int, list[int]]:
    """Bytes that a backward pass needs for any number of images, such as autocast's weights, and for each image.

    The latter by tensor. Found from one and two images, but never more than a micro-batch: of one, all are the image's.
    """
    assert isinstance(built.placement, WholeModel)
    setup, side, fused = built.placement.setup, built.images.training.image_size, built.placement.fused(model)

    def forward(images: int, keep: Keep) -> None:
        black = _black(images, side, setup.device)
        run = _Fused(fused.model, keep).run if fused else model
        setup.regime.run(run, setup.normalise(black))

    def saved(images: int) -> list[int]:
        with torch.backends.cudnn.flags(enabled=False):  # it would spend seconds on kernels for sizes never used again
            return _saved(model, partial(forward, images))

    one = saved(1)
    if built.shape.micro_batch == 1:
        return 0, one
    growth = [more - less for less, more in zip(one, saved(2), strict=True)]
    return sum(one) - sum(growth), growth


class _Fused(fx.Interpreter):
    """Runs a fused model's layers as they are, and keeps of each what the fused one would."""

    def __init__(self, model: fx.GraphModule, keep: Keep) -> None:
        super().__init__(model)
        self._keep = keep

    def call_module(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.module.get_submodule(str(target))
        fused = FusedNorm | FusedGroupNorm | FusedPool | FusedHalving | FusedExcitation | FusedStem
        if not isinstance(layer, fused):
            return super().call_module(target, args, kwargs)
        for tensor in layer.saved(*args):
            self._keep(tensor)
        with torch.no_grad():
            computed = layer(*args)
        result = computed[0] if isinstance(computed, tuple) else computed
        # A copy: a layer that follows may change its input in place, which a leaf of a graph does not allow.
        copied = result.detach().requires_grad_().clone()
        return (copied, copied) if isinstance(computed, tuple) else copied


def _saved(model: nn.Module, forward: Callable[[Keep], None]) -> list[int]:
    """Bytes of each tensor that a backward pass would need, without the weights; `forward` may name further ones.

    In evaluation mode, so that running statistics and random numbers stay as they are: it keeps the same tensors.
    """
    modes = {module: module.training for module in model.modules()}
    known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    alive: list[torch.UntypedStorage] = []  # a freed storage's number would be used again

    def keep(tensor: Tensor) -> None:  # the tensor itself would keep the graph that saves it
        alive.append(tensor.untyped_storage())
        found[_storage(tensor)] = tensor.untyped_storage().nbytes()

    model.eval()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
            forward(keep)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return [count for storage, count in found.items() if storage not in known]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def capacity(device: torch.device, processes: int = 1) -> int:
    """Bytes that this process has or could still get, on the device or, for a CPU, on the host.

    `processes`: how many will share the host, if none of them has been started yet.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + torch.cuda.memory_reserved(device), allowed)
    place = find_place(os.environ)
    return host.available() // (place.local_size if place else processes)


def warning(built: BuiltPhase, model: nn.Module | None = None) -> str | None:
    """One line if a phase is predicted to need more than there is, with what is predicted to fit.

    `model`: as it is trained; None: for a plan, a copy of the one that would be.
    """
    device, shape = built.site.world.device, built.shape
    have, total = capacity(device, built.launch.division.processes), shape.micro_batch * _accumulation(built)
    sizes = divisors(total, least=least_micro_batch(built.options.augmentation))
    smaller = [size for size in sizes if size < shape.micro_batch]
    if not isinstance(built.placement, WholeModel):
        return _warning_of_stages(built, have=have, smaller=smaller)
    need = predicted(built, built.placement.copied() if model is None else model)
    if need is None or need.of(shape.micro_batch) <= have:
        return None
    fitting = [size for size in smaller if need.of(size) <= have]
    helps = "expected a smaller model or smaller images"
    if fitting:
        asked = _options(fitting[-1], total, which=built.phase.prefix)
        helps = f"{asked} is predicted to need {need.of(fitting[-1]) / GIB:.2f} GiB"
    return (
        f"warning: predicted to need {need.of(shape.micro_batch) / GIB:.2f} GiB, but {device} has {have / GIB:.2f} GiB;"
        f" {helps}"
    )


def _accumulation(built: BuiltPhase) -> int:
    """As asked for: not that of the replicas that run."""
    return built.options.training.gradient_accumulation


def _warning_of_stages(built: BuiltPhase, *, have: int, smaller: Sequence[int]) -> str | None:
    """Each stage has its own device; on a host, all share the memory. First another schedule is tried."""
    from falconet.train.pipeline_step import StagedModel

    placement, device, shape = built.placement, built.site.world.device, built.shape
    assert isinstance(placement, StagedModel)

    def needs(micro_batch: int, kind: "Kind") -> float:
        """Bytes of the largest stage; on a host, of the average one, because all have the same share."""
        stages = placement.needs(micro_batch, kind)
        return max(stages) if device.type == "cuda" else sum(stages) / len(stages)

    kind, total = built.options.parallel.pipeline_schedule, shape.micro_batch * _accumulation(built)
    if needs(shape.micro_batch, kind) <= have:
        return None
    schedules: list[Kind] = [kind]
    if kind == "grouped" and _accumulation(built) >= built.launch.division.stages:
        schedules.append("interleaved")
    tried = [(size, each) for size in (shape.micro_batch, *reversed(smaller)) for each in schedules]
    fitting = next(((size, each) for size, each in tried if needs(size, each) <= have), None)
    helps = "expected more --pipeline-splits, fewer images per update or smaller ones"
    if fitting:
        size, each = fitting
        asked = [f"--pipeline-schedule {each}"] if each != kind else []
        asked += [_options(size, total, which=built.phase.prefix)] if size != shape.micro_batch else []
        helps = f"{' '.join(asked)} is predicted to need {needs(*fitting) / GIB:.2f} GiB"
    what = "a stage" if device.type == "cuda" else "a stage on average"
    return (
        f"warning: {what} is predicted to need {needs(shape.micro_batch, kind) / GIB:.2f} GiB, but"
        f" {device} has {have / GIB:.2f} GiB{'' if device.type == 'cuda' else ' for each'}; {helps}"
    )


def _options(micro_batch: int, total: int, *, which: str = "") -> str:
    """What to type; `which`: the options of a later phase."""
    return f"--{which}micro-batch-size {micro_batch} --{which}gradient-accumulation {total // micro_batch}"


# Found by trying.


def divisors(number: int, *, least: int = 1) -> list[int]:
    """In ascending order, from `least`."""
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
        """Of one replica, which starts anew with any weights."""
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
    held = [_black(_images(built), side, device)]
    if device.type == "cuda":
        held += [torch.empty(int(SPARE * capacity(device)), dtype=torch.uint8, device=device)]
    if messages:  # replicas send copies of the gradients
        held += [torch.empty_like(weight) for weight in state.model.parameters()]
    mix = None
    if mixing.mixes_or_cuts(built.options.augmentation):
        mix = Mix(torch.ones(shape.micro_batch, device=device), torch.zeros(4, dtype=torch.int64, device=device))
    labels = torch.zeros(shape.micro_batch, dtype=torch.int64, device=device)
    for update in range(UPDATES if built.uncaptured else WARM + 1):  # with a graph, which has memory of its own
        batch = Batch(_black(shape.micro_batch, side, device), labels, mix)
        step([batch] * min(2, shape.accumulation), update=update, lr=0.0)
    if built.plan.validation_mode != "none":
        _validate(built, state, evaluate.validation_batch(built.options))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _validate(built: BuiltPhase, state: TrainState, batch: int) -> None:
    side, setup = built.images.preprocessing.image_size, built.placement.setup
    images = setup.normalise(_black(batch, side, setup.device))
    setup.regime.run(views.averaged(state.model.eval(), built.options.views.tta), images)


def _black(images: int, side: int, device: torch.device) -> Tensor:
    return torch.zeros((images, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)


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


def settled(launch: Launch, site: Site) -> Launch:
    """The launch with a number for `--micro-batch-size auto`, and with its images, which trials need.

    An update keeps its images: those of the checkpoint that a run continues from, or of the config, else 64 per
    micro-batch that was asked for. All processes take what fits on each of them.
    """
    options = launch.loaded.options
    if options.data.micro_batch_size != "auto":
        return launch
    stored = processes.stored_number(launch.restored.manifest, "micro-batch-size") if launch.restored else None
    if launch.restored and stored and launch.again:  # the same run, which has found its own
        total = stored * processes.stored_number(launch.restored.manifest, "gradient-accumulation")
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
    smaller = [other for other in divisors(total, least=least_micro_batch(built.options.augmentation)) if other < size]
    found = largest(smaller, trials.fits)
    if found is None:
        return error
    asked = _options(found, total, which=built.phase.prefix)
    return DeviceError(f"{error.short}; {asked} fits here, with the same updates of {total} images; {error.after}")
