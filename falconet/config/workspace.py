"""Memory that the device's libraries take for themselves."""

from dataclasses import dataclass
from typing import Annotated

from falconet.config.ranges import Between


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What convolutions may use beside their data."""

    available_memory_proportion: tuple[Annotated[float, Between(0, 1)], ...] = ()
    """Share of a CUDA device's memory that a convolution may use beside its data; one for all, or one a stage."""


def share_of(proportions: tuple[float, ...], *, stage: int, stages: int) -> float | None:
    """The share for one stage; stages that run together have the largest."""
    if not proportions:
        return None
    return proportions[stage] if len(proportions) == stages else max(proportions)
