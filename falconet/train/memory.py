"""The memory that training is predicted to need, and the warning where there is less."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Target

from falconet.config.rules import least_micro_batch
from falconet.models.fused_layers import FusedExcitation, FusedHalving, FusedNorm, FusedPool
from falconet.models.groupnorm import FusedGroupNorm
from falconet.models.outer_layers import FusedStem
from falconet.parallel import host
from falconet.parallel.environment import find_place
from falconet.train.build import BuiltPhase
from falconet.train.placement import GIB, WholeModel, training_bytes

if TYPE_CHECKING:
    from falconet.parallel.pipeline import Kind  # torch's pipelines take a second to import

AHEAD = 2  # updates whose images are on the device in any case: the one in use, and the next
Keep = Callable[[Tensor], None]


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
    return Need(fixed=weights + casts + images_held(built) * pixels, per_image=per_image)


def images_held(built: BuiltPhase) -> int:
    """Images on the device in updates, and in validations between them: delivered, or decoded there and read ahead."""
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
        pixels = black(images, side, setup.device)
        run = _Fused(fused.model, keep).run if fused else model
        setup.regime.run(run, setup.normalise(pixels))

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
        asked = batch_line(fitting[-1], total, which=built.phase.prefix)
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
        asked += [batch_line(size, total, which=built.phase.prefix)] if size != shape.micro_batch else []
        helps = f"{' '.join(asked)} is predicted to need {needs(*fitting) / GIB:.2f} GiB"
    what = "a stage" if device.type == "cuda" else "a stage on average"
    return (
        f"warning: {what} is predicted to need {needs(shape.micro_batch, kind) / GIB:.2f} GiB, but"
        f" {device} has {have / GIB:.2f} GiB{'' if device.type == 'cuda' else ' for each'}; {helps}"
    )


def batch_line(micro_batch: int, total: int, *, which: str = "") -> str:
    """The options to type; `which`: those of a later phase."""
    return f"--{which}micro-batch-size {micro_batch} --{which}gradient-accumulation {total // micro_batch}"


def divisors(number: int, *, least: int = 1) -> list[int]:
    """The divisors of a number in ascending order, from `least`."""
    return [size for size in range(least, number + 1) if number % size == 0]


def black(images: int, side: int, device: torch.device) -> Tensor:
    return torch.zeros((images, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
