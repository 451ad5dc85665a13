"""An exponential moving average of the weights, corrected for its start."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from falconet.optim.optimizer_state import check_names, check_shape

UPDATES = "updates"
AVERAGE = "average"


def decay_for(half_life_epochs: float, updates_per_epoch: int) -> float:
    """The decay at which an update counts half as much `half_life_epochs` later."""
    assert half_life_epochs > 0
    assert updates_per_epoch > 0
    return math.pow(0.5, 1.0 / (half_life_epochs * updates_per_epoch))


class Ema:
    """The average of a model's weights and floating buffers over its updates; other buffers are copied.

    After t updates the newest weights enter with (1 - d) / (1 - d^t), so the average holds nothing of the values
    before training: the first update makes it equal to the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        assert 0.0 <= decay < 1.0
        self.decay = decay
        self.updates = 0
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        tensors = _tensors(self._model)
        # Of full-precision tensors the model's own are the averages; half ones are averaged beside it, in fp32.
        self._averages = {
            name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
            for name, t in tensors.items()
            if t.is_floating_point()
        }
        self._copies = {name: t for name, t in tensors.items() if not t.is_floating_point()}
        self._rounded = [(tensors[name], t) for name, t in self._averages.items() if t is not tensors[name]]

    @property
    @torch.no_grad()
    def model(self) -> nn.Module:
        """A model of its own with the average, for evaluation; of the same types as the trained one."""
        for rounded, average in self._rounded:
            rounded.copy_(average)
        return self._model

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after an update; the device is not waited for."""
        self.updates += 1
        weight = (1.0 - self.decay) / (1.0 - self.decay**self.updates)
        tensors = _tensors(model)
        if self._averages:
            newest = [tensors[name].to(average.dtype) for name, average in self._averages.items()]
            torch._foreach_lerp_(list(self._averages.values()), newest, weight)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), [tensors[name] for name in self._copies])

    def state_tensors(self) -> dict[str, Tensor]:
        """The average by name, and the number of updates: its own tensors, not copies."""
        tensors = {f"{AVERAGE}/{name}": t.detach() for name, t in self._kept().items()}
        return {UPDATES: torch.tensor(self.updates, dtype=torch.int64), **tensors}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave; nothing is changed when a name or a shape is wrong."""
        kept = {f"{AVERAGE}/{name}": t for name, t in self._kept().items()}
        check_names(tensors, wanted=[UPDATES, *kept], what="moving average")
        for name, t in kept.items():
            check_shape(tensors[name], like=t, name=f"moving average '{name}'")
        for name, t in kept.items():
            t.copy_(tensors[name])
        self.updates = int(tensors[UPDATES])

    def _kept(self) -> dict[str, Tensor]:
        """What a checkpoint holds: all but the buffers that the model itself does not save."""
        saved = self._model.state_dict().keys()
        return {name: t for name, t in {**self._averages, **self._copies}.items() if name in saved}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
