"""An exponential moving average of the weights, without bias towards the initial ones."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from falconet.optim.optimizer_state import check_names, check_shape

UPDATES = "updates"
AVERAGE = "average"


def decay_for(half_life_epochs: float, updates_per_epoch: int) -> float:
    """The decay at which an update's weight halves every `half_life_epochs`."""
    assert half_life_epochs > 0
    assert updates_per_epoch > 0
    return math.pow(0.5, 1.0 / (half_life_epochs * updates_per_epoch))


class Ema:
    """A moving average of a model's weights and floating-point buffers over its updates; other buffers are copied.

    After t updates the newest weights count for (1 - d) / (1 - d^t), so the average has no share of the values before
    training: after the first update it equals the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        assert 0.0 <= decay < 1.0
        self.decay = decay
        self.updates = 0
        self._weight = 1.0  # of the newest weights
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        tensors = _tensors(self._model)
        # Full-precision tensors are averaged in the copied model itself, half ones beside it in fp32.
        self._averages = {
            name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
            for name, t in tensors.items()
            if t.is_floating_point()
        }
        self._copies = {name: t for name, t in tensors.items() if not t.is_floating_point()}
        devices = {t.device for t in tensors.values()}
        # A captured update reads the weight on the device.
        self._on_device = torch.ones((), device=devices.pop()) if {d.type for d in devices} == {"cuda"} else None
        self._rounded = [(tensors[name], t) for name, t in self._averages.items() if t is not tensors[name]]

    @property
    @torch.no_grad()
    def model(self) -> nn.Module:
        """A separate model with the average for evaluation, with the same types as the trained one."""
        for rounded, average in self._rounded:
            rounded.copy_(average)
        return self._model

    def update(self, model: nn.Module) -> None:
        """Add the weights after an update, without waiting for the device."""
        self.next()
        self.add(model)

    def next(self) -> None:
        """Count an update, and set the share that its weights will have."""
        self.updates += 1
        self._weight = (1.0 - self.decay) / (1.0 - self.decay**self.updates)
        if self._on_device is not None:
            self._on_device.fill_(self._weight)

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """Add the weights of the update that was counted; the same work for every update."""
        tensors = _tensors(model)
        if self._averages:
            averages = list(self._averages.values())
            newest = [tensors[name].to(average.dtype) for name, average in self._averages.items()]
            if self._on_device is None:
                torch._foreach_lerp_(averages, newest, self._weight)
            else:  # torch's lerp takes a number or a tensor of every shape
                differences = torch._foreach_sub(newest, averages)
                torch._foreach_mul_(differences, self._on_device)
                torch._foreach_add_(averages, differences)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), [tensors[name] for name in self._copies])

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by name, and the number of updates: the tensors themselves, not copies."""
        tensors = {f"{AVERAGE}/{name}": t.detach() for name, t in self._kept().items()}
        return {UPDATES: torch.tensor(self.updates, dtype=torch.int64), **tensors}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_tensors` returned; change nothing if a name or a shape is wrong."""
        kept = {f"{AVERAGE}/{name}": t for name, t in self._kept().items()}
        check_names(tensors, expected=[UPDATES, *kept], what="moving average")
        for name, t in kept.items():
            check_shape(tensors[name], like=t, name=f"moving average '{name}'")
        for name, t in kept.items():
            t.copy_(tensors[name])
        self.updates = int(tensors[UPDATES])

    def _kept(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: everything except buffers that the model does not save."""
        saved = self._model.state_dict().keys()
        return {name: t for name, t in {**self._averages, **self._copies}.items() if name in saved}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
