"""The range of a number, written beside its type; and what an option may say instead of a number."""

from dataclasses import dataclass
from typing import Literal

Auto = Literal["auto"]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `low` itself is out when `open_low`."""

    low: float
    high: float | None = None
    open_low: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is not None:
            return f"from {_short(self.low)} to {_short(self.high)}"
        return f"more than {self.low:g}" if self.open_low else f"at least {self.low:g}"


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def AtLeast(low: float) -> Range:  # noqa: N802, reads as a type in annotations
    return Range(low)


def MoreThan(low: float) -> Range:  # noqa: N802
    return Range(low, open_low=True)


def Between(low: float, high: float) -> Range:  # noqa: N802
    return Range(low, high)


def value_or(value: int | Auto, automatic: int) -> int:
    """What an option says, or what `auto` comes to."""
    return automatic if value == "auto" else value
