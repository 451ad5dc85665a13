"""Search spaces: a range or a list of choices, typed in place of an option's value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from falconet.config.fields import Option
from falconet.config.settings import LINE, Setting
from falconet.errors import ConfigError

LOG, RANGE = "log", "range"
FREE_TEXT = ("model",)  # the only option without a list of choices whose values are names, not paths or patterns


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    values: tuple[str, ...]

    def ends(self) -> tuple[str, ...]:
        """Values to check before the first trial."""
        return self.values

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`; by its logarithm, every factor of ten is equally likely."""

    low: float
    high: float
    by_logarithm: bool
    whole: bool

    def ends(self) -> tuple[str, ...]:
        return tuple(f"{int(end) if self.whole else end}" for end in (self.low, self.high))

    def __str__(self) -> str:
        low, high = self.ends()
        return f"{low} to {high}" + (", by its logarithm" if self.by_logarithm else "")


Space = Choices | Range


def spaces_in(line: Sequence[Setting], options: Mapping[str, Option]) -> dict[str, Space]:
    """The options of a line whose value is a space, in the order of the line."""
    found: dict[str, Space] = {}
    for setting in line:
        option = options.get(setting.bare)
        space = _space(setting, option) if setting.source == LINE and option and len(setting.values) == 1 else None
        found.pop(setting.bare, None)  # a later value replaces an earlier one
        if space:
            found[setting.bare] = space
    return found


def _space(setting: Setting, option: Option) -> Space | None:
    (text,) = setting.values
    kind, colon, rest = text.partition(":")
    if colon and kind in (LOG, RANGE) and option.is_number:
        return _range(setting, option, rest, by_logarithm=kind == LOG)
    if "," not in text or not (option.is_number or option.choices or option.name in FREE_TEXT):
        return None
    values = tuple(part.strip() for part in text.split(","))
    for value in values:
        _require(setting, option, value)
    if len(set(values)) < len(values):
        raise ConfigError(f"{setting.where}: got '{text}', expected different values")
    return Choices(values)


def _range(setting: Setting, option: Option, rest: str, *, by_logarithm: bool) -> Range:
    low, _, high = rest.partition(":")
    for end in (low, high):
        _require(setting, option, end)
    first, last = float(low), float(high)
    if not first < last or not math.isfinite(last):
        raise ConfigError(
            f"{setting.where}: got '{setting.values[0]}', expected a smaller number and then a larger one"
        )
    if by_logarithm and first <= 0:
        raise ConfigError(f"{setting.where}: got '{setting.values[0]}', expected more than 0 in a range by logarithm")
    return Range(first, last, by_logarithm=by_logarithm, whole=option.is_whole)


def _require(setting: Setting, option: Option, text: str) -> None:
    try:
        option.value((text,))
        if not text:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{setting.where}: got '{setting.values[0]}', expected {option.expected()} where it has '{text}'; a range"
            f" is {LOG}:1e-4:1e-1 or {RANGE}:0:1, choices are a,b,c"
        ) from None
