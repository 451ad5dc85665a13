"""The state of a pipelined model: whole on the first process, to be saved; and each stage's part, to be loaded."""

import json
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from falconet.parallel.grid import Grid
from falconet.parallel.processes import Processes

Content = Mapping[str, Mapping[str, Tensor]]  # tensors by file and name


class Stages(Protocol):
    """How the state of this process becomes that of the whole model, and back."""

    def gathered(self, content: Content) -> Content:
        """The whole state on the first process; every process calls it."""

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the whole model's tensors that this process wants."""


class OneStage:
    """The whole model is here."""

    def gathered(self, content: Content) -> Content:
        return content

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors


class SeveralStages:
    """Tensors are named `parameter` or `slot/parameter`; what is named otherwise is the same on all stages."""

    def __init__(self, grid: Grid, *, own: Collection[str], every: Collection[str]) -> None:
        """`own`, `every`: the names in the state of this stage, and of all."""
        self._grid, self._others = grid, set(every) - set(own)

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: t for name, t in tensors.items() if name.rpartition("/")[2] not in self._others}

    @torch.no_grad()
    def gathered(self, content: Content) -> Content:
        """Replicas have the same state: those of the first send theirs, the others nothing."""
        if self._grid.replicas.rank > 0:
            return content
        stages = self._grid.stages
        assert isinstance(stages, Processes)
        tensors = [
            (stem, name, t.detach().cpu().contiguous()) for stem, part in content.items() for name, t in part.items()
        ]
        headers = stages.texts(
            json.dumps([(stem, name, _kind(t)) for stem, name, t in tensors]), "describing the state"
        )
        if stages.rank > 0:
            with stages.waiting("sending the state to the first process"):
                for _, _, tensor in tensors:
                    if tensor.numel():
                        dist.send(_bytes(tensor), group_dst=0, group=stages.host)
            return content
        whole = {stem: dict(part) for stem, part in content.items()}
        for rank, header in enumerate(headers[1:], start=1):
            for stem, name, (dtype, shape) in json.loads(header):
                received = torch.empty(shape, dtype=getattr(torch, dtype))
                if received.numel():
                    with stages.waiting(f"taking over the state of stage {rank}"):
                        dist.recv(_bytes(received), group_src=rank, group=stages.host)
                whole.setdefault(stem, {}).setdefault(name, received)
        return whole


def _kind(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
