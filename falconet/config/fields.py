"""What is declared beside an option's type: a number's range, `auto`, and whether a checkpoint may supply the value."""

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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


_KNOWN: dict[type[object], dict[str, "Option"]] = {}  # reading the source of the sections takes milliseconds


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: `name` as it is typed, without the dashes; `path` as (section, field)."""

    name: str
    path: tuple[str, str]
    type: Any
    default: object
    help: str
    origin: Origin | None = None  # None: training itself, which a checkpoint supplies

    @property
    def is_local(self) -> bool:
        """Whether a checkpoint never supplies it."""
        return self.origin is not None and self.origin.local

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def takes_many(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def takes_path(self) -> bool:
        return Path in _parts(self.type)

    def wanted(self) -> str:
        """The type in words: `a whole number, at least 1, or auto`."""
        return _in_words(self.type)

    def choices(self) -> tuple[str, ...]:
        return tuple(str(choice) for choice in _choices(self.type))

    def out_of_range(self, value: object) -> str | None:
        """What was wanted instead of `value`, if it is outside the option's range."""
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int | float) and not _allows(self.type, item):
                return self.wanted()
        return None


def options_of(command: type[object]) -> dict[str, Option]:
    """Every option of a command by name, in the order of the help."""
    if command not in _KNOWN:
        _KNOWN[command] = {option.name: option for option in _options(command)}
    return _KNOWN[command]


def value_of(options: object, option: Option) -> object:
    """The value of one option."""
    section, field = option.path
    return getattr(getattr(options, section), field)


def sections_of(command: type[object]) -> dict[str, type[object]]:
    """The sections of a command by field name."""
    return dict(get_type_hints(command))


def _options(command: type[object]) -> Iterator[Option]:
    for section, cls in sections_of(command).items():
        hints = get_type_hints(cls, include_extras=True)
        helps = docstrings(cls)
        for each in fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
            yield Option(
                name=each.name.replace("_", "-"),
                path=(section, each.name),
                type=hints[each.name],
                default=each.default,
                help=helps[each.name],
                origin=each.metadata.get(ORIGIN),
            )


def docstrings(cls: type) -> dict[str, str]:
    """The string under each field, which Python itself throws away."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for line, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(line.target, ast.Name)
            assert isinstance(following.value, ast.Constant)
            texts[line.target.id] = " ".join(str(following.value.value).split())
    return texts


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _choices(kind: Any) -> tuple[object, ...]:
    return tuple(choice for part in _parts(kind) if get_origin(part) is Literal for choice in get_args(part))


def _allows(kind: Any, value: float) -> bool:
    """Whether some part of the type holds the number."""
    if get_origin(kind) is tuple:
        return _allows(get_args(kind)[0], value)
    if value in _choices(kind):
        return True
    if value != value or value in (float("inf"), float("-inf")):
        return False
    ranges = [
        mark
        for part in _parts(kind)
        if get_origin(part) is Annotated
        for mark in get_args(part)[1:]
        if isinstance(mark, Range)
    ]
    return not ranges or any(mark.holds(value) for mark in ranges)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list: {_in_words(get_args(kind)[0])}"
    words = []
    for part in _parts(kind):
        if get_origin(part) is Annotated:
            base, *marks = get_args(part)
            words.append(", ".join([_in_words(base), *(str(mark) for mark in marks if isinstance(mark, Range))]))
        elif get_origin(part) is Literal:
            words.append(", ".join(str(choice) for choice in get_args(part)))
        elif part is not type(None):
            words.append({"int": "a whole number", "float": "a number", "Path": "a path"}.get(part.__name__, "text"))
    return " or ".join(words)
