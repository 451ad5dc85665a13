"""What one option is: its name, type, range, default and help, and whether a checkpoint may supply its value."""

import ast
import inspect
import itertools
import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from falconet.errors import DataError, path_near

Auto = Literal["auto"]
ORIGIN = "origin"  # the key in a field's metadata
UNSET = "None"  # what is typed to remove a stored value
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # of files, in lower case
WHOLE_OR_NOT = int | float  # usually whole: a search tries whole numbers only
T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """Where an option's value may come from."""

    local: bool  # never from a checkpoint
    again: str = ""  # what typing it again with `restore` does, in words; empty: no note
    bare: str = ""  # the value that the option alone stands for; empty: it needs a value


def local(default: T, *, again: str = "", bare: str = "") -> T:
    """Declare a field that a checkpoint never supplies: a path, a sink, or what deletes or uses the network.

    A checkpoint may come from another person; such options come from the command line, a config or the environment.
    """
    return field(default=default, metadata={ORIGIN: Origin(local=True, again=again, bare=bare)})


def portable(default: T) -> T:
    """Declare a path or a sink that a checkpoint may supply: it is only read, or stays in the run folder."""
    return field(default=default, metadata={ORIGIN: Origin(local=False)})


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`; `open_low` excludes `low`."""

    low: float
    high: float | None = None
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is not None:
            low = f"more than {_short(self.low)} and at most" if self.open_low else f"from {_short(self.low)} to"
            return f"{low} {_short(self.high)}"
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
    """The option's value, or `automatic` if that is auto."""
    return automatic if value == "auto" else value


_KNOWN: dict[type[object], dict[str, "Option"]] = {}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: `name` as typed, without dashes; `path` is (section, field)."""

    name: str
    path: tuple[str, str]
    section: type[object]
    type: Any
    default: object
    origin: Origin | None = None  # None: part of the training, which a checkpoint supplies

    @property
    def help(self) -> str:
        """The help text: the string below the field."""
        source = inspect.getsourcefile(self.section)
        assert source is not None
        return _helps(Path(source))[self.section.__name__, self.path[1]]

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

    @property
    def is_number(self) -> bool:
        """Whether it takes one number, perhaps besides other choices."""
        return bool(_numbers(self.type))

    @property
    def is_whole(self) -> bool:
        """Whether its number must be whole."""
        return _numbers(self.type) == [int]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(map(str, _choices(self.type)))

    def expected(self) -> str:
        """The type in words: `a whole number, at least 1, or auto`."""
        return _in_words(self.type)

    def metavar(self) -> str:
        """The type in a word, for the help: N, PATH or {a,b}."""
        return _metavar(self.type)

    def value(self, texts: Sequence[str]) -> object:
        """Convert what was typed; ValueError unless it is of this option's type and within its range."""
        if self.takes_many:
            (item, _) = get_args(self.type)
            return tuple(_converted(item, text) for text in texts)
        (text,) = texts
        return _converted(self.type, text)


def options_of(command: type[object]) -> dict[str, Option]:
    """Every option of a command by name, section by section."""
    if command not in _KNOWN:
        _KNOWN[command] = {option.name: option for option in _options(command)}
    return _KNOWN[command]


def value_of(options: object, option: Option) -> object:
    """The value of one option."""
    section, name = option.path
    return getattr(getattr(options, section), name)


def sections_of(command: type[object]) -> dict[str, type[object]]:
    """The sections of a command by field name."""
    hints = get_type_hints(command)
    return {each.name: hints[each.name] for each in fields(command)}  # type: ignore[arg-type]  # a dataclass


def _options(command: type[object]) -> Iterator[Option]:
    for section, cls in sections_of(command).items():
        hints = get_type_hints(cls, include_extras=True)
        for each in fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
            yield Option(
                name=each.name.replace("_", "-"),
                path=(section, each.name),
                section=cls,
                type=hints[each.name],
                default=each.default,
                origin=each.metadata.get(ORIGIN),
            )


@cache
def _helps(source: Path) -> dict[tuple[str, str], str]:
    """The strings below the fields, by class and field, read from the source: Python does not keep them."""
    found = {}
    module = ast.parse(source.read_text(encoding="utf-8"))
    for cls in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for line, text in itertools.pairwise(cls.body):
            if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(line.target, ast.Name)
                found[cls.name, line.target.id] = " ".join(str(text.value.value).split())
    return found


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _numbers(kind: Any) -> list[type[float]]:
    bases = [get_args(part)[0] if get_origin(part) is Annotated else part for part in _parts(kind)]
    return [int if base == WHOLE_OR_NOT else base for base in bases if base in (int, float, WHOLE_OR_NOT)]


def _choices(kind: Any) -> tuple[object, ...]:
    return tuple(choice for part in _parts(kind) if get_origin(part) is Literal for choice in get_args(part))


def _converted(kind: Any, text: str) -> object:
    """The value of a text; choices are tried first, so that `auto` is never a path."""
    for choice in _choices(kind):
        if text == str(choice):
            return choice
    parts = _parts(kind)
    if text == UNSET and type(None) in parts:
        return None
    for part in parts:
        base, *ranges = get_args(part) if get_origin(part) is Annotated else (part,)
        if base in (int, float, WHOLE_OR_NOT):
            number: float = int(text) if base is int else float(text)
            if base == WHOLE_OR_NOT and number.is_integer():
                number = int(number)
            if math.isfinite(number) and all(number in each for each in ranges):
                return number
        elif base in (str, Path):
            return base(text)
    raise ValueError(text)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list: {_in_words(get_args(kind)[0])}"
    text = ""
    for part in _parts(kind):
        if part is not type(None):
            comma = "," if ", " in text else ""  # `a whole number, at least 1, or auto`
            text += f"{comma} or {_name(part)}" if text else _name(part)
    return text


def _name(part: Any) -> str:
    if get_origin(part) is Annotated:
        base, *ranges = get_args(part)
        return ", ".join([_name(base), *map(str, ranges)])
    if get_origin(part) is Literal:
        *others, last = map(str, get_args(part))
        return f"{', '.join(others)} or {last}" if others else last
    if part == WHOLE_OR_NOT:
        return "a number"
    return {"int": "a whole number", "float": "a number", "Path": "a path"}.get(part.__name__, "text")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])} ..."
    return "|".join(_letters(part) for part in _parts(kind) if part is not type(None))


def _letters(part: Any) -> str:
    if get_origin(part) is Annotated:
        return _letters(get_args(part)[0])
    if get_origin(part) is Literal:
        choices = ",".join(map(str, get_args(part)))
        return f"{{{choices}}}" if "," in choices else choices
    if part == WHOLE_OR_NOT:
        return "N"
    return {"int": "N", "float": "X", "Path": "PATH"}.get(part.__name__, "TEXT")


def require_folder(folder: Path, expected: str, *, meant: str = "") -> None:
    """`meant`: what to suggest instead of a folder of nearly the same name."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {what}; expected {expected}{meant or path_near(folder)}")


def require_photos(path: Path, *, meant: str = "") -> None:
    """Require a folder of photos, or a table of photos and labels; `meant`: see `require_folder`."""
    if not path.is_file():
        require_folder(path, "photos in a folder per class, or a table of photos and labels", meant=meant)
