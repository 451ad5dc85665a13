"""The help of a command: its options in groups, with worked examples."""

import contextlib
import shutil
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from falconet.config.fields import docstrings, options_of, sections_of
from falconet.config.settings import spelled

STYLE = (tyro.conf.OmitArgPrefixes,)
GOES_ON = " \\"  # at the end of a shell's line


def print_help(command: type, *, usage: str, about: str, examples: Sequence[str], first: Sequence[str] = ()) -> None:
    """`usage`: what is typed before the options; `about`: what the command does; `first`: options to know first."""
    lines = [*wrapped(about), "", "Example:" if len(examples) == 1 else "Examples:"]
    lines += [line for example in examples for line in _typed(example)]
    if first:
        lines += ["", *wrapped(f"Options to begin with: {', '.join(first)}.", indent="  ")]
    switches = [option.name for option in options_of(command).values() if option.is_flag and not option.default]
    if switches:
        lines += [
            "",
            *wrapped(f"A switch is turned off by --no- before its name, as in --no-{switches[0]}."),
        ]
    description = "\n".join(lines)
    registry = ConstructorRegistry()
    registry.primitive_rule(_unset)
    with registry, contextlib.suppress(SystemExit):
        tyro.cli(_shown(command), args=["--help"], prog=usage, description=description, config=STYLE)


def wrapped(text: str, *, indent: str = "") -> list[str]:
    """The lines of a text on this terminal, those after the first behind `indent`."""
    return textwrap.wrap(
        text, width=_columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _typed(example: str) -> list[str]:
    """A command line; what a terminal cannot hold goes on in the next line, as a shell takes it."""
    parts = textwrap.wrap(example, width=_columns() - 8, break_long_words=False, break_on_hyphens=False)
    return ("  " + f"{GOES_ON}\n      ".join(parts)).split("\n")


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _shown(command: type) -> type:
    """The same options, each switch under one name: a pair of names for each leaves no room for what it does.

    A switch that is on has both: its words are about the one, and the other is what somebody types.
    """
    sections = [
        (name, make_dataclass(cls.__name__, list(_fields(cls)), namespace={"__doc__": cls.__doc__}))
        for name, cls in sections_of(command).items()
    ]
    return make_dataclass(command.__name__, [(name, cls, field(default_factory=cls)) for name, cls in sections])


def _fields(cls: type[object]) -> Iterator[tuple[str, Any, Any]]:
    hints, helps = get_type_hints(cls, include_extras=True), docstrings(cls)
    for each in fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
        kind, hint = hints[each.name], None
        if kind is bool:
            hint = f"(default: {'on' if each.default else 'off'})"
        kind = Annotated[kind, tyro.conf.arg(help=helps[each.name], help_behavior_hint=hint)]
        yield each.name, Annotated[kind, tyro.conf.FlagCreatePairsOff] if each.default is False else kind, each.default


def _unset(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """An option that may stay unset, or a list that may be empty, by what it takes and `default: none`.

    tyro itself would offer `{None}` as a value, and show the empty list as nothing.
    """
    parts = get_args(info.type)
    if get_origin(info.type) is tuple:
        metavar = f"{_metavar(parts[0])} ..."
    elif get_origin(info.type) in (Union, types.UnionType) and type(None) in parts:
        metavar = "|".join(_metavar(part) for part in parts if part is not type(None))
    else:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda _: True,
        str_from_instance=lambda value: ["none" if value in (None, ()) else " ".join(spelled(value))],
    )


def _metavar(part: Any) -> str:
    if get_origin(part) is Annotated:
        return _metavar(get_args(part)[0])
    if get_origin(part) is Literal:
        return "{" + ",".join(map(str, get_args(part))) + "}"
    return str(part.__name__).upper()
