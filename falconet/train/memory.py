"""The memory that training is predicted to need, and that there is."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Target

from falconet.config import commands
from falconet.models.fused.layers import FusedExcitation, FusedHalving, FusedNorm, FusedPool
from falconet.models.fused.outer_layers import FusedStem
from falconet.models.groupnorm import FusedGroupNorm
from falconet.numerics.precision import Regime
from falconet.parallel import host
from falconet.parallel.environment import find_place

if TYPE_CHECKING:
    from falconet.parallel.pipeline import Kind  # torch's pipelines take a second to import

GIB = 2**30
Keep = Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Predicted bytes of training."""

    fixed: int  # weights, their casts, gradients, optimizer state, and images of this and later updates
    per_image: int  # of a micro-batch

    def of(self, micro_batch: int) -> int:
        return self.fixed + micro_batch * self.per_image


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a phase is predicted to need in a process with other micro-batches and schedules, and how to say so."""

    of: "Callable[[int, Kind], float]"  # bytes, from images of a micro-batch and a schedule of stages
    schedules: "Sequence[Kind]"  # the one that was asked for, then another that needs less
    subject: str = ""  # of the prediction
    share: str = ""  # whose the memory is that there is
    helps: str  # where nothing fits


def training_bytes(model: nn.Module, options: commands.TrainOptions, *, regime: Regime, replicas: int) -> int:
    """Bytes of weights, gradients and the update rule's state, which the replicas may shard."""
    slots = {"adamw": 2, "rmsprop": 2, "rmsprop_tf": 2}.get(options.optimizer.optimizer, 1)
    shares = replicas if options.parallel.enable_optimizer_rts else 1
    per_weight = 2 + slots / shares + (options.optimizer.ema_half_life is not None)
    sizes = (p.numel() * (regime.update.itemsize if p.ndim > 1 else 4) for p in model.parameters())
    return int(sum(sizes) * per_weight)


def kept_bytes(model: nn.Module, forward: Callable[[int, Keep], None], *, micro_batch: int) -> tuple[int, list[int]]:
    """Bytes that a backward pass needs for any number of images, such as autocast's weights, and for each image.

    The latter by tensor. `forward` passes so many images through the model, and names what is kept besides. Found from
    one and two images, but never more than a micro-batch: of one, all are the image's.
    """

    def saved(images: int) -> list[int]:
        with torch.backends.cudnn.flags(enabled=False):  # it would spend seconds on kernels for sizes never used again
            return _saved(model, partial(forward, images))

    one = saved(1)
    if micro_batch == 1:
        return 0, one
    growth = [more - less for less, more in zip(one, saved(2), strict=True)]
    return sum(one) - sum(growth), growth


class FusedPass(fx.Interpreter):
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


def black(images: int, side: int, device: torch.device) -> Tensor:
    return torch.zeros((images, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
