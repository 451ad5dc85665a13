"""The values of an old line: what was typed, else the program's own default."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from falconet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from falconet.dialects.table import Old, Place

_LARGEST_EXPONENT = 100  # a rate of 2**100 times a batch is still a float
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


class Values:
    """Old options by name, typed; reading one that the program does not have is our mistake."""

    def __init__(self, options: Mapping[str, "Old"], given: Mapping[str, tuple[str, ...]], place: "Place") -> None:
        self._options, self._given, self.place = options, given, place

    def given(self, *names: str) -> bool:
        """Whether one of these was typed, or stands in the config."""
        return any(name in self._given for name in names)

    def has(self, name: str) -> bool:
        """Whether it was typed or has a default."""
        return bool(self.texts(name))

    def flag(self, name: str) -> bool:
        return name in self._given if name in self._options else False

    def text(self, name: str) -> str:
        texts = self.texts(name)
        assert texts, f"{name} has neither value nor default; ask `has` first"
        return texts[-1]

    def texts(self, name: str) -> tuple[str, ...]:
        if name in self._given:
            return self._given[name]
        default = self._options[name].default
        return () if default is None else tuple(default.split())

    def whole(self, name: str, *, least: int | None = None) -> int:
        number = _whole(name, self.text(name))
        if least is not None and number < least:
            raise ConfigError(f"{name}: got '{number}', wanted a whole number, at least {least}")
        return number

    def number(self, name: str) -> float:
        return _number(name, self.text(name))

    def numbers(self, name: str) -> list[float]:
        return [_number(name, text) for text in self.texts(name)]

    def listed(self, name: str, *, wanted: str) -> list[float]:
        """The numbers of a text with commas between them; `wanted` says what they should be."""
        try:
            return [_number(name, text) for text in self.text(name).split(",") if text]
        except ConfigError:
            raise ConfigError(f"{name}: got '{self.text(name)}', wanted {wanted}") from None


def check(option: "Old", values: tuple[str, ...], *, spelled: str) -> tuple[str, ...]:
    """The values of an option if they are of its kind; `spelled` is the name as the user wrote it."""
    if option.kind == "flag":
        if values:
            raise ConfigError(f"{spelled}: is a switch and takes no value, got '{' '.join(values)}'")
        return values
    if not values and option.count == "maybe":
        assert option.bare is not None
        return (option.bare,)
    if not values:
        raise ConfigError(f"{spelled}: needs a value, {wanted(option)}")
    if len(values) > 1 and option.count != "some":
        raise ConfigError(f"{spelled}: takes one value, got '{' '.join(values)}'")
    values = tuple(value.lower() for value in values) if option.lower else values
    for value in values:
        if option.choices and value not in option.choices:
            meant = did_you_mean(value, option.choices)
            raise ConfigError(f"{spelled}: got '{value}', wanted {wanted(option)}{meant}")
        if option.kind == "whole":
            _require_least(option, _whole(spelled, value), spelled=spelled)
        if option.kind == "number":
            _require_least(option, _number(spelled, value), spelled=spelled)
    return values


def wanted(option: "Old") -> str:
    """The kind of an option in words."""
    if option.choices:
        return " or ".join(option.choices)
    return {"whole": "a whole number", "number": "a number", "text": "text", "flag": "nothing"}[option.kind]


def truth(text: str) -> bool | None:
    """A switch as YAML has it; None when it is none."""
    return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None


def short(number: float) -> str:
    """A number as a person would type it: 0.5, 3e-05, 16384; every digit that matters is kept."""
    if number == int(number) and abs(number) < 1e15:
        return f"{number:.0f}"
    return repr(round(number, 15) if abs(number) >= 1e-6 else float(f"{number:.9g}"))


def power_of_two(name: str, exponent: float) -> float:
    """2**x, the form of the originals' learning rates."""
    if exponent > _LARGEST_EXPONENT:
        raise ConfigError(f"{name}: got {exponent:g}, wanted an exponent of 2, at most {_LARGEST_EXPONENT}")
    return float(2.0**exponent)


def _require_least(option: "Old", number: float, *, spelled: str) -> None:
    if option.least is not None and number < option.least:
        raise ConfigError(f"{spelled}: got {number:g}, wanted at least {option.least}")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: got '{text}', wanted a whole number") from None


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: got '{text}', wanted a number")
    return number
