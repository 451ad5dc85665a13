"""Rows of the originals' tables: an old option, the values it takes, and what it becomes."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from falconet.errors import ConfigError, did_you_mean

_LARGEST_EXPONENT = 100  # 2**100 times a batch is still a float
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class To:
    """A canonical option with its value as text; a switch has none, and `no-` before its name turns it off."""

    option: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """One line for the user: what is different here."""

    text: str


@dataclass(frozen=True)
class Variable:
    """An environment variable that has the old option's effect."""

    name: str
    value: str


@dataclass(frozen=True)
class Needs:
    """A folder that must exist before the line runs, and how to get it."""

    folder: Path
    how: str


Effect = To | Note | Variable | Needs


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place where an old line was typed, and the files and variables that it depends on there."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # of the program
    configs: Path | None = None  # its configs.yml, if it has one
    replicas: int | None = None  # the total that a launcher was asked for


class Values:
    """The values of an old line by option: typed values, otherwise the program's defaults."""

    def __init__(self, options: Mapping[str, "Old"], given: Mapping[str, tuple[str, ...]], place: Place) -> None:
        self._options, self._given, self.place = options, given, place

    def given(self, *names: str) -> bool:
        """Whether one of these options was typed, or is in the config."""
        return any(name in self._given for name in names)

    def has(self, name: str) -> bool:
        """Whether the option was typed, is in the config, or has a default."""
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
            raise ConfigError(f"{name}: got '{number}', expected a whole number, at least {least}")
        return number

    def number(self, name: str) -> float:
        return _number(name, self.text(name))

    def numbers(self, name: str) -> list[float]:
        return [_number(name, text) for text in self.texts(name)]

    def listed(self, name: str, *, expected: str) -> list[float]:
        """Numbers separated by commas; `expected` describes them in the error."""
        try:
            return [_number(name, text) for text in self.text(name).split(",") if text]
        except ConfigError:
            raise ConfigError(f"{name}: got '{self.text(name)}', expected {expected}") from None


Rule = Callable[[Values], Iterable[Effect]]
Kind = Literal["flag", "whole", "number", "text"]
Count = Literal["one", "some", "maybe"]  # values: one, one or more, none or one


@dataclass(frozen=True, kw_only=True)
class Old:
    """One option of an original program."""

    name: str  # as it is typed, with its dashes
    kind: Kind
    effect: str  # one line: what it does here, or why it has no effect
    new: tuple[str, ...] = ()  # canonical options it sets, without dashes; none: no effect here
    rule: Rule | None = None
    aliases: tuple[str, ...] = ()
    count: Count = "one"
    default: str | None = None  # as it would be typed
    choices: tuple[str, ...] = ()
    bare: str | None = None  # the value of a `maybe` option that is given without one
    required: bool = False
    lower: bool = False  # upper and lower case are the same
    least: int | None = None  # the smallest valid number
    about: str = ""  # what it means; empty: the same as the first canonical option that it sets

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def has_effect(self) -> bool:
        return bool(self.new)


@dataclass(frozen=True, kw_only=True)
class OfModel:
    """The options and defaults that a program's help shows for the typed model."""

    title: str
    options: tuple[str, ...]  # which only this model has
    hidden: tuple[str, ...]  # which only others have
    defaults: Mapping[str, str]  # of options whose default depends on the model


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the originals."""

    name: str  # as the tables of the originals have it: tf1:train.py
    options: tuple[Old, ...]
    command: str | Callable[[Values], str]  # the canonical command
    about: str
    whole: bool = True  # sets its defaults too; else what was typed only, over a checkpoint's options
    conventions: str = "falconet"  # whose lines, files and names its users see
    settled: Callable[[Values], Mapping[str, object]] = lambda _: {}  # defaults that it computes, by option
    lacks: Callable[[Values], Collection[str]] = lambda _: ()  # options of its table that it does not store
    rule: Rule | None = None  # what it always sets
    of_model: Callable[[Values], OfModel] | None = None
    word: Old | None = None  # the words that belong to no option, such as a path; None: there are none

    @property
    def rows(self) -> tuple[Old, ...]:
        """The program's options, and the words that belong to none."""
        return (*self.options, self.word) if self.word else self.options

    @property
    def dialect(self) -> str:
        return self.name.partition(":")[0]

    @property
    def script(self) -> str:
        return self.name.partition(":")[2].rpartition("/")[2]


IPU = "tuned the IPU only"
# Where argparse stored options under another name, switches by their opposite.
STORED = {"--no-validation": "validation", "--no-proxy-recompute": "proxy_recompute", "--gc-profile": "profile"}


