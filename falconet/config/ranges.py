"""What is declared beside an option's type: a number's range, `auto`, and whether a checkpoint may supply the value."""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

Auto = Literal["auto"]
ORIGIN = "origin"  # the key in a field's metadata
T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """Where the value of an option may come from."""

    local: bool  # never from a checkpoint
    again: str = ""  # what naming it again on the line of `restore` does, in words; empty: not worth a note


def local(default: T, *, again: str = "") -> T:
    """A field that a checkpoint never supplies: every path, every sink, and what deletes or reaches the network.

    A checkpoint may come from another person; such options are for the command line, a config or the environment.
    """
    return field(default=default, metadata={ORIGIN: Origin(local=True, again=again)})


def portable(default: T) -> T:
    """A path or a sink that a checkpoint may supply all the same: one that is only read, or stays in the run folder."""
    return field(default=default, metadata={ORIGIN: Origin(local=False)})


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
