"""Further averages of a run's checkpoints as they are typed: mean:N, mean:all, exponential:DECAY."""

import re
from dataclasses import dataclass
from typing import Literal

_MEAN = re.compile(r"mean:(all|[1-9]\d{0,8})")
_EXPONENTIAL = re.compile(r"exponential:(0?\.\d+|[01](?:\.0*)?)")


@dataclass(frozen=True, kw_only=True)
class Further:
    """One more average."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None  # checkpoints; None: all

    @property
    def suffix(self) -> str:
        """What its folder is called by, behind `averaged`."""
        return f"exp_{self.decay:.15g}" if self.strategy == "exponential" else f"mean_{self.last or 'all'}"


def further(text: str) -> Further | None:
    """None: the text is none."""
    mean, exponential = _MEAN.fullmatch(text), _EXPONENTIAL.fullmatch(text)
    if mean:
        return Further(strategy="mean", last=None if mean[1] == "all" else int(mean[1]))
    return Further(strategy="exponential", decay=float(exponential[1])) if exponential else None
