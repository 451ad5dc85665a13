"""Which tensors of the whole model's state are a stage's: to load, and to answer for when all save theirs."""

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from falconet.parallel.grid import Grid


class Stages(Protocol):
    """What of the model this process has."""

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the whole model's tensors that this process wants."""

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of this process's tensors that no other stage saves."""


class OneStage:
    """The whole model is here."""

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors


class SeveralStages:
    """Tensors are named `parameter` or `slot/parameter`; what is named otherwise is the same on all stages."""

    def __init__(self, grid: Grid, *, own: Collection[str], every: Collection[str]) -> None:
        """`own`, `every`: the names in the state of this stage, and of all."""
        self._own, self._others, self._is_first = set(own), set(every) - set(own), grid.is_first_stage

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t for name, t in tensors.items() if _weight(name) not in self._others}

    def answered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t for name, t in tensors.items() if self._is_first or _weight(name) in self._own}


def _weight(name: str) -> str:
    """Of divided state, names have bars for dots."""
    return name.rpartition("/")[2].replace("|", ".")