def stored(own: Program, values: Values) -> dict[str, object]:
    """Every option as argparse had it, by name: typed or default, numbers as numbers; None where it had neither."""
    found: dict[str, object] = {STORED.get(name, name): value for name, value in own.settled(values).items()}
    left_out = {"--help", "-h", *own.lacks(values)}
    for option in (each for each in own.options if each.name not in left_out):
        name = STORED.get(option.name, option.name)
        if option.kind == "flag":
            found.setdefault(name, values.flag(option.name) is not (option.name in STORED))
        elif option.count == "some":
            found[name] = [_plain(option, text) for text in values.texts(option.name)]
        elif values.has(option.name):
            found[name] = _plain(option, values.text(option.name))
        else:
            found.setdefault(name, None)
    return {name.lstrip("-").replace("-", "_"): value for name, value in found.items()}


def _plain(option: "Old", text: str) -> object:
    return {"whole": int, "number": float}.get(option.kind, str)(text)


def same(name: str, kind: Kind, default: str | None = None, *, new: str = "", effect: str = "", **more: Any) -> Old:
    """An option whose value stays the same, under its name or a `new` one."""
    option = new or name.lstrip("-")

    def rule(old: Values) -> Iterable[Effect]:
        if kind == "flag":
            if old.flag(name):
                yield To(option)
        elif old.has(name):
            yield To(option, old.texts(name))

    text = effect or ("the same" if option == name.lstrip("-") else "the same, under another name")
    return Old(name=name, kind=kind, default=default, new=(option,), effect=text, rule=rule, **more)


def becomes(name: str, kind: Kind, default: str | None, new: str, rule: Rule, effect: str, **more: Any) -> Old:
    """An option whose value `rule` computes; `new` names the canonical options it sets."""
    return Old(name=name, kind=kind, default=default, new=tuple(new.split()), effect=effect, rule=rule, **more)


def part_of(name: str, kind: Kind, default: str | None, new: str, effect: str, **more: Any) -> Old:
    """An option that another option's rule reads."""
    return Old(name=name, kind=kind, default=default, new=tuple(new.split()), effect=effect, **more)


def nothing(name: str, kind: Kind, why: str, default: str | None = None, **more: Any) -> Old:
    """An option without effect here; `why` gives the reason and what to use instead."""

    def rule(old: Values) -> Iterable[Effect]:
        if old.given(name):
            yield Note(f"{name}: {why}")

    return Old(name=name, kind=kind, default=default, effect=why, rule=rule, **more)


def unused(option: Old, why: str) -> Old:
    """The same option in a program where it has no effect."""
    return replace(option, rule=nothing(option.name, option.kind, why).rule, new=(), effect=why, required=False)


def check_value(option: Old, values: tuple[str, ...], *, spelled: str) -> tuple[str, ...]:
    """The values of an option, checked; `spelled` is its name as the user wrote it."""
    if option.kind == "flag":
        if values:
            raise ConfigError(f"{spelled}: is a switch and takes no value, got '{' '.join(values)}'")
        return values
    if not values and option.count == "maybe":
        assert option.bare is not None
        return (option.bare,)
    if not values:
        raise ConfigError(f"{spelled}: needs a value, {expected(option)}")
    if len(values) > 1 and option.count != "some":
        raise ConfigError(f"{spelled}: takes one value, got '{' '.join(values)}'")
    values = tuple(value.lower() for value in values) if option.lower else values
    for value in values:
        if option.choices and value not in option.choices:
            meant = did_you_mean(value, option.choices)
            raise ConfigError(f"{spelled}: got '{value}', expected {expected(option)}{meant}")
        if option.kind == "whole":
            _require_least(option, _whole(spelled, value), spelled=spelled)
        if option.kind == "number":
            _require_least(option, _number(spelled, value), spelled=spelled)
    return values


def expected(option: Old) -> str:
    """A phrase for the values that an option takes."""
    if option.choices:
        return " or ".join(option.choices)
    return {"whole": "a whole number", "number": "a number", "text": "text", "flag": "nothing"}[option.kind]


def truth(text: str) -> bool | None:
    """A switch as YAML spells it; None: neither true nor false."""
    return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None


def short(number: float) -> str:
    """A number as a person would type it: 0.5, 3e-05, 16384; no significant digit is lost."""
    if number == int(number) and abs(number) < 1e15:
        return f"{number:.0f}"
    return repr(round(number, 15) if abs(number) >= 1e-6 else float(f"{number:.9g}"))


def power_of_two(name: str, exponent: float) -> float:
    """2**x, the form of the originals' learning rates."""
    if exponent > _LARGEST_EXPONENT:
        raise ConfigError(f"{name}: got {exponent:g}, expected an exponent of 2, at most {_LARGEST_EXPONENT}")
    return float(2.0**exponent)


def _require_least(option: Old, number: float, *, spelled: str) -> None:
    if option.least is not None and number < option.least:
        raise ConfigError(f"{spelled}: got {number:g}, expected at least {option.least}")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: got '{text}', expected a whole number") from None


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: got '{text}', expected a number")
    return number
