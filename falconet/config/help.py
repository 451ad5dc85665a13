"""The help of a command: its options in groups, with worked examples."""

import contextlib
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from falconet.config.settings import spelled

STYLE = (tyro.conf.OmitArgPrefixes,)


def print_help(command: type, *, usage: str, examples: Sequence[str]) -> None:
    """`usage` is what is typed before the options."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    description = "\n".join([(command.__doc__ or "").strip(), "", title, *(f"  {example}" for example in examples)])
    registry = ConstructorRegistry()
    registry.primitive_rule(_unset)
    with registry, contextlib.suppress(SystemExit):
        tyro.cli(command, args=["--help"], prog=usage, description=description, config=STYLE)


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
